"""Saves and loads beside plain writing and reading of as many bytes, in pairs.

python -m benchmarks.checkpoint_speed 2    two ranks
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import shardbook as sb
from benchmarks import ranks
from benchmarks.step_time import Round, Times, slowest_of, usage

MIN_PAIRS, MAX_PAIRS = 9, 21
BUDGET_SECONDS = 15.0
"""After which no pair begins, if there are enough."""
FOREIGN = 0.10
WIDTH, NUM_UNITS = 2048, 8
NBYTES = NUM_UNITS * 2 * WIDTH * (WIDTH + 1) * 12
"""Of masters and moments."""
BLOCK = 4 << 20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """``nbytes``: of all ranks. Only pairs count in which other processes took at most ``FOREIGN`` (the five quietest, if fewer did)."""

    nbytes: int
    times: Times

    @property
    def ratios(self) -> list[float]:
        """Of throughputs, ours by plain, sorted."""
        return sorted(one.seconds["plain"] / one.seconds["ours"] for one in self.times.quiet(FOREIGN))

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_quiet(self) -> bool:
        return all(one.foreign <= FOREIGN for one in self.times.quiet(FOREIGN))

    def cells(self) -> list[str]:
        """Speeds, ratio with its quartiles, ratio of the shortest times, pairs that count, and others' share in the busiest of them."""
        speeds = [f"{self.nbytes / GIB / self.times.median(name, FOREIGN):.2f}" for name in ("ours", "plain")]
        quartiles = statistics.quantiles(self.ratios, n=4)
        kept = self.times.quiet(FOREIGN)
        best = min(one.seconds["plain"] for one in kept) / min(one.seconds["ours"] for one in kept)
        count, others = f"{len(kept)} of {len(self.times.rounds)}", f"{max(one.foreign for one in kept):.0%}"
        return [*speeds, f"{self.median:.2f}", f"{quartiles[0]:.2f} to {quartiles[2]:.2f}", f"{best:.2f}", count, others]


def measured(num_ranks: int) -> dict[str, Pairs]:
    """By what was done."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".evidence-"))
    try:
        return ranks.run(num_ranks, job, folder)[0]
    finally:
        shutil.rmtree(folder)


def job(folder: Path) -> dict[str, Pairs]:
    """One rank's part."""
    engine = _engine()
    engine.backward(engine(torch.randn(4, WIDTH)).float().square().mean())
    engine.step()
    kept = engine.save(folder / "kept")
    rank = engine.transport.rank
    own = kept / f"rank-{rank:05d}.safetensors"
    nbytes = own.stat().st_size
    buffer = bytearray(BLOCK)
    block = memoryview(os.urandom(BLOCK))
    assert engine.optimizer is not None
    optimizer = engine.optimizer

    def clear() -> None:
        if rank == 0:
            shutil.rmtree(folder / "new", ignore_errors=True)
        (folder / f"plain-{rank}").unlink(missing_ok=True)

    def load() -> None:
        engine.load(kept)

    def read() -> None:
        _read(own, buffer)

    total = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
    return {
        name: Pairs(nbytes=total, times=_times(*work))
        for name, work in {
            "save": (lambda: engine.save(folder / "new"), lambda: _write(folder / f"plain-{rank}", block, nbytes), clear),
            "load, cold": (load, read, lambda: _drop(own)),
            "load, cold and fresh": (load, read, lambda: (_drop(own), optimizer.state.clear())),
            "load, warm": (load, read, lambda: None),
        }.items()
    }


def _engine() -> sb.Engine:
    torch.manual_seed(0)
    units = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)]
    model = torch.nn.Sequential(*units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    names = [str(index) for index in range(NUM_UNITS)]
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16"), units=names))


def _times(ours: Callable[[], object], plain: Callable[[], object], before: Callable[[], object]) -> Times:
    """Ranks begin each together, after ``before``."""
    works = {"ours": ours, "plain": plain}
    rounds: list[Round] = []
    while len(rounds) < MIN_PAIRS or (len(rounds) < MAX_PAIRS and sum(one.lasted for one in rounds) < BUDGET_SECONDS):
        busy, own, begin = usage()
        seconds: dict[str, float] = {}
        for name in sorted(works, reverse=len(rounds) % 2 == 0):  # each goes first in turn: the disk remembers what came before
            before()
            dist.barrier()
            start = time.perf_counter()
            works[name]()
            seconds[name] = time.perf_counter() - start
        now = usage()
        rounds.append(slowest_of(seconds, now[0] - busy, now[1] - own, now[2] - begin))
    return Times(names=tuple(works), rounds=tuple(rounds), losses={})


def _write(path: Path, block: memoryview, nbytes: int) -> None:
    with path.open("xb", buffering=0) as file:
        for at in range(0, nbytes, BLOCK):
            file.write(block[: min(BLOCK, nbytes - at)])
        os.fsync(file.fileno())


def _read(path: Path, buffer: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _drop(path: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    for name, found in measured(int(sys.argv[1])).items():
        print(name, *found.cells(), sep="\t", flush=True)


if __name__ == "__main__":
    main()
