"""What `gpu_check` lets ranks do: train beside the plain loop, also under delayed kernels, and use NCCL's transport by itself.

Each case is called by every rank of a group, returns a :class:`Found`, and runs on a CUDA device or, for a try of the code itself,
on the CPU. All ranks share one device.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import engines, models

STEPS = 3
ACCUMULATE = 2


@dataclass(kw_only=True)
class Found:
    """Of one rank: what is wrong (nothing, if the check passes), and figures for the table."""

    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the equality cases train."""

    stage: int
    dtype: engines.Dtype
    delayed: bool = False
    side_stream: bool = False
    optimizer_on: str = "none"  # or "host", "disk"
    params_on: str = "none"
    recompute: str = "none"
    rests: bool = False  # inputs of recomputed blocks, on the host


def prepare(device: str) -> torch.device:
    """Deterministic kernels only; every rank on the first device."""
    torch.use_deterministic_algorithms(True)
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def equality(device: str, training: Training) -> Found:
    """Train with the engine; on rank 0 train the plain loop over all ranks' batches as well, and compare every bit."""
    where = prepare(device)
    reports, parameters = _with_engine(where, training)
    if dist.get_rank():
        return Found()
    plain_reports, plain_parameters = _with_plain_loop(where, training)
    wrong = [
        f"step {step}: {ours} and {theirs}"
        for step, (ours, theirs) in enumerate(zip(reports, plain_reports, strict=True))
        if ours != theirs
    ]
    for name, value in plain_parameters.items():
        if not torch.equal(parameters[name], value):
            wrong.append(f"{name}: up to {float((parameters[name].double() - value.double()).abs().max()):.1e} apart")
    return Found(wrong=wrong)


def _with_engine(device: torch.device, training: Training) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    import shardbook as sb

    model = models.build(models.SMALL).to(device)
    optimizer = _adamw(model.parameters())
    folder = Path(tempfile.gettempdir()) if training.optimizer_on == "disk" else None
    config = sb.ZeroConfig(
        stage=training.stage,  # pyright: ignore[reportArgumentType]
        precision=sb.Precision(param=training.dtype),
        accumulate=ACCUMULATE,
        clip_grad_norm=1.0,
        recompute=sb.Recompute(policy=training.recompute, offload=training.rests),  # pyright: ignore[reportArgumentType]
        offload=sb.Offload(optimizer=training.optimizer_on, params=training.params_on, path=folder),  # pyright: ignore[reportArgumentType]
    )
    engine = sb.Engine(model, optimizer, config)
    reports: list[tuple[float, float]] = []
    with (
        _delays(model, optimizer, device) if training.delayed else nullcontext(),
        _stream(device) if training.side_stream else nullcontext(),
    ):
        for step in range(STEPS):
            for micro in range(ACCUMULATE):
                engine.backward(engine(*_batch(device, dist.get_rank(), step, micro)))
            report = engine.step()
            assert report.loss is not None
            reports.append((report.loss, report.grad_norm))
        parameters = {name: value.clone() for name, value in engine.full_parameters()}
    if device.type == "cuda":
        torch.cuda.synchronize()  # what is compared was made on another stream
    engine.close()
    return reports, parameters


def _with_plain_loop(device: torch.device, training: Training) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    from tests.oracle import PlainRun, Types

    make: Any = _adamw if training.optimizer_on == "none" else SteppedOnHost
    run = PlainRun(
        models.build(models.SMALL).to(device),
        lambda named: make(parameter for _, parameter in named),
        lambda model, batch: (model(*batch), None),
        num_ranks=dist.get_world_size(),
        types=Types(param=training.dtype),
        clip=1.0,
        reduce_each=training.stage >= 2,
    )
    outcomes = [
        run.step([[_batch(device, rank, step, micro) for micro in range(ACCUMULATE)] for rank in range(dist.get_world_size())])
        for step in range(STEPS)
    ]
    return [(outcome.loss, outcome.norm) for outcome in outcomes], run.full_parameters()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class SteppedOnHost:
    """AdamW of the plain loop where the engine's steps on the host: kernels of processor and device round differently."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._copies = [parameter.detach().cpu().requires_grad_() for parameter in self._parameters]
        self._optimizer = _adamw(self._copies)

    def step(self) -> None:
        """Gradients down, the step, and values up."""
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.cpu()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self._copies, strict=True):
                parameter.copy_(copy)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """As an optimizer's."""
        for parameter in self._parameters:
            parameter.grad = None if set_to_none else torch.zeros_like(parameter)


def _batch(device: torch.device, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    inputs, targets = models.batch(models.SMALL, 2, rank=rank, step=100 * step + micro)
    return inputs.to(device), targets.to(device)


# ---- delayed kernels ------------------------------------------------------------------------------------------------------


@contextmanager
def _delays(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Generator[None]:
    """Make the compute stream late before each layer, each of its gradients and each optimizer step, by different times on each rank.

    So a gather that did not wait for the optimizer's writes, or a reduction that did not wait for a gradient, sends old bytes.
    """
    sleep = sleeper(device)

    def late(*_: Any) -> None:
        sleep()

    def late_gradient(_module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(late)

    handles: list[Any] = [optimizer.register_step_pre_hook(late)]

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            handles.append(module.register_forward_pre_hook(late))
            handles.append(module.register_forward_hook(late_gradient))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sleeper(device: torch.device) -> Callable[[], None]:
    """A function that puts a kernel which only waits, up to some milliseconds, on the current stream."""
    turns = itertools.cycle((3, 1, 7, 2, 5) if dist.get_rank() % 2 else (1, 8, 2, 4))
    if device.type == "cuda":
        return lambda: torch.cuda._sleep(1_000_000 * next(turns))
    return lambda: time.sleep(0.0001 * next(turns))


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    """Another stream than the default one, which waits for what was done so far."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def collectives(device: str) -> Found:
    """The transport that NCCL gets, on the backend itself: each collective reads what a delayed kernel writes before it."""
    from shardbook.engine.comm import Collectives
    from shardbook.engine.journal import Journal
    from shardbook.engine.watch import Watch

    where, wrong = prepare(device), []
    for ordered in (True, False):
        transport = Collectives(dist.group.WORLD, dist.group.WORLD, Watch(0, 1, None, ""), Journal(), ordered=ordered)
        for turn in range(3):
            wrong += [
                f"{what}, {'ordered' if ordered else 'native'}: other values than were sent"
                for what in _wrong_values(transport, turn, where)
            ]
        if transport.mismatch is not None and bool(transport.mismatch):
            wrong.append("headers: an operation did not find its own label")
    return Found(wrong=wrong)


def _wrong_values(transport: Any, turn: int, device: torch.device) -> Iterator[str]:
    """Which of a lone rank's collectives do not bring back what was sent. The end of a shard is the label's."""
    from shardbook.engine.comm import Channel

    sleep, channel = sleeper(device), Channel(turn, "check")
    values = torch.arange(1 << 16, dtype=torch.float32, device=device) + turn
    compared = slice(0, -transport.header_numel)
    full, own, receive = (
        torch.zeros_like(values),
        torch.zeros_like(values),
        torch.empty(transport.receive_numel(values.numel()), device=device),
    )
    sleep()
    own.copy_(values)
    transport.gather(full, own, channel, "gather").wait()
    got = full.clone()
    own.zero_()  # what was sent may be changed now
    if not torch.equal(got[compared], values[compared]):
        yield "gather"
    sleep()
    full.copy_(values)
    transport.reduce(full, receive, channel).wait()
    got = transport.parts(full, receive)[0].clone()
    full.zero_()
    if not torch.equal(got[compared], values[compared]):
        yield "reduce"
    sleep()
    if transport.exchange(torch.full((7,), float(turn), dtype=torch.float64, device=device), "check").tolist() != [[float(turn)] * 7]:
        yield "exchange"


def books(device: str, stage: int, optimizer_on: str = "none", recompute: str = "none") -> Found:
    """Measured steps of the engine: books against the allocator, and the allocator's history against its own peak counter."""
    import shardbook as sb

    where, options = prepare(device), dict[str, Any]()
    if stage:
        options = {"offload": sb.Offload(optimizer=optimizer_on), "recompute": sb.Recompute(policy=recompute)}  # pyright: ignore[reportArgumentType]
    contender = engines.make(f"shardbook-{stage}", "fp32", models.SMALL, device, **options)
    with sb.measure(contender.model, contender.optimizer) as measured:
        for step in range(STEPS):
            contender.step(*(tensor.to(where) for tensor in models.batch(models.SMALL, 2, rank=dist.get_rank(), step=step)))
    contender.settle()
    document = measured.document()
    wrong = [note for note in document.notes if "of host memory" not in note]  # which it is meant to hold
    for found in document.reconciliations:
        if found.books["UNACCOUNTED"] > 0.01 * found.allocated:
            wrong.append(f"rank {found.rank}: {found.books['UNACCOUNTED']:,} of {found.allocated:,} bytes unaccounted")
        if (counter := document.counters[found.rank].allocated) is not None and abs(counter - found.allocated) > 0.001 * counter:
            wrong.append(f"rank {found.rank}: {found.allocated:,} bytes by the history, {counter:,} by the peak counter")
    figures = {"unaccounted": max(found.books["UNACCOUNTED"] / found.allocated for found in document.reconciliations)}
    return Found(wrong=wrong, figures=figures)
