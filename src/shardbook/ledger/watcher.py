"""Sees what operators make and what autograd saves, and books it: for any loop, without a word from it.

Every operator of this thread passes through here, above the device's kernels: a kernel's own temporaries are seen by the allocator
alone, and are told apart later by when the operator ran (`reconcile`). What autograd saves is seen by its own hooks; what they are
given back has the same version check as without them.
"""

import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.accounts import Account
from shardbook.ledger.items import Item, Items
from shardbook.ledger.operators import accounts_of_arguments, accounts_of_outputs
from shardbook.ledger.places import Places

SITE_NBYTES = 64 * 1024
"""From this size on the line of user code that made a storage is looked up."""

_FOREIGN = ("<", str(Path(__file__).parents[1]), str(Path(torch.__file__).parents[1]), sysconfig.get_paths()["stdlib"])


@dataclass(slots=True)
class Operator:
    """One operator as it ran: nanoseconds of ``time.perf_counter_ns``."""

    begin: int
    end: int
    name: str
    phase: str
    unit: str


class Watcher(TorchDispatchMode):
    """See the file's header. ``on_failure`` is told of an operator that could not get memory, while everything is still held."""

    def __init__(self, items: Items, places: Places, on_failure: Callable[[RuntimeError, Operator], None]) -> None:
        super().__init__()
        self._items, self._places, self._on_failure = items, places, on_failure
        self._recomputed: list[Item] = []
        self.operators: list[Operator] = []
        self.reduces = False  # gradients that autograd has made go on to other ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a sharded tensor: what it does inside comes by
        phase, unit = place = self._places.now()
        operator = Operator(time.perf_counter_ns(), sys.maxsize, func.__name__, phase, unit)
        self.operators.append(operator)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._on_failure(error, operator)
            raise
        operator.end = time.perf_counter_ns()
        self._see(func, args, kwargs, result, place)
        return result

    def turn(self) -> list[Operator]:
        """A step ends: its operators."""
        ended, self.operators = self.operators, []
        return ended

    def saving(self) -> AbstractContextManager[Any]:
        """While it is open, what autograd saves is seen."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any, place: tuple[str, str]) -> None:
        name = str(func)
        for tensor, account in accounts_of_arguments(name, args, kwargs):
            self._claim(tensor, account, place, name)
        account = accounts_of_outputs(name)
        for tensor in _tensors(result):
            item = self._items.see(tensor, account or Account.WORKSPACE, place, name)
            if item is None:
                continue
            if account is not None and item.account is Account.WORKSPACE:
                self._items.know(item, account)
            self._note(item, place)
        if place[0] == "backward":
            self._see_backward(args)
        elif place[0] == "between":
            for tensor in _tensors(args):  # what the loop reads to make its batches
                self._items.see(tensor, Account.INPUT, place, "read outside of the model")

    def _claim(self, tensor: Tensor, account: Account, place: tuple[str, str], name: str) -> None:
        item = self._items.see(tensor, account, place, name)
        if item is not None and item.account is Account.WORKSPACE:
            self._items.know(item, account, name)

    def _note(self, item: Item, place: tuple[str, str]) -> None:
        """Of a large one: who made it. Of a recomputation's: that it may be kept."""
        if item.nbytes >= SITE_NBYTES and not item.site:
            if place[0] == "backward":
                item.site = self._places.site_in_backward()
            if not item.site:
                item.site = user_site()
                if place[0] == "forward":
                    self._places.note_site(item.site)
        if place[0] == "backward" and torch.is_grad_enabled() and item.account is Account.WORKSPACE:
            self._recomputed.append(item)

    def _see_backward(self, args: Any) -> None:
        """What of a recomputation is still there when backward goes on, is what it was made for; and gradients of parameters."""
        if self._recomputed and not torch.is_grad_enabled():
            for item in self._recomputed:
                if item.died is None:
                    self._items.know(item, Account.ACTIVATION)
            self._recomputed = []
        variable = getattr(torch._C._current_autograd_node(), "variable", None)
        if variable is None:
            return
        unit, name = self._places.name_of(variable)
        for tensor in _tensors(args):
            item = self._items.find(tensor)
            if item is not None and item.account is Account.WORKSPACE:
                self._items.know(item, Account.GRAD_FULL if self.reduces else Account.GRAD, f"gradient of {name}", unit)

    def _pack(self, tensor: Tensor) -> Any:
        item = self._items.find(tensor)
        if item is None:
            self._items.see(tensor, Account.ACTIVATION, self._places.now(), "saved by autograd")
        elif item.account is Account.WORKSPACE:
            self._items.know(item, Account.ACTIVATION)
        if tensor.is_leaf or type(tensor) is not Tensor:
            return tensor, tensor._version
        with torch._C._DisableTorchDispatch():
            return tensor.detach(), tensor._version  # the tensor itself would hold the node that holds it


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # with hooks torch leaves the check to them
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def user_site() -> str:
    """``file.py:12 in function`` of the innermost frame that is neither this library's, torch's nor Python's own; or empty."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_FOREIGN):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _tensors(values: Any) -> Iterator[Tensor]:
    """Tensors of an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        items: Iterable[Any] = values  # pyright: ignore[reportUnknownVariableType]
        for value in items:
            yield from _tensors(value)
