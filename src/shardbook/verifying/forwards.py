"""Micro-batches of the two runs, matched by what went into them, whichever rank and place they came in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardbook.recording.micro_batches import TensorFacts
from shardbook.recording.read import MicroBatch, Step
from shardbook.verifying.closeness import Closeness
from shardbook.verifying.pairing import Pair

_SAME_OUTPUT = 0.1
"""Relative distance of outputs in 16 bits, at most; those of other inputs are about 1 apart."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Of a micro-batch's tensor with targets: all elements, and those that count (not negative). Rows, where no tensor has integers."""

    numel: int
    valid: int


@dataclass(frozen=True)
class Matched:
    """A micro-batch that both runs have. ``rank``: the candidate's; ``same_inputs``: of all, targets too where those are known."""

    rank: int
    candidate: MicroBatch
    baseline: MicroBatch
    counted: Counted | None
    same_inputs: bool

    @cached_property
    def output(self) -> Closeness | None:
        mine, theirs = self.candidate.output, self.baseline.output
        return None if mine is None or theirs is None else Closeness.of(mine, theirs)

    @cached_property
    def gradient(self) -> Closeness | None:
        """What reached the output, unscaled: for an output that is a loss, the factor on it."""
        mine, theirs = self.candidate.output_gradient, self.baseline.output_gradient
        return None if mine is None or theirs is None else Closeness.of(mine, theirs)

    @property
    def is_loss(self) -> bool:
        return self.candidate.output is not None and self.candidate.output.numel == 1


def matched(pair: Pair) -> list[Matched]:
    """Each of the candidate's once, with one of the baseline's that has the same inputs, else the same first input.

    One loop may cast before the model is called, the other inside. Then what they say they were given counts, if all outputs agree:
    forwards needn't come in the order in which a loop tells its batches.
    """
    steps = pair.candidate, pair.baseline
    keys = [[_key(micro) for _, micro, _ in each_forward(step)] for step in steps]
    if len({_kinds([micro.inputs for _, micro, _ in each_forward(step)]) for step in steps}) == 1:
        return _by_keys(pair, *keys)
    told = [_told(step) for step in steps]
    if not all(told) or len({_kinds(one) for one in told}) > 1:
        return _by_keys(pair, *keys)
    found = _by_keys(pair, *([_hashes(facts) for facts in one] for one in told))
    return found if all(one.output is None or one.output.distance < _SAME_OUTPUT for one in found) else []


def _by_keys(pair: Pair, mine: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> list[Matched]:
    left = [(micro, counted, key) for (_, micro, counted), key in zip(each_forward(pair.baseline), theirs, strict=True)]
    found: list[Matched] = []
    for (rank, micro, counted), key in zip(each_forward(pair.candidate), mine, strict=True):
        place = next((at for at, other in enumerate(left) if other[2] == key), None)
        if place is None and key:
            place = next((at for at, other in enumerate(left) if other[2][:1] == key[:1]), None)
        if place is not None:
            other, known, same = left.pop(place)
            found.append(Matched(rank, micro, other, known or counted, same_inputs=same == key))
    return found


def _told(step: Step) -> list[tuple[TensorFacts, ...]]:
    """What each forward was given, as the loop told it; empty where it didn't tell of each."""
    each = [(step.given[rank] if rank < len(step.given) else (), micros) for rank, micros in enumerate(step.micro_batches)]
    return [one for given, _ in each for one in given] if all(len(given) == len(micros) for given, micros in each) else []


def _kinds(ones: list[tuple[TensorFacts, ...]]) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(one.dtype for one in micro) for micro in ones)


def _hashes(facts: tuple[TensorFacts, ...]) -> tuple[int, ...]:
    return tuple(one.hash for one in facts)


def varies(ones: list[float]) -> float:
    """Largest relative deviation from their mean; 0 for fewer than two."""
    mean = sum(ones) / len(ones) if ones else 0.0
    return max((abs(one / mean - 1.0) for one in ones), default=0.0) if mean and math.isfinite(mean) else 0.0


def _key(micro: MicroBatch) -> tuple[int, ...]:
    return _hashes(micro.inputs)


def each_forward(step: Step) -> Iterator[tuple[int, MicroBatch, Counted | None]]:
    """(rank, micro-batch, what is known of its targets)."""
    for rank, micros in enumerate(step.micro_batches):
        given = step.given[rank] if rank < len(step.given) and len(step.given[rank]) == len(micros) else None
        for place, micro in enumerate(micros):
            facts = micro.inputs if given is None else given[place]
            whole = [Counted(one.numel, one.valid) for one in facts if one.valid is not None]
            rows = Counted(micro.num_rows, micro.num_rows) if micro.num_rows else None
            yield rank, micro, min(whole, key=lambda one: one.valid) if whole else rows
