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
from shardbook.recording.record import Recorder
from shardbook.train.seeding import Seeding, unseeded

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
        reduces_each: whether ranks are added before micro-batches are; None: as the run's stage does.

    Raises:
        ConfigError: parameters that ``precision.keep`` holds out of the policy: the plain loop has one type for all.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any],
        *,
        reduces_each: bool | None = None,
    ) -> None:
        precision = config.precision
        if precision.keep:
            raise ConfigError("the plain loop has one type for all parameters; leave zero.precision.keep out, or don't compare with it")
        self.model, self.config = model, config
        self.call: Callable[..., Any] = model  # or what calls it in turn
        # Stages 2 and 3 reduce after every micro-batch.
        self._reduces_each = config.stage >= 2 if reduces_each is None else reduces_each
        self.recorder: Recorder | None = None
        self.names = [name for name, _ in model.named_parameters()]
        self.masters = (
            [nn.Parameter(p.detach().to(_TYPES[precision.master_dtype])) for p in model.parameters()] if precision.has_master else None
        )
        model.to(_TYPES[precision.param])
        held = self.masters or list(model.parameters())
        self.optimizer = make_optimizer(zip(self.names, held, strict=True))
        self.scheduler = make_scheduler(self.optimizer)

    def check_repeatable(self, batch: Sequence[Any], seed: Seeding) -> None:
        """Raises ConfigError for a model that is random although its generators are seeded: no two runs of it are comparable."""
        losses: list[Tensor] = []
        with torch.no_grad():
            for _ in range(2):
                seed(0, 0)
                losses.append(self.model(*batch)[0])
        if not torch.equal(*losses):
            raise ConfigError(
                "the same batch gives two losses although torch's generators were seeded alike before each: the model draws random numbers "
                "elsewhere, or its kernels are not deterministic; let it draw from torch's generators, or drop the check"
            )

    def step(self, batches: Sequence[Sequence[Sequence[Any]]], loss_scale: float, seed: Seeding = unseeded) -> PlainReport:
        """One step over ``batches[rank][micro]``.

        Args:
            batches: what each rank is given.
            loss_scale: the power of two that the run used.
            seed: called before each forward.
        """
        ranks, micro = range(len(batches)), range(len(batches[0]))
        losses, weights = [0.0] * len(batches), [0.0] * len(batches)
        given: list[Sequence[Any]] = []
        total: Part | None = None
        for outer in micro if self._reduces_each else ranks:
            inner_sum: Part | None = None
            for inner in ranks if self._reduces_each else micro:
                rank, index = (inner, outer) if self._reduces_each else (outer, inner)
                seed(rank, index)
                loss, weight, part = self._part(batches[rank][index], loss_scale)
                losses[rank] += loss
                weights[rank] += weight
                given.append(batches[rank][index])
                inner_sum = _add(inner_sum, part)
            total = _add(total, inner_sum or [])
        gradients = [None if g is None else g.to(self._grad_dtype) for g in total or []]
        loss, weight = self._totals(losses, weights)
        if self.recorder is not None:
            self._record(self.recorder, gradients, loss, weight, loss_scale, given)
        return self._apply(gradients, loss, weight, loss_scale)

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

    @property
    def _grad_dtype(self) -> torch.dtype:
        return _TYPES[self.config.precision.grad_dtype]

    @property
    def _held(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        return self.masters or list(self.model.parameters())

    def _totals(self, losses: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
        """Loss and weight of the step, from those of the ranks."""
        return _left_to_right(losses), _left_to_right(weights)

    def _norm(self, gradients: Part, divisor: float) -> float:
        """Of the objective's gradient."""
        return self._rounded(math.sqrt(_left_to_right(float(g.double().square().sum()) for g in gradients if g is not None))) / divisor

    def _part(self, batch: Sequence[Any], loss_scale: float) -> tuple[float, float, Part]:
        """Loss, weight and gradients of one micro-batch."""
        loss_sum, weight = self.call(*batch)
        (loss_sum * loss_scale if loss_scale != 1.0 else loss_sum).backward()
        return float(loss_sum.detach()), float(weight), self._take_gradients()

    def _take_gradients(self) -> Part:
        dtype = _TYPES[self.config.precision.reduce]
        part: Part = [None if p.grad is None else p.grad.to(dtype) for p in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return part

    def _record(
        self, recorder: Recorder, gradients: Part, loss: float, weight: float, loss_scale: float, given: list[Sequence[Any]] | None
    ) -> None:
        """The gradient of the objective, before clipping, where a recorder looks for it."""
        self._place(gradients, self._rounded(1.0 / (weight * loss_scale)))
        recorder.step(loss=loss, weight=weight, batch=given)
        for parameter in self._held:
            parameter.grad = None

    def _apply(self, gradients: Part, loss_sum: float, weight: float, loss_scale: float) -> PlainReport:
        """One scale for all, in float64 until its one rounding; then the optimizer, and the masters cast into the model."""
        loss = loss_sum / weight
        norm = self._norm(gradients, weight * loss_scale)
        clip = self.config.clip_grad_norm
        clip_factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        applied = math.isfinite(norm) and math.isfinite(loss)
        if applied:
            self._place(gradients, self._rounded(clip_factor / (weight * loss_scale)))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            self._cast_masters()
        return PlainReport(loss=loss, weight=weight, grad_norm=norm, clip_factor=clip_factor, applied=applied)

    def _place(self, gradients: Part, scale: float) -> None:
        """Scaled, where the optimizer finds them: one multiplication, in single precision or better."""
        for parameter, gradient in zip(self._held, gradients, strict=True):
            wide = None if gradient is None else gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            parameter.grad = None if wide is None else (wide * scale).to(parameter.dtype)

    def _rounded(self, value: float) -> float:
        """To single precision, as the engine's numbers are; not where the baseline is one of double precision."""
        return value if self._grad_dtype == torch.float64 else _single(value)

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
