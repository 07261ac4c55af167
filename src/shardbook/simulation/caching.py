"""A simulated run through the model of the caching allocator: what would be reserved, and how much of it would lie idle.

One stream is taken for all: shardbook's engine frees nothing across streams, and each further stream has a pool of its own.
"""

from collections.abc import Iterable, Iterator, Sequence

from shardbook.forecasting.result import Replayed
from shardbook.ledger.allocator import Change
from shardbook.replay.replay import Replay, replay
from shardbook.replay.settings import Settings
from shardbook.replay.trace import Event

NUM_POINTS = 400


def replayed(changes: Sequence[Change], held: int, settings: Settings, name: str) -> Replayed:
    """What comes of a run. ``held``: bytes that libraries take with their first use and keep; ``name``: the settings as text."""
    result = replay(events(changes, held), settings)
    return Replayed(
        settings=name,
        reserved=result.peak_reserved,
        allocated=result.peak_allocated,
        fragmented=result.unused_shares[result.peak_event],
        series=tuple(_series(result)),
    )


def events(changes: Iterable[Change], held: int) -> Iterator[Event]:
    """The run's changes as an allocator's events. An address that comes again is another allocation."""
    if held:
        yield Event(kind="alloc", id=0, nbytes=held, label="workspaces of libraries")
    for change in changes:
        if change.nbytes > 0:
            yield Event(kind="alloc", id=change.address, nbytes=change.nbytes, time=change.nanoseconds)
        else:
            yield Event(kind="free", id=change.address, time=change.nanoseconds)


def _series(result: Replay) -> Iterator[tuple[float, int, int]]:
    """Of each stretch of the trace, the place where most is reserved."""
    length = len(result.reserved)
    count = min(NUM_POINTS, length)
    for number in range(count):
        begin, end = number * length // count, max((number + 1) * length // count, number * length // count + 1)
        at = max(range(begin, end), key=lambda index: (result.reserved[index], result.allocated[index]))
        yield at / length, result.allocated[at], result.reserved[at]
