"""What `gpu_simulation` lets a device do: short trainings of one rank, each from an empty allocator, with everything that was seen.

    cases()           what is trained
    build, batch      its model and its data, on fake tensors as on real ones
    measure_all       one process: every case after the other, each written to a file of its own as soon as it is over

A case runs four steps under the allocator's history: the model, one step that makes the optimizer's state, and two that count. Then two
more under ``sb.measure``. On a CPU the history is the profiler's, so that everything but CUDA itself can be tried without a GPU.
"""

import gc
import gzip
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import shardbook as sb
from benchmarks import models
from benchmarks.gpu_memory import CpuHistory, CudaHistory
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder

LATER_STEPS = 2
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. ``attention``: ``"pinned"`` leaves flash attention and the memory-efficient one, ``"any"`` is torch's choice.

    ``engine``: ``"shardbook"``, ``"fsdp2"`` or ``"plain"``: no engine, which is what DDP's forecasts and simulations of one rank are.
    """

    shape: Literal["gpt", "llama", "small gpt", "small llama"]
    stage: int
    engine: str = "shardbook"
    precision: str = "fp32"
    micro_batch: int = 4
    sequence: int = 512
    accumulate: int = 1
    clip: bool = False
    kernel: Literal["fused", "foreach", "for-loop"] = "fused"
    attention: Literal["pinned", "any"] = "pinned"
    expandable: bool = False

    @property
    def config(self) -> sb.ZeroConfig:
        return sb.ZeroConfig(
            stage=self.stage,  # pyright: ignore[reportArgumentType]
            precision=sb.Precision.preset(self.precision),
            accumulate=self.accumulate,
            clip_grad_norm=1.0 if self.clip else None,
        )

    def __str__(self) -> str:
        own = f"stage {self.stage}" if self.engine == "shardbook" else self.engine
        details = [
            *([f"{self.accumulate} ×"] if self.accumulate > 1 else []),
            f"{self.micro_batch} × {self.sequence}",
            self.kernel,
            *(["clipped"] if self.clip else []),
            *(["any attention"] if self.attention == "any" else []),
            *(["expandable"] if self.expandable else []),
        ]
        return f"{self.shape}, {own}, {self.precision}, {', '.join(details)}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one case, bytes above what was allocated before.

    ``first``, ``later``: highest instants of the first step and of those after it. ``reserved``, ``num_segments``: highest, by the
    allocator's counters; None on a CPU, which has none. ``seen``: highest instant of measured steps by the allocator's history, with
    ``books`` at it. ``trace``: the file of the history.
    """

    first: int
    later: int
    reserved: int | None
    num_segments: int | None
    base_reserved: int
    seen: int
    books: dict[str, int]
    phase: str
    operator: str
    trace: str
    seconds: float
    stats: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def cases() -> list[Case]:
    """All, those without expandable segments first: the setting holds for a whole process."""
    return [
        Case(shape="gpt", stage=0),
        Case(shape="llama", stage=3, precision="bf16", micro_batch=8),
        Case(shape="gpt", stage=3, precision="bf16", micro_batch=8, sequence=1024),
        Case(shape="llama", stage=0, precision="bf16", kernel="foreach"),
        Case(shape="gpt", stage=2, precision="bf16", accumulate=4),
        Case(shape="llama", stage=2, clip=True, accumulate=2),
        Case(shape="gpt", stage=1, precision="bf16", clip=True),
        Case(shape="llama", stage=1, kernel="for-loop"),
        Case(shape="gpt", stage=3, clip=True, kernel="foreach"),
        Case(shape="llama", stage=3, precision="bf16", micro_batch=8, attention="any"),
        Case(shape="llama", stage=3, engine="fsdp2", precision="bf16", micro_batch=8),
        Case(shape="gpt", stage=0, engine="plain"),
        Case(shape="gpt", stage=3, precision="bf16", micro_batch=8, sequence=1024, expandable=True),
        Case(shape="llama", stage=0, precision="bf16", kernel="foreach", expandable=True),
        Case(shape="llama", stage=3, clip=True, expandable=True),
        Case(shape="gpt", stage=3, engine="fsdp2", expandable=True),
    ]


def small_cases() -> list[Case]:
    """For a try of the check itself."""
    return [
        Case(shape="small gpt", stage=3, precision="bf16", micro_batch=2, sequence=64, clip=True),
        Case(shape="small llama", stage=0, micro_batch=2, sequence=64, accumulate=2, kernel="foreach", expandable=True),
    ]


# ---- models and data: on fake tensors as on real ones -----------------------------------------------------------------------------


_VOCAB = {"gpt": 16_384, "llama": 32_000, "small gpt": 1024, "small llama": 512}


def build(case: Case) -> nn.Module:
    """The model: 110 million parameters as a GPT, 246 million as a Llama; its values are whatever the device draws."""
    vocab = _VOCAB[case.shape]
    if case.shape == "gpt":
        return models.GPT(models.GPTConfig(layers=12, width=768, heads=12, vocab=vocab, sequence=case.sequence))
    if case.shape == "small gpt":
        return models.GPT(models.GPTConfig(layers=3, width=64, heads=2, vocab=vocab, sequence=case.sequence))
    if case.shape == "llama":
        return Decoder(DecoderConfig(layers=16, width=1024, heads=16, kv_heads=4, ffn=2816, vocab=vocab))
    return Decoder(DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, ffn=176, vocab=vocab))


def batch(case: Case, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Inputs and targets of a micro-batch, in storages of their own."""
    shape = case.micro_batch, case.sequence
    return torch.randint(_VOCAB[case.shape], shape, device=device), torch.randint(_VOCAB[case.shape], shape, device=device)


def adamw(case: Case, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every case."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=case.kernel == "fused", foreach=case.kernel == "foreach")


def _on_device(case: Case, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        model = build(case)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model


# ---- training --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """``step`` takes a whole optimizer step; ``settle`` awaits what it left under way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    settle: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


def _train(case: Case, device: torch.device) -> _Trained:
    model = _on_device(case, device)
    if case.engine == "shardbook":
        return _own(case, model, device)
    return _usual(case, _fsdp2(case, model, device) if case.engine == "fsdp2" else model, device)


def _own(case: Case, model: nn.Module, device: torch.device) -> _Trained:
    optimizer = adamw(case, model.parameters())
    engine = sb.Engine(model, optimizer, case.config)

    def step() -> None:
        for _ in range(case.accumulate):
            given = batch(case, device)
            loss, weight = _loss(engine(*given))
            engine.backward(loss, weight=weight)
            del given, loss, weight
        engine.step()

    def settle() -> None:
        with engine.gathered() if case.stage < 3 else nullcontext():
            pass

    return _Trained(model=model, optimizer=optimizer, step=step, settle=settle, close=engine.close)


def _loss(output: Any) -> tuple[Tensor, Any]:
    return output if isinstance(output, tuple) else (output, None)


def _fsdp2(case: Case, model: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (1,))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = narrow if case.precision == "bf16" else MixedPrecisionPolicy()
    for module in (*model.get_submodule("blocks").children(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def _usual(case: Case, model: nn.Module, device: torch.device) -> _Trained:
    optimizer = adamw(case, model.parameters())

    def step() -> None:
        for _ in range(case.accumulate):
            given = batch(case, device)
            loss, weight = _loss(model(*given))
            mean = loss if weight is None else loss / weight
            (mean / case.accumulate).backward()
            del given, loss, weight, mean
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _Trained(model=model, optimizer=optimizer, step=step)


def _attention(case: Case, device: torch.device) -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda" or case.attention == "any":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


# ---- measuring ------------------------------------------------------------------------------------------------------------------


def measure(case: Case, device: torch.device, folder: Path, number: int) -> Measured:
    """Train, read counters and history, then keep books over two more steps."""
    began = time.monotonic()
    gc.collect()
    history = CudaHistory(device) if device.type == "cuda" else CpuHistory(device)
    with _attention(case, device):
        trained = _train(case, device)
        readings: list[int] = []
        for steps in (1, LATER_STEPS):
            history.begin()
            for _ in range(steps):
                trained.step()
            trained.settle()
            readings.append(history.peak())
        trace, stats = history.stop()
        found, notes = _books(trained)
    trained.close()
    if device.type != "cuda":
        readings = [stats.pop(f"reading {at}") for at in range(2)]
    name = f"trace-{number}.json.gz"
    with gzip.open(folder / name, "wt", encoding="utf-8") as file:
        json.dump(trace, file, default=str)
    return Measured(
        first=readings[0], later=readings[1], reserved=stats.get("reserved_bytes.all.peak"), num_segments=stats.get("segment.all.peak"),
        base_reserved=history.base_reserved, seen=found.allocated, books=dict(found.books), phase=found.phase, operator=found.operator,
        trace=name, seconds=time.monotonic() - began, stats=stats, notes=notes,
    )  # fmt: skip


def _books(trained: _Trained) -> tuple[Any, tuple[str, ...]]:
    with sb.measure(trained.model, trained.optimizer) as run:
        for _ in range(LATER_STEPS):
            trained.step()
    trained.settle()
    document = run.document()
    return document.reconciliations[0], tuple(document.notes)


def measure_all(chosen: Sequence[tuple[int, Case]], device: str, folder: str, until: float) -> None:
    """Cases in order until there is no time for another as slow as the slowest: each answer is a file, ``measured-NUMBER.json``.

    ``until`` is by ``time.time``, which processes share.
    """
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(0)
        _warm_up(where)
    slowest = 0.0
    for number, case in chosen:
        if time.time() + slowest > until:
            return
        began = time.monotonic()
        try:
            found: dict[str, Any] = asdict(measure(case, where, Path(folder), number))
        except Exception as error:  # noqa: BLE001 - one case that fails must not hide the others
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        (Path(folder) / f"measured-{number}.json").write_text(json.dumps(found), encoding="utf-8")
        slowest = max(slowest, time.monotonic() - began)


def _warm_up(device: torch.device) -> None:
    """Loads the kernels, once: a small model in both types."""
    for case in small_cases():
        trained = _train(case, device)
        trained.step()
        trained.settle()
        trained.close()
