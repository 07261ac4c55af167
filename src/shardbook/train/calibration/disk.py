"""Rates of a disk past the system's cache, as offload uses it: each rank has a file, and one thread that reads and one that writes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from shardbook.tiers.direct import DirectFile, Extent
from shardbook.tiers.pages import aligned_empty
from shardbook.tiers.pipeline import Pipeline
from shardbook.train.calibration.clock import Clock

BLOCK_NBYTES = 8 << 20
FILE_NBYTES = 256 << 20
_SLOTS, _ROUNDS = 3, 3


def disk(clock: Clock, folder: Path, nbytes: int = FILE_NBYTES) -> str:
    """Measure below ``folder``; what is to be said of it, "" for nothing.

    Raises:
        ConfigError: the folder is none, is full, or can't be written to.
        DiskError: the disk returned an error.
    """
    file = DirectFile(folder, nbytes, "calibration")
    pipeline = Pipeline(file, [aligned_empty(BLOCK_NBYTES) for _ in range(_SLOTS)])
    extents = [Extent(offset, BLOCK_NBYTES) for offset in range(0, nbytes, BLOCK_NBYTES)]
    for number, slot in enumerate(pipeline.run(extents, reads=False)):
        slot.memory.random_(number + 1, 255)  # not zeros, which some disks don't store
    pipeline.finish()
    for name, reads, writes in (("read", True, False), ("write", False, True), ("both", True, True)):
        found = statistics.median(_seconds(clock, pipeline, extents, reads=reads, writes=writes) for _ in range(_ROUNDS))
        clock.keep(f"disk.{name}", "", ((nbytes,),), [found], None)
    pipeline.close()
    file.close()
    return "" if file.is_direct else f"{folder}: the file system has no direct I/O; its rates are those of the system's cache"


def _seconds(clock: Clock, pipeline: Pipeline, extents: Sequence[Extent], *, reads: bool, writes: bool) -> float:
    """Until all ranks have moved all of their file; what is read and written goes each way once."""
    clock.meet()
    start = time.perf_counter()
    for _ in pipeline.run(extents, reads=reads, writes=writes):
        pass
    pipeline.finish()
    clock.meet()
    return time.perf_counter() - start
