"""Rates of a disk past the system's cache, as offload uses it: each rank has a file, and one thread that reads and one that writes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from shardbook.tiers.direct import DirectFile, Extent
from shardbook.tiers.pages import aligned_empty
from shardbook.tiers.pipeline import Pipeline
from shardbook.train.calibration.clock import Clock

EXTENT_NBYTES = (4 << 10, 128 << 10, 1 << 20, 8 << 20)
FILE_NBYTES = 256 << 20
_SLOTS, _ROUNDS, _MOST_EXTENTS = 3, 3, 64


def disk(clock: Clock, folder: Path, nbytes: int = FILE_NBYTES) -> str:
    """Measure below ``folder``; what is to be said of it, "" for nothing.

    Raises:
        ConfigError: the folder is none, is full, or can't be written to.
        DiskError: the disk returned an error.
    """
    file = DirectFile(folder, nbytes, "calibration")
    pipeline = Pipeline(file, [aligned_empty(EXTENT_NBYTES[-1]) for _ in range(_SLOTS)])
    rows = [_extents(length, nbytes) for length in EXTENT_NBYTES]
    for number, slot in enumerate(pipeline.run(rows[-1], reads=False)):
        slot.memory.random_(number + 1, 255)  # not zeros, which some disks don't store
    pipeline.finish()
    for name, reads, writes in (("read", True, False), ("write", False, True), ("both", True, True)):
        found = [_each(clock, pipeline, extents, reads=reads, writes=writes) for extents in rows]
        clock.keep(f"disk.{name}", "", (EXTENT_NBYTES,), found, None)
    pipeline.close()
    file.close()
    return "" if file.is_direct else f"{folder}: the file system has no direct I/O; its rates are those of the system's cache"


def _extents(length: int, nbytes: int) -> Sequence[Extent]:
    return [Extent(offset, length) for offset in range(0, nbytes, length)][:_MOST_EXTENTS]


def _each(clock: Clock, pipeline: Pipeline, extents: Sequence[Extent], *, reads: bool, writes: bool) -> float:
    """Seconds of one extent of many in a row."""
    found = statistics.median(_seconds(clock, pipeline, extents, reads=reads, writes=writes) for _ in range(_ROUNDS))
    return found / len(extents)


def _seconds(clock: Clock, pipeline: Pipeline, extents: Sequence[Extent], *, reads: bool, writes: bool) -> float:
    """Until all ranks have moved all of them; what is read and written goes each way once."""
    clock.meet()
    start = time.perf_counter()
    for _ in pipeline.run(extents, reads=reads, writes=writes):
        pass
    pipeline.finish()
    clock.meet()
    return time.perf_counter() - start
