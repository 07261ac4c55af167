"""One measurement: all ranks begin together, repeat it for a while, and each takes its first quartile.

Whatever disturbs a measurement adds to it, and never takes away: pages that are touched for the first time, interrupts. Work of one
thread alone is timed by what it had of its core, so that other processes cost it nothing but caches and memory.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from shardbook.facts.curves import Curve

Work = Callable[[], Any]
Make = Callable[..., Work]
"""Sizes of one point to what is to be timed."""

USUAL_SECONDS = 0.03
_WARM, _FEWEST = 2, 7
_QUEUED = 8
"""Calls that a device is given before it is waited for: in a step, too, the next one is there before the last one is done."""


class Clock:
    """Times work on one device, together with the other ranks of the default group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.curves: list[Curve] = []

    def curve(
        self, what: str, dtype: str, axes: Sequence[Sequence[int]], make: Make, *, powers: Sequence[float] | None = None,
        seconds: float = USUAL_SECONDS,
    ) -> None:  # fmt: skip
        """Measure at every point of a grid, and keep the curve."""
        found = [self.usual(make(*sizes), seconds) for sizes in product(*axes)]
        self.keep(what, dtype, axes, found, powers)

    def keep(self, what: str, dtype: str, axes: Sequence[Sequence[int]], found: Sequence[float], powers: Sequence[float] | None) -> None:
        """Keep what this rank has measured, as the mean of all ranks."""
        self.curves.append(
            Curve(
                what=what,
                dtype=dtype,
                axes=tuple(tuple(axis) for axis in axes),
                seconds=tuple(self.mean(found)),
                powers=None if powers is None else tuple(powers),
            )
        )

    def usual(self, work: Work, seconds: float = USUAL_SECONDS) -> float:
        """Seconds of one call, on this rank, while the others do the same."""
        for _ in range(_WARM):
            work()
        self.meet()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < _FEWEST or time.perf_counter() < end:
            times.append(self.alone(work))
        return quartile(times)

    def together(self, work: Work, rounds: int) -> float:
        """The same for work that the ranks do with each other: all must do it equally often."""
        work()
        times: list[float] = []
        for _ in range(rounds):
            self.meet()
            times.append(self.once(work))
        return quartile(times)

    def alone(self, work: Work) -> float:
        """Seconds of one call that waits for nobody."""
        if self.device.type != "cpu":
            return self.once(lambda: [work() for _ in range(_QUEUED)]) / _QUEUED
        start = time.thread_time()
        work()
        return time.thread_time() - start

    def once(self, work: Work) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - start

    def settle(self) -> None:
        """What the device was given is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """All ranks are here."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def mean(self, found: Sequence[float]) -> list[float]:
        """Of all ranks, element by element."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return list(found)
        total = torch.tensor(list(found), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).tolist()


def quartile(times: Sequence[float]) -> float:
    """The first."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]
