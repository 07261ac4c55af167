"""What kernels take besides their results, while they run: named models, one for each operator that is known to.

A fake tensor computes nothing, so these are the only bytes of a simulation that no engine and no operator has told. Operators that are
not here take nothing, or it is not known: ``docs/accuracy.md`` shows which peaks that touches.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardbook.forecasting import scratch
from shardbook.simulation.peers_staging import staged

Model = Callable[[Sequence[Any], Any], int]
"""(arguments, result) to bytes."""


def on_cpu(operator: Any, arguments: Sequence[Any], result: Any) -> int:
    """Of one operator on a CPU with one intra-op thread."""
    model = _CPU.get(operator.__name__)
    return model(arguments, result) if model is not None else 0


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


_CPU: dict[str, Model] = {
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "native_layer_norm_backward.default": _layer_norm_backward,
}
