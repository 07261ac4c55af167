"""What kernels take besides their results, while they run: named models, one for each operator that is known to.

A fake tensor computes nothing, so these are the only bytes of a simulation that no engine and no operator has told. Operators that are
not here take nothing, or it is not known: ``docs/accuracy.md`` shows which peaks that touches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardbook.forecasting import scratch
from shardbook.simulation.peers_staging import staged

Workspaces = Callable[[Any, Sequence[Any], Any], int]
"""(operator, arguments, result) to the bytes that its kernel holds besides, while it runs."""

_Kernel = Callable[[Sequence[Any], Any], int]
"""(arguments, result) to bytes."""


def on_cpu(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Of one operator on a CPU with one intra-op thread."""
    kernel = _CPU.get(operator.__name__)
    return kernel(arguments, result) if kernel is not None else 0


def with_staging(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """The same, and what gloo copies inside the collectives of others' engines."""
    return on_cpu(operator, arguments, result) + staged(operator, arguments)


def _attention_forward(arguments: Sequence[Any], _: Any) -> int:
    query, key = arguments[0], arguments[1]
    return scratch.attention_forward(query.shape[-2], key.shape[-2], query.shape[-1], query.element_size())


def _attention_backward(arguments: Sequence[Any], _: Any) -> int:
    query, key = arguments[1], arguments[2]
    return scratch.attention_backward(query.shape[-2], key.shape[-2], query.element_size())


def _layer_norm_backward(arguments: Sequence[Any], _: Any) -> int:
    x: Tensor = arguments[1]
    normalised: Sequence[int] = arguments[2]
    columns = 1
    for length in normalised:
        columns *= length
    return scratch.layer_norm_backward(columns, x.element_size())


def _sum(arguments: Sequence[Any], result: Any) -> int:
    """What is summed up is cast first where the sum has a wider type: flags are counted in int64. (Seen by the profiler.)"""
    x: Tensor = arguments[0]
    counts = x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
    wider = x.dtype != result.dtype and (counts or result.element_size() > x.element_size())
    return x.numel() * result.element_size() if wider else 0


def _beside_a_number(arguments: Sequence[Any], _: Any) -> int:
    """A Python number becomes a tensor of 8 bytes, and that one of the other's type. (Seen by the profiler.)"""
    first, *others = arguments
    one = first[0] if isinstance(first, (list, tuple)) and first else first  # pyright: ignore[reportUnknownVariableType]
    number: Any = others[0] if others else None
    number = number[0] if isinstance(number, (list, tuple)) and number else number  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(one, Tensor) or not isinstance(number, (int, float)):
        return 0
    same = one.dtype is torch.float64 and isinstance(number, float)
    return 8 if same else 8 + one.element_size()


_CPU: dict[str, _Kernel] = {
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "sum.default": _sum,
    "sum.dim_IntList": _sum,
    **{f"{name}{end}.Tensor": _beside_a_number for name in ("add", "sub", "mul", "div") for end in ("", "_")},
    **{
        f"_foreach_{name}{end}.{overload}": _beside_a_number
        for name in ("add", "sub", "mul", "div")
        for end in ("", "_")
        for overload in ("Scalar", "ScalarList")
    },
}
