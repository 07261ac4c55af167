"""The plain loop that the engine is held to, bit for bit: one process, no shards, no threads. It shares no code with shardbook.

``plain_step``      one optimizer step over the micro-batches of all ranks: what "the same training" means.
``PlainRun``        a model, the copies its optimizer updates, and ``plain_step`` over and over.
``usual_step``      the same objective in the form people write, ``(loss / weight).backward()``. It rounds in another order,
                    so it is compared within a derived bound and never for equality.

A *part* is the gradient of one micro-batch on one rank, a list with one entry per parameter. ``None`` in it is a missing
gradient, which adds nothing: not even a zero, because ``-0.0 + 0.0`` is ``0.0``.
"""

import fnmatch
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Part = list[Tensor | None]
Forward = Callable[[Callable[..., Any], Any], tuple[Tensor, Any]]  # (model, batch) -> (loss, weight or None)
NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Types:
    """Which type holds what. ``param``: the model; ``reduce``: sums; ``grad``: the sum as it waits; ``master``: the optimizer's."""

    param: str = "fp32"
    reduce: str = "fp32"
    grad: str | None = None
    master: str | None = "fp32"
    keep: Mapping[str, str] = field(default_factory=dict)
    cast_inputs: bool = True


@dataclass(frozen=True)
class Outcome:
    """What one step reports, of the objective: the sum of all losses over the sum of all weights."""

    loss: float
    weight: float
    norm: float
    clip_factor: float
    applied: bool


def float32(value: float) -> float:
    """``value`` rounded to single precision once."""
    return math.copysign(math.inf, value) if abs(value) > 3.5e38 else struct.unpack("f", struct.pack("f", value))[0]


def add(left: Part | None, right: Part) -> Part:
    """Element by element; ``None`` adds nothing."""
    if left is None:
        return right
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def plain_step(
    model: nn.Module,
    masters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[Any]],
    forward: Forward,
    *,
    clip: float | None = None,
    reduce_each: bool = False,
    reduce: torch.dtype = torch.float32,
    grad: torch.dtype | None = None,
    loss_scale: float = 1.0,
    buffers: "RankBuffers | None" = None,
) -> Outcome:
    """One step. ``batches[r][j]`` is micro-batch ``j`` of rank ``r``, ``None`` an empty one.

    ``masters`` is what ``optimizer`` holds, one per parameter of the model and possibly the same object. ``reduce_each``
    says how stages 2 and 3 nest the two loops: ranks are summed in each micro-batch, instead of micro-batches on each rank.
    A forward that returns no weight counts 1.
    """
    ranks, micro = range(len(batches)), range(len(batches[0]))
    losses = [0.0 for _ in ranks]
    weights = [0.0 for _ in ranks]

    def part(r: int, j: int) -> Part:
        if batches[r][j] is None:
            return [None for _ in model.parameters()]
        if buffers is not None:
            buffers.enter(r)
        loss, weight = forward(model, batches[r][j])
        (loss * loss_scale if loss_scale != 1.0 else loss).backward()
        if buffers is not None:
            buffers.leave(r)
        losses[r] += float(loss.detach())
        weights[r] += 1.0 if weight is None else float(weight)
        gradients = [None if p.grad is None else p.grad.to(no_narrower(reduce, p)) for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients

    total: Part | None = None
    for outer in micro if reduce_each else ranks:
        inner_sum: Part | None = None
        for inner in ranks if reduce_each else micro:
            inner_sum = add(inner_sum, part(inner, outer) if reduce_each else part(outer, inner))
        assert inner_sum is not None
        total = add(total, inner_sum)
    assert total is not None
    if grad is not None:
        total = [None if g is None else g.to(no_narrower(grad, p)) for g, p in zip(total, model.parameters(), strict=True)]

    weight = left_to_right(weights)
    loss = left_to_right(losses) / weight
    raw = float32(math.sqrt(left_to_right(float(g.double().square().sum()) for g in total if g is not None)))
    divisor = weight * loss_scale
    norm = raw / divisor
    clip_factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    scale = float32(clip_factor / divisor)
    applied = math.isfinite(norm) and math.isfinite(loss)
    if applied:
        for master, g in zip(masters, total, strict=True):
            master.grad = None if g is None else scaled(g, scale, master.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)
    return Outcome(loss, weight, norm, clip_factor, applied)


def no_narrower(dtype: torch.dtype, parameter: Tensor) -> torch.dtype:
    """Nothing is added in a narrower type than its parameter has."""
    return torch.promote_types(dtype, parameter.dtype)


def left_to_right(values: Iterable[float]) -> float:
    """Their sum, each rounding where it falls: ``sum`` of newer Pythons compensates."""
    total = 0.0
    for value in values:
        total = total + value
    return total


def scaled(gradient: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """One multiplication, in single precision or wider, rounded once to the type that the optimizer wants."""
    wide = torch.promote_types(torch.promote_types(gradient.dtype, dtype), torch.float32)
    return (gradient.to(wide) * scale).to(dtype)


class RankBuffers:
    """The module buffers of each rank, put into the one model while a micro-batch of that rank runs."""

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        self._places = [(module, name) for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None]
        self._of_rank = [[module._buffers[name].clone() for module, name in self._places] for _ in range(num_ranks)]

    def enter(self, rank: int) -> None:
        for (module, name), value in zip(self._places, self._of_rank[rank], strict=True):
            module._buffers[name] = value

    def leave(self, rank: int) -> None:
        self._of_rank[rank] = [module._buffers[name] for module, name in self._places]

    def named(self, rank: int, model: nn.Module) -> dict[str, Tensor]:
        """Of one rank, by full name."""
        self.enter(rank)
        return dict(model.named_buffers())


# ---- types ---------------------------------------------------------------------------------------------------------------


def wanted_types(model: nn.Module, types: Types) -> dict[str, torch.dtype]:
    """The type of each parameter: ``types.param`` governs the model's main floating type, the one with most elements."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    main = max(counts, key=lambda dtype: counts[dtype]) if counts else None
    wanted: dict[str, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        kept = kept_type(name, types.keep)
        wanted[name] = kept or (TYPES[types.param] if parameter.dtype is main else parameter.dtype)
    return wanted


def kept_type(name: str, keep: Mapping[str, str]) -> torch.dtype | None:
    """What ``keep`` says of a parameter: a pattern matches its name or the name of any module around it."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    for pattern, dtype in keep.items():
        if any(fnmatch.fnmatchcase(candidate, pattern) for candidate in around):
            return TYPES[dtype]
    return None


def split_masters(model: nn.Module, types: Types) -> list[nn.Parameter]:
    """Casts the model in place; returns what the optimizer holds, copied before the cast, one per parameter."""
    wanted = wanted_types(model, types)
    masters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        needs_master = (
            types.master is not None
            and parameter.requires_grad
            and wanted[name].is_floating_point
            and wanted[name].itemsize < TYPES[types.master].itemsize
        )
        unrounded = parameter.detach().clone()
        if parameter.dtype is not wanted[name]:
            parameter.data = parameter.data.to(wanted[name])
        masters.append(nn.Parameter(unrounded.to(TYPES[types.master])) if needs_master and types.master else parameter)
    return masters


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating tensor of a nest of arguments, in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


# ---- runs ----------------------------------------------------------------------------------------------------------------


class PlainRun:
    """A model under the plain loop. ``make_optimizer`` is given (name, master) pairs, so groups may follow names."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[NamedParameters], torch.optim.Optimizer],
        forward: Forward,
        *,
        num_ranks: int,
        types: Types | None = None,
        clip: float | None = None,
        reduce_each: bool = False,
        loss_scale: float = 1.0,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        self.model, self.clip, self.reduce_each, self.loss_scale = model, clip, reduce_each, loss_scale
        self.types = types or Types()
        names = [name for name, _ in model.named_parameters()]
        self.masters = split_masters(model, self.types)
        trainable = [(name, master) for name, master in zip(names, self.masters, strict=True) if master.requires_grad]
        self.optimizer = make_optimizer(trainable)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.buffers = RankBuffers(model, num_ranks)
        self._forward = forward

    def step(self, batches: Sequence[Sequence[Any]]) -> Outcome:
        grad = self.types.grad
        outcome = plain_step(
            self.model,
            self.masters,
            self.optimizer,
            batches,
            self.forward,
            clip=self.clip,
            reduce_each=self.reduce_each,
            reduce=TYPES[self.types.reduce],
            grad=None if grad is None else TYPES[grad],
            loss_scale=self.loss_scale,
            buffers=self.buffers,
        )
        if outcome.applied and self.scheduler is not None:
            self.scheduler.step()
        return outcome

    def forward(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        if not self.types.cast_inputs:
            return self._forward(model, batch)
        dtype = TYPES[self.types.param]
        return self._forward(lambda *args, **kwargs: model(*cast(args, dtype), **cast(kwargs, dtype)), batch)

    def full_parameters(self) -> dict[str, Tensor]:
        """The model's own values, by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def updated(self) -> dict[str, nn.Parameter]:
        """What the optimizer holds, by the model's names: the master where there is one."""
        names = [name for name, _ in self.model.named_parameters()]
        return {name: master for name, master in zip(names, self.masters, strict=True) if master.requires_grad}


def usual_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[Any]],
    forward: Forward,
    *,
    clip: float | None = None,
) -> Outcome:
    """The step as people write it: each loss over the total weight, gradients left to accumulate in ``.grad``."""
    flat = [batch for rank in batches for batch in rank if batch is not None]
    with torch.no_grad():
        weight = float(sum(1.0 if w is None else float(w) for w in (forward(model, batch)[1] for batch in flat)))
    loss = 0.0
    for batch in flat:
        share = forward(model, batch)[0] / weight
        share.backward()
        loss += float(share.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Outcome(loss, weight, norm, 1.0 if clip is None else min(1.0, clip / (norm + 1e-6)), True)
