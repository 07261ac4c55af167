"""One clock for all ranks' timelines, and all of them in one place.

On one host ``time.perf_counter`` is one clock for all processes. Across hosts each rank asks rank 0 for the time, several times; the
answer with the shortest way there and back was given half of that way ago, so the offset is known to within the half.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from shardbook.ledger.timeline import RankTimeline

_NUM_QUESTIONS = 16


def together(timeline: RankTimeline, group: Any = None) -> list[RankTimeline]:
    """Every rank's record on rank 0's clock, by rank, on every rank; without a process group, the one there is.

    All ranks of the group call it, between steps.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return [timeline]
    moved = timeline.shifted(offset(group))
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, moved, group=group)
    return found


def offset(group: Any = None) -> float:
    """Seconds to add to this rank's clock to get rank 0's. All ranks of the group call it."""
    import torch.distributed as dist

    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, _host(), group=group)
    if len(set(hosts)) == 1:
        return 0.0
    rank, found = dist.get_rank(group), 0.0
    for other in range(1, len(hosts)):  # one after the other, so that rank 0 answers at once
        if rank == other:
            found = _ask(dist, group)
        elif rank == 0:
            _answer(dist, group, other)
    return found


def offset_of(exchanges: Sequence[tuple[float, float, float]]) -> float:
    """The offset by the quickest of several (asked, answered, heard), the middle one by the other clock.

    >>> offset_of([(1.0, 11.3, 1.4), (2.0, 12.1, 2.2)])
    10.0
    """
    asked, answered, heard = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return answered - (asked + heard) / 2


def _ask(dist: Any, group: Any) -> float:
    exchanges: list[tuple[float, float, float]] = []
    for _ in range(_NUM_QUESTIONS):
        asked, answer = perf_counter(), [0.0]
        dist.send_object_list([asked], group=group, group_dst=0)
        dist.recv_object_list(answer, group=group, group_src=0)
        exchanges.append((asked, answer[0], perf_counter()))
    return offset_of(exchanges)


def _answer(dist: Any, group: Any, other: int) -> None:
    for _ in range(_NUM_QUESTIONS):
        dist.recv_object_list([None], group=group, group_src=other)
        dist.send_object_list([perf_counter()], group=group, group_dst=other)


def _host() -> str:
    """What processes that share a clock have in common: the host, since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
