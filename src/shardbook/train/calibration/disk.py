"""Rates of a disk past the system's cache: all ranks read, write, and do both at once, each in a file of its own."""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardbook.errors import ConfigError
from shardbook.train.calibration.clock import Clock

BLOCK_NBYTES = 8 << 20
_FILE_NBYTES = 192 << 20
_THREADS = 2
_DIRECT = getattr(os, "O_DIRECT", 0)
_ROUNDS = 3

Transfer = Callable[[int, int, memoryview], None]
"""Descriptor, offset, and a block's bytes."""


def disk(clock: Clock, folder: Path, nbytes: int = _FILE_NBYTES) -> str:
    """Measure below ``folder``; what is to be said of it, "" for nothing.

    Raises:
        ConfigError: the folder is missing, full, or can't be written to.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, 2 * nbytes)
            descriptor, is_direct = _reopened(file.fileno())
            try:
                _measure(clock, descriptor, nbytes)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"--path {folder}: can't be measured ({error.strerror}); give a folder on the disk that offload would use"
        ) from error
    return "" if is_direct else f"{folder}: the file system has no direct I/O; its rates are those of the system's cache"


def _reopened(descriptor: int) -> tuple[int, bool]:
    """The same file past the cache, if that works."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDWR | _DIRECT), bool(_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.dup(descriptor), False


def _measure(clock: Clock, descriptor: int, nbytes: int) -> None:
    buffers = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(2 * _THREADS)]
    views = [memoryview(buffer) for buffer in buffers]
    for view in views:
        view[:] = os.urandom(4096) * (BLOCK_NBYTES // 4096)  # neither absent nor zeros, which some disks don't store
    with ThreadPoolExecutor(2 * _THREADS) as pool:

        def moved(transfers: list[Transfer]) -> float:
            """Seconds in which each of the transfers has moved ``nbytes``, in its own half of the file."""
            clock.meet()
            start = time.perf_counter()
            jobs = [
                pool.submit(_run, transfer, descriptor, half * nbytes, nbytes, thread, views[half * _THREADS + thread])
                for half, transfer in enumerate(transfers)
                for thread in range(_THREADS)
            ]
            for job in jobs:
                job.result()
            clock.meet()
            return time.perf_counter() - start

        moved([_write, _write])  # space that was never written is not read from the disk
        for name, transfers in (("read", [_read]), ("write", [_write]), ("both", [_read, _write])):
            found = sorted(moved(transfers) for _ in range(_ROUNDS))[_ROUNDS // 2]
            clock.keep(f"disk.{name}", "", ((nbytes,),), [found], None)
    for view in views:
        view.release()


def _run(transfer: Transfer, descriptor: int, begin: int, nbytes: int, thread: int, view: memoryview) -> None:
    for offset in range(begin + thread * BLOCK_NBYTES, begin + nbytes, _THREADS * BLOCK_NBYTES):
        transfer(descriptor, offset, view)


def _read(descriptor: int, offset: int, view: memoryview) -> None:
    _whole(os.preadv(descriptor, [view], offset))


def _write(descriptor: int, offset: int, view: memoryview) -> None:
    _whole(os.pwritev(descriptor, [view], offset))


def _whole(moved: int) -> None:
    if moved != BLOCK_NBYTES:
        raise OSError(errno.EIO, f"{moved} of {BLOCK_NBYTES} bytes were moved")
