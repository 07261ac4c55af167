"""The books below the accounts: one item for each storage somebody has seen, from when it is seen until it is gone.

An item is opened for a tensor that an operator made, that a model, optimizer or engine holds, or that an engine booked by itself.
It closes when its storage dies, or when the engine takes it back. Knowledge may come later than the bytes (an operator's output
turns out to be saved by autograd): then the item moves to another account for its whole life, and a booking says so.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardbook.accounts import Account, Tier
from shardbook.events import Booking
from shardbook.ledger.memory import REAL, Memory


class Item:
    """One storage in the books.

    ``born`` and ``died`` are of ``time.perf_counter_ns``; ``died`` is None while it lives. ``is_booked``: by the engine whose it is, so
    that nobody else moves it. ``is_backed``: the allocator had a block for it, once. ``memory_gone``: it ended with its storage, or
    with the storage's memory, not by somebody's word. ``tier``: where it lies; on a CPU the host's is memory of the same allocator.
    """

    __slots__ = (
        "account",
        "address",
        "born",
        "died",
        "dtype",
        "is_backed",
        "is_booked",
        "memory_gone",
        "name",
        "nbytes",
        "phase",
        "reference",
        "shape",
        "site",
        "storage_key",
        "tier",
        "unit",
    )  # fmt: skip

    def __init__(self, address: int, nbytes: int, account: Account, unit: str, name: str, phase: str) -> None:
        self.address, self.nbytes, self.account, self.unit, self.name, self.phase = address, nbytes, account, unit, name, phase
        self.shape: tuple[int, ...] = ()
        self.dtype = self.site = ""
        self.reference: weakref.ref[Any] | None = None
        self.born = time.perf_counter_ns()
        self.died: int | None = None
        self.is_backed = self.is_booked = self.memory_gone = False
        self.storage_key = 0
        self.tier = Tier.DEVICE

    @property
    def is_away(self) -> bool:
        """Whether it lies in another tier than the device."""
        return self.tier is not Tier.DEVICE

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether the item is that storage, not an earlier one at the same address. An engine's own items are its word."""
        return self.reference is None or self.reference() is storage


class Items:
    """All items that live, by address, and those of the step so far, in order.

    ``move`` is told of every change: (account, tier, unit, bytes, phase). A plain call, as there is one for most operators.
    """

    def __init__(self, move: Callable[[Account, Tier, str, int, str], None], memory: Memory = REAL) -> None:
        self._move = move
        self._storage_of, self._address_of = memory.storage_of, memory.address_of
        self.live: dict[int, Item] = {}
        self.recent: list[Item] = []
        self.gathered: list[Item] = []  # in accounts whose storages are emptied and filled again
        self._by_key: dict[int, Item] = {}
        self._has_away = False
        self.unclaimed: dict[int, Item] = {}  # older than the books, and nobody's so far

    def find(self, tensor: Tensor) -> Item | None:
        """The item of a tensor's storage."""
        storage = self._storage_of(tensor)
        item = None if storage is None else self.live.get(self._address_of(storage))
        return item if item is not None and storage is not None and item.is_of(storage) else None

    def see(self, tensor: Tensor, account: Account, place: tuple[str, str], name: str, tier: Tier = Tier.DEVICE) -> Item | None:
        """The item of a tensor's storage, opened if need be; ``place`` is (phase, unit). None: it has no memory of its own."""
        storage = self._storage_of(tensor)
        if storage is None or not (nbytes := storage.nbytes()):
            return None
        address = self._address_of(storage)
        item = self.live.get(address)
        if item is not None:
            if item.is_of(storage) and item.nbytes == nbytes:
                return item
            self.close(item)  # its memory went without a word, and this is another's
        moved = self._by_key.get(storage._cdata)
        if moved is not None and moved.is_of(storage):
            moved.memory_gone = True  # the same storage, elsewhere
            self.close(moved)
        return self._see_first(tensor, storage, account, place, name, tier)

    def tier_of_results(self, tensors: Iterable[Tensor]) -> Tier:
        """Where an operator on these makes its results: an optimizer that steps on the host's memory takes its temporaries there too."""
        if not self._has_away:
            return Tier.DEVICE
        tiers = {item.tier for tensor in tensors if (item := self.find(tensor)) is not None}
        return Tier.HOST if tiers and Tier.DEVICE not in tiers else Tier.DEVICE

    def take_older(self, tensor: Tensor, storage: torch.UntypedStorage, name: str) -> None:
        """A storage that was there before the books were opened, and that an engine may have told of already."""
        known = self.live.get(self._address_of(storage))
        if known is None:
            item = self._see_first(tensor, storage, Account.UNACCOUNTED, ("before", ""), name)
            self.unclaimed[item.address] = item
        elif known.reference is None:
            known.shape, known.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            known.reference = weakref.ref(storage, _closing(self, known))

    @property
    def unclaimed_nbytes(self) -> int:
        return sum(item.nbytes for item in self.unclaimed.values())

    def touch(self, tensor: Tensor, account: Account, name: str) -> None:
        """An operator uses a tensor: if it is older than the books and nobody's, it is the loop's."""
        storage = self._storage_of(tensor)
        item = None if storage is None else self.unclaimed.get(self._address_of(storage))
        if item is not None:
            self.know(item, account, name)

    def hang(self, storage: torch.UntypedStorage) -> None:
        """It hangs on a model: older and in no account, but not somebody else's."""
        self.unclaimed.pop(self._address_of(storage), None)

    def _see_first(
        self, tensor: Tensor, storage: torch.UntypedStorage, account: Account, place: tuple[str, str], name: str, tier: Tier = Tier.DEVICE
    ) -> Item:
        address, nbytes = self._address_of(storage), storage.nbytes()
        phase, unit = place
        item = Item(address, nbytes, account, unit, name, phase)
        item.tier = tier
        item.shape, item.dtype = () if tensor.is_nested else tuple(tensor.shape), str(tensor.dtype)[6:]
        item.reference = weakref.ref(storage, _closing(self, item))
        item.storage_key = storage._cdata
        self._by_key[item.storage_key] = item
        return self._open(item)

    def know(self, item: Item, account: Account, name: str = "", unit: str = "") -> None:
        """Move an item to the account it turns out to belong to."""
        if item.account is not account:
            self.unclaimed.pop(item.address, None)
            self._tell(item, -1)
            item.account = account
            item.unit = unit or item.unit
            self._tell(item, 1)
            self._follow(item)
        item.name, item.unit = name or item.name, unit or item.unit

    def close(self, item: Item) -> None:
        """The storage is gone, or its memory."""
        if item.died is None:
            item.died = time.perf_counter_ns()
            item.reference = None
            if self.live.get(item.address) is item:
                del self.live[item.address]
            if self.unclaimed.get(item.address) is item:
                del self.unclaimed[item.address]
            if self._by_key.get(item.storage_key) is item:
                del self._by_key[item.storage_key]
            self._tell(item, -1)

    def book(self, booking: Booking) -> None:
        """An engine's own word about its memory."""
        if not booking.address:
            return
        known, storage = self.live.get(booking.address), None
        if booking.nbytes < 0:
            if known is not None:
                self.close(known)
            return
        if known is not None:
            storage = None if known.reference is None else known.reference()
            self.close(known)  # as the operator that made it saw it
            known.tier = booking.tier  # where it has been from its first instant on
        item = Item(booking.address, booking.nbytes, booking.account, booking.unit, "flat buffer", booking.phase)
        item.is_booked, item.tier = True, booking.tier
        self._has_away = self._has_away or item.is_away
        if known is not None:
            item.shape, item.dtype, item.site = known.shape, known.dtype, known.site
            item.reference = None if storage is None else weakref.ref(storage, _closing(self, item))
        self._open(item)

    def check_gathered(self) -> None:
        """An engine may free a gathered parameter by emptying its storage, which nobody tells of."""
        for item in self.gathered:
            if item.reference is not None and ((storage := item.reference()) is None or storage.nbytes() != item.nbytes):
                self.close(item)
        self.gathered = [item for item in self.gathered if item.died is None]

    def turn(self) -> list[Item]:
        """A step ends: all items that lived in it."""
        ended, self.recent = self.recent, list(self.live.values())
        return ended

    def _open(self, item: Item) -> Item:
        self.live[item.address] = item
        self.recent.append(item)
        self._tell(item, 1)
        self._follow(item)
        return item

    def _follow(self, item: Item) -> None:
        if item.account is Account.GATHERED:
            self.gathered.append(item)

    def _tell(self, item: Item, sign: int) -> None:
        self._move(item.account, item.tier, item.unit, sign * item.nbytes, item.phase)


def _closing(items: Items, item: Item) -> Callable[[Any], None]:
    def close(_: Any) -> None:
        item.memory_gone = item.died is None
        items.close(item)

    return close
