"""Lays a replay beside what the real allocator did: segment by segment, event by event."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from shardbook.replay.recorded import Recorded, recorded
from shardbook.replay.replay import Replay, replay, segments_after
from shardbook.replay.segments import SegmentChange, SegmentFacts
from shardbook.replay.snapshot import read_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One event at which both took or gave back something else: signed bytes of each change, and whose event it was."""

    event: int
    label: str
    real: tuple[int, ...]
    replayed: tuple[int, ...]

    def __str__(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return f"event {self.event}{label}: the allocator {_told(self.real)}, the replay {_told(self.replayed)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How well the model explains a real run. Figures are bytes.

    Args:
        num_events: events of the trace.
        differences: events whose segments differ, in order.
        real_peak_reserved, peak_reserved: of the allocator and of the replay.
        largest_gap: the largest distance between what both had reserved after one event.
        same_end: whether both end with segments of the same sizes, streams and pools. Stretches of expandable segments count by
            their sum, because the address at which the real one begins is not known.
    """

    num_events: int
    differences: tuple[Difference, ...]
    real_peak_reserved: int
    peak_reserved: int
    largest_gap: int
    same_end: bool

    @property
    def equal(self) -> bool:
        """Every segment was taken and given back at the same event, and the end is the same."""
        return not self.differences and self.same_end

    def __str__(self) -> str:
        if self.equal:
            return f"the replay equals the allocator at each of {self.num_events} events: {self.peak_reserved} bytes reserved at the peak"
        return (
            f"the replay differs from the allocator at {len(self.differences)} of {self.num_events} events: "
            f"{self.peak_reserved} against {self.real_peak_reserved} bytes reserved at the peak, {self.largest_gap} apart at most"
            + "".join(f"\n  {difference}" for difference in self.differences[:5])
        )


def compare_snapshot(path: str | Path, *, device: int | None = None, capacity: int | None = None, elsewhere: int = 0) -> Comparison:
    """Replays the run in a snapshot file and compares; arguments and errors as :func:`shardbook.replay.snapshot.read_snapshot`."""
    return compare(recorded(read_snapshot(path, device=device, capacity=capacity, elsewhere=elsewhere)))


def compare(run: Recorded) -> Comparison:
    """Replays a recorded run with its own settings and lays both beside each other."""
    replayed = replay(run.events, run.settings, start=run.start)
    begin, num_events = sum(segment.nbytes for segment in run.start), len(run.events)
    # one place more: a snapshot may be taken between a segment and the request that it was for
    real, ours = _per_event(run.changes, num_events + 1), _per_event(replayed.changes, num_events + 1)
    real_reserved = list(accumulate(map(sum, real), initial=begin))[1:]
    end = segments_after(run.events, num_events - 1, run.settings, start=run.start)
    return Comparison(
        num_events=num_events,
        differences=tuple(_differences(run, real, ours)),
        real_peak_reserved=_peak(run, begin),
        peak_reserved=replayed.peak_reserved,
        largest_gap=_largest_gap(real_reserved, replayed),
        same_end=_inventory(run.end) == _inventory(end),
    )


def _per_event(changes: Iterable[SegmentChange], num_events: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(num_events)]
    for change in changes:
        found[change.event].append(change.signed_nbytes)
    return found


def _differences(run: Recorded, real: list[list[int]], ours: list[list[int]]) -> Iterable[Difference]:
    for number, (theirs, mine) in enumerate(zip(real, ours, strict=True)):
        # the order within one event is that of addresses, which the model does not have
        if sorted(theirs) != sorted(mine):
            label = run.events[number].label if number < len(run.events) else ""
            yield Difference(event=number, label=label, real=tuple(theirs), replayed=tuple(mine))


def _peak(run: Recorded, begin: int) -> int:
    return max(accumulate((change.signed_nbytes for change in run.changes), initial=begin))


def _largest_gap(real: list[int], replayed: Replay) -> int:
    return max((abs(theirs - mine) for theirs, mine in zip(real, replayed.reserved, strict=False)), default=0)


def _inventory(segments: Iterable[SegmentFacts]) -> Counter[tuple[int, bool, bool, int]]:
    found: Counter[tuple[int, bool, bool, int]] = Counter()
    for one in segments:
        if one.expandable:
            found[one.stream, one.small, True, 0] += one.nbytes
        else:
            found[one.stream, one.small, False, one.nbytes] += 1
    return found


def _told(changes: tuple[int, ...]) -> str:
    return " and ".join(f"{'took' if nbytes > 0 else 'gave back'} {abs(nbytes)}" for nbytes in changes) or "kept to what it had"
