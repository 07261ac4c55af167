"""The only place of the engine that allocates or frees tensor memory; whatever it does, it books.

A :class:`Buffer` is a tensor object that lives as long as the engine while its *memory* comes and goes: views made once
(parameters, slots of gradients) stay valid objects, and cost nothing while the memory is away. Reading through such a view
while the memory is away would crash the interpreter; `guard` keeps people and autograd from doing it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account, Tier
from shardbook.engine.journal import Journal


class Buffer:
    """A flat tensor of ``numel`` elements whose memory is absent until :meth:`take` and again after :meth:`give_back`."""

    __slots__ = ("_journal", "_padding", "_tier", "account", "present", "tensor", "unit")

    def __init__(
        self, journal: Journal, account: Account, unit: str, numel: int, dtype: torch.dtype, device: torch.device, padding: int
    ) -> None:
        self._journal = journal
        self._tier = Tier.DEVICE
        self._padding = padding * dtype.itemsize
        self.account = account
        self.unit = unit
        self.present = True
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._book(1)

    @property
    def nbytes(self) -> int:
        """Bytes while present."""
        return self.tensor.numel() * self.tensor.element_size()

    def take(self) -> Tensor:
        """Make the memory available, its content undefined; nothing happens if it is there already."""
        if not self.present:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self.present = True
            self._book(1)
        return self.tensor

    def give_back(self) -> None:
        """Free the memory, whoever still holds a view of it."""
        if self.present:
            self.tensor.untyped_storage().resize_(0)
            self.present = False
            self._book(-1)

    def rebook(self, account: Account) -> None:
        """The same bytes serve another purpose from now on."""
        if account is not self.account:
            if self.present:
                self._book(-1)
            self.account = account
            if self.present:
                self._book(1)

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor object on this memory that autograd does not know as a view (so it can become a parameter)."""
        # set_ rather than slicing: a fake tensor keeps weak references to its views, and those forbid swap_tensors
        with torch.no_grad():
            return self.tensor.new_empty(0).set_(self.tensor.untyped_storage(), offset, tuple(shape), tuple(stride))

    def _book(self, sign: int) -> None:
        self._journal.book(self.account, self._tier, self.unit, sign * self.nbytes, sign * self._padding)


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


def is_memory_known(tensor: Tensor) -> bool:
    """Whether the tensor has values: false on the meta device and for fake tensors."""
    return tensor.device.type != "meta" and not _is_fake(tensor)


def place(parameter: nn.Parameter, view: Tensor) -> None:
    """Make the parameter an alias of ``view``: same object, same hooks and groups, other memory (and perhaps another type)."""
    requires_grad, grad = parameter.requires_grad, parameter.grad
    if grad is not None:
        parameter.grad = None
    if parameter.device.type == view.device.type and _is_fake(parameter) == _is_fake(view):
        parameter.data = view
        return
    # from the meta device, .data refuses another kind of tensor; swapping keeps identity
    fresh: Any = view if _is_fake(view) else nn.Parameter(view, requires_grad=False)
    if _is_fake(view):
        fresh._is_param = True
    torch.utils.swap_tensors(parameter, fresh)
    parameter.requires_grad_(requires_grad)


def _is_fake(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
