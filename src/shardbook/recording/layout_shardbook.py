"""shardbook's own engine: pieces of flat buffers. Read by attribute, as any other engine is."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.engine.state import pieces_of
from shardbook.recording.fragments import Fragment


class ShardbookLayout:
    """Gradients are sums over ranks and micro-batches: divided by nothing until the engine's step."""

    def __init__(self, passes: Any, optimizer: Any) -> None:
        self._passes, self._optimizer = passes, optimizer
        # Which parameters other ranks had gradients of is told in the step's exchange: until then what is reduced may be of them alone.
        self._knows_no_others = dist.is_initialized() and dist.get_world_size() > 1

    def _flats(self) -> Iterator[Any]:
        for unit in self._passes._units:
            yield from unit.flats

    def _pieces(self) -> Iterator[tuple[Any, Any]]:
        for flat in self._flats():
            for piece in flat.pieces:
                yield flat, piece

    def _held(self) -> Iterator[tuple[Any, Tensor, Mapping[str, Any]]]:
        """Each piece, its values and its state. What is on a disk is copied: all of it is in memory while it is recorded."""
        for piece, value, state in pieces_of(self._passes._context.disk, self._passes._units, self._optimizer.state):
            if piece.chunk is None:
                yield piece, value, state
            else:
                yield piece, value.clone(), {key: one.clone() if isinstance(one, Tensor) else one for key, one in state.items()}

    def weights(self) -> list[Fragment]:
        found = [Fragment(piece.member.name, piece.span.start, value) for piece, value, _ in self._held()]
        for flat in self._flats():
            if not flat.trainable:
                found += _resting(flat)
        return found

    def model(self) -> list[Fragment]:
        """Where parameters stay full and a master is what the optimizer updates. Awaits a refresh under way, as reading them would."""
        found: list[Fragment] = []
        for unit in self._passes._units:
            if any(flat._residency.full_parameters for flat in unit.flats):
                unit.wait()
        for flat in self._flats():
            if flat.trainable and flat.master is not None and flat._residency.full_parameters:
                found += _of(flat, flat.full.tensor, flat.layout.whole())
        return found

    def gradients(self) -> list[Fragment]:
        with torch.no_grad():
            self._passes.finish()
        return [
            Fragment(piece.member.name, piece.span.start, flat.gradient_of(piece))
            for flat, piece in self._pieces()
            if flat.grad.present and (flat.has_gradient[piece.span.slot] or self._knows_no_others)
        ]

    def stepped(self) -> list[Fragment]:
        return [
            Fragment(piece.member.name, piece.span.start, piece.parameter.grad)
            for _, piece in self._pieces()
            if piece.parameter.grad is not None
        ]

    def states(self) -> Mapping[str, list[Fragment]]:
        found: dict[str, list[Fragment]] = {}
        for piece, _, state in self._held():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step" and value.shape == piece.parameter.shape:
                    found.setdefault(key, []).append(Fragment(piece.member.name, piece.span.start, value))
        return found

    def divisor(self) -> Any:
        """This rank's total weight times the loss scale: what the sum over ranks of these divides the gradients by."""
        return self._passes.tally.weight * self._passes.loss_scale

    def divided_by(self) -> Any:
        """While the optimizer steps: what the engine has divided the gradients by, clipping apart, all ranks together."""
        report = self._passes.report
        return None if report is None else report.weight * report.loss_scale

    def groups(self) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
        names = {id(piece.parameter): piece.member.name for _, piece in self._pieces()}
        return [(group, tuple(names.get(id(parameter), "") for parameter in group["params"])) for group in self._optimizer.param_groups]


def _resting(flat: Any) -> list[Fragment]:
    """What this rank keeps of a frozen buffer."""
    if flat._residency.full_parameters:
        return _of(flat, flat.full.tensor, flat.layout.whole())
    buffer = flat.master if flat.shard is None else flat.shard
    return _of(flat, buffer.tensor, flat.layout.spans(flat._transport.rank))


def _of(flat: Any, tensor: Tensor, spans: Any) -> list[Fragment]:
    return [Fragment(flat.members[span.slot].name, span.start, tensor[span.offset : span.offset + span.numel]) for span in spans]
