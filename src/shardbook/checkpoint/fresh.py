"""Optimizer state that an engine hasn't got yet: in its own memory while it is checked, the optimizer's only when all ranks agree.

A load may change nothing before everything is checked, so what is there already is read twice. Where there is nothing yet, nothing is
changed by filling new memory: it becomes the training state's, or is given back.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.read import Range, Reader
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Piece
from shardbook.engine.state import WEIGHT
from shardbook.tiers.pages import in_large_pages


class Fresh:
    """Rooms, by piece and state, booked from the moment they are made."""

    def __init__(self, engine: Engine) -> None:
        self._optimizer, self._pieces = engine.optimizer, engine._pieces
        self._rooms: dict[tuple[int, str], Tensor] = {}

    def make(self, states: Sequence[tuple[Piece, Sequence[str]]], reader: Reader) -> None:
        """Rooms for the states that are stored as they are kept here, of pieces that have none.

        Raises:
            MemoryError: there is not enough of it.
        """
        if self._optimizer is None or self._pieces is None:
            return
        for piece, names in states:
            if piece.chunk is not None:
                continue  # on a disk, and filled a chunk at a time
            for what in names if not self._optimizer.state.get(piece.parameter) else ():
                stored, dtype = state_types(reader, piece, what)
                if stored == dtype and piece.parameter.device.type == "cpu":
                    self._rooms[id(piece.parameter), what] = room = new_room(piece, dtype)
                    self._pieces.reserve(piece, room)

    def part(self, piece: Piece, what: str, wanted: Range) -> Tensor | None:
        """Where the elements of a range belong, if there is a room for them."""
        room = self._rooms.get((id(piece.parameter), what))
        first = wanted.stored.start + wanted.start - piece.span.start
        return None if room is None else room[first : first + wanted.numel]

    def taken(self, piece: Piece, what: str) -> Tensor | None:
        """The room, from now on the caller's."""
        return self._rooms.pop((id(piece.parameter), what), None)

    def give_up(self) -> None:
        """Give back what nobody has taken, whoever still holds a view of it: the frames of an error do. No thread may be filling it."""
        if self._pieces is not None and self._rooms:
            while self._rooms:
                self._rooms.popitem()[1].untyped_storage().resize_(0)
            self._pieces.settle()


@contextmanager
def fresh_states(engine: Engine) -> Generator[Fresh]:
    """Rooms that are given up with the block, but for those that were taken."""
    fresh = Fresh(engine)
    try:
        yield fresh
    finally:
        fresh.give_up()


def state_types(reader: Reader, piece: Piece, what: str) -> tuple[torch.dtype, torch.dtype]:
    """How a state is stored, and how it is kept here: in its own type where the weight keeps its type, else in the weight's, as
    ``load_state_dict`` would have it.
    """
    weight, stored = (TYPES[reader.stored(kind, piece.member.name)[0].dtype] for kind in (WEIGHT, what))
    keeps = weight == piece.parameter.dtype or not stored.is_floating_point
    return stored, stored if keeps else piece.parameter.dtype


def new_room(piece: Piece, dtype: torch.dtype) -> Tensor:
    """Memory for a state of a piece.

    Raises:
        MemoryError: there is not enough of it.
    """
    try:
        return in_large_pages(torch.empty_like(piece.parameter, dtype=dtype, requires_grad=False))
    except RuntimeError as error:  # torch has no type of its own for this on the host
        raise MemoryError(f"no memory for the optimizer's state of {piece.member.name!r}: {error}") from error


def room_that_fits(before: object, piece: Piece, dtype: torch.dtype) -> Tensor | None:
    """What the optimizer has already, if a state of this type can go there."""
    if isinstance(before, Tensor) and before.shape == piece.parameter.shape and before.dtype == dtype:
        return before
    return None
