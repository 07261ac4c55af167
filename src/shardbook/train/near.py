"""Keeps a rank on the processors that are near to its device, where a machine has several NUMA nodes."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from shardbook.facts.topology import ROOT, near_cores, nodes, slot_of
from shardbook.train.world import World


def bind(world: World, device: torch.device, root: Path = ROOT) -> str:
    """Bind all threads of this process, and those to come; says what was done, in words for the beginning of a run.

    Whoever started the ranks may have bound them already (``numactl``, ``srun --cpu-bind``): then nothing is changed.
    """
    if not hasattr(os, "sched_setaffinity"):
        return "not bound: this system binds no processes"
    found = nodes(root)
    if len(found) < 2:
        return "not bound: one NUMA node" if found else "not bound: NUMA nodes can't be seen"
    allowed = os.sched_getaffinity(0)
    if not allowed >= frozenset[int]().union(*(node.cores for node in found)):
        return f"bound already, to {len(allowed)} cores"
    address = address_of(device)
    near = None if address is None else slot_of(address, root).node
    cores = near_cores(world.local_rank, world.num_local_ranks, found, near)
    for thread in _threads():
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(thread, cores)
    number = next(node.number for node in found if node.cores == cores)
    why = "near to its device" if near == number else "in turn: which node is near to the device can't be seen" if address else "in turn"
    return f"bound to NUMA node {number} ({len(cores)} cores), {why}"


def address_of(device: torch.device) -> str | None:
    """A device's address on PCI Express; None for the CPU, and where torch does not tell."""
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    numbers = [getattr(facts, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _threads() -> list[int]:
    """Of this process; 0 stands for the calling one where they can't be seen."""
    with suppress(OSError):
        return [int(folder.name) for folder in Path("/proc/self/task").iterdir()]
    return [0]
