"""The step of an engine whose master and moments are on a disk, beside its lanes alone: in turn, within one process.

*disk* is the same direct I/O without an engine: as many bytes read and written, in pieces of the same lengths. *host* is the same
optimizer's step with all of it in memory (``Offload(optimizer="host")``). *step* is ``engine.step()`` until everything is written: norm,
scaling, host step and disk. Forward and backward come before it, as no parameter may change before the norm of all is known.

    python -m benchmarks.tiers_step FOLDER [--dry]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardbook as sb
from benchmarks.tiers_disk import alone
from shardbook.tiers.direct import DirectFile
from shardbook.tiers.pages import aligned_empty

GIB = 2**30
ROUNDS, ROWS = 9, 4
KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "the disk is slowest": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "the host's step is slowest": partial(torch.optim.Rprop, lr=1e-3, foreach=False),
}


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Medians in seconds, GiB read and written in a step, and medians of the rounds' ratios."""

    kind: str
    disk: float
    host: float
    step: float
    gib: float
    share: float  # of what the disk does alone: disk / step
    over: float  # step / the slowest lane of the same round


def measure(kind: str, folder: Path, *, layers: int = 64, width: int = 1024, rounds: int = ROUNDS) -> Lanes:
    """Both engines train on; the first round, in which optimizers make their state, is left out."""
    ours = _engine(kind, sb.Offload(optimizer="disk", path=folder), layers, width)
    disk = ours._context.disk
    assert disk is not None
    extents = [chunk.extent for unit in ours._units for flat in unit.flats for chunk in flat.chunks]
    file = DirectFile(folder, sum(extent.nbytes for extent in extents))
    memories = [aligned_empty(max(extent.nbytes for extent in extents)).fill_(1) for _ in range(3)]
    host = _engine(kind, sb.Offload(optimizer="host"), layers, width)
    alone(file, memories, extents)  # the first pass over a file makes its extents
    found: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        disk_seconds = _timed(partial(alone, file, memories, extents))
        _backward(host, width)
        host_seconds = _timed(host.step)
        _backward(ours, width)
        step_seconds = _timed(lambda: (ours.step(), disk.settle()))
        if number:
            found.append((disk_seconds, host_seconds, step_seconds))
    file.close()
    ours.close()
    host.close()
    return Lanes(
        kind=kind,
        disk=statistics.median(one for one, _, _ in found),
        host=statistics.median(one for _, one, _ in found),
        step=statistics.median(one for _, _, one in found),
        gib=2 * sum(extent.nbytes for extent in extents) / GIB,
        share=statistics.median(disk / step for disk, _, step in found),
        over=statistics.median(step / max(disk, host) for disk, host, step in found),
    )


def _engine(kind: str, offload: sb.Offload, layers: int, width: int) -> sb.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return sb.Engine(model, KINDS[kind](list(model.parameters())), sb.ZeroConfig(stage=2, offload=offload, clip_grad_norm=1.0))


def _backward(engine: sb.Engine, width: int) -> None:
    engine.backward(engine(torch.ones(ROWS, width)).square().sum(), weight=ROWS)


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in KINDS:
        found = measure(kind, options.folder, **({"layers": 4, "width": 256, "rounds": 1} if options.dry else {}))
        print(
            f"{kind}: disk {found.disk:.3f} s for {found.gib:.2f} GiB, host {found.host:.3f} s, step {found.step:.3f} s: "
            f"{found.share:.2f} of the disk alone, {found.over:.2f} of the slowest lane"
        )


if __name__ == "__main__":
    main()
