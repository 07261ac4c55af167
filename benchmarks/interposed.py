"""The allocator's peak as :func:`shardbook.measure` tells it, beside a counter that is interposed outside Python.

    python -m benchmarks.interposed      a plain loop, and shardbook's stage 3 on one rank and on two

`interposed.c` is built by the system's C compiler and loaded before everything else (LD_PRELOAD) into processes of its own. There it
counts what torch's CPU allocator asks of ``posix_memalign`` and gives back by ``free``, in every thread, from before the first tensor
on. It knows no tensors, no profiler and no clock.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY = "SHARDBOOK_INTERPOSED"
"""In the environment of a process that counts: where the library is."""

SETTINGS = (("plain", 1), ("shardbook-3", 1), ("shardbook-3", 2))
"""Engine and ranks."""

BOUND = 0.001


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Bytes, of one rank. ``lost``: blocks that the counter's table had no room for."""

    engine: str
    num_ranks: int
    rank: int
    measured: int
    interposed: int
    lost: int

    @property
    def difference(self) -> float:
        return abs(self.measured / self.interposed - 1)


def not_run() -> str | None:
    """Why it can't be done on this machine, or None."""
    if sys.platform != "linux":
        return f"not run: nothing is loaded ahead of the C library on {sys.platform}; run it on Linux"
    if _compiler() is None:
        return "not run: there is no C compiler; apt-get install gcc, or name one in CC"
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path) -> Path:
    """The library, made in a folder.

    Raises:
        RuntimeError: the compiler refused, with what it said.
    """
    library, compiler = folder / "interposed.so", _compiler()
    assert compiler is not None, "not_run() says so"
    command = [compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{SOURCE.name} could not be built: {ended.stderr.strip()}; another compiler can be named in CC")
    return library


def compare(engine: str, num_ranks: int, *, shape: str = "gpt") -> list[Compared]:
    """By rank, from new processes. ``shape``: of :mod:`benchmarks.books_case`.

    Raises:
        RuntimeError: the library could not be built, or the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = str(build(Path(folder)))
        environment = {**os.environ, "LD_PRELOAD": library, LIBRARY: library, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        out = Path(folder) / "compared.json"
        command = [sys.executable, "-m", "benchmarks.interposed", engine, str(num_ranks), shape, str(out)]
        root = Path(__file__).parents[1]
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if ended.returncode:
            raise RuntimeError(f"{engine} on {num_ranks} ranks failed under the counter:\n{ended.stderr}")
        return [Compared(**values) for values in json.loads(out.read_text())]


class Counter:
    """The library that is loaded in this process; counting begins here."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        for name in ("live", "peak", "lost"):
            getattr(self._library, f"interposed_{name}").restype = ctypes.c_longlong
        self._library.interposed_begin.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._library.interposed_begin(*_code_of("libc10.so"))

    def reset(self) -> None:
        """The peak becomes what is live now."""
        self._library.interposed_reset()

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._library, f"interposed_{name}")())


def _code_of(name: str) -> tuple[int, int]:
    """Where a loaded library's code lies."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if len(line) > 5 and Path(line[5]).name == name and "x" in line[1]]
    return min(int(begin, 16) for begin, _ in ranges), max(int(end, 16) for _, end in ranges)


def count(engine: str, num_ranks: int, shape: str) -> Compared:
    """Every rank of a group calls it, in a process that has the library."""
    import torch.distributed as dist

    import shardbook as sb
    from benchmarks.books_case import NUM_STEPS, Case, build

    counter = Counter()
    contender, batch = build(Case(engine=engine, shape=shape))
    contender.step(*batch(0))  # so that the base is not only parameters
    contender.settle()
    with sb.measure(contender.model, contender.optimizer) as run:
        counter.reset()
        for step in range(1, NUM_STEPS + 1):
            contender.step(*batch(step))
        contender.settle()
        peak = counter.peak
    measured = run.part().reconciliation
    assert measured is not None
    return Compared(
        engine=engine, num_ranks=num_ranks, rank=dist.get_rank(), measured=measured.allocated, interposed=peak, lost=counter.lost
    )


def main() -> int:
    if len(sys.argv) > 1:
        from benchmarks import ranks

        engine, num_ranks, shape, out = sys.argv[1:]
        found = ranks.run(int(num_ranks), count, engine, int(num_ranks), shape)
        Path(out).write_text(json.dumps([asdict(one) for one in found]), encoding="utf-8")
        return 0
    if (why := not_run()) is not None:
        print(why)
        return 0
    holds = True
    for engine, num_ranks in SETTINGS:
        for one in compare(engine, num_ranks):
            print(f"{one.engine} on {one.num_ranks}, rank {one.rank}: {one.measured:,} measured, {one.interposed:,} ({one.difference:.4%})")
            holds = holds and one.difference <= BOUND and not one.lost
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
