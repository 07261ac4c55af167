"""The same mathematics with other rounding: modes under which any training loop can be run again.

    with precision():             every operator computed in the next wider type and rounded once
    with order(seed=0):           sums taken in another order
    with rounding(seed=0):        as ``precision``, but rounded up or down at random

Each is a ``TorchDispatchMode``: it sees what forward, backward and the optimizer ask for below autograd, also in autograd's own threads,
and patches nothing. Left as they are: views, copies and casts, whatever draws random numbers (so dropout masks stay), operators on
integers or on float64 (by ``precision`` and ``rounding``), operators that aren't torch's own, and those that have no kernel in the wider
type. A compiled model runs uncompiled below a mode. What differs from the plain run afterwards is what rounding alone can do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardbook.verifying.reorder import REORDERED, Reorder, Shuffle

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}

_EXACT = {
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "arange", "argmax", "argmin", "as_strided", "as_strided_scatter", "cat",
    "clone", "constant_pad_nd", "copy", "copy_", "diagonal_backward", "empty_like", "embedding", "equal", "eq", "fill", "fill_", "flip",
    "full_like", "gather", "ge", "gt", "index", "index_select", "isfinite", "isinf", "isnan", "le", "lift_fresh", "lt", "masked_fill",
    "masked_fill_", "maximum", "minimum", "ne", "neg", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "relu", "relu_",
    "repeat", "resize_", "roll", "select_backward", "select_scatter", "set_", "sign", "slice_backward", "slice_scatter", "sort",
    "stack", "threshold_backward", "topk", "tril", "tril_", "triu", "triu_", "unfold_backward", "where", "zero", "zero_", "zeros_like",
    "_foreach_copy_", "_foreach_neg", "_foreach_neg_", "_foreach_zero_",
}  # fmt: skip
"""Operators of ATen that round nothing, or whose one rounding every engine does alike (casts)."""

_UNANNOTATED = {"native_batch_norm": ("running_mean", "running_var"), "cudnn_batch_norm": ("running_mean", "running_var")}
"""Arguments that are written to although the schema doesn't say so."""

_STAYS = {"state_steps"}
"""Arguments that a kernel wants in float32 whatever the type of the others: step counters of fused optimizers."""


class Rerun(TorchDispatchMode):
    """What the modes share: which operators they take."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, say: what it does to its local tensors comes by as well
        kwargs = dict(kwargs or {})
        if func.namespace != "aten" or _is_view(func) or _draws(func, args, kwargs):
            return func(*args, **kwargs)
        return self.again(func, _named(func, args, kwargs))

    def again(self, func: Any, arguments: dict[str, Any]) -> Any:
        """The operator's result, rounded otherwise."""
        raise NotImplementedError


class Ordered(Rerun):
    """Sums in another order, the same for every sum of as many terms: recomputation in backward meets the bits of forward again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._shuffle = Shuffle(seed)

    def again(self, func: Any, arguments: dict[str, Any]) -> Any:
        rewrite: Reorder | None = REORDERED.get(_name(func))
        if rewrite is None:
            return func(**arguments)
        undo = rewrite(arguments, self._shuffle)
        found = func(**arguments)
        return found if undo is None else undo(found)


class Wider(Rerun):
    """Operators in the next wider type; ``rounded`` brings the results back."""

    def __init__(self, rounded: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        super().__init__()
        self._rounded = rounded
        self._types: dict[Any, list[torch.dtype | None]] = {}

    def again(self, func: Any, arguments: dict[str, Any]) -> Any:
        wide = None if _name(func) in _EXACT else _wide_type(arguments)
        if wide is None:
            return func(**arguments)
        wider = {name: value if name in _STAYS else _widened(value, wide) for name, value in arguments.items()}
        try:
            found = func(**wider)
        except (RuntimeError, NotImplementedError):
            return func(**arguments)  # no kernel for it in the wider type; or wrong, and then it says so here
        written = _written(func)
        for name in written.values():
            self._write(arguments[name], wider[name])
        flat, shape = tree_flatten(found)
        kept = [arguments[written[place]] if place in written else None for place in range(len(flat))]
        types = self._types_of(func, arguments) if flat and any(one is None for one in kept) else [None] * len(flat)
        back = zip(flat, kept, types, strict=True)
        return tree_unflatten([self._back(value, dtype) if old is None else old for value, old, dtype in back], shape)

    def _write(self, target: Any, wide: Any) -> None:
        for into, value in zip(*((one if isinstance(one, (list, tuple)) else [one]) for one in (target, wide)), strict=True):
            if isinstance(into, Tensor) and into is not value:
                into.copy_(self._rounded(value, into.dtype))

    def _back(self, value: Any, dtype: torch.dtype | None) -> Any:
        is_wide = isinstance(value, Tensor) and dtype is not None and value.dtype is not dtype and value.is_floating_point()
        return self._rounded(value, dtype) if is_wide else value  # pyright: ignore[reportArgumentType]

    def _types_of(self, func: Any, arguments: Mapping[str, Any]) -> list[torch.dtype | None]:
        """The types of the operator's results as it is, found by running it once, on copies of what it would write to."""
        flat, _ = tree_flatten(arguments)
        key = func, tuple(value.dtype if isinstance(value, Tensor) else value if isinstance(value, torch.dtype) else None for value in flat)
        if key not in self._types:
            writes = set(_written(func).values())
            copies = {name: _copied(value) if name in writes else value for name, value in arguments.items()}
            results, _ = tree_flatten(func(**copies))
            self._types[key] = [value.dtype if isinstance(value, Tensor) else None for value in results]
        return self._types[key]


def order(seed: int = 0) -> Rerun:
    """Sums in an order drawn from ``seed``: of matrix products, convolutions, reductions, norms, softmax, attention and scatters.

    >>> x = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0))
    >>> with order():
    ...     other = x @ x.T
    >>> torch.equal(other, x @ x.T), torch.allclose(other, x @ x.T, atol=1e-3)
    (False, True)
    """
    return Ordered(seed)


def precision() -> Rerun:
    """Every operator in the next wider type, rounded once to the nearest: float32 by way of float64, 16 bits by way of float32.

    >>> x = torch.full((3,), 0.1)
    >>> with precision():
    ...     (x.sum() - torch.full((3,), 0.1).double().sum().float()).item()
    0.0
    """
    return Wider(lambda value, dtype: value.to(dtype))


def rounding(seed: int = 0) -> Rerun:
    """As :func:`precision`, each result rounded up or down with the probability of how near it is: exact results stay, means do.

    This is random rounding as CESTAC has it. What it does to a result is what another order of correctly rounded operations can do,
    additions of gradients and the optimizer's formula included. Which way a value goes follows from ``seed`` and from the value as it was
    before rounding: equal values go alike, so that replicas stay equal, recomputation meets the bits of forward, and an element-wise
    optimizer stays one. Torch's generators are left alone.
    """
    return Wider(partial(_randomly, seed))


def _randomly(seed: int, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds bits below the last one that is kept, made of all the value's bits, then cuts them off."""
    dropped = _MANTISSA[value.dtype] - _MANTISSA[dtype]
    if dropped <= 0:
        return value.to(dtype)
    lanes = value.view(torch.int64 if value.dtype is torch.float64 else torch.int32)
    noise = _mixed(lanes.long(), seed).bitwise_and_((1 << dropped) - 1).to(lanes.dtype)
    cut = noise.add_(lanes).bitwise_and_(-(1 << dropped)).view(value.dtype)
    return torch.where(value.isfinite(), cut, value).to(dtype)


def _mixed(bits: Tensor, seed: int) -> Tensor:
    """Two rounds of multiplication and folding: 31 bits, each of which depends on all that came in."""
    mixed = bits.add(seed * 0x632BE59BD9B4E019 % 2**63).mul_(-0x61C8864680B583EB)
    mixed ^= mixed >> 32
    mixed.mul_(-0x2E4F6F0C5A3B9D17)
    return mixed ^ (mixed >> 29)


# ---- operators and their arguments -----------------------------------------------------------------------------------------


@cache
def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; those that were left out stay out."""
    return dict(zip(_arguments(func), args, strict=False)) | dict(kwargs)


@cache
def _arguments(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _is_view(func: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it draws random numbers: attention only does with dropout."""
    if not _may_draw(func):
        return False
    return "scaled_dot_product" not in _name(func) or bool(_named(func, args, kwargs).get("dropout_p"))


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _written(func: Any) -> dict[int, str]:
    """Arguments that are written to: by the place of the result that they are, or by a negative number if none is."""
    schema = func._schema
    by_set = {name: place for place, one in enumerate(schema.returns) if one.alias_info is not None for name in one.alias_info.before_set}
    found: dict[int, str] = {}
    for number, one in enumerate(schema.arguments):
        if one.name in _UNANNOTATED.get(_name(func), ()):
            found[-1 - number] = one.name
        elif one.alias_info is not None and one.alias_info.is_write:
            places = [by_set[name] for name in one.alias_info.before_set if name in by_set]
            found[places[0] if places else -1 - number] = one.name
    return found


def _wide_type(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """One above the widest of the floating tensors; None where there are none, or one above is none."""
    flat, _ = tree_flatten(list(arguments.values()))
    types = {value.dtype for value in flat if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())}
    if not types or not types <= _WIDER.keys():
        return None
    return torch.float64 if torch.float32 in types else torch.float32


def _widened(value: Any, wide: torch.dtype) -> Any:
    """Its floating tensors, and a type where one is named, in the wide type."""
    flat, shape = tree_flatten(value)
    return tree_unflatten([_wide(one, wide) for one in flat], shape)


def _wide(value: Any, wide: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(wide) if value.is_floating_point() else value
    return wide if isinstance(value, torch.dtype) and value in _WIDER else value


def _copied(value: Any) -> Any:
    flat, shape = tree_flatten(value)
    return tree_unflatten([one.clone() if isinstance(one, Tensor) else one for one in flat], shape)
