"""Ways to write, to check and to fill that checkpoints could have used, in turn with plain writing and reading of the same bytes.

python -m benchmarks.checkpoint_variants 7    so many rounds
"""

import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import local

import torch
import xxhash

BLOCK, NUM_BLOCKS = 4 << 20, 200
GIB = 2**30
OWN = local()


def plain_write(path: Path, after: Callable[[int, int], object] = lambda _file, _at: None, *, reserve: bool = False) -> None:
    path.unlink(missing_ok=True)
    block = bytes(BLOCK)
    with path.open("xb", buffering=0) as file:
        if reserve:
            os.posix_fallocate(file.fileno(), 0, NUM_BLOCKS * BLOCK)
        for number in range(NUM_BLOCKS):
            file.write(block)
            after(file.fileno(), number * BLOCK)
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def begin(file: int, at: int) -> None:
    ctypes.CDLL(None).sync_file_range(file, ctypes.c_int64(at), ctypes.c_int64(BLOCK), 2)


def give_up(file: int, at: int) -> None:
    os.posix_fadvise(file, at, BLOCK, os.POSIX_FADV_DONTNEED)


def check(path: Path, threads: int, piece: int, ahead: int = 0) -> None:
    """As a load does it first; ``ahead``: blocks that the system is told of before."""

    def one(file: int, number: int) -> None:
        if len(getattr(OWN, "buffer", b"")) != piece:
            OWN.buffer = bytearray(piece)
        total = xxhash.xxh3_64()
        if ahead:
            os.posix_fadvise(file, (number + ahead) * BLOCK, BLOCK, os.POSIX_FADV_WILLNEED)
        for at in range(number * BLOCK, (number + 1) * BLOCK, piece):
            os.preadv(file, [OWN.buffer], at)
            total.update(OWN.buffer)

    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(one, file.fileno()), range(NUM_BLOCKS)))


def check_streams(path: Path, streams: int, piece: int) -> None:
    """Each reads its part from end to end, through a descriptor of its own."""
    nbytes = path.stat().st_size

    def one(number: int) -> None:
        total, room = xxhash.xxh3_64(), memoryview(bytearray(piece))
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for at in range(nbytes * number // streams, nbytes * (number + 1) // streams, piece):
                total.update(room[: os.preadv(file.fileno(), [room], at)])

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(one, range(streams)))


def check_mapped(path: Path) -> None:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda at: xxhash.xxh3_64_digest(view[at : at + BLOCK]), range(0, len(view), BLOCK)))


def fill(path: Path, into: bytearray, rounded: torch.Tensor, threads: int, piece: int) -> None:
    """As a load does it then: a third goes to a second target in bf16."""
    values, view = torch.frombuffer(into, dtype=torch.float32), memoryview(into)

    def one(file: int, number: int) -> None:
        for at in range(number * BLOCK, (number + 1) * BLOCK, piece):
            os.preadv(file, [view[at : at + piece]], at)
            first, end = at // 4, (at + piece) // 4
            if end <= rounded.numel():
                rounded[first:end].copy_(values[first:end])

    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(one, file.fileno()), range(NUM_BLOCKS)))


def drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(title: str, ways: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None) -> None:
    """The first way is the plain one; prints speeds, and ratios to it in each round."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    plain = seconds[next(iter(ways))]
    for name, found in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(plain, found, strict=True))
        speed = NUM_BLOCKS * BLOCK / GIB / statistics.median(found)
        print(f"{title:18} {name:32} {speed:6.2f} GiB/s, ratio {ratio:.2f}, of the shortest {min(plain) / min(found):.2f}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".evidence-") as folder:
        path = Path(folder) / "data"
        writing = {
            "plain": partial(plain_write, path),
            "sync_file_range": partial(plain_write, path, begin),
            "posix_fallocate": partial(plain_write, path, reserve=True),
            "POSIX_FADV_DONTNEED": partial(plain_write, path, give_up),
        }
        compare("writing", writing, rounds)
        checking = {"plain": partial(plain_read, path)}
        checking |= {f"{n} threads, {size >> 10} KiB": partial(check, path, n, size) for n in (1, 2, 4) for size in (1 << 19, BLOCK)}
        checking |= {f"{n} streams, 512 KiB": partial(check_streams, path, n, 1 << 19) for n in (1, 2, 3, 4)}
        checking |= {f"2 threads, WILLNEED {n} ahead": partial(check, path, 2, 1 << 19, n) for n in (4, 16)}
        checking["2 threads, mmap"] = partial(check_mapped, path)
        compare("checking, cold", checking, rounds, partial(drop, path))
        compare("checking, warm", checking, rounds)
        into, rounded = bytearray(NUM_BLOCKS * BLOCK), torch.zeros(NUM_BLOCKS * BLOCK // 12, dtype=torch.bfloat16)
        filling = {"plain": partial(plain_read, path)}
        filling |= {
            f"{n} threads, {size >> 10} KiB": partial(fill, path, into, rounded, n, size) for n in (1, 2, 4) for size in (1 << 17, 1 << 19)
        }
        compare("filling, warm", filling, rounds)
        block, piece = os.urandom(BLOCK), os.urandom(1 << 18)
        sums = {
            "crc32": lambda: [zlib.crc32(block) for _ in range(NUM_BLOCKS)],
            "xxh3": lambda: [xxhash.xxh3_64_digest(block) for _ in range(NUM_BLOCKS)],
            "xxh3, in the cache": lambda: [xxhash.xxh3_64_digest(piece) for _ in range(16 * NUM_BLOCKS)],
        }
        compare("adding up", sums, rounds)


if __name__ == "__main__":
    main()
