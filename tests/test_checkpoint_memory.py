"""What a save and a load hold above the training state: at most one unit, by the ledger and by the allocator."""

import ctypes
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardbook as sb
from shardbook.accounts import Account
from shardbook.checkpoint.write import BLOCK_NBYTES
from tests import ranks

WIDTH, NUM_UNITS = 1024, 8
UNIT = 2 * WIDTH * (WIDTH + 1) * 4
"""Bytes of one unit's full parameters."""


def engine_of(stage: int, param: str, seed: int) -> sb.Engine:
    torch.manual_seed(seed)
    units = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)]
    model = torch.nn.Sequential(*units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    precision = sb.Precision(param=param)
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=precision, units=[str(index) for index in range(NUM_UNITS)]))


def held(engine: sb.Engine, work: Any) -> dict[str, int]:
    """Bytes: the training state after the work, and the peaks inside it: of the books, of the allocator, and of the process above what
    it has before and after.
    """
    start, peak, is_over = trimmed(), 0, threading.Event()

    def look() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, resident())
            time.sleep(0.001)

    looking = threading.Thread(target=look)
    looking.start()
    with sb.measure(engine) as run, run.step():
        work()
    is_over.set()
    looking.join()
    document = run.document()
    balances = {str(account): sum(found.values()) if isinstance(found, dict) else found for account, found in document.peak.items()}
    state = sum(engine._journal.live(account) for account in Account)
    return {
        "state": state,
        "books": sum(value for account, value in balances.items() if account != "UNACCOUNTED"),
        "allocator": document.peak_allocated,
        "process": peak - max(start, trimmed()),
    }


def trimmed() -> int:
    """Resident bytes without what the C library keeps of memory that was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def job(stage: int, param: str, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    engine = engine_of(stage, param, 0)
    engine.backward(engine(torch.randn(2, WIDTH)).float().square().mean())
    engine.step()
    saving = held(engine, lambda: engine.save(folder / "c"))
    engine.close()
    fresh = engine_of(stage, param, 1)
    loading = held(fresh, lambda: fresh.load(folder / "c"))
    fresh.close()
    return saving, loading


def import_job(stage: int, param: str, folder: Path) -> dict[str, int]:
    engine = engine_of(stage, param, 1)
    engine.backward(engine(torch.randn(2, WIDTH)).float().square().mean())
    engine.step()
    importing = held(engine, lambda: engine.load_weights(folder / "w.safetensors"))
    engine.close()
    return importing


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "param"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_at_most_a_unit_above_the_training_state(stage: int, param: str, tmp_path: Path):
    for saving, loading in ranks.call(2, job, stage, param, tmp_path):
        assert saving["state"] > (NUM_UNITS * UNIT) * (1.5 if stage else 3)
        assert saving["books"] - saving["state"] < 1 << 20
        assert saving["allocator"] - saving["state"] < 1 << 20
        assert saving["process"] < UNIT + (64 << 20)
        assert loading["state"] == saving["state"]
        assert loading["books"] - loading["state"] < UNIT
        assert loading["allocator"] - loading["state"] < UNIT
        assert loading["process"] < UNIT + (64 << 20)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "param"), [(0, "fp32"), (2, "bf16"), (3, "bf16")])
def test_an_import_holds_a_block(stage: int, param: str, tmp_path: Path):
    """4 MiB of a file at a time, whatever the size of the unit (8 MiB) and of the file (64 MiB)."""
    names = [f"{unit}.{layer}" for unit in range(NUM_UNITS) for layer in (0, 1)]
    values = {f"{name}.weight": torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16) for name in names}
    save_file(values | {f"{name}.bias": torch.ones(WIDTH, dtype=torch.bfloat16) for name in names}, tmp_path / "w.safetensors")
    for importing in ranks.call(2, import_job, stage, param, tmp_path):
        assert importing["books"] - importing["state"] <= BLOCK_NBYTES
        assert importing["allocator"] - importing["state"] < 3 * BLOCK_NBYTES
        assert importing["process"] < UNIT + (64 << 20)
