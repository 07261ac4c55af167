"""Which tensors have memory, where it lies, and who says when it comes and goes.

:data:`REAL` is a device's own. A simulation brings another that answers the same questions of fake tensors, and everything above (items,
owners, reconciliation) reads it without knowing the difference.
"""

from typing import Protocol

import torch
from torch import Tensor

from shardbook.ledger.allocator import Records, counter_of, live_storages, records_of, storage_of


class Memory(Protocol):
    """See the file's header."""

    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The tensor's storage; None: it has none that counts here."""
        ...

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Where it lies: no two storages that live at the same time lie at the same place. 0: nowhere."""
        ...

    def live(self, device: torch.device) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
        """Address to (a tensor on it, the storage) of all that is there now."""
        ...

    def records(self, device: torch.device) -> Records:
        """Who tells of every change from now on."""
        ...

    def counter(self, device: torch.device) -> str:
        """By which counter ``allocated`` is meant."""
        ...


class _Real:
    def storage_of(self, tensor: Tensor) -> torch.UntypedStorage | None:
        return storage_of(tensor)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()

    def live(self, device: torch.device) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
        return live_storages(device)

    def records(self, device: torch.device) -> Records:
        return records_of(device)

    def counter(self, device: torch.device) -> str:
        return counter_of(device)


REAL: Memory = _Real()
