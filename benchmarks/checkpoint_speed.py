"""Saves and loads beside plain writing and reading of as many bytes, in turn.

*plain* reads into one buffer that stays in the processor's cache; *memory* reads into as much memory as the training state takes, where
two thirds are new if the optimizer has no state yet, which is the least that a load has to do.

python -m benchmarks.checkpoint_speed 2    two ranks
"""

import ctypes
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
from shardbook.tiers.pages import bytes_of, in_large_pages

MIN_PAIRS, MAX_PAIRS = 9, 31
BUDGET_SECONDS = 30.0
"""After which no pair begins, if there are enough."""
FOREIGN = 0.10
WIDTH, NUM_UNITS = 2048, 8
NBYTES = NUM_UNITS * 2 * WIDTH * (WIDTH + 1) * 12
"""Of masters and moments."""
BLOCK = 4 << 20
TENSOR = WIDTH * WIDTH * 4
ON_CORES = ", on cores"
GIB = 2**30
Works = dict[str, Callable[[], object]]
"""By name, ours first."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """``nbytes``: of all ranks. Only pairs count in which other processes took at most ``FOREIGN`` (the five quietest, if fewer did)."""

    nbytes: int
    times: Times

    @property
    def rivals(self) -> tuple[str, ...]:
        """ "plain", and "memory" for a load."""
        return self.times.names[1:]

    def ratios(self, to: str) -> list[float]:
        """Of throughputs, ours by theirs, sorted."""
        return sorted(one.seconds[to] / one.seconds["ours"] for one in self.times.quiet(FOREIGN))

    def median(self, to: str = "plain") -> float:
        return statistics.median(self.ratios(to))

    @property
    def is_quiet(self) -> bool:
        return all(one.foreign <= FOREIGN for one in self.times.quiet(FOREIGN))

    def rows(self) -> list[list[str]]:
        """For each rival: speeds, ratio with its quartiles, ratio of the shortest times, seconds of processors, pairs that count, and
        others' share in the busiest of them.
        """
        return [[rival, *self._cells(rival)] for rival in self.rivals]

    def _cells(self, rival: str) -> list[str]:
        speeds = [f"{self.nbytes / GIB / self.times.median(name, FOREIGN):.2f}" for name in ("ours", rival)]
        quartiles, kept = statistics.quantiles(self.ratios(rival), n=4), self.times.quiet(FOREIGN)
        best = min(one.seconds[rival] for one in kept) / min(one.seconds["ours"] for one in kept)
        used = [f"{self.times.median(name + ON_CORES, FOREIGN):.2f}" for name in ("ours", rival)]
        count, others = f"{len(kept)} of {len(self.times.rounds)}", f"{max(one.foreign for one in kept):.0%}"
        return [*speeds, f"{self.median(rival):.2f}", f"{quartiles[0]:.2f} to {quartiles[2]:.2f}", f"{best:.2f}", *used, count, others]


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

    room = Memory(nbytes)

    def clear() -> None:
        if rank == 0:
            shutil.rmtree(folder / "new", ignore_errors=True)
        (folder / f"plain-{rank}").unlink(missing_ok=True)

    def begin_anew() -> None:
        optimizer.state.clear()
        room.renew()
        _drop(own)

    loads: Works = {"ours": lambda: engine.load(kept), "plain": lambda: _read(own, buffer), "memory": lambda: room.read(own)}
    saves: Works = {"ours": lambda: engine.save(folder / "new"), "plain": lambda: _write(folder / f"plain-{rank}", block, nbytes)}
    total = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
    rows: dict[str, tuple[Works, Callable[[], object]]] = {
        "save": (saves, clear),
        "load, cold and fresh": (loads, begin_anew),
        "load, cold": (loads, lambda: _drop(own)),
        "load, warm": (loads, lambda: None),
    }
    return {name: Pairs(nbytes=total, times=_times(*of)) for name, of in rows.items()}


class Memory:
    """As much as one rank's part of the training state, in tensors as large as a weight; two thirds of it are an optimizer's moments."""

    def __init__(self, nbytes: int) -> None:
        self._sizes = [min(TENSOR, nbytes - at) for at in range(0, nbytes, TENSOR)]
        self._tensors = [torch.zeros(size, dtype=torch.uint8) for size in self._sizes]

    def renew(self) -> None:
        """The moments are not there any more, and the system has their memory back."""
        self._tensors = self._tensors[: len(self._sizes) // 3]
        ctypes.CDLL(None).malloc_trim(0)

    def read(self, path: Path) -> None:
        """The whole file, 4 MiB at a time."""
        for size in self._sizes[len(self._tensors) :]:
            self._tensors.append(in_large_pages(torch.empty(size, dtype=torch.uint8)))
        with path.open("rb", buffering=0) as file:
            for tensor in self._tensors:
                for part in tensor.split(BLOCK):
                    file.readinto(bytes_of(part))


def _engine() -> sb.Engine:
    torch.manual_seed(0)
    units = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)]
    model = torch.nn.Sequential(*units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    names = [str(index) for index in range(NUM_UNITS)]
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16"), units=names))


def _times(works: Works, before: Callable[[], object]) -> Times:
    """Ranks begin each together, after ``before``. Beside the seconds of each, those that it kept cores busy with."""
    names, rounds = list(works), list[Round]()
    while len(rounds) < MIN_PAIRS or (len(rounds) < MAX_PAIRS and sum(one.lasted for one in rounds) < BUDGET_SECONDS):
        busy, own, begin = usage()
        seconds: dict[str, float] = {}
        first = len(rounds) % len(names)
        for name in names[first:] + names[:first]:  # each goes first in turn: the disk remembers what came before
            before()
            dist.barrier()
            start, on_cores = time.perf_counter(), time.process_time()
            works[name]()
            seconds[name], seconds[name + ON_CORES] = time.perf_counter() - start, time.process_time() - on_cores
        now = usage()
        rounds.append(slowest_of(seconds, now[0] - busy, now[1] - own, now[2] - begin))
    return Times(names=tuple(names), rounds=tuple(rounds), losses={})


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
        for row in found.rows():
            print(name, *row, sep="\t", flush=True)


if __name__ == "__main__":
    main()
