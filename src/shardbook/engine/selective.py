"""What selective recomputation keeps beside a block's inputs: results that are dear to compute for what they weigh.

Kept are the results of attention, and of the first, third... product of matrices of a block; all else is cheap, or would weigh as much as
it saves. Attention with dropout is computed again: served from what was kept it would draw no random numbers, and all that are drawn
behind it would be others. A result that the forward has written to since (``x += residual``) is computed again as well.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.accounts import Account
from shardbook.engine.storage import Storage

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution", "_convolution", "_addmm_activation")
)
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward")


class Choice:
    """Says of each operator of one run of a block whether its result is kept."""

    def __init__(self) -> None:
        self._num_products = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        kind, place = _kind_of(func)
        if kind == "product":
            self._num_products += 1
            return self._num_products % 2 == 1
        if kind == "attention":
            return not (kwargs.get("dropout_p") or (args[place] if place < len(args) else 0.0))
        return False


@cache
def _kind_of(func: Any) -> tuple[str, int]:
    """``product``, ``attention`` or nothing, and where among its arguments attention's dropout stands."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    namespace, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    if schema is None or namespace != "aten" or schema.is_mutable:
        return "", 0
    if name in _PRODUCTS:
        return "product", 0
    if name.startswith(_ATTENTION) and not name.endswith("_backward"):
        names = [argument.name for argument in schema.arguments]
        return "attention", names.index("dropout_p") if "dropout_p" in names else len(names)
    return "", 0


@cache
def _written(func: Any) -> tuple[int | str, ...]:
    """Which arguments the operator writes to: numbers, or names of those that are given by name only."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        argument.name if argument.kwarg_only else number
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class Kept:
    """The kept results of one forward of a block, in the order in which they were made."""

    def __init__(self, storage: Storage, unit: str) -> None:
        self._storage, self._unit = storage, unit
        self._entries: list[tuple[Any, Any, list[int]] | None] = []
        self._numbers: dict[int, int] = {}  # of the entry, by storage

    def add(self, func: Any, result: Any) -> None:
        kept = pytree.tree_map_only(Tensor, _alias, result)
        tensors = _tensors(kept)
        for tensor in tensors:
            self._storage.adopt(tensor, Account.ACTIVATION, self._unit)
            self._numbers[tensor.untyped_storage()._cdata] = len(self._entries)
        self._entries.append((func, kept, [tensor._version for tensor in tensors]))

    def write_to(self, tensor: Tensor) -> None:
        """An operator writes to the tensor: if that is kept memory, it is no longer another operator's result."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None and (entry := self._entries[number]) is not None:
            for kept in _tensors(entry[1]):
                del self._numbers[kept.untyped_storage()._cdata]
            self._entries[number] = None

    def end(self) -> None:
        """The first run is over: only counts of writes tell of those that come after it."""
        self._numbers = {}

    def take(self, number: int, func: Any) -> Any:
        """The result of kept operator ``number``, once; None: it must be computed."""
        if number >= len(self._entries):
            return None
        entry, self._entries[number] = self._entries[number], None
        return entry[1] if entry is not None and entry[0] is func and _is_unchanged(entry) else None

    def clear(self) -> None:
        """The second run is over, and what it did not come to is not needed."""
        self._entries = []


class Keeping(TorchDispatchMode):
    """The first run of a block's forward."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept, self._choice = kept, Choice()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._choice(func, args, kwargs or {}):
            self._kept.add(func, result)
        for place in _written(func):
            # not by counts of writes alone: parts that unsafe_chunk makes count by themselves
            value = (kwargs or {}).get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in _tensors(value):
                self._kept.write_to(tensor)
        return result


class Serving(TorchDispatchMode):
    """The second run."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept, self._choice, self._number = kept, Choice(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._choice(func, args, kwargs or {}):
            result = self._kept.take(self._number, func)
            self._number += 1
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._kept.clear()
        super().__exit__(*error)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and count of writes, without the graph that the tensor will belong to."""
    native: Any = torch._C
    with native._SetExcludeDispatchKeyGuard(native.DispatchKey.ADInplaceOrView, False):  # else it would count writes by itself
        return tensor.detach()


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _is_unchanged(entry: tuple[Any, Any, list[int]]) -> bool:
    return [tensor._version for tensor in _tensors(entry[1])] == entry[2]
