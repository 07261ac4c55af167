"""Micro-batches of the two runs, matched by what went into them, whichever rank and place they came in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardbook.recording.read import MicroBatch, Step
from shardbook.verifying.closeness import Closeness
from shardbook.verifying.pairing import Pair


@dataclass(frozen=True, slots=True)
class Counted:
    """Of a micro-batch's tensor with targets: all elements, and those that count (not negative). Rows, where no tensor has integers."""

    numel: int
    valid: int


@dataclass(frozen=True)
class Matched:
    """One micro-batch that both runs have. ``rank``: the candidate's."""

    rank: int
    candidate: MicroBatch
    baseline: MicroBatch
    counted: Counted | None

    @property
    def same_inputs(self) -> bool:
        """All of them, targets included where the model is given those."""
        return _key(self.candidate) == _key(self.baseline)

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
    """Each of the candidate's once, with one of the baseline's that has the same inputs, else the same first input."""
    theirs = [(micro, counted) for _, micro, counted in each_forward(pair.baseline)]
    found: list[Matched] = []
    for rank, micro, counted in each_forward(pair.candidate):
        place = next((at for at, (other, _) in enumerate(theirs) if _key(other) == _key(micro)), None)
        if place is None:
            place = next((at for at, (other, _) in enumerate(theirs) if _key(other)[:1] == _key(micro)[:1] and _key(micro)), None)
        if place is not None:
            other, known = theirs.pop(place)
            found.append(Matched(rank, micro, other, known or counted))
    return found


def varies(ones: list[float]) -> float:
    """Largest relative deviation from their mean; 0 for fewer than two."""
    mean = sum(ones) / len(ones) if ones else 0.0
    return max((abs(one / mean - 1.0) for one in ones), default=0.0) if mean and math.isfinite(mean) else 0.0


def _key(micro: MicroBatch) -> tuple[int, ...]:
    return tuple(one.hash for one in micro.inputs)


def each_forward(step: Step) -> Iterator[tuple[int, MicroBatch, Counted | None]]:
    """(rank, micro-batch, what is known of its targets)."""
    for rank, micros in enumerate(step.micro_batches):
        given = step.given[rank] if rank < len(step.given) and len(step.given[rank]) == len(micros) else None
        for place, micro in enumerate(micros):
            facts = micro.inputs if given is None else given[place]
            whole = [Counted(one.numel, one.valid) for one in facts if one.valid is not None]
            rows = Counted(micro.num_rows, micro.num_rows) if micro.num_rows else None
            yield rank, micro, min(whole, key=lambda one: one.valid) if whole else rows
