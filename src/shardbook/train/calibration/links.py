"""Rates between the ranks, and between device and host."""

from typing import Any

import torch
import torch.distributed as dist

from shardbook.engine.pinned import pin
from shardbook.train.calibration.clock import Clock, Work

LINK_NBYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
COPY_NBYTES = (1 << 14, 1 << 18, 1 << 22, 1 << 25)
_ROUNDS = 9


def between_ranks(clock: Clock) -> float | None:
    """Sends to each other rank, and receives as much from it; returns the share of it that is waited for beside a computation.

    None where there is one rank alone, and nothing to measure.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    found = [clock.together(_exchange(clock, nbytes), _ROUNDS) for nbytes in LINK_NBYTES]
    clock.keep("link", "", (LINK_NBYTES,), found, None)
    return _beside(clock, LINK_NBYTES[-1])


def _exchange(clock: Clock, nbytes: int) -> Work:
    start = _starter(clock, nbytes)

    def work() -> None:
        for one in start():
            one.wait()

    return work


def _starter(clock: Clock, nbytes: int) -> Any:
    """Posts the messages of one exchange, and gives what is to be waited for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "nccl":
        full = torch.zeros(nbytes * ranks, dtype=torch.uint8, device=clock.device)
        out = torch.empty_like(full)

        def start_all() -> list[Any]:
            return [dist.all_to_all_single(out, full, async_op=True)]

        return start_all
    others = [(rank + step) % ranks for step in range(1, ranks)]
    sent = torch.zeros(nbytes, dtype=torch.uint8)
    landing = [torch.empty_like(sent) for _ in others]

    def start() -> list[Any]:
        works = [dist.irecv(target, peer) for target, peer in zip(landing, others, strict=True)]
        return [work for work in works + [dist.isend(sent, peer) for peer in others] if work is not None]

    return start


def _beside(clock: Clock, nbytes: int) -> float:
    """Time of both together, less that of the computation alone, as a share of the exchange alone; within 0 and 1."""
    start, side = _starter(clock, nbytes), 512
    x, y = (torch.randn(side, side, device=clock.device) for _ in range(2))

    def computes(rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(x, x, out=y)

    exchange = clock.mean([clock.together(_exchange(clock, nbytes), _ROUNDS)])[0]
    once = clock.mean([clock.together(lambda: computes(8), _ROUNDS) / 8])[0]
    rounds = max(1, int(2 * exchange / once))
    alone = clock.mean([clock.together(lambda: computes(rounds), _ROUNDS)])[0]

    def both() -> None:
        works = start()
        computes(rounds)
        for work in works:
            work.wait()

    together = clock.mean([clock.together(both, _ROUNDS)])[0]
    return min(1.0, max(0.0, (together - alone) / exchange))


def device_and_host(clock: Clock) -> None:
    """Copies each way; on a CPU device and host are one memory, and a copy is a copy."""
    kinds = ("pageable", "pinned") if clock.device.type == "cuda" else ("pageable",)
    for kind in kinds:
        for way in ("down", "up"):

            def make(nbytes: int, way: str = way, kind: str = kind) -> Work:
                there = torch.zeros(nbytes, dtype=torch.uint8, device=clock.device)
                host = torch.zeros(nbytes, dtype=torch.uint8)
                if kind == "pinned":
                    pin(host)
                target, source = (host, there) if way == "down" else (there, host)
                return lambda: target.copy_(source, non_blocking=kind == "pinned")

            clock.curve(f"copy.{way}", kind, (COPY_NBYTES,), make)
