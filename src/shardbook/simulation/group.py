"""A process group of any size in one process: everybody sends, nobody answers."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardbook.errors import ConfigError, UsageError


def check_group(ranks: Any, rank: Any) -> None:
    """Raises:
    ConfigError: ``ranks`` is no number of ranks, ``rank`` none of them.
    UsageError: this process is in a process group already.
    """
    for name, value, least in (("ranks", ranks, 1), ("rank", rank, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} = {value!r}: allowed is a whole number from {least}; for example {least}")
    if rank >= ranks:
        raise ConfigError(f"rank = {rank}: allowed is 0 to {ranks - 1} with ranks = {ranks}; 0 is the default")
    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            f"simulate: this process is in a process group already ({dist.get_backend()}, {dist.get_world_size()} ranks), and a simulation"
            " needs a fake one of its own; call it in another process, or before init_process_group, or after destroy_process_group()"
        )


@contextmanager
def fake_group(ranks: int, rank: int, *, alone_needs_one: bool = False) -> Generator[None]:
    """Be ``rank`` of ``ranks`` while it is open. One rank alone has no group, unless its engine needs one.

    Raises:
        ConfigError, UsageError: as :func:`check_group`.
    """
    check_group(ranks, rank)
    if ranks == 1 and not alone_needs_one:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
