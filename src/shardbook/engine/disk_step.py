"""The step where master and state are on a disk: chunk by chunk they are lent to the optimizer, stepped on, published and written back.

Between steps the optimizer holds pieces without memory, and of its state what it keeps once for a parameter. For the length of a chunk's
step its pieces, and their entries in ``optimizer.state``, are views of the slot that has the chunk. State that an optimizer makes itself,
in its first step on a piece, is copied there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardbook.accounts import Account, Tier
from shardbook.engine.disk import Chunk, Disk
from shardbook.engine.flat import Flat, Piece
from shardbook.engine.journal import Journal
from shardbook.engine.storage import address_of
from shardbook.engine.unit import Unit
from shardbook.errors import ConfigError


class DiskStep:
    """One per engine that keeps its optimizer's state on a disk."""

    def __init__(self, disk: Disk, optimizer: Optimizer, journal: Journal) -> None:
        self._disk, self._journal = disk, journal
        self._state: dict[Any, dict[str, Any]] = optimizer.state

    def absorb(self, flats: Sequence[Flat]) -> None:
        """Write the state that the optimizer has in memory, as it does where it stepped before there was an engine."""
        state, work = self._state, [(flat, chunk) for flat in flats for chunk in flat.chunks]
        work = [(flat, chunk) for flat, chunk in work if any(kept_in(state.get(piece.parameter), piece) for piece in flat.pieces_in(chunk))]
        with self._disk.changing("writing the optimizer's state"):
            for (flat, chunk), (_, memory) in zip(work, self._disk.visit([chunk for _, chunk in work]), strict=True):
                for piece in flat.pieces_in(chunk):
                    self._take_state(piece, chunk, memory)
        self.book(flats)

    def parts(
        self, units: Sequence[Unit], scale: float, has_gradient: Sequence[bool], settle: Callable[[Unit], None]
    ) -> Iterator[Sequence[Piece]]:
        """The step, a chunk at a time; ``settle`` is called when a unit is done. Chunks without a gradient are neither read nor written."""
        flats = [flat for unit in units for flat in unit.stepped]
        work = {
            flat: [chunk for chunk in flat.chunks if any(has_gradient[piece.member.number] for piece in flat.pieces_in(chunk))]
            for flat in flats
        }
        with self._disk.changing("a step"):
            visits = self._disk.visit([chunk for chunks in work.values() for chunk in chunks])
            try:
                for unit in units:
                    for flat in unit.stepped:
                        for _ in work[flat]:
                            chunk, memory = next(visits)
                            yield from self._step_on(flat, chunk, memory, scale, has_gradient)
                    settle(unit)
                next(visits, None)  # the last chunk is handed back
            finally:
                visits.close()
        self.book(flats)
        self._disk.ahead([chunk for flat in flats for chunk in flat.chunks])

    def _step_on(self, flat: Flat, chunk: Chunk, memory: Tensor, scale: float, has_gradient: Sequence[bool]) -> Iterator[Sequence[Piece]]:
        pieces = flat.pieces_in(chunk)
        for piece in pieces:
            self._lend(piece, chunk, memory)
        cast = flat.scaled_gradients(scale, [has_gradient[member.number] for member in flat.members], chunk)
        try:
            yield pieces
        finally:
            for piece in pieces:
                piece.parameter.grad = None
                self._take_back(piece, chunk, memory)
            if cast is not None:
                cast.give_back()
        flat.publish_part(chunk, chunk.master(memory, chunk.begin, chunk.end - chunk.begin))

    def _lend(self, piece: Piece, chunk: Chunk, memory: Tensor) -> None:
        piece.parameter.data = chunk.master(memory, piece.span.offset, piece.span.numel)
        names = self._disk.present.get(piece.parameter, ())
        if names:
            self._state[piece.parameter] |= {name: view for name, view in states_in(self._disk, piece, memory).items() if name in names}

    def _take_back(self, piece: Piece, chunk: Chunk, memory: Tensor) -> None:
        self._take_state(piece, chunk, memory)
        master = chunk.master(memory, piece.span.offset, piece.span.numel)
        if address_of(piece.parameter) != address_of(master):  # the optimizer has given it other memory
            master.copy_(piece.parameter.data)
        piece.parameter.data = self._disk.nothing(piece.span.numel, master.dtype)

    def _take_state(self, piece: Piece, chunk: Chunk, memory: Tensor) -> None:
        """What the optimizer has for each element goes into the slot, and out of ``optimizer.state``."""
        state = self._state.get(piece.parameter)
        found = kept_in(state, piece)
        if state is None or not found:
            return
        views = states_in(self._disk, piece, memory)
        for name, value in found.items():
            if name not in views:
                raise ConfigError(
                    f"optimizer: it keeps {name!r} for each element of {piece.member.name!r}, which it did not when it was tried on small "
                    f"tensors, so there is no room for it on the disk; use Offload(optimizer='host')"
                )
            if address_of(value) != address_of(memory):
                self._copy(views[name], value, chunk.unit)
            del state[name]
        self._disk.present[piece.parameter] = tuple(found)

    def _copy(self, target: Tensor, made: Tensor, unit: str) -> None:
        """From memory that the optimizer has taken by itself: seen here first, and gone when this is over."""
        entry = (Account.WORKSPACE, Tier.HOST, unit)
        self._journal.book(*entry, made.nbytes, address=address_of(made))
        target.copy_(made)
        self._journal.book(*entry, -made.nbytes, address=address_of(made))

    def book(self, flats: Sequence[Flat]) -> None:
        """States that have values are booked on the disk, others not."""
        for flat in flats:
            if flat.chunks:
                there = any(piece.parameter in self._disk.present for piece in flat.pieces)
                self._disk.book_states(flat.unit, flat.chunks, flat.padding, there=there)


def kept_in(state: dict[str, Any] | None, piece: Piece) -> dict[str, Tensor]:
    """What an optimizer's state has for each element of a piece, by name."""
    return {key: value for key, value in (state or {}).items() if is_elementwise(key, value, piece)}


def is_elementwise(key: str, value: Any, piece: Piece) -> bool:
    """Whether a value of the optimizer's state has one entry for each element of the piece."""
    return key != "step" and isinstance(value, Tensor) and value.shape == piece.parameter.shape


def states_in(disk: Disk, piece: Piece, memory: Tensor) -> dict[str, Tensor]:
    """Room for every state of a piece, by name, in the slot that has its chunk."""
    assert piece.chunk is not None
    kept = disk.kept(piece.member.parameter, piece.chunk.form.master)
    return {
        name: piece.chunk.state(memory, segment, dtype, piece.span.offset, piece.span.numel)
        for segment, (name, dtype) in enumerate(kept.items())
    }
