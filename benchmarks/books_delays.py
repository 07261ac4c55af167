"""Delays put in by hand, and what the timeline says of them: which unit, why, and for how long.

    python -m benchmarks.books_delays     2 and 4 ranks, work of 1 ms and of 30 ms a block

The model and the ways to delay it are those of the tests (`tests/delays.py`). The machine has other work as well, and a delay is one of
many things that make a rank wait. So a length is the median over steps, and a setting that is further off is tried again, twice at most.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks import ranks
from shardbook.ledger.exposed import common_steps, exposed, pieces
from shardbook.ledger.timeline import RankTimeline
from tests import delays

SECONDS = 0.08
UNIT = 2
WORKS = (0.001, 0.03)
NUM_RANKS = (2, 4)
ATTEMPTS = 3
ERROR = 0.05
STAGE = 3


@dataclass(frozen=True, kw_only=True)
class Delay:
    """``what`` is put in, into ``UNIT``; rank 0 is to wait for it because of ``cause``. ``seconds``: in a step, altogether."""

    what: str
    cause: str
    culprit: int | None
    seconds: float


def kinds(num_ranks: int) -> tuple[Delay, ...]:
    """One rank's work, one rank's part of a unit's gather (twice in a step, as stage 3 does), and that gather on all ranks."""
    last = num_ranks - 1
    return (
        Delay(what="work", cause="straggler rank", culprit=last, seconds=SECONDS),
        Delay(what="gather of one rank", cause="straggler rank", culprit=1, seconds=2 * SECONDS),
        Delay(what="gather of all ranks", cause="bandwidth", culprit=None, seconds=2 * SECONDS),
    )


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What rank 0's longest waiting was said to be for, and for how many seconds a step it waited there."""

    delay: Delay
    num_ranks: int
    work: float
    unit: str
    cause: str
    culprit: int | None
    seconds: float
    attempts: int = 1

    @property
    def error(self) -> float:
        return abs(self.seconds / self.delay.seconds - 1)

    @property
    def holds(self) -> bool:
        named = (self.unit, self.cause, self.culprit) == (f"blocks.{UNIT}", self.delay.cause, self.delay.culprit)
        return named and self.error <= ERROR


def trained(delay: Delay, work: float) -> list[RankTimeline]:
    """Every rank of a group calls it."""
    num_ranks = dist.get_world_size()
    if delay.what == "work":
        assert delay.culprit is not None
        return delays.in_rank(STAGE, work, delay.culprit, "forward", UNIT, SECONDS)
    late = tuple(range(num_ranks)) if delay.culprit is None else (delay.culprit,)
    return delays.in_messages(STAGE, work, late, "gather", UNIT, SECONDS, "late")


def _all(settings: Sequence[tuple[Delay, float]]) -> list[list[RankTimeline]]:
    return [trained(delay, work) for delay, work in settings]


def reported(delay: Delay, work: float, timelines: list[RankTimeline], attempts: int) -> Reported:
    """Read from the timelines of all ranks."""
    largest = max((entry for entry in exposed(timelines) if entry.rank == 0), key=lambda entry: entry.seconds)
    by_step = dict.fromkeys(common_steps(timelines), 0.0)
    for piece in pieces(timelines):
        if (piece.rank, piece.unit, piece.cause, piece.culprit) == (0, largest.unit, largest.cause, largest.culprit):
            by_step[piece.step] += piece.seconds
    return Reported(
        delay=delay,
        num_ranks=len(timelines),
        work=work,
        unit=largest.unit,
        cause=largest.cause,
        culprit=largest.culprit,
        seconds=statistics.median(by_step.values()),
        attempts=attempts,
    )


def measure(num_ranks: int, works: Sequence[float] = WORKS) -> list[Reported]:
    """Every kind of delay at every length of work; all settings of one attempt in the same processes."""
    settings = [(delay, work) for work in works for delay in kinds(num_ranks)]
    found: dict[tuple[Delay, float], Reported] = {}
    for attempt in range(1, ATTEMPTS + 1):
        left = [setting for setting in settings if setting not in found or not found[setting].holds]
        if left:
            for setting, timelines in zip(left, ranks.run(num_ranks, _all, left)[0], strict=True):
                found[setting] = reported(*setting, timelines, attempt)
    return list(found.values())


def main() -> None:
    for num_ranks in NUM_RANKS:
        for one in measure(num_ranks):
            print(
                f"{num_ranks} ranks, work {one.work * 1e3:.0f} ms, {one.delay.what}: {one.seconds * 1e3:.1f} of "
                f"{one.delay.seconds * 1e3:.0f} ms in {one.unit}, {one.cause} {one.culprit}, attempt {one.attempts}"
            )


if __name__ == "__main__":
    main()
