"""What `gpu_check` lets ranks do: train beside the plain loop, under delayed kernels, and with the allocator's counters.

Each case is called by every rank of a group, returns a :class:`Found`, and runs on a CUDA device or, for a try of the code itself,
on the CPU. All ranks share one device.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import engines, models
from benchmarks.measure import MIB, AllocationRecords

STEPS = 3
ACCUMULATE = 2
MEMORY_CONFIG = models.GPTConfig(layers=12, width=1024, heads=16, vocab=16_384, sequence=512)
WORKSPACE_MIB = 80
"""What cuBLAS keeps for itself in the allocator, generously."""


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
    config = sb.ZeroConfig(
        stage=training.stage,  # pyright: ignore[reportArgumentType]
        precision=sb.Precision(param=training.dtype),
        accumulate=ACCUMULATE,
        clip_grad_norm=1.0,
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
    engine.close()
    return reports, parameters


def _with_plain_loop(device: torch.device, training: Training) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    from tests.oracle import PlainRun, Types

    run = PlainRun(
        models.build(models.SMALL).to(device),
        lambda named: _adamw(parameter for _, parameter in named),
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


def _batch(device: torch.device, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    inputs, targets = models.batch(models.SMALL, 2, rank=rank, step=100 * step + micro)
    return inputs.to(device), targets.to(device)


# ---- delayed kernels ------------------------------------------------------------------------------------------------------


@contextmanager
def _delays(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Make the compute stream late before each layer, each of its gradients and each optimizer step, by different times on each rank.

    So a gather that did not wait for the optimizer's writes, or a reduction that did not wait for a gradient, sends old bytes.
    """
    sleep = sleeper(device)
    handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: sleep())]

    def late_gradient(_module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: sleep())

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            handles.append(module.register_forward_pre_hook(lambda *_: sleep()))
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
    from shardbook.engine.comm import Channel, Collectives
    from shardbook.engine.journal import Journal
    from shardbook.engine.watch import Watch

    where, wrong = prepare(device), []
    sleep = sleeper(where)
    for ordered in (True, False):
        transport = Collectives(dist.group.WORLD, dist.group.WORLD, Watch(0, 1, None, ""), Journal(), ordered=ordered)
        for turn in range(3):
            values = torch.arange(1 << 16, dtype=torch.float32, device=where) + turn
            full, receive = torch.zeros_like(values), torch.empty(transport.receive_numel(values.numel()), device=where)
            for name in ("gather", "reduce"):
                sleep()
                full.copy_(values)
                pending = (
                    transport.gather(full, Channel(turn, name), "gather")
                    if name == "gather"
                    else transport.reduce(full, receive, Channel(turn, name))
                )
                pending.wait()
                got = (full if name == "gather" else transport.parts(full, receive)[0]).clone()
                full.zero_()  # what was sent may be changed now
                if not torch.equal(got[: -transport.header_numel], values[: -transport.header_numel]):
                    wrong.append(f"{name}, {'ordered' if ordered else 'native'}: other values than were sent")
            sleep()
            vector = torch.full((7,), float(turn), dtype=torch.float64, device=where)
            if transport.exchange(vector, "exchange").tolist() != [[float(turn)] * 7]:
                wrong.append("exchange: other values than were sent")
        if transport.mismatch is not None and bool(transport.mismatch):
            wrong.append("headers: an operation did not find its own label")
    return Found(wrong=wrong)


# ---- memory ---------------------------------------------------------------------------------------------------------------


def memory(device: str, stage: int, dtype: engines.Dtype, config: models.GPTConfig) -> Found:
    """Allocator figures of a steady step, beside the engine's books and the closed form between steps."""
    where = prepare(device)
    counters = _cuda_counters if device == "cuda" else _cpu_counters
    contender, peak, reserved, live = counters(f"shardbook-{stage}", dtype, config, where)
    booked = 0

    def add(event: Any) -> None:
        nonlocal booked
        booked += getattr(event, "nbytes", 0)

    contender.settle()
    with contender.engine.observe(add):
        pass
    expected = persistent_nbytes(stage, dtype, config.num_parameters, dist.get_world_size())
    wrong: list[str] = []
    if not booked <= live <= booked * 1.01 + WORKSPACE_MIB * MIB:
        wrong.append(f"between steps {live} bytes are allocated, {booked} are booked")
    if not expected * 0.999 <= booked <= expected * 1.02 + MIB:
        wrong.append(f"between steps {booked} bytes are booked, the closed form is {expected}")
    figures = {
        "peak MiB": peak / MIB,
        "reserved MiB": reserved / MIB,
        "live MiB": live / MIB,
        "booked MiB": booked / MIB,
        "formula MiB": expected / MIB,
    }
    return Found(wrong=wrong, figures=figures)


def persistent_nbytes(stage: int, dtype: engines.Dtype, num_parameters: int, num_ranks: int) -> int:
    """Between steps: parameters, master where it is another type, and two moments, each full or one rank's share."""
    param, state = (0, 12) if dtype == "fp32" else (2, 12)  # in fp32 the parameters are what the optimizer updates
    if stage == 0:
        return num_parameters * (param + state)
    if stage == 3:
        return num_parameters * state // num_ranks
    return (
        num_parameters * 4 + num_parameters * 8 // num_ranks
        if dtype == "fp32"
        else num_parameters * param + num_parameters * state // num_ranks
    )


def _cuda_counters(
    name: str, dtype: engines.Dtype, config: models.GPTConfig, device: torch.device
) -> tuple[engines.Contender, int, int, int]:
    torch.cuda.init()
    base = torch.cuda.memory_allocated()
    contender = engines.make(name, dtype, config, device="cuda")
    for step in range(STEPS):
        _train_once(contender, config, device, step)
    torch.cuda.reset_peak_memory_stats()
    _train_once(contender, config, device, STEPS)
    torch.cuda.synchronize()
    return contender, torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated() - base


def _cpu_counters(
    name: str, dtype: engines.Dtype, config: models.GPTConfig, device: torch.device
) -> tuple[engines.Contender, int, int, int]:
    with AllocationRecords() as records:
        contender = engines.make(name, dtype, config)
        for step in range(STEPS + 1):
            with records.span(str(step)):
                _train_once(contender, config, device, step)
    return contender, records.peak(str(STEPS)).nbytes, 0, records.live_at_end(str(STEPS))


def _train_once(contender: engines.Contender, config: models.GPTConfig, device: torch.device, step: int) -> None:
    inputs, targets = models.batch(config, 4, rank=dist.get_rank(), step=step)
    contender.step(inputs.to(device), targets.to(device))
    contender.settle()
