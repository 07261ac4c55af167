"""What a rank's memory is, by counters that are each what they say and are never mixed.

allocated   bytes in live tensors, by the allocator. On CUDA its own peak counter; on the CPU, which has none, the profiler's
            record of every allocation in one steady step, on top of the live tensors found at the step's beginning.
reserved    what CUDA's caching allocator took from the driver; a CPU has no such thing.
resident    the process's resident set: interpreter and libraries included.
"""

import gc
import resource
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

_STATUS = Path("/proc/self/status")

CPU_COUNTER = "live tensors at the beginning of one steady step, and the profiler's allocation records within it"
CUDA_COUNTER = "torch.cuda.max_memory_allocated"


class AllocatorPeak:
    """The largest number of bytes in live tensors: from :meth:`restart` on where the device counts them, else in one step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counter = CUDA_COUNTER if device.type == "cuda" else CPU_COUNTER
        self._step_peak: int | None = None

    def restart(self) -> None:
        """Forgets what was before, as the plain loop's."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def watch_step(self, excluded: Iterable[Tensor]) -> Generator[None]:
        """Measures one step where the device's allocator keeps no peak of its own; ``excluded`` belongs to somebody else."""
        if self.device.type == "cuda":
            yield
            return
        base = live_nbytes(excluded)
        with _allocation_records() as changes:
            yield
        self._step_peak = base + _largest_sum(changes)

    @property
    def allocated(self) -> int | None:
        """Peak bytes in live tensors; ``None`` if no step was watched."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._step_peak

    @property
    def reserved(self) -> int | None:
        """Peak bytes of the caching allocator; ``None`` on the CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None


def live_nbytes(excluded: Iterable[Tensor] = ()) -> int:
    """Bytes of all CPU storages that a Python tensor reaches, each once, without those of ``excluded``."""
    storages: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter's guard would refuse to show its storage
        for found in gc.get_objects():
            if issubclass(type(found), Tensor) and found.device.type == "cpu" and found.layout == torch.strided:
                storage = found.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    for tensor in excluded:
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storages.values())


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


def _status_nbytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


@contextmanager
def _allocation_records() -> Generator[list[tuple[int, int]]]:
    """Every allocation and free while the block runs, as (nanoseconds, signed bytes); filled in when it ends.

    Only the scope that no operator runs in is recorded, so that there are allocations and nothing else. That is not for speed:
    a gloo message that was posted under the usual profiler and ends after it writes into the profiler's freed memory (seen in
    torch 2.13), and the new parameters of a step travel on into the next one.
    """
    changes: list[tuple[int, int]] = []
    config = profile(use_cpu=True, profile_memory=True).config(create_trace_id=True)
    native: Any = torch._C
    profiler = native._autograd  # the scopes are in no public function, and in no stub
    profiler._prepare_profiler(config, {ProfilerActivity.CPU})
    profiler._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.STATIC_RUNTIME_MODEL})
    try:
        yield changes
    finally:
        events = profiler._disable_profiler().events()
        changes += [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


def _largest_sum(changes: list[tuple[int, int]]) -> int:
    """The largest running sum of signed sizes, in the order of time."""
    running = largest = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        running += nbytes
        largest = max(largest, running)
    return largest
