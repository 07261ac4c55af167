"""The counters of one rank's device and process, each by its own definition."""

import resource
import sys
from pathlib import Path

import torch

from shardbook.document import Counters

_STATUS = Path("/proc/self/status")


def counters(device: torch.device, allocated: int | None) -> Counters:
    """What there is to count; ``allocated`` is the peak as it was measured where the device keeps none of its own."""
    if device.type != "cuda":
        return Counters(allocated=allocated, requested=allocated, resident=peak_resident_nbytes())
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved, live = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    return Counters(
        allocated=stats["allocated_bytes.all.peak"],
        requested=stats["requested_bytes.all.peak"],
        active=stats["active_bytes.all.peak"],
        reserved=stats["reserved_bytes.all.peak"],
        fragmentation=reserved - live,
        largest_free_block=_largest_free_block(device),
        driver=total - free,
        resident=peak_resident_nbytes(),
    )


def peak_resident_nbytes() -> int:
    """The largest resident set of this process so far."""
    # getrusage on Linux also counts what the process was before exec, hence the launcher's libraries.
    if (found := _status_nbytes("VmHWM")) is not None:
        return found
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def resident_nbytes() -> int:
    """The resident set now; its peak where the system tells only that."""
    found = _status_nbytes("VmRSS")
    return peak_resident_nbytes() if found is None else found


def _largest_free_block(device: torch.device) -> int:
    snapshot = torch.cuda.memory._snapshot(device)
    free = [block["size"] for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == "inactive"]
    return max(free, default=0)


def _status_nbytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
