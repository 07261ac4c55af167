"""Which device a rank uses, and the process group of all of them."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardbook.errors import ConfigError
from shardbook.train.world import World

_TIMEOUT = timedelta(minutes=10)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], world: World) -> torch.device:
    """``auto``: CUDA where every local rank has a device of its own, else the CPU. ``cuda``: ranks share devices if they must.

    Raises:
        ConfigError: ``cuda`` without a CUDA device.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not found:
        raise ConfigError("run.device = 'cuda': torch finds no CUDA device; use --device cpu, or see shardbook doctor")
    if wanted == "cpu" or found == 0 or (wanted == "auto" and found < world.num_local_ranks):
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % found)


@contextmanager
def process_group(world: World, device: torch.device) -> Generator[str]:
    """The default process group while the block runs; its value is the backend's name, ``"none"`` for a rank alone.

    NCCL wants a device of its own for each rank; where ranks share one, gloo carries CUDA tensors.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.num_ranks == 1:
        yield "none"
        return
    shared = device.type == "cuda" and torch.cuda.device_count() < world.num_local_ranks
    backend = "nccl" if device.type == "cuda" and not shared else "gloo"
    os.environ.update(world.variables)
    dist.init_process_group(backend, store=_store(world), rank=world.rank, world_size=world.num_ranks, timeout=_TIMEOUT)
    try:
        yield backend
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(world: World) -> Store:
    """Where the ranks tell each other their addresses.

    torchrun's usual rendezvous keeps one store over all restarts, in which a rank that is started again finds addresses of ranks that
    are gone: each start of a machine's ranks gets names of its own. Where there are several machines, their agents may count otherwise.
    """
    store, _, _ = next(rendezvous("env://", world.rank, world.num_ranks, timeout=_TIMEOUT))
    store.set_timeout(_TIMEOUT)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if world.num_local_ranks == world.num_ranks else "0"
    return PrefixStore(f"start-{start}", store)
