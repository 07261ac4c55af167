"""Where each parameter lies in a flat buffer, and which part of it each rank owns. Numbers only: no torch here.

Three nouns. A *slot* is the room of one parameter in the flat buffer; a *shard* is the contiguous 1/N of the buffer that a
rank owns; a *span* is the part of one slot that lies in one shard. The optimizer steps on spans (as *pieces*).

Every slot starts, and every shard is cut, at a multiple of :data:`ALIGNMENT` elements, so a cut always falls on a multiple of
64 elements counted from the start of the parameter. Vectorised element-wise kernels treat the last few elements of a tensor
in another loop than the rest; with such cuts each element meets the same loop in a piece as in the whole parameter, and the
result of a step is the same to the bit whatever N.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements. At least two vectors of the widest CPU registers in the narrowest supported type (2 * 32 bf16 in 512 bits)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's room: ``numel`` elements from element ``offset`` of the flat buffer."""

    name: str
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``start`` to ``stop`` of the parameter in slot number ``slot``; ``offset`` is where they begin in the rank's shard."""

    slot: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def within(self, begin: int, end: int) -> "Span | None":
        """The part of it in elements ``begin`` to ``end`` of the shard, if there is one.

        >>> Span(slot=0, start=64, stop=264, offset=0).within(128, 1024)
        Span(slot=0, start=192, stop=264, offset=128)
        """
        first, last = max(begin, self.offset), min(end, self.offset + self.numel)
        shift = self.start - self.offset
        return Span(self.slot, first + shift, last + shift, first) if first < last else None


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A flat buffer of ``num_ranks`` equal shards.

    >>> layout = lay_out([("weight", 100), ("bias", 10)], num_ranks=2)
    >>> layout.numel, layout.shard_numel, layout.padding
    (256, 128, 146)
    >>> layout.spans(0)
    (Span(slot=0, start=0, stop=100, offset=0),)
    >>> layout.spans(1)
    (Span(slot=1, start=0, stop=10, offset=0),)
    """

    slots: tuple[Slot, ...]
    shard_numel: int
    num_ranks: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.num_ranks

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of the rank's shard, and the one after its last."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The parts of the parameters that lie in the rank's shard, in order; empty parts are left out."""
        first, end = self.bounds(rank)
        found: list[Span] = []
        for index, slot in enumerate(self.slots):
            begin, stop = max(first, slot.offset), min(end, slot.offset + slot.numel)
            if begin < stop:
                found.append(Span(index, begin - slot.offset, stop - slot.offset, begin - first))
        return tuple(found)

    def whole(self) -> tuple[Span, ...]:
        """Every parameter in full, as one span each, offsets counted from the start of the buffer."""
        return tuple(Span(index, 0, slot.numel, slot.offset) for index, slot in enumerate(self.slots) if slot.numel)


def lay_out(sizes: Sequence[tuple[str, int]], num_ranks: int, reserve: int = 0) -> FlatLayout:
    """Lay parameters of the given (name, numel) one after the other, each from a multiple of :data:`ALIGNMENT`.

    ``reserve`` elements at the end of the buffer are kept free of parameters (the header of a transport lies there).
    """
    slots: list[Slot] = []
    offset = 0
    for name, numel in sizes:
        slots.append(Slot(name, numel, offset))
        offset += -(-numel // ALIGNMENT) * ALIGNMENT
    step = ALIGNMENT * num_ranks
    return FlatLayout(tuple(slots), shard_numel=-(-(offset + reserve) // step) * ALIGNMENT, num_ranks=num_ranks)
