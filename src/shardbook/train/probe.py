"""A real gather and a real reduction between ranks, with values that only the right order of the right parts gives."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

NUMEL = 1 << 22
"""Elements of the buffer that is gathered and reduced: 16 MiB in fp32."""

_ROUNDS = 3


def probe() -> dict[str, float]:
    """Run by each rank: ``{"gather_gb_s": ..., "reduce_gb_s": ...}``, in 10^9 bytes a second that one rank sends, best of a few rounds.

    Raises:
        RuntimeError: values that are not what was sent.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = NUMEL // ranks
    gathered = torch.zeros(shard * ranks)
    gather = min(_timed(lambda: _gather(gathered, rank, shard)) for _ in range(_ROUNDS))
    expected = torch.arange(ranks).repeat_interleave(shard).float() + 0.25
    if not torch.equal(gathered, expected):
        raise RuntimeError(f"a gather between {ranks} ranks gave wrong values on rank {rank}")
    # 2^24 + 1 is no fp32 number: rank order gives 2^24 + 0 + ..., another order or another part would show.
    values = torch.full((shard * ranks,), 2.0**24 if rank == 0 else 1.0)
    total = torch.zeros(shard)
    reduce = min(_timed(lambda: _reduce(total, values, rank, shard)) for _ in range(_ROUNDS))
    if not torch.equal(total, torch.full((shard,), 2.0**24)):
        raise RuntimeError(f"a reduction between {ranks} ranks gave wrong values on rank {rank}")
    sent = shard * 4 * (ranks - 1)
    dist.barrier()
    dist.destroy_process_group()
    return {"gather_gb_s": sent / gather / 1e9, "reduce_gb_s": sent / reduce / 1e9}


def _timed(work: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _gather(gathered: torch.Tensor, rank: int, shard: int) -> None:
    """Every rank's shard to every other, point to point, straight into its place."""
    parts = list(gathered.split(shard))
    parts[rank].fill_(rank + 0.25)
    others = [other for other in range(len(parts)) if other != rank]
    works = [dist.irecv(parts[other], other) for other in others] + [dist.isend(parts[rank], other) for other in others]
    for work in works:
        if work is not None:
            work.wait()


def _reduce(total: torch.Tensor, values: torch.Tensor, rank: int, shard: int) -> None:
    """The owner of a shard receives every rank's part and adds them in rank order."""
    parts = list(values.split(shard))
    received = [parts[rank] if other == rank else torch.empty(shard) for other in range(len(parts))]
    others = [other for other in range(len(parts)) if other != rank]
    works = [dist.irecv(received[other], other) for other in others] + [dist.isend(parts[other], other) for other in others]
    for work in works:
        if work is not None:
            work.wait()
    total.copy_(received[0])
    for part in received[1:]:
        total += part
