"""Throughput of saves and loads beside plain writing and reading of as many bytes, in pairs; and the long tests of kills and corruption.

    python -m benchmarks.evidence_checkpoints            figures on the terminal
    python -m benchmarks.evidence_checkpoints --long     and 50 kills, 1,000 corruptions

Plain writing is 4 MiB at a time with one fsync; plain reading as much at a time into one buffer. Files are dropped from the page cache
before they are read.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardbook as sb

NUM_PAIRS = 9
WIDTH, NUM_UNITS = 2048, 12
BLOCK = 4 << 20


def build(seed: int) -> sb.Engine:
    torch.manual_seed(seed)
    units = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)]
    model = torch.nn.Sequential(*units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    names = [str(index) for index in range(NUM_UNITS)]
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16"), units=names))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path, nbytes: int) -> None:
    block = memoryview(os.urandom(BLOCK))
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // BLOCK):
            file.write(block)
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def drop(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cold(folder: Path, work: Callable[[], object]) -> float:
    drop(folder)
    return seconds(work)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".evidence-"))
    try:
        pairs(folder)
    finally:
        shutil.rmtree(folder)
    if "--long" in sys.argv:
        tests = ["tests/test_checkpoint_kill.py", "tests/test_checkpoint_fuzz.py"]
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "full", *tests], check=False).returncode)


def pairs(folder: Path) -> None:
    engine = build(0)
    engine.backward(engine(torch.randn(4, WIDTH)).float().square().mean())
    engine.step()
    kept = engine.save(folder / "kept")
    nbytes = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
    saves: list[list[float]] = []
    loads: list[list[float]] = []
    for number in range(NUM_PAIRS):
        first = slice(None, None, 1 if number % 2 else -1)  # each goes first in turn: the disk remembers what came before
        writing = [lambda: engine.save(folder / "new"), lambda: plain_write(folder / "plain", nbytes)]
        saves.append([seconds(work) for work in writing[first]][first])
        shutil.rmtree(folder / "new")
        (folder / "plain").unlink()
        reading = [lambda: engine.load(kept), lambda: plain_read(kept / "rank-00000.safetensors")]
        loads.append([cold(kept, work) for work in reading[first]][first])
    print(f"{nbytes / 2**30:.2f} GiB, one rank, {NUM_PAIRS} pairs, medians")
    for name, plain, found in (("save", "plain write", saves), ("load", "plain read", loads)):
        ours, theirs = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = sorted(second / first for first, second in found)
        print(
            f"{name} {nbytes / 2**30 / ours:.2f} GiB/s, {plain} {nbytes / 2**30 / theirs:.2f} GiB/s; "
            f"ratio of each pair: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
