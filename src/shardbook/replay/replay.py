"""A whole trace through the allocator: what was reserved, how it was used, and where it ran short."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from shardbook.errors import ConfigError
from shardbook.replay.allocator import Allocator
from shardbook.replay.segments import SegmentChange, SegmentFacts, Shortage
from shardbook.replay.settings import Settings
from shardbook.replay.trace import Event


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What came of a trace. Series have one entry for each event, the state right after it; figures are bytes.

    Args:
        settings: those of the allocator.
        times: the events' own.
        allocated, active, reserved: as :class:`shardbook.replay.counters.Counters`.
        largest_free: the largest free block, of whichever stream and pool.
        shortages: requests that could not be met. A program would have ended at the first one; the replay goes on without that
            allocation, so that what comes after it answers "and else?".
        changes: every segment or stretch of pages that was taken from the device or given back.
        stats: the figures at the end, under the names of ``torch.cuda.memory_stats()``.
        segments_at_peak: the map right after the event at which most was reserved for the first time.
    """

    settings: Settings
    times: Sequence[int]
    allocated: Sequence[int]
    active: Sequence[int]
    reserved: Sequence[int]
    largest_free: Sequence[int]
    shortages: tuple[Shortage, ...]
    changes: tuple[SegmentChange, ...]
    stats: dict[str, int]
    segments_at_peak: tuple[SegmentFacts, ...]

    @property
    def peak_allocated(self) -> int:
        return self.stats["allocated_bytes.all.peak"]

    @property
    def peak_active(self) -> int:
        return self.stats["active_bytes.all.peak"]

    @property
    def peak_reserved(self) -> int:
        return self.stats["reserved_bytes.all.peak"]

    @property
    def peak_event(self) -> int:
        """Number of the first event after which most was reserved; -1 for an empty trace."""
        return _first_peak(self.reserved)

    @property
    def unused_shares(self) -> list[float]:
        """1 − allocated / reserved after each event: the share of reserved memory that no tensor has; 0 where nothing is reserved."""
        return [1 - used / held if held else 0.0 for used, held in zip(self.allocated, self.reserved, strict=True)]

    @property
    def scattered_shares(self) -> list[float]:
        """1 − largest free block / all free bytes after each event: how much of what is free cannot serve one request; 0 if none is."""
        free = (held - used for used, held in zip(self.active, self.reserved, strict=True))
        return [1 - largest / total if total else 0.0 for largest, total in zip(self.largest_free, free, strict=True)]


def replay(events: Iterable[Event], settings: Settings | None = None, *, start: Iterable[SegmentFacts] = ()) -> Replay:
    """Puts a trace through a new allocator, or through one that begins with the segments ``start``.

    >>> from shardbook.replay.trace import alloc, free
    >>> result = replay([alloc(1, 3 << 20), alloc(2, 100), free(1), free(2)])
    >>> result.peak_reserved >> 20, result.peak_allocated, result.peak_event
    (22, 3146240, 1)

    Raises:
        ConfigError: naming the event, if it does not fit those before it.
    """
    events, start = tuple(events), tuple(start)
    settings = settings if settings is not None else Settings()
    allocator = _begin(settings, start)
    counters = allocator.counters
    allocated, active, reserved, largest_free = array("q"), array("q"), array("q"), array("q")
    shortages: list[Shortage] = []
    for number, event in enumerate(events):
        if shortage := _apply(allocator, number, event):
            shortages.append(shortage)
        allocated.append(counters.allocated)
        active.append(counters.active)
        reserved.append(counters.reserved)
        largest_free.append(allocator.largest_free)
    return Replay(
        settings=settings,
        times=array("q", (event.time for event in events)),
        allocated=allocated,
        active=active,
        reserved=reserved,
        largest_free=largest_free,
        shortages=tuple(shortages),
        changes=tuple(allocator.changes),
        stats=counters.memory_stats(),
        segments_at_peak=segments_after(events, _first_peak(reserved), settings, start=start),
    )


def segments_after(
    events: Iterable[Event], number: int, settings: Settings | None = None, *, start: Iterable[SegmentFacts] = ()
) -> tuple[SegmentFacts, ...]:
    """The map of segments right after event ``number``: the trace is replayed as far as that."""
    allocator = _begin(settings if settings is not None else Settings(), start)
    for done, event in enumerate(islice(events, number + 1)):
        _apply(allocator, done, event)
    return allocator.segments()


def _begin(settings: Settings, start: Iterable[SegmentFacts]) -> Allocator:
    allocator = Allocator(settings)
    allocator.restore(start)
    return allocator


def _apply(allocator: Allocator, number: int, event: Event) -> Shortage | None:
    try:
        return allocator.apply(event, number)
    except ConfigError as error:
        raise ConfigError(f"event {number}: {error}") from error


def _first_peak(series: Sequence[int]) -> int:
    return series.index(max(series)) if series else -1
