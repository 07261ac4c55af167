"""What `gpu_check` lets ranks measure: the allocator's figures of a steady step at each stage, beside the books and the closed form."""

from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engines, models
from benchmarks.gpu_cases import Found, prepare
from benchmarks.measure import MIB, AllocationRecords

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
