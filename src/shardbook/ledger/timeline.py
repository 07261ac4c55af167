"""What one rank's main thread did and when: an observer of an engine, and the plain record it leaves.

    engine ── marks ──▶ Timeline ── record() ──▶ RankTimeline ── all ranks' together ──▶ exposed, chrome

While the engine runs, an event costs one entry in a list; reading happens in :meth:`Timeline.record`. A record is plain data and may
be sent to other ranks. All its times are seconds on one rank's clock (see `clocks` for ranks on several hosts).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

from shardbook.events import Booking, Event, Mark, Traffic, Transfer
from shardbook.ledger.reading import Reader

MAX_EVENTS = 200_000
"""Marks kept of one step; one with more (an evaluation that never steps) is not kept, so that memory stays bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``number`` counts the exchanges of the engine and is the same on all ranks; ``is_whole``: no exception, no mark missing."""

    number: int
    begin: float
    end: float
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A time in which the main thread stood in no collective. ``phase``: forward, backward, step, or ``outside`` of the engine."""

    phase: str
    unit: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Forward or backward of a unit, or a step, from beginning to end: collectives and units inside are included."""

    phase: str
    unit: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective as this rank took part in it.

    Args:
        kind: ``gather``, ``reduce``, ``refresh``, ``return``, or ``step`` (the step's exchange).
        unit: whose; ``""`` for the exchange.
        sequence: together with kind and unit the same on all ranks; -1 where it is not known (issued before the timeline began).
        issue_begin: when the main thread turned to it,
        posted: when the last of its messages was under way, and
        issue_end: when the main thread went on.
        wait_begin: when the main thread came to need it; ``None``: not within the timeline.
        wait_end: when it was complete and the main thread went on.
        sent_nbytes: by this rank to all others.
        held: since when it was held back by ``Prefetch.limit``; ``None``: it was not.
    """

    kind: str
    unit: str
    sequence: int
    issue_begin: float
    posted: float
    issue_end: float
    wait_begin: float | None
    wait_end: float | None
    sent_nbytes: int
    held: float | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it on all ranks."""
        return self.kind, self.unit, self.sequence

    @property
    def began_before(self) -> bool:
        """Whether only its wait is within the timeline."""
        return self.sequence < 0 and self.issue_begin == self.wait_begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """The last steps of one rank, each list in order of time."""

    rank: int
    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...]

    def shifted(self, seconds: float) -> "RankTimeline":
        """The same on a clock that is ``seconds`` ahead."""

        def moved(item: Any, *names: str) -> Any:
            return replace(item, **{name: value + seconds for name in names if (value := getattr(item, name)) is not None})

        times = ("issue_begin", "posted", "issue_end", "wait_begin", "wait_end", "held")
        return RankTimeline(
            rank=self.rank,
            steps=tuple(moved(step, "begin", "end") for step in self.steps),
            segments=tuple(moved(segment, "begin", "end") for segment in self.segments),
            spans=tuple(moved(span, "begin", "end") for span in self.spans),
            collectives=tuple(moved(collective, *times) for collective in self.collectives),
        )


class Clock(Protocol):
    """When an event happened. A stamp is taken when the event comes and read when the record is made."""

    def stamp(self, event: Mark | Traffic) -> Any: ...
    def seconds(self, stamp: Any) -> float: ...


class HostClock:
    """The main thread's own time: right wherever it stands in its waits, as with gloo."""

    def stamp(self, event: Mark | Traffic) -> float:
        """A mark brings its time; traffic is told at the moment its messages are under way."""
        return event.seconds if isinstance(event, Mark) else perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp


class StreamClock:
    """CUDA: when the current stream came to the mark. There a wait makes the stream stand, not the thread.

    Events are recorded as marks come and read after :meth:`Timeline.record` has let the stream catch up, so that nothing synchronises
    inside a step. Not run on a GPU yet.
    """

    def __init__(self) -> None:
        import torch

        self._make: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)
        self._zero = self._make()
        self._zero.record()
        self._zero.synchronize()
        self._zero_seconds = perf_counter()

    def stamp(self, event: Mark | Traffic) -> Any:
        stamp = self._make()
        stamp.record()
        return stamp

    def seconds(self, stamp: Any) -> float:
        stamp.synchronize()
        return self._zero_seconds + self._zero.elapsed_time(stamp) / 1e3


def clock_for(device_type: str) -> Clock:
    """The clock by which waits are seen where parameters live on ``cuda``, or elsewhere."""
    return StreamClock() if device_type == "cuda" else HostClock()


class Timeline:
    """An observer of an engine; keeps the last ``num_steps`` whole steps.

    >>> timeline = Timeline(rank=0)
    >>> for name, edge, seconds in [("step", "begin", 1.0), ("step", "end", 3.0)]:
    ...     timeline(Mark(name=name, unit="", edge=edge, seconds=seconds))
    >>> [segment.phase for segment in timeline.record().segments]
    ['step']
    """

    def __init__(self, *, rank: int = 0, num_steps: int = 32, clock: Clock | None = None) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; at least 1 step must be kept")
        self.rank = rank
        self._clock: Clock = clock or HostClock()
        self._stamp = self._clock.stamp
        # one step more than asked for: what the oldest one waits for was issued in the one before
        self._closed: deque[list[tuple[Event, Any]]] = deque(maxlen=num_steps + 1)
        self._open: list[tuple[Event, Any]] = []
        self._is_over_full = False
        self._num_steps = num_steps
        self._num_closed = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, (Booking, Transfer)):
            return
        if len(self._open) >= MAX_EVENTS:
            self._open.clear()
            self._is_over_full = True
        self._open.append((event, self._stamp(event)))
        if isinstance(event, Mark) and event.name == "step" and event.edge == "end":
            self._close_step()

    def _close_step(self) -> None:
        if self._is_over_full:  # what is left of it has no beginning
            self._closed.clear()
        else:
            self._closed.append(self._open)
        self._num_closed += 1
        self._open, self._is_over_full = [], False

    def record(self) -> RankTimeline:
        """The last whole steps; what came after them is left out. Call it between steps, on a GPU after synchronising."""
        reader = Reader(first_number=self._num_closed - len(self._closed))
        for events in self._closed:
            for event, stamp in events:
                reader.take(event, self._clock.seconds(stamp))
        return _made(self.rank, reader, self._num_steps)


def _made(rank: int, reader: Reader, num_steps: int) -> RankTimeline:
    steps = tuple(Step(number=number, begin=begin, end=end, is_whole=whole) for number, begin, end, whole in reader.steps)[-num_steps:]
    begin = steps[0].begin if steps else float("inf")
    return RankTimeline(
        rank=rank,
        steps=steps,
        segments=_since(begin, [Segment(phase=p, unit=u, begin=b, end=e) for p, u, b, e in reader.segments]),
        spans=_since(
            begin, [Span(phase=p, unit=u, begin=b, end=e) for p, u, b, e in sorted(reader.spans, key=lambda span: (span[2], -span[3]))]
        ),
        collectives=tuple(
            collective
            for open_one in reader.collectives
            if (collective := Collective(**open_one)).wait_end is None or collective.wait_end > begin
        ),
    )


def _since(begin: float, items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(item for item in items if item.begin >= begin)
