"""A process group of any size in one process: everybody sends, nobody answers."""

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from shardbook.errors import UsageError


@contextmanager
def fake_group(ranks: int, rank: int, *, alone_needs_one: bool = False) -> Generator[None]:
    """Be ``rank`` of ``ranks`` while it is open. One rank alone has no group, unless its engine needs one.

    Raises:
        UsageError: this process is in a group already.
    """
    if dist.is_initialized():
        raise UsageError(
            f"simulate: this process is rank {dist.get_rank()} of a {dist.get_backend()} process group, and a simulation needs one of its "
            "own; simulate before the group is made, after destroy_process_group(), or in another process"
        )
    if ranks == 1 and not alone_needs_one:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
