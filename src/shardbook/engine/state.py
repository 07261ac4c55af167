"""What of an engine has to outlive it: this rank's part of every weight and of its optimizer's state, by name and place.

A *weight* is what the optimizer updates: the master, or the parameter where that is its own master. Parameters in a narrower type are
the weight, rounded, so they are never kept beside it. A *state* is what an optimizer keeps for each element of a parameter
("exp_avg"); what it keeps once for a parameter ("step") is a *scalar*. Each element of each belongs to one rank, whatever the stage:
the owner of the shard it lies in. Places are elements of the parameter in the order of its memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardbook.engine.flat import Flat, Member, Piece
from shardbook.engine.layout import Span
from shardbook.engine.unit import Unit

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of one parameter from ``start`` on, flat: of its weight, or of the state that ``what`` names."""

    what: str
    name: str
    start: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where elements ``start`` to ``stop`` of a parameter's weight (or state) belong here: ``targets``, each filled from the one before.

    A parameter is its master, rounded: the chain makes it the same to the bit as a step would. ``through``: a type that values take on
    their way where this rank holds no master of these elements.
    """

    what: str
    name: str
    start: int
    targets: tuple[Tensor, ...]
    through: torch.dtype | None = None

    @property
    def stop(self) -> int:
        return self.start + self.targets[0].numel()


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


def is_elementwise(key: str, value: Any, piece: Piece) -> bool:
    """Whether a value of the optimizer's state has one entry for each element of the piece."""
    return key != "step" and isinstance(value, Tensor) and value.shape == piece.parameter.shape


def weight_places(flat: Flat, rank: int) -> list[Place]:
    """Where this rank needs weights: in its shard, or all of them where parameters stay full."""
    if not flat.stays_full:
        rest = [buffer.tensor for buffer in (flat.master, flat.shard) if buffer is not None]
        return [_place(flat, span, [tensor[span.offset :] for tensor in rest]) for span in flat.layout.spans(rank)]
    if flat.master is None:
        return [_place(flat, span, [flat.full.tensor[span.offset :]]) for span in flat.layout.whole()]
    if flat.master.tensor.numel() == flat.layout.numel:
        return [_place(flat, span, [flat.master.tensor[span.offset :], flat.full.tensor[span.offset :]]) for span in flat.layout.whole()]
    return _split_places(flat, rank)


def _split_places(flat: Flat, rank: int) -> list[Place]:
    """Full parameters, of which this rank has the master of its own shard only."""
    assert flat.master is not None
    own = {span.slot: span for span in flat.layout.spans(rank)}
    found: list[Place] = []
    for whole in flat.layout.whole():
        full = flat.full.tensor[whole.offset : whole.offset + whole.numel]
        span = own.get(whole.slot)
        start, stop = (span.start, span.stop) if span else (whole.numel, whole.numel)
        if span:
            found.append(_place(flat, span, [flat.master.tensor[span.offset :], full[start:]]))
        for begin, end in ((0, start), (stop, whole.numel)):
            if begin < end:
                found.append(_place(flat, Span(whole.slot, begin, end, 0), [full[begin:]], flat.master.tensor.dtype))
    return found


def _place(flat: Flat, span: Span, tensors: Sequence[Tensor], through: torch.dtype | None = None) -> Place:
    return Place(WEIGHT, flat.members[span.slot].name, span.start, tuple(tensor[: span.numel] for tensor in tensors), through)


def members_of(units: Sequence[Unit]) -> list[tuple[Unit, Flat, Member]]:
    """Every parameter, in the order of units."""
    return [(unit, flat, member) for unit in units for flat, _, member in unit.members]
