"""What a program asked of the allocator, one event after the other: the input of a replay."""

from dataclasses import dataclass
from typing import Literal

from shardbook.checks import listed, nearest, refuse

Kind = Literal["alloc", "free", "use", "complete", "empty_cache"]
KINDS: tuple[Kind, ...] = ("alloc", "free", "use", "complete", "empty_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One request.

    Args:
        kind: ``alloc``: ``nbytes`` are wanted on ``stream``. ``free``: the program needs ``id`` no longer. ``use``: ``stream``
            works on ``id`` too (``record_stream``), so that its free is put off. ``complete``: every stream that used ``id`` has
            come past its free; the block is free from the next ``alloc`` on. ``empty_cache``: ``torch.cuda.empty_cache()``.
        id: which allocation: an address, a counter; it may come again after its free is complete. Not read by ``empty_cache``.
        nbytes: bytes wanted, before any rounding; 0 takes no memory. Read by ``alloc`` only.
        stream: 0 is the default stream.
        time: any integer that does not fall, in any unit; it is handed through to the series.
        label: whose bytes they are, for the report of a shortage.

    Raises:
        ConfigError: an unknown kind; a negative number of bytes.
    """

    kind: Kind
    id: int = 0
    nbytes: int = 0
    stream: int = 0
    time: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            refuse(f"Event.kind = {self.kind!r}", listed(KINDS), nearest(self.kind, KINDS))
        if self.nbytes < 0:
            refuse(f"Event.nbytes = {self.nbytes} (id {self.id})", "a number of bytes from 0 up", "give the bytes that were asked for")


EMPTY_CACHE = Event(kind="empty_cache")


def alloc(id: int, nbytes: int, *, stream: int = 0, time: int = 0, label: str = "") -> Event:  # noqa: A002  # the field's name
    """The event that asks for ``nbytes``.

    >>> alloc(1, 1000).nbytes
    1000
    """
    return Event(kind="alloc", id=id, nbytes=nbytes, stream=stream, time=time, label=label)


def free(id: int, *, time: int = 0) -> Event:  # noqa: A002
    """The event that gives ``id`` back."""
    return Event(kind="free", id=id, time=time)
