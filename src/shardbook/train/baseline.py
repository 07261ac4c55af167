"""The plain loop that a run is compared with: one process, whole parameters, every rank's micro-batches one after the other.

It shares the model's class, the optimizer's settings and the data function with the run, and nothing with the engine. So
what agrees here, to the last bit, is what sharding, communication and the engine's arithmetic did.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.config import ZeroConfig
from shardbook.errors import ConfigError

_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Part = list[Tensor | None]
"""The gradient of one micro-batch on one rank, an entry per parameter; a missing one adds nothing."""


@dataclass(frozen=True, kw_only=True)
class PlainReport:
    """What one plain step found, to be equal to what the engine reports."""

    loss: float
    weight: float
    grad_norm: float
    clip_factor: float
    applied: bool


class PlainLoop:
    """A whole model, the masters its optimizer updates where it computes in another type, and the optimizer.

    Args:
        model: built as the engine's was, in fp32; taken over.
        config: the run's: types, clipping, and how the two sums of a step are nested.
        make_optimizer: an optimizer for (name, parameter) pairs, as the run's was built.
        make_scheduler: its scheduler.

    Raises:
        ConfigError: parameters that ``precision.keep`` holds out of the policy: the plain loop has one type for all.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        precision = config.precision
        if precision.keep:
            raise ConfigError("run.check_baseline: the plain loop has one type for all parameters; leave zero.precision.keep out")
        self.model, self.config = model, config
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = (
            [nn.Parameter(p.detach().to(_TYPES[precision.master_dtype])) for p in model.parameters()] if precision.has_master else None
        )
        model.to(_TYPES[precision.param])
        held = self.masters or list(model.parameters())
        self.optimizer = make_optimizer(zip(self.names, held, strict=True))
        self.scheduler = make_scheduler(self.optimizer)

    def check_repeatable(self, batch: Sequence[Any]) -> None:
        """Raises ConfigError for a model that draws random numbers in forward: no two runs of it are comparable."""
        with torch.no_grad():
            first, second = (self.model(*batch)[0] for _ in range(2))
        if not torch.equal(first, second):
            raise ConfigError(
                "run.check_baseline: the same batch gives two losses, as dropout does; set the model's dropout to 0, or drop the check"
            )

    def step(self, batches: Sequence[Sequence[Sequence[Any]]], loss_scale: float) -> PlainReport:
        """One step over ``batches[rank][micro]``; ``loss_scale`` is the power of two that the run used."""
        precision = self.config.precision
        # Stages 2 and 3 reduce after every micro-batch, so that ranks are added before micro-batches are.
        reduce_each = self.config.stage >= 2
        ranks, micro = range(len(batches)), range(len(batches[0]))
        losses, weights = [0.0] * len(batches), [0.0] * len(batches)
        total: Part | None = None
        for outer in micro if reduce_each else ranks:
            inner_sum: Part | None = None
            for inner in ranks if reduce_each else micro:
                rank, index = (inner, outer) if reduce_each else (outer, inner)
                loss_sum, weight = self.model(*batches[rank][index])
                (loss_sum * loss_scale if loss_scale != 1.0 else loss_sum).backward()
                losses[rank] += float(loss_sum.detach())
                weights[rank] += float(weight)
                inner_sum = _add(inner_sum, self._take_gradients(_TYPES[precision.reduce]))
            total = _add(total, inner_sum or [])
        gradients = [None if g is None else g.to(_TYPES[precision.grad_dtype]) for g in total or []]
        return self._apply(gradients, _left_to_right(losses), _left_to_right(weights), loss_scale)

    def first_difference(self, step: int, parameters: Iterable[tuple[str, Tensor]]) -> str | None:
        """The first of the run's full parameters that isn't equal bit for bit, in one line. Reads all: each is a collective."""
        mine = dict(zip(self.names, self.model.parameters(), strict=True))
        masters = dict(zip(self.names, self.masters or [], strict=False))
        found: str | None = None
        for name, theirs in parameters:
            if name not in mine:
                found = found or f"step {step}: {name}: no parameter of the plain loop, or read twice"
                continue
            plain = mine.pop(name).detach()
            if plain.dtype != theirs.dtype and name in masters:
                plain = masters[name].detach()
            if found is None and not _same_bits(plain, theirs):
                found = f"step {step}: {name}: {_how_different(plain, theirs)}"
        return found or (f"step {step}: {next(iter(mine))}: missing in the run" if mine else None)

    def report_difference(self, step: int, mine: PlainReport, theirs: Any) -> str | None:
        """The first of the run's reported numbers that isn't equal, in one line."""
        for name in ("applied", "weight", "loss", "grad_norm", "clip_factor"):
            plain, other = getattr(mine, name), getattr(theirs, name)
            if plain != other and not (_is_nan(plain) and _is_nan(other)):
                return f"step {step}: {name} is {other!r}, in the plain loop {plain!r}"
        return None

    def tensors(self) -> list[Tensor]:
        """Everything it holds between steps."""
        state = [value for values in self.optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *(self.masters or []), *state]

    def _take_gradients(self, dtype: torch.dtype) -> Part:
        part: Part = [None if p.grad is None else p.grad.to(dtype) for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return part

    def _apply(self, gradients: Part, loss_sum: float, weight: float, loss_scale: float) -> PlainReport:
        """One scale for all, in float64 until its one rounding; then the optimizer, and the masters cast into the model."""
        loss = loss_sum / weight
        raw = _single(math.sqrt(_left_to_right(float(g.double().square().sum()) for g in gradients if g is not None)))
        norm = raw / (weight * loss_scale)
        clip = self.config.clip_grad_norm
        clip_factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        scale = _single(clip_factor / (weight * loss_scale))
        applied = math.isfinite(norm) and math.isfinite(loss)
        if applied:
            held = self.masters or list(self.model.parameters())
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = None if gradient is None else (gradient.float() * scale).to(parameter.dtype)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            self._cast_masters()
        return PlainReport(loss=loss, weight=weight, grad_norm=norm, clip_factor=clip_factor, applied=applied)

    @torch.no_grad()
    def _cast_masters(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters or [], strict=False):
            parameter.copy_(master)


def _add(left: Part | None, right: Part) -> Part:
    if left is None:
        return right
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def _left_to_right(values: Iterable[float]) -> float:
    """Their sum, each rounding where it falls; ``sum`` of newer Pythons compensates."""
    total = 0.0
    for value in values:
        total = total + value
    return total


def _single(value: float) -> float:
    """Rounded once to single precision."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal as bytes: unlike ``==``, 0.0 and -0.0 differ and NaN equals itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.detach().to(left.device)
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def _how_different(plain: Tensor, theirs: Tensor) -> str:
    if plain.dtype != theirs.dtype or plain.shape != theirs.shape:
        return f"{theirs.dtype} {tuple(theirs.shape)}, in the plain loop {plain.dtype} {tuple(plain.shape)}"
    wide, other = plain.double(), theirs.detach().to(plain.device).double()
    different = int((wide != other).sum())
    return f"{different:,} of {plain.numel():,} elements differ, by {float((wide - other).abs().max()):.3g} at most"
