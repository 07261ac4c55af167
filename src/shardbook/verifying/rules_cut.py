"""Micro-batches that are cut otherwise than the baseline's: none has its like, so they are judged all together."""

import math
from collections.abc import Iterator

from shardbook.recording.forwards import SAMPLE_NUMEL
from shardbook.recording.read import Step
from shardbook.verifying.case import Case
from shardbook.verifying.findings import CERTAIN, Finding
from shardbook.verifying.forwards import Counted, each_forward

_EXACT = 1e-4
_OTHER = 1e-3


def mean_of_means_cut(case: Case) -> Iterator[Finding]:
    """From the same weights, what reaches an output is the baseline's but for one factor for each micro-batch.

    With the factor N / (K n) for n of N tokens in one of K micro-batches, squares that are multiplied by its inverse's square add up to
    the baseline's.
    """
    mine, theirs = (_squares(step) for step in case.here.sides)
    tokens, baseline = [count for count, _ in mine], sum(squares for _, squares in theirs)
    if len(mine) < 2 or len(mine) == len(theirs) or not case.here.same_before() or not baseline or min(tokens) < 1:
        return
    plain = math.sqrt(sum(squares for _, squares in mine) / baseline)
    weighed = math.sqrt(sum(squares * count**2 for count, squares in mine) / baseline) * len(mine) / sum(tokens)
    num_ranks = case.num_ranks[0]
    for factor in {1.0, float(num_ranks)}:  # of ranks that are averaged afterwards, each one's part is as many times as large
        if abs(weighed / factor - 1.0) < _EXACT and abs(plain / factor - 1.0) > _OTHER:
            yield Finding(
                "weight.mean_of_means", CERTAIN,
                f"step {case.here.number}: {len(mine)} micro-batches of {min(tokens)} to {max(tokens)} tokens count as much as one another:"
                f" what reaches the outputs is {plain / factor:.4f} of the baseline's, and {weighed / factor:.4f} once each is weighed by "
                f"its tokens",
            )  # fmt: skip
            return


def _squares(step: Step) -> list[tuple[int, float]]:
    """(tokens that count, squares of the gradient of the output) of each micro-batch; empty where one is not known, or only a sample is."""
    ones = [(known, micro.output_gradient) for _, micro, known in each_forward(step)]
    whole = [(known.valid, one.squares) for known, one in ones if known is not None and one is not None and _is_whole(one.numel, known)]
    return whole if len(whole) == len(ones) else []


def _is_whole(numel: int, known: Counted) -> bool:
    """Whether the sample is all of an output: as many elements for each target, and room for more."""
    return numel % known.numel == 0 and numel < SAMPLE_NUMEL
