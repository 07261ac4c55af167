"""The allocator of a simulation: it gives out numbers instead of memory.

A fake tensor's storage has a size and no bytes. This mode lies right above the fake mode and sees every operator of the simulated
engine; a storage that it sees for the first time has just been allocated, one that dies has been freed, and one that is resized is
both. What a kernel takes and frees inside is not seen here, as nothing computes: a `workspaces` function says it, operator by operator.
The ledger reads the changes as it reads a profiler's.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.accounts import Tier
from shardbook.events import Booking
from shardbook.ledger.allocator import Change
from shardbook.ledger.watcher import tensors_among
from shardbook.simulation.sent import sent_nbytes
from shardbook.simulation.workspaces import Workspaces

COUNTER = "storages of fake tensors, and what kernels are known to take inside"
_DEVICE = torch.ops.prim.device.default


class FakeMemory(TorchDispatchMode):
    """See the file's header. ``mode`` is the fake mode whose tensors count, except while ``shapes_only`` says that an operator runs for
    the shape of its result alone. All changes since the beginning are kept, those that are not the host's (:meth:`book`) in
    ``trace``, and ``sent`` are the bytes that collectives of torch's own have sent.
    """

    def __init__(self, mode: FakeTensorMode, workspaces: Workspaces, shapes_only: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._mode, self._workspaces, self._shapes_only = mode, workspaces, shapes_only
        self._trace: list[Change] = []
        self._last: dict[int, int] = {}  # by address: where in the trace its last allocation is
        self._away: set[int] = set()  # places in the trace
        self._real: set[int] = set()  # addresses of storages with values
        self.sent = 0
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._changes: list[Change] = []
        self._resize: Any = None

    # ---- what happens --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # what the mode below would say, ten times as fast
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a distributed tensor: what it does inside comes by
        result = func(*args, **(kwargs or {}))
        if self._shapes_only():
            return result
        for tensor in tensors_among(result):
            self._see(tensor)
        if func.namespace == "c10d":
            self.sent += sent_nbytes(func, args, self._ranks)
        inside = self._workspaces(func, args, result)
        if inside:
            self._tell(-1, inside)
            self._tell(-1, -inside)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = self.storage_of(tensor)
        if storage is not None and storage._cdata not in self._live:
            self._take(storage)

    def _take(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        self._live[address] = weakref.ref(storage, lambda _: self._give(address)), nbytes
        if nbytes:
            self._tell(address, nbytes)

    def _give(self, address: int) -> None:
        _, nbytes = self._live.pop(address)
        if nbytes:
            self._tell(address, -nbytes)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            address = storage._cdata
            before = self._live.get(address)
            result = resize(storage, nbytes)
            if before is not None and before[1] != nbytes:
                self._live[address] = before[0], nbytes
                if before[1]:
                    self._tell(address, -before[1])
                if nbytes:
                    self._tell(address, nbytes)
            return result

        return resize_

    def _tell(self, address: int, nbytes: int) -> None:
        change = Change(time.perf_counter_ns(), address, nbytes)
        self._changes.append(change)
        if address >= 0:
            if nbytes > 0:
                self._last[address] = len(self._trace)
            elif self._last.get(address) in self._away:
                self._away.add(len(self._trace))
        self._trace.append(change)

    def book(self, booking: Booking) -> None:
        """What the engine says of its memory: what is the host's is no device's; and some of it has values (random states), and is not
        seen by operators here.
        """
        address = booking.address
        if not address or booking.tier is Tier.DISK:
            return
        if address not in self._live and (booking.nbytes > 0) != (address in self._real):
            self._tell(address, booking.nbytes)
            self._real ^= {address}
        if booking.nbytes > 0 and booking.tier is not Tier.DEVICE:
            self._away.add(self._last[address])

    @property
    def trace(self) -> list[Change]:
        """All changes of the device's memory."""
        return [change for place, change in enumerate(self._trace) if place not in self._away]

    # ---- what the ledger asks ------------------------------------------------------------------------------------------------

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Of a fake tensor of the simulated run; None for any other."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode and not self._shapes_only():
            return tensor.untyped_storage()
        return None

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """A number that no other storage has while it lives."""
        return storage._cdata

    def live(self, device: torch.device) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
        """Everything that has been given out and not come back."""
        found: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
        for address, (reference, nbytes) in list(self._live.items()):
            storage = reference()
            if storage is not None and nbytes:
                found[address] = torch.empty(0, device="meta"), storage
        return found

    def records(self, device: torch.device) -> "FakeMemory":
        """It records itself."""
        return self

    def counter(self, device: torch.device) -> str:
        """What ``allocated`` is in a simulation."""
        return COUNTER

    def start(self) -> None:
        """From now on changes are of the next log."""
        self._changes = []

    def stop(self) -> list[Change]:
        """The changes since :meth:`start`."""
        changes, self._changes = self._changes, []
        return changes
