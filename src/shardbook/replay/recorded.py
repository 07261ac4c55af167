"""Turns a snapshot into events: what was there when its trace began, and what the program asked for since.

A snapshot shows the end. The beginning is found by undoing the trace from the end to the start. What the program asked for is in
the trace as it is, except two things that are told from what happened around them: ``empty_cache()``, and the other stream of a
delayed free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardbook.replay.segments import Action, SegmentChange, SegmentFacts
from shardbook.replay.settings import Settings
from shardbook.replay.sizes import segment_nbytes
from shardbook.replay.snapshot import SEGMENT_ACTIONS, Entry, Snapshot
from shardbook.replay.start import start_of
from shardbook.replay.trace import Event

GIVEN_BACK = ("segment_free", "segment_unmap")
TAKEN = ("segment_alloc", "segment_map")
OTHER_STREAM = -1
"""Stands for the stream that a freed block still waits for: a trace does not say which one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A real run, ready to be replayed.

    Args:
        start: the segments when the trace began; a block that has gone since has the size that its request rounds to.
        events: the program's requests.
        changes: what the real allocator took from the device and gave back, filed under the event that caused it.
        end: the segments of the snapshot itself.
        settings: of the real allocator.
    """

    start: tuple[SegmentFacts, ...]
    events: tuple[Event, ...]
    changes: tuple[SegmentChange, ...]
    end: tuple[SegmentFacts, ...]
    settings: Settings


def recorded(snapshot: Snapshot) -> Recorded:
    """The events of a snapshot's trace, and the state they begin from.

    Frees that another stream delays are written as a use on :data:`OTHER_STREAM`. Memory that went back to the device is an
    ``empty_cache()``, unless the allocator's own reasons explain it: more was wanted than the device or the limit had left, or
    garbage collection is on, and a segment was asked for right afterwards. Without a capacity no other reason is known, and a
    request that was refused is left out, because a replay without a capacity would meet it.

    Raises:
        ConfigError: a trace that contradicts itself or the segments.
    """
    start, ids = start_of(snapshot)
    reader = _Reader(snapshot, ids, sum(segment.nbytes for segment in start))
    return Recorded(
        start=start,
        events=tuple(reader.events()),
        changes=tuple(reader.changes),
        end=snapshot.segments,
        settings=snapshot.settings,
    )


@dataclass
class _Reader:
    """``ids``: address -> id of what is allocated or waits. ``reserved``: bytes that the real allocator holds at this entry."""

    snapshot: Snapshot
    ids: dict[int, int]
    reserved: int
    changes: list[SegmentChange] = field(default_factory=list[SegmentChange])
    num_events: int = 0
    _next_id: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_id = len(self.ids)

    def events(self) -> Iterator[Event]:
        entries = self.snapshot.entries
        place = 0
        while place < len(entries):
            run = self._run(place)
            if run:
                told = self._given_back(entries[place : place + run], entries[place + run : place + run + 1])
            else:
                run, told = 1, self._answer(entries[place], entries[place + 1] if place + 1 < len(entries) else None)
            for event in told:
                self.num_events += 1
                yield event
            place += run

    def _run(self, place: int) -> int:
        """How many entries from ``place`` on are memory given back, and delayed frees that end before or between; 0 if none is."""
        entries, end = self.snapshot.entries, place
        for position in range(place, len(entries)):
            entry = entries[position]
            if entry.action in GIVEN_BACK:
                end = position + 1
            elif entry.action != "free_completed" or entry.address not in self.ids:
                break
        return end - place

    def _given_back(self, run: Sequence[Entry], after: Sequence[Entry]) -> Iterator[Event]:
        """Garbage collection, a second try after a shortage, or ``empty_cache()``. The last two wait for every stream by themselves."""
        reason = self._reason(run, after[0]) if after else "empty_cache"
        for entry in run:
            if entry.action == "free_completed":
                done = self.ids.pop(entry.address)
                if reason == "garbage":
                    yield Event(kind="complete", id=done, time=entry.time)
        for entry in run:
            if entry.action in GIVEN_BACK:
                self._change(entry)
        if reason == "empty_cache":
            yield Event(kind="empty_cache", time=run[0].time)

    def _reason(self, run: Sequence[Entry], after: Entry) -> Literal["garbage", "shortage", "empty_cache"]:
        """Why memory was given back before ``after``."""
        settings = self.snapshot.settings
        if after.action not in (*TAKEN, "oom"):
            return "empty_cache"
        wanted = segment_nbytes(after.nbytes, settings.large_segment)
        bounds = [bound for bound in (settings.available, settings.limit) if bound is not None]
        if bounds and self.reserved + wanted > min(bounds):
            return "shortage"
        segments = all(entry.action != "segment_unmap" for entry in run)
        collects = settings.limit is not None and settings.garbage_collection_threshold > 0
        return "garbage" if segments and collects else "empty_cache"

    def _answer(self, entry: Entry, after: Entry | None) -> Iterator[Event]:
        if entry.action == "alloc" or (entry.action == "oom" and self.snapshot.settings.capacity is not None):
            yield self._alloc(entry)
        elif entry.action == "free_requested" and entry.address in self.ids:
            number = self.ids[entry.address]
            if after is not None and after.action == "free_completed" and after.address == entry.address:
                del self.ids[entry.address]
            else:
                yield Event(kind="use", id=number, stream=OTHER_STREAM, time=entry.time)
            yield Event(kind="free", id=number, time=entry.time)
        elif entry.action == "free_completed" and (done := self.ids.pop(entry.address, None)) is not None:
            yield Event(kind="complete", id=done, time=entry.time)
        elif entry.action in TAKEN:
            self._change(entry)

    def _alloc(self, entry: Entry) -> Event:
        number = self._next_id
        self._next_id += 1
        if entry.action == "alloc":
            self.ids[entry.address] = number
        return Event(kind="alloc", id=number, nbytes=entry.nbytes, stream=entry.stream, time=entry.time, label=entry.label)

    def _change(self, entry: Entry) -> None:
        """Filed under the event that is about to be told: the request that wanted memory, or the ``empty_cache``."""
        action: Action = next(action for action in SEGMENT_ACTIONS if action == entry.action)
        change = SegmentChange(event=self.num_events, action=action, address=entry.address, nbytes=entry.nbytes, stream=entry.stream)
        self.changes.append(change)
        self.reserved += change.signed_nbytes
