"""The only place of the engine that allocates or frees tensor memory; whatever it does, it books.

A :class:`Buffer` is a tensor object that lives as long as the engine while its *memory* comes and goes: views made once
(parameters, slots of gradients) stay valid objects, and cost nothing while the memory is away. Reading through such a view
while the memory is away would crash the interpreter; `guard` keeps people and autograd from doing it.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account, Tier
from shardbook.engine.journal import Journal
from shardbook.engine.pinned import pin
from shardbook.tiers.pages import aligned, slack_nbytes


class Buffer:
    """A flat tensor of ``numel`` elements whose memory is absent until :meth:`take` and again after :meth:`give_back`."""

    __slots__ = ("_address", "_aliases", "_journal", "_padding", "_tier", "account", "present", "tensor", "unit")

    def __init__(
        self, journal: Journal, account: Account, unit: str, numel: int, dtype: torch.dtype, device: torch.device, padding: int,
        tier: Tier = Tier.DEVICE,
    ) -> None:  # fmt: skip
        self._journal = journal
        self._tier = tier
        self._padding = padding * dtype.itemsize
        self.account = account
        self.unit = unit
        self.present = True
        self._aliases: list[tuple[Tensor, int]] = []
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        if tier is Tier.PINNED:
            pin(self.tensor)
        self._book_in()

    @property
    def nbytes(self) -> int:
        """Bytes while present."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_away(self) -> bool:
        """Whether it lies in another tier than the device."""
        return self._tier is not Tier.DEVICE

    def take(self) -> Tensor:
        """Make the memory available, its content undefined; nothing happens if it is there already."""
        if not self.present:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.present = True
            self._book_in()
        return self.tensor

    def give_back(self) -> None:
        """Free the memory, whoever still holds a view of it. Pinned memory stays: to pin it again would take longer than a step."""
        if self.present and self._tier is not Tier.PINNED:
            if not self.tensor.untyped_storage().resizable():
                self.leave()  # numpy has been given it
            self.tensor.untyped_storage().resize_(0)
            self.present = False
            self._book_out()

    def drop(self) -> None:
        """Free the memory for good, pinned or not; nobody may hold a view of it."""
        if self.present:
            self._book_out()
            self.present = False
        self.tensor = self.tensor.new_empty(0)

    def leave(self) -> None:
        """Let whoever holds a view of the memory keep it, and go on in other memory, its content undefined."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            fresh = torch.empty_like(self.tensor)
            for alias, offset in self._aliases:
                view = self._view_of(fresh, offset, alias.shape, alias.stride())
                if isinstance(alias, nn.Parameter):
                    alias.data = view
                else:
                    alias.set_(view)  # pyright: ignore[reportArgumentType]
            if self.present:
                self._book_out()
            self.tensor.set_(fresh)  # pyright: ignore[reportArgumentType]
            if self.present:
                self._book_in()

    def rebook(self, account: Account) -> None:
        """The same bytes serve another purpose from now on."""
        if account is not self.account:
            if self.present:
                self._book_out()
            self.account = account
            if self.present:
                self._book_in()

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor object on this memory that autograd does not know as a view (so it can become a parameter)."""
        with torch.no_grad():
            view = self._view_of(self.tensor, offset, shape, stride)
        self._aliases.append((view, offset))
        return view

    def place(self, parameter: nn.Parameter, offset: int, shape: Sequence[int], stride: Sequence[int]) -> None:
        """Make the parameter an alias of this memory: same object, same hooks and groups, other memory (and perhaps another type)."""
        with torch.no_grad():
            _become(parameter, self._view_of(self.tensor, offset, shape, stride))
        self._aliases.append((parameter, offset))

    @staticmethod
    def _view_of(tensor: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        # set_ rather than slicing: a fake tensor keeps weak references to its views, and those forbid swap_tensors
        return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, tuple(shape), tuple(stride))

    def _book_in(self) -> None:
        self._address = address_of(self.tensor)
        self._journal.book(self.account, self._tier, self.unit, self.nbytes, self._padding, self._address)

    def _book_out(self) -> None:
        self._journal.book(self.account, self._tier, self.unit, -self.nbytes, -self._padding, self._address)


class Storage:
    """Makes buffers on one device."""

    def __init__(self, device: torch.device, journal: Journal) -> None:
        self.device = device
        self._journal = journal

    def buffer(self, account: Account, unit: str, numel: int, dtype: torch.dtype, *, padding: int = 0, present: bool = True) -> Buffer:
        """A buffer of ``numel`` elements; ``present=False`` makes the object without its memory."""
        made = Buffer(self._journal, account, unit, numel, dtype, self.device, padding)
        if not present:
            made.give_back()
        return made

    @property
    def away_tier(self) -> Tier:
        """Where memory beside the device's lies: pinned where a device copies from it by itself."""
        return Tier.PINNED if self.device.type == "cuda" else Tier.HOST

    def away_buffer(self, account: Account, unit: str, numel: int, dtype: torch.dtype, *, padding: int = 0, present: bool = True) -> Buffer:
        """A buffer on the host for what is offloaded: another tier, also where the device is the host."""
        device = torch.device("cpu") if self.device.type == "cuda" else self.device
        made = Buffer(self._journal, account, unit, numel, dtype, device, padding, self.away_tier)
        if not present:
            made.give_back()
        return made

    def aligned_buffer(self, account: Account, unit: str, nbytes: int) -> tuple[Buffer, Tensor]:
        """Pageable memory of the host that a disk fills fast: a buffer, and the ``nbytes`` of it that are to be used."""
        device, slack = torch.device("cpu") if self.device.type == "cuda" else self.device, slack_nbytes(nbytes)
        made = Buffer(self._journal, account, unit, nbytes + slack, torch.uint8, device, slack, Tier.HOST)
        return made, aligned(made.tensor, nbytes) if is_memory_known(made.tensor) else made.tensor[:nbytes]

    def host_buffer(self, account: Account, unit: str, numel: int, dtype: torch.dtype, *, padding: int = 0) -> Buffer:
        """A buffer in the host's memory, wherever the others are; where they are there too, it is booked with them."""
        tier = Tier.DEVICE if self.device.type == "cpu" else Tier.HOST
        return Buffer(self._journal, account, unit, numel, dtype, torch.device("cpu"), padding, tier)

    @property
    def is_fake(self) -> bool:
        """Whether tensors made now have no values."""
        return not is_memory_known(torch.empty(0, device=self.device))

    def adopt(self, tensor: Tensor, account: Account, unit: str) -> Tensor:
        """Book a tensor that lives as long as somebody holds it, until its storage dies."""
        storage = tensor.untyped_storage()
        address, nbytes = address_of(tensor), storage.nbytes()
        tier = Tier.DEVICE if tensor.device.type == self.device.type else Tier.HOST
        self._journal.book(account, tier, unit, nbytes, 0, address)
        weakref.finalize(storage, self._journal.book, account, tier, unit, -nbytes, 0, address).atexit = False
        return tensor

    def fresh(self, account: Account, unit: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor on the device, content undefined, that lives as long as somebody holds it."""
        return self.adopt(torch.empty(numel, dtype=dtype, device=self.device), account, unit)

    def copy_of(self, tensor: Tensor, account: Account, unit: str) -> Tensor:
        """The same values in memory of its own, for as long as somebody holds it."""
        with torch.no_grad():
            return self.adopt(tensor.detach().clone(), account, unit)


def address_of(tensor: Tensor) -> int:
    """Where the tensor's storage lies; of one without values, a number that no other storage has while it lives."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if is_memory_known(tensor) else storage._cdata


def is_memory_known(tensor: Tensor) -> bool:
    """Whether the tensor has values: false on the meta device and for fake tensors."""
    return not _is_fake(tensor) and tensor.device.type != "meta"  # in this order: a fake one is slow to tell its device


def make_fake_meta(parameter: nn.Parameter) -> None:
    """Under fake tensors a real parameter on the meta device can't be touched: make it a fake one there."""
    if parameter.device.type == "meta" and not _is_fake(parameter):
        _become(parameter, torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"))


def _become(parameter: nn.Parameter, view: Tensor) -> None:
    requires_grad = parameter.requires_grad
    parameter.grad = None
    if parameter.device.type == view.device.type and _is_fake(parameter) == _is_fake(view):
        parameter.data = view
        return
    # from the meta device, .data refuses another kind of tensor; swapping keeps identity
    if _is_fake(view):
        fresh: Any = view
        fresh._is_param = True
        if _is_fake(parameter):
            _swap_fakes(parameter, fresh)
        else:
            torch.utils.swap_tensors(parameter, fresh)
    else:
        torch.utils.swap_tensors(parameter, nn.Parameter(view, requires_grad=False))
    parameter.requires_grad_(requires_grad)


def _swap_fakes(one: Any, other: Any) -> None:
    """``swap_tensors`` for two fake tensors, which it refuses because their mode keeps weak references to them."""
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
