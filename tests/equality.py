"""One training run in two forms, under the engine on this rank and as the plain loop, and what differs between the two.

A :class:`Case` says everything about a run. ``engine_trace`` is a job for every rank, ``plain_trace`` for any process; both
give a :class:`Trace` of plain numbers and raw bits, and ``differences`` lists what is not the same. Nothing is compared with
a tolerance: tensors are viewed as integers, numbers by their bits.
"""

import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.oracle import NamedParameters, PlainRun, Types
from tests.zoo import ZOO, Batch, Entry

CLIP = 1.3  # of norms around one: it bites in some steps and not in others
STEPS = 3
SEED = 1234


@dataclass(frozen=True)
class Case:
    """One run. ``ragged``: the second step ends one micro-batch early; ``empty``: some micro-batches of some ranks have no data."""

    entry: str = "plain"
    num_ranks: int = 2
    stage: int = 3
    precision: str = "fp32"
    accumulate: int = 1
    ahead: int = 1
    optimizer: str = "adamw_fused"
    clip: bool = True
    weighted: bool = True
    ragged: bool = False
    empty: bool = False
    scheduled: bool = False
    offload: str = "none"
    recompute: str = "none"
    steps: int = STEPS

    def __str__(self) -> str:
        flags = [name for name in ("clip", "weighted", "ragged", "empty", "scheduled") if getattr(self, name)]
        flags += [f"{name}-{value}" for name, value in (("offload", self.offload), ("recompute", self.recompute)) if value != "none"]
        return "-".join(
            [
                self.entry,
                f"n{self.num_ranks}",
                f"stage{self.stage}",
                self.precision,
                f"acc{self.accumulate}",
                f"ahead{self.ahead}",
                self.optimizer,
                *flags,
            ]
        )

    @property
    def reduce_each(self) -> bool:
        """Stages 2 and 3 add the ranks' gradients in every micro-batch."""
        return self.stage >= 2

    @property
    def plain(self) -> "Case":
        """The case that stands for all those which the same plain loop answers."""
        stage = (3 if self.reduce_each else 0) if self.accumulate > 1 else 0
        return Case(**{**vars(self), "stage": stage, "ahead": 0, "offload": "none", "recompute": "none"})


@dataclass(frozen=True)
class Trace:
    """What a run leaves behind: what each step reported, the final values, and what the optimizer holds, cut into pieces or whole."""

    steps: list[dict[str, Any]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    pieces: list["HeldPiece"] = field(default_factory=list)


@dataclass(frozen=True)
class HeldPiece:
    """A part of a parameter that an optimizer steps on, with its state: elements from ``start`` on, in the order of memory."""

    name: str
    start: int
    value: Tensor
    state: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value, **{key: value for key, value in self.state.items() if isinstance(value, Tensor)}}


# ---- what a case stands for ----------------------------------------------------------------------------------------------

PRECISIONS: dict[str, Types] = {
    "fp32": Types(),
    "bf16": Types(param="bf16"),
    "fp16": Types(param="fp16"),
    "pure-bf16": Types(param="bf16", reduce="bf16", master=None),
    "bf16-no-master": Types(param="bf16", master=None),
    "2+2+4+8": Types(param="bf16", grad="bf16"),
}
LOSS_SCALE = 2.0**7
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"optimizer": "host"},
    "params": {"params": "host"},
    "both": {"optimizer": "host", "params": "host"},
    "disk": {"optimizer": "disk", "path": tempfile.gettempdir()},  # nothing is left there
    "disk-both": {"optimizer": "disk", "params": "host", "path": tempfile.gettempdir()},
}
RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"policy": "full"},
    "second": {"policy": "full", "every": 2},
    "selective": {"policy": "selective"},
    "inputs": {"policy": "full", "offload": True},
}


def two_groups(make: Callable[..., torch.optim.Optimizer], named: NamedParameters, **options: Any) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not and learns faster; an empty group is left out."""
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    rest = [parameter for _, parameter in named if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    return make([group for group in groups if group["params"]], **options)


def one_group(make: Callable[..., torch.optim.Optimizer], named: NamedParameters, **options: Any) -> torch.optim.Optimizer:
    return make([parameter for _, parameter in named], **options)


OPTIMIZERS: dict[str, Callable[[NamedParameters], torch.optim.Optimizer]] = {
    "sgd": partial(one_group, torch.optim.SGD, lr=0.1),
    "sgd_momentum": partial(two_groups, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(one_group, torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw_fused": partial(two_groups, torch.optim.AdamW, lr=0.01, fused=True),
    "adamw_foreach": partial(two_groups, torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw_plain": partial(two_groups, torch.optim.AdamW, lr=0.01, foreach=False),
    "adagrad": partial(one_group, torch.optim.Adagrad, lr=0.02, lr_decay=0.01),
    "rmsprop": partial(two_groups, torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
}


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def built(entry: Entry, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return entry.build()


def micro_batches(case: Case, rank: int, step: int) -> list[Batch | None]:
    """What one rank trains on in one step. Some rank always has data in a micro-batch."""
    count = case.accumulate - 1 if case.ragged and step == 1 and case.accumulate > 1 else case.accumulate
    batches: list[Batch | None] = []
    for micro in range(count):
        empty = case.empty and case.num_ranks > 1 and (rank + step + micro) % case.num_ranks == case.num_ranks - 1
        batches.append(None if empty else ZOO[case.entry].batches(rank, step, micro))
    return batches


def forward(case: Case, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Any]:
    """With weights the loss is a sum; without, the mean of the micro-batch."""
    loss, weight = ZOO[case.entry].forward(model, batch)
    return (loss, weight) if case.weighted else (loss / weight, None)


# ---- the two runs --------------------------------------------------------------------------------------------------------


def plain_trace(case: Case) -> Trace:
    """The plain loop over all ranks' micro-batches."""
    entry = ZOO[case.entry]
    types = PRECISIONS[case.precision]
    run = PlainRun(
        built(entry, SEED),
        OPTIMIZERS[case.optimizer],
        partial(forward, case),
        num_ranks=case.num_ranks,
        types=Types(**{**vars(types), "keep": entry.keep}),
        clip=CLIP if case.clip else None,
        reduce_each=case.reduce_each,
        loss_scale=LOSS_SCALE if case.precision == "fp16" else 1.0,
        make_scheduler=make_scheduler if case.scheduled else None,
    )
    steps: list[dict[str, Any]] = []
    for step in range(case.steps):
        rates = tuple(float(group["lr"]) for group in run.optimizer.param_groups)
        outcome = run.step([micro_batches(case, rank, step) for rank in range(case.num_ranks)])
        steps.append({**vars(outcome), "learning_rates": rates})
    pieces = [HeldPiece(name, 0, in_memory_order(master), state_of(run.optimizer, master)) for name, master in run.updated().items()]
    return Trace(steps, {name: value.clone() for name, value in run.full_parameters().items()}, run.buffers.named(0, run.model), pieces)


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """A parameter's optimizer state, every tensor flat in the order of memory."""
    return flattened(optimizer.state.get(parameter, {}))


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    return {key: in_memory_order(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def in_memory_order(tensor: Tensor) -> Tensor:
    """A flat copy; a tensor with gaps in its memory counts as contiguous."""
    dense = tensor.detach().clone()
    return dense.as_strided((dense.numel(),), (1,))


def engine_config(case: Case) -> Any:
    import shardbook as sb

    types = vars(PRECISIONS[case.precision]) | {"keep": ZOO[case.entry].keep}
    return sb.ZeroConfig(
        stage=case.stage,
        precision=sb.Precision(**types, keep_param_shard=case.precision == "2+2+4+8"),
        prefetch=sb.Prefetch(ahead=case.ahead),
        accumulate=case.accumulate,
        clip_grad_norm=CLIP if case.clip else None,
        offload=sb.Offload(**OFFLOADS[case.offload]),
        recompute=sb.Recompute(**RECOMPUTES[case.recompute]),
        loss_scale=LOSS_SCALE if case.precision == "fp16" else None,
        units=ZOO[case.entry].units,
    )


def engine_trace(case: Case, rank: int) -> Trace:
    """The same under the engine, on this rank. Ranks start from different weights: those of rank 0 count."""
    import shardbook as sb

    model = built(ZOO[case.entry], SEED + rank)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trainable)
    scheduler = make_scheduler(optimizer) if case.scheduled else None
    with mock.patch("shardbook.engine.disk._LEAST_NUMEL", 64):  # small models have several chunks too
        engine = sb.Engine(model, optimizer, engine_config(case), scheduler=scheduler)
    steps: list[dict[str, Any]] = []
    for step in range(case.steps):
        batches = micro_batches(case, rank, step)
        early = len(batches) < case.accumulate
        for micro, batch in enumerate(batches):
            last = True if early and micro == len(batches) - 1 else None
            if batch is None:
                engine.backward(None, last=last)
                continue
            loss, weight = forward(case, engine, batch)
            engine.backward(loss, weight=weight, last=last)
        steps.append(reported(engine.step()))
        held = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert not held, f"gradients are kept after the step: {held}"
    full = {name: value.clone() for name, value in engine.full_parameters()}
    held = held_pieces(engine)
    if case.offload.startswith("disk"):
        engine.close()  # threads, and space
    return Trace(steps, full if rank == 0 else {}, dict(model.named_buffers()), held)


def held_pieces(engine: Any) -> list[HeldPiece]:
    """What this rank's optimizer steps on. The one place of the tests that looks behind the engine's public names for values."""
    from shardbook.engine.state import pieces_of

    return [
        HeldPiece(piece.member.name, piece.span.start, value.clone(), flattened(state))
        for piece, value, state in pieces_of(engine._context.disk, engine._units, engine.optimizer.state)
    ]


def reported(report: Any) -> dict[str, Any]:
    """A step report as plain data, under the plain loop's names."""
    return {
        "loss": report.loss,
        "weight": report.weight,
        "norm": report.grad_norm,
        "clip_factor": report.clip_factor,
        "applied": report.applied,
        "learning_rates": tuple(report.learning_rates),
    }


def traces(cases: Sequence[Case], plain: Sequence[Case]) -> tuple[list[Trace], dict[Case, Trace]]:
    """A job: every case under the engine, then this rank's share of the plain runs."""
    import torch.distributed as dist

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine = [engine_trace(case, rank) for case in cases]
    return engine, {case: plain_trace(case) for case in plain[rank::num_ranks]}


# ---- comparison ----------------------------------------------------------------------------------------------------------


def differences(engine: Trace, plain: Trace, *, rank: int = 0) -> list[str]:
    """What is not the same to the last bit, in the order in which it arises."""
    found: list[str] = []
    for step, (ours, theirs) in enumerate(zip(engine.steps, plain.steps, strict=True)):
        found += [
            f"rank {rank}, step {step}: {name} is {ours[name]!r}, plain {theirs[name]!r}"
            for name in theirs
            if bits(ours[name]) != bits(theirs[name])
        ]
    if rank == 0:
        found += tensors_that_differ("parameter", engine.parameters, plain.parameters)
        found += tensors_that_differ("buffer", engine.buffers, plain.buffers)
    whole = {piece.name: piece for piece in plain.pieces}
    for piece in engine.pieces if whole else ():
        found += pieces_that_differ(piece, whole[piece.name], rank)
    return found


def pieces_that_differ(piece: HeldPiece, whole: HeldPiece, rank: int) -> list[str]:
    """A piece and its optimizer state against the same elements of the whole parameter."""
    expected = {
        key: value[piece.start : piece.start + piece.value.numel()] if value.numel() == whole.value.numel() else value
        for key, value in whole.tensors.items()
    }
    found = tensors_that_differ(f"rank {rank}: from {piece.start} of {piece.name}:", piece.tensors, expected)
    if piece.start % 64:
        found.append(f"rank {rank}: {piece.name} is cut at element {piece.start}, no multiple of 64")
    return found


def tensors_that_differ(what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    found: list[str] = []
    if set(ours) != set(theirs):
        found.append(f"{what}s are named {sorted(ours)}, plain {sorted(theirs)}")
    for name in theirs:
        if name not in ours:
            continue
        one, other = ours[name], theirs[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.append(f"{what} {name} is {one.dtype} {tuple(one.shape)}, plain {other.dtype} {tuple(other.shape)}")
        elif not same_bits(one, other):
            unequal = as_integers(one) != as_integers(other)
            where = [int(i) for i in unequal.reshape(-1).nonzero()[:3, 0]]
            largest = float((one.double() - other.double()).abs().max())
            found.append(f"{what} {name} differs in {int(unequal.sum())} of {one.numel()} elements, first {where}, by up to {largest:.3g}")
    return found


def as_integers(tensor: Tensor) -> Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(sizes[tensor.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also ``-0.0`` and ``0.0`` are told apart."""
    return torch.equal(as_integers(one), as_integers(other))


def bits(value: Any) -> Any:
    """A number by its bits; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    return struct.pack("d", value) if isinstance(value, float | int) and not isinstance(value, bool) else value


def by_ranks(cases: Iterable[Case]) -> dict[int, list[Case]]:
    """Cases by their number of ranks."""
    grouped: dict[int, list[Case]] = {}
    for case in cases:
        grouped.setdefault(case.num_ranks, []).append(case)
    return grouped
