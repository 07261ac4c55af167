"""What the allocator itself says about one device, on the books' clock: ``time.perf_counter_ns``.

On a CPU there is no counter of live tensors. What there is, are the profiler's records of every allocation and free in the
threads that take part in the measured loop, operators' internal temporaries included. Blocks older than the first record are
found by walking the live tensors at that moment (:func:`live_storages`); their freeing is not recorded, nor is one in another
thread: both are noticed when the storage dies (`reconcile`). On CUDA the allocator's own history of events says the same.
"""

import gc
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

from shardbook.ledger.silence import quieten, without_remarks

CPU_COUNTER = "live tensors at the beginning, and the profiler's record of every allocation and free since"
CUDA_COUNTER = "torch.cuda.max_memory_allocated"
_CALIBRATION_NBYTES = 77_777
_NUM_CALIBRATIONS = 5


@dataclass(frozen=True, slots=True)
class Change:
    """``nbytes`` (negative: freed) at ``address``."""

    nanoseconds: int
    address: int
    nbytes: int


class Records(Protocol):
    """A source of changes."""

    def start(self) -> None: ...
    def stop(self) -> list[Change] | None: ...


class CpuRecords:
    """Records of the CPU's allocator in this thread and those that autograd runs for it.

    Only the scope that no operator runs in is recorded, so that there are allocations and nothing else. That is not for speed: a gloo
    message that was posted under the usual profiler and ends after it writes into the profiler's freed memory (seen in torch 2.13),
    and the new parameters of a step travel on into the next one.
    """

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        """From now on everything is recorded."""
        if self._profiler is None:
            self._start_first()
        self._start()
        self._calibrations = [_allocate_for_calibration() for _ in range(_NUM_CALIBRATIONS)]

    def _start_first(self) -> None:
        native: Any = torch._C
        self._profiler = native._autograd  # the scopes are in no public function, and in no stub
        with without_remarks():
            self._start()
            self._profiler._disable_profiler()
        quieten()

    def _start(self) -> None:
        config = profile(use_cpu=True, profile_memory=True).config(create_trace_id=True)
        self._profiler._prepare_profiler(config, {ProfilerActivity.CPU})
        self._profiler._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.STATIC_RUNTIME_MODEL})

    def stop(self) -> list[Change] | None:
        """What was recorded since :meth:`start`, in order; ``None``: another profiler has taken this one's place meanwhile."""
        if not is_profiling():
            return None
        result = self._profiler._disable_profiler()  # the events live no longer than this
        found = [
            (event.start_time_ns, fields.ptr, fields.alloc_size)
            for event in result.experimental_event_tree()
            if event.name == "[memory]" and (fields := event.typed[1]).device.type == "cpu"
        ]
        found.sort(key=lambda entry: entry[0])
        # the profiler counts from another zero, at the same rate: the tightest of our own, which were read when the block was there
        ours = 2 * _NUM_CALIBRATIONS
        if [entry[2] for entry in found[:ours]] != [_CALIBRATION_NBYTES, -_CALIBRATION_NBYTES] * _NUM_CALIBRATIONS:
            return None
        offset = max(entry[0] - known for entry, known in zip(found[:ours:2], self._calibrations, strict=True))
        return [Change(seen - offset, address, nbytes) for seen, address, nbytes in found[ours:]]


class CudaRecords:
    """Records of CUDA's caching allocator, from its own history."""

    def __init__(self, device: torch.device, max_entries: int = 1_000_000) -> None:
        self._device, self._max_entries = device, max_entries

    def start(self) -> None:
        """From now on everything is recorded."""
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=self._max_entries)
        self._offset = time.time_ns() - time.perf_counter_ns()

    def stop(self) -> list[Change]:
        """What was recorded since :meth:`start`, in order."""
        torch.cuda.synchronize(self._device)
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        snapshot: Any = torch.cuda.memory._snapshot(self._device)
        trace = snapshot["device_traces"][index]
        torch.cuda.memory._record_memory_history(enabled=None)
        return self.changes_of(trace, self._offset)

    @staticmethod
    def changes_of(trace: Iterable[Any], offset: int) -> list[Change]:
        """Allocations and completed frees of a history; its clock is ``offset`` nanoseconds ahead of ours."""
        signs = {"alloc": 1, "free_completed": -1}
        return [
            Change(entry["time_us"] * 1000 - offset, entry["addr"], sign * entry["size"])
            for entry in trace
            if (sign := signs.get(entry["action"])) is not None
        ]


def records_of(device: torch.device) -> Records:
    """The source of changes for a device."""
    return CudaRecords(device) if device.type == "cuda" else CpuRecords()


def counter_of(device: torch.device) -> str:
    """By which counter ``allocated`` is meant."""
    return CUDA_COUNTER if device.type == "cuda" else CPU_COUNTER


def live_storages(device: torch.device) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
    """Address to (a tensor on it, the storage) of every storage on the device that a Python object reaches, gradients included."""
    found: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
    with shown():
        for candidate in gc.get_objects():
            if not issubclass(type(candidate), Tensor):
                continue
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                storage = None if tensor is None or tensor.device.type != device.type else storage_of(tensor)
                if tensor is not None and storage is not None and storage.nbytes() and not _is_foreign(storage):
                    found.setdefault(storage.data_ptr(), (tensor, storage))
    return found


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this thread, this one's or another's."""
    autograd: Any = torch.autograd
    return autograd._profiler_enabled()


def _is_foreign(storage: torch.UntypedStorage) -> bool:
    """Memory that numpy, say, has allocated: torch's own starts at a multiple of 64 bytes."""
    return not storage.resizable() and storage.device.type == "cpu" and storage.data_ptr() % 64 != 0


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; ``None`` for one without (a wrapper around another tensor, which is found by itself; a sparse one)."""
    if type(tensor) is not Tensor and _has_no_memory(type(tensor)):
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return storage


def _has_no_memory(kind: type[Tensor]) -> bool:
    """A fake tensor warns when it is asked where it lies; a wrapper has only what is inside."""
    fakes = any(base.__name__ in ("FakeTensor", "FunctionalTensor") for base in kind.__mro__)  # a guard of an engine may be around one
    return fakes or hasattr(kind, "__tensor_flatten__")


@contextmanager
def shown() -> Generator[None]:
    """A sharded parameter's guard would refuse to show its storage."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


def _allocate_for_calibration() -> int:
    """Allocates and frees a known number of bytes; returns when, at the latest."""
    block = torch.UntypedStorage(_CALIBRATION_NBYTES)
    now = time.perf_counter_ns()
    del block
    return now
