"""The pipeline beside the same direct I/O alone: same file, same buffers, same bytes, in turn within one process.

*alone* reads every extent with one thread and writes every extent with another, as fast as the disk takes them. *pipeline* reads ahead,
has the caller work on each extent, and writes behind. The work is a copy of one kind: none, or as long as a share of the disk's time.

python -m benchmarks.tiers_disk FOLDER [GIB]
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from shardbook.tiers.direct import DirectFile, Extent
from shardbook.tiers.pages import aligned_empty, bytes_of
from shardbook.tiers.pipeline import Pipeline

NUM_SLOTS, SLOT_NBYTES = 3, 48 << 20
"""A chunk of 4 Mi elements with master and two moments in fp32."""
GIB = 2**30
PAIRS = 9


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians in seconds, and the median of the pairs' ratios: alone by pipeline."""

    alone: float
    pipeline: float
    ratio: float


def compare(folder: Path, nbytes: int, *, pairs: int = PAIRS, work_share: float = 0.0) -> Result:
    """``work_share``: seconds of work with each extent, in those that the disk needs for it (which then is the slowest lane below 1)."""
    extents = [Extent(offset, SLOT_NBYTES) for offset in range(0, nbytes, SLOT_NBYTES)]
    file = DirectFile(folder, len(extents) * SLOT_NBYTES)
    memories = [aligned_empty(SLOT_NBYTES).fill_(1) for _ in range(NUM_SLOTS)]
    pipeline = Pipeline(file, memories)
    seconds: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        by_itself = _timed(partial(alone, file, memories, extents))
        ours = _timed(partial(_ours, pipeline, extents, by_itself / len(extents) * work_share))
        if number:  # the first pass over a file makes its extents
            seconds.append((by_itself, ours))
    pipeline.close()
    file.close()
    return Result(
        alone=statistics.median(one for one, _ in seconds), pipeline=statistics.median(other for _, other in seconds),
        ratio=statistics.median(one / other for one, other in seconds),
    )  # fmt: skip


def alone(file: DirectFile, memories: Sequence[Tensor], extents: Sequence[Extent]) -> None:
    """Reads and writes that wait for nothing but the disk."""

    def each(call: Callable[[memoryview, int], None], memory: Tensor) -> None:
        for extent in extents:
            call(bytes_of(memory), extent.offset)

    writes = threading.Thread(target=each, args=(file.write, memories[1]))
    writes.start()
    each(file.read, memories[0])
    writes.join()


def _ours(pipeline: Pipeline, extents: Sequence[Extent], work_seconds: float) -> None:
    for slot in pipeline.run(extents):
        end = time.perf_counter() + work_seconds
        while time.perf_counter() < end:
            slot.memory[: 1 << 20].add_(0)
    pipeline.finish()


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    folder, gib = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    for share in (0.0, 0.5, 0.9):
        found = compare(folder, int(gib * GIB), work_share=share)
        speed = 2 * gib / found.alone
        print(
            f"work {share:.1f} of the disk's time: alone {found.alone:.2f} s ({speed:.2f} GiB/s read and written), "
            f"pipeline {found.pipeline:.2f} s, ratio {found.ratio:.2f}"
        )


if __name__ == "__main__":
    main()
