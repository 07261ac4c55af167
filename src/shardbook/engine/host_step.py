"""The optimizer's step on the host of a device: which code of torch's makes it, and on how many threads.

On a CPU alone both stay as they are, as the step is to be the same to the bit with and without offload. Beside a GPU the two steps are
other kernels anyway, and what counts is that the host's is not the slow one.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


def prefer_fused(optimizer: Optimizer) -> None:
    """Let groups that leave the choice to torch use its fused kernel: on a CPU torch would choose the loop, several times slower."""
    for group in optimizer.param_groups:
        if "fused" in group and group["fused"] is None and not group.get("foreach") and not group.get("capturable"):
            group["fused"] = True


def planned_threads(num_local_ranks: int) -> int:
    """Threads of one rank's host step, where ``num_local_ranks`` share the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, num_local_ranks))


@contextmanager
def host_threads(num_threads: int) -> Generator[None]:
    """So many threads inside of operators, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
