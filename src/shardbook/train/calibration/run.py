"""A whole calibration: run by each rank, and told as plain data by all of them alike."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardbook.facts.machine import Machine
from shardbook.tiers.memory import keep_freed_memory
from shardbook.train.calibration import compute, disk, links, overhead, whole
from shardbook.train.calibration.clock import Clock
from shardbook.train.devices import choose_device
from shardbook.train.near import bind
from shardbook.train.world import ALONE, find_world


def calibrate(job: Mapping[str, Any]) -> str:
    """The document, as JSON. ``job``: ``device`` ("auto", "cpu" or "cuda"), and ``path``, the folder whose disk is measured, or None."""
    began, world = time.perf_counter(), find_world(os.environ) or ALONE
    device = choose_device(job["device"], world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bind(world, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()  # as engines do: without, each large result would be timed with the clearing of new pages
    clock = Clock(device)
    notes: list[str] = []
    numbers = dict(overhead.operators(clock))
    numbers |= overhead.units(clock)
    numbers |= overhead.away(clock)
    numbers |= overhead.recomputation(clock)
    numbers["host.nbytes"] = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    compute.compute(clock)
    beside = links.between_ranks(clock)
    if beside is None:
        notes.append("the link between ranks: one rank alone was measured")
    else:
        numbers["link.beside"] = beside
    links.device_and_host(clock)
    if job["path"] is None:
        notes.append("the disk: no folder was given")
    else:
        if said := disk.disk(clock, Path(job["path"])):
            notes.append(said)
        numbers["disk.piece"] = overhead.pieces(clock, Path(job["path"]))
    numbers |= whole.whole(clock)
    machine = Machine(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=processor(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ranks=dist.get_world_size(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch=torch.__version__,
        took=0.0,
        curves=tuple(clock.curves),
        numbers=numbers,
        notes=tuple(notes),
    )
    dist.barrier()
    dist.destroy_process_group()
    return replace(machine, took=round(time.perf_counter() - began, 1)).to_json()


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """As the system tells it."""
    try:
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
