"""What `gpu_check` lets ranks measure: the allocator's figures of a steady step at each stage, beside the books and the closed form;
and, for `gpu_simulation`, the allocator's counters and its history over a few steps.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engines, models
from benchmarks.gpu_cases import Found, prepare
from benchmarks.measure import MIB, AllocationRecords
from shardbook.ledger.allocator import CpuRecords

CONFIG = models.GPTConfig(layers=12, width=1024, heads=16, vocab=16_384, sequence=512)
WARM_STEPS = 3
WORKSPACE_MIB = 80
"""What cuBLAS keeps for itself in the allocator, generously."""


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
    """Between steps, for AdamW with fp32 master and moments: 4 + 8 bytes a parameter in fp32, 2 + 4 + 8 in bf16, of which a stage
    keeps the first (stages 0 to 2, else nothing beside what the optimizer updates) and the others in full or for 1/N."""
    state = {"fp32": 8, "bf16": 12}[dtype]
    param = {"fp32": 4, "bf16": 2}[dtype]
    if stage == 0:
        return num_parameters * (param + state)
    if stage < 3:
        return num_parameters * param + num_parameters * state // num_ranks
    return num_parameters * 12 // num_ranks


def _cuda_counters(
    name: str, dtype: engines.Dtype, config: models.GPTConfig, device: torch.device
) -> tuple[engines.Contender, int, int, int]:
    torch.cuda.init()
    base = torch.cuda.memory_allocated()
    contender = engines.make(name, dtype, config, device="cuda")
    for step in range(WARM_STEPS):
        _train_once(contender, config, device, step)
    torch.cuda.empty_cache()  # what building the model left
    torch.cuda.reset_peak_memory_stats()
    _train_once(contender, config, device, WARM_STEPS)
    torch.cuda.synchronize()
    return contender, torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated() - base


def _cpu_counters(
    name: str, dtype: engines.Dtype, config: models.GPTConfig, device: torch.device
) -> tuple[engines.Contender, int, int, int]:
    with AllocationRecords() as records:
        contender = engines.make(name, dtype, config)
        for step in range(WARM_STEPS + 1):
            with records.span(str(step)):
                _train_once(contender, config, device, step)
    return contender, records.peak(str(WARM_STEPS)).nbytes, 0, records.live_at_end(str(WARM_STEPS))


def _train_once(contender: engines.Contender, config: models.GPTConfig, device: torch.device, step: int) -> None:
    inputs, targets = models.batch(config, 4, rank=dist.get_rank(), step=step)
    contender.step(inputs.to(device), targets.to(device))
    contender.settle()


# ---- counters and history ---------------------------------------------------------------------------------------------------


Trace = dict[str, Any]
"""As ``torch.cuda.memory._snapshot`` gives it, without stacks."""


class CudaHistory:
    """Counters of ``memory_stats``, and the history that a snapshot ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        native: Any = torch._C
        native._cuda_clearCublasWorkspaces()  # they are part of what a case takes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.base, self.base_reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        self._highest: dict[str, int] = {}
        torch.cuda.memory._record_memory_history(enabled=None)  # of a case that failed
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)

    def begin(self) -> None:
        """From here to :meth:`peak` is one reading."""
        self._note()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self.base

    def _note(self) -> dict[str, int]:
        """The counters; what was reserved counts from the start, as the replay's does."""
        stats = {name: int(value) for name, value in torch.cuda.memory_stats(self._device).items() if _is_compared(name)}
        for name in ("reserved_bytes.all.peak", "segment.all.peak"):
            stats[name] = self._highest[name] = max(self._highest.get(name, 0), stats[name])
        return stats

    def stop(self) -> tuple[Trace, dict[str, int]]:
        index = self._device.index or 0
        snapshot: Any = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(enabled=None)
        stats = self._note()
        traces = [[{key: value for key, value in entry.items() if key != "frames"} for entry in snapshot["device_traces"][index]]]
        return {**{name: snapshot.get(name) for name in ("segments", "allocator_settings")}, "device_traces": traces}, stats


def _is_compared(name: str) -> bool:
    kinds = ("allocated_bytes.", "reserved_bytes.", "active_bytes.", "requested_bytes.", "inactive_split_bytes.", "segment.")
    return name.startswith("num_") or (name.startswith(kinds) and name.endswith((".all.current", ".all.peak")))


class CpuHistory:
    """The same from the profiler's records: there are no counters, and nothing is reserved."""

    base = base_reserved = 0

    def __init__(self, device: torch.device) -> None:
        self._records = CpuRecords()
        self._records.start()
        self._marks: list[int] = []

    def begin(self) -> None:
        self._marks.append(time.perf_counter_ns())

    def peak(self) -> int:
        self._marks.append(time.perf_counter_ns())
        return 0  # known when the records end

    def stop(self) -> tuple[Trace, dict[str, int]]:
        changes = self._records.stop()
        if changes is None:
            raise RuntimeError("the profiler's records are lost: another profiler took their place")
        entries = [
            {"action": action, "addr": one.address, "size": abs(one.nbytes), "stream": 0, "time_us": one.nanoseconds // 1000}
            for one in changes
            for action in (("alloc",) if one.nbytes > 0 else ("free_requested", "free_completed"))
        ]
        live, highest = 0, [0] * (len(self._marks) // 2)
        for one in changes:
            live += one.nbytes
            for number in range(len(highest)):
                if self._marks[2 * number] <= one.nanoseconds <= self._marks[2 * number + 1]:
                    highest[number] = max(highest[number], live)
        return {"device_traces": [entries], "segments": [], "allocator_settings": None}, {
            f"reading {number}": value for number, value in enumerate(highest)
        }
