"""What of an engine has to outlive it: this rank's part of every weight and of its optimizer's state, by name and place.

A *weight* is what the optimizer updates: the master, or the parameter where that is its own master. Parameters in a narrower type are
the weight, rounded, so they are never kept beside it. A *state* is what an optimizer keeps for each element of a parameter
("exp_avg"); what it keeps once for a parameter ("step") is a *scalar*. Each element of each belongs to one rank, whatever the stage:
the owner of the shard it lies in. Places are elements of the parameter in the order of its memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardbook.engine.disk import Chunk, Disk
from shardbook.engine.disk_step import is_elementwise, states_in
from shardbook.engine.flat import Flat, Member, Piece
from shardbook.engine.layout import Span
from shardbook.engine.unit import Unit

WEIGHT = "weight"


class Stream:
    """Chunks of a disk, one after the other, each read once while they are asked for in the order in which they are given."""

    def __init__(self, disk: Disk, chunks: Sequence[Chunk]) -> None:
        self._disk, self._chunks = disk, tuple(chunks)
        self._visits: Iterator[tuple[Chunk, Tensor]] = iter(())
        self._now: tuple[Chunk, Tensor] | None = None

    def at(self, chunk: Chunk) -> Tensor:
        """The memory that has the chunk, until another one is asked for."""
        if self._now is None:
            self._disk.check_whole()
            self._disk.settle()
            self._visits = self._disk.visit(self._chunks[self._chunks.index(chunk) :], writes=False)
        while self._now is None or self._now[0] is not chunk:
            self._now = next(self._visits, None)
            if self._now is None:  # it was passed already
                return self.at(chunk)
        return self._now[1]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Stands for a flat tensor that is read when it is needed."""

    numel: int
    dtype: torch.dtype
    load: Callable[[], Tensor]
    """The tensor, valid until another one of the same stream is loaded."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter from ``start`` on, flat: of its weight, or of the state that ``what`` names."""

    what: str
    name: str
    start: int
    tensor: Tensor | OnDisk


@dataclass(frozen=True, slots=True)
class Place:
    """Where elements ``start`` to ``stop`` of a parameter's weight (or state) belong here: ``targets``, each filled from the one before.

    A parameter is its master, rounded: the chain makes it the same to the bit as a step would. ``through``: a type that values take on
    their way where this rank holds no master of these elements. ``is_on_disk``: the targets are there when their chunk is; without it they
    have a length only.
    """

    what: str
    name: str
    start: int
    targets: tuple[Tensor, ...]
    through: torch.dtype | None = None
    is_on_disk: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.targets[0].numel()


def held_by(disk: Disk | None, units: Sequence[Unit], rank: int, state: Mapping[Any, Mapping[str, Any]]) -> list[Held]:
    """This rank's weights and states, unit after unit. What is on a disk is loaded fastest in this order."""
    flats = [flat for unit in units for flat in unit.flats]
    stream = None if disk is None else Stream(disk, [chunk for flat in flats for chunk in flat.chunks])
    found: list[Held] = []
    for flat in flats:
        if disk is not None and stream is not None and flat.chunks:
            found += _on_disk(disk, stream, flat)
        else:
            found += [*weights_of(flat, rank), *states_of(flat, rank, state)]
    return found


def _on_disk(disk: Disk, stream: Stream, flat: Flat) -> list[Held]:
    found: list[Held] = []
    for chunk in flat.chunks:
        for piece in flat.pieces_in(chunk):
            name, span, master = piece.member.name, piece.span, chunk.form.master
            weight = partial(_loaded_weight, stream, chunk, span)
            found.append(Held(WEIGHT, name, span.start, OnDisk(span.numel, master, weight)))
            kept = disk.kept(piece.member.parameter, master)
            for key in sorted(disk.present.get(piece.parameter, ())):
                state = partial(_loaded_state, stream, disk, piece, key)
                found.append(Held(key, name, span.start, OnDisk(span.numel, kept[key], state)))
    return found


def _loaded_weight(stream: Stream, chunk: Chunk, span: Span) -> Tensor:
    return chunk.master(stream.at(chunk), span.offset, span.numel)


def _loaded_state(stream: Stream, disk: Disk, piece: Piece, key: str) -> Tensor:
    assert piece.chunk is not None
    return states_in(disk, piece, stream.at(piece.chunk))[key]


def loaded(tensor: Tensor | OnDisk) -> Tensor:
    """The tensor itself, read if it is on a disk."""
    return tensor if isinstance(tensor, Tensor) else tensor.load()


def weights_of(flat: Flat, rank: int) -> list[Held]:
    """The weights in this rank's shard of a flat buffer."""
    weight = (flat.master or flat.shard or flat.full).tensor
    first = flat.layout.bounds(rank)[0] if weight.numel() == flat.layout.numel else 0
    return [
        Held(WEIGHT, flat.members[span.slot].name, span.start, weight[first + span.offset : first + span.offset + span.numel])
        for span in flat.layout.spans(rank)
    ]


def states_of(flat: Flat, rank: int, state: Mapping[Any, Mapping[str, Any]]) -> list[Held]:
    """The optimizer's state of the elements in this rank's shard, in a fixed order."""
    spans = {span.slot: span for span in flat.layout.spans(rank)}
    found: list[Held] = []
    for piece in flat.pieces:
        mine = spans.get(piece.span.slot)
        if mine is not None:
            first = mine.start - piece.span.start
            for key, value in sorted(state.get(piece.parameter, {}).items()):
                if is_elementwise(key, value, piece):
                    found.append(Held(key, piece.member.name, mine.start, value.reshape(-1)[first : first + mine.numel]))
    return found


def scalars_of(flat: Flat, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps once for each parameter of which this rank has a piece."""
    return {
        piece.member.name: {key: value for key, value in state[piece.parameter].items() if not is_elementwise(key, value, piece)}
        for piece in flat.pieces
        if piece.parameter in state
    }


def weight_places(flat: Flat, rank: int) -> list[Place]:
    """Where this rank needs weights: in its shard, or all of them where parameters stay full."""
    if flat.chunks:
        own = [place for chunk in flat.chunks for place in chunk_places(flat, chunk, None)]
        return [*own, *(_others_places(flat, rank) if flat.stays_full else [])]
    if not flat.stays_full:
        rest = [buffer.tensor for buffer in (flat.master, flat.shard) if buffer is not None]
        return [_place(flat, span, [tensor[span.offset :] for tensor in rest]) for span in flat.layout.spans(rank)]
    if flat.master is None:
        return [_place(flat, span, [flat.full.tensor[span.offset :]]) for span in flat.layout.whole()]
    if flat.master.tensor.numel() == flat.layout.numel:
        return [_place(flat, span, [flat.master.tensor[span.offset :], flat.full.tensor[span.offset :]]) for span in flat.layout.whole()]
    return _split_places(flat, rank)


def chunk_places(flat: Flat, chunk: Chunk, memory: Tensor | None) -> list[Place]:
    """Where the weights of a chunk belong: in the memory that has it (None: not yet), and from there to where parameters rest."""
    rest = flat.own(flat.full) if flat.stays_full or flat.shard is None else flat.shard.tensor
    found: list[Place] = []
    for piece in flat.pieces_in(chunk):
        span, dtype = piece.span, chunk.form.master
        here = torch.empty(span.numel, dtype=dtype, device="meta") if memory is None else chunk.master(memory, span.offset, span.numel)
        targets = (here, rest[span.offset : span.offset + span.numel])
        found.append(Place(WEIGHT, piece.member.name, span.start, targets, is_on_disk=True))
    return found


def places_in_turn(flat: Flat, rank: int) -> Iterator[Place]:
    """:func:`weight_places`, each to be filled before the next is asked for."""
    yield from (place for place in weight_places(flat, rank) if not place.is_on_disk)
    for chunk, memory in flat.visited():
        yield from chunk_places(flat, chunk, memory)


def _split_places(flat: Flat, rank: int) -> list[Place]:
    """Full parameters, of which this rank has the master of its own shard only."""
    assert flat.master is not None
    master, full = flat.master.tensor, flat.own(flat.full)
    own = [_place(flat, span, [master[span.offset :], full[span.offset :]]) for span in flat.layout.spans(rank)]
    return [*own, *_others_places(flat, rank)]


def _others_places(flat: Flat, rank: int) -> list[Place]:
    """The full parameters outside of this rank's shard."""
    own = {span.slot: span for span in flat.layout.spans(rank)}
    found: list[Place] = []
    for whole in flat.layout.whole():
        full = flat.full.tensor[whole.offset : whole.offset + whole.numel]
        span = own.get(whole.slot)
        start, stop = (span.start, span.stop) if span else (whole.numel, whole.numel)
        for begin, end in ((0, start), (stop, whole.numel)):
            if begin < end:
                found.append(_place(flat, Span(whole.slot, begin, end, 0), [full[begin:]], flat.types.master or flat.types.param))
    return found


def _place(flat: Flat, span: Span, tensors: Sequence[Tensor], through: torch.dtype | None = None) -> Place:
    return Place(WEIGHT, flat.members[span.slot].name, span.start, tuple(tensor[: span.numel] for tensor in tensors), through)


def members_of(units: Sequence[Unit]) -> list[tuple[Unit, Flat, Member]]:
    """Every parameter, in the order of units."""
    return [(unit, flat, member) for unit in units for flat, _, member in unit.members]


def pieces_of(
    disk: Disk | None, units: Sequence[Unit], state: Mapping[Any, Mapping[str, Any]]
) -> Iterator[tuple[Piece, Tensor, dict[str, Any]]]:
    """What the optimizer steps on: each piece, its values, and its state, in memory or from a disk; valid until the next is asked for."""
    flats = [flat for unit in units for flat in unit.flats]
    stream = None if disk is None else Stream(disk, [chunk for flat in flats for chunk in flat.chunks])
    for flat in flats:
        for piece in flat.pieces:
            own = dict(state.get(piece.parameter, {}))
            if disk is None or stream is None or piece.chunk is None:
                yield piece, piece.parameter.detach(), own
                continue
            memory = stream.at(piece.chunk)
            names = disk.present.get(piece.parameter, ())
            own |= {name: view for name, view in states_in(disk, piece, memory).items() if name in names}
            yield piece, piece.chunk.master(memory, piece.span.offset, piece.span.numel), own
