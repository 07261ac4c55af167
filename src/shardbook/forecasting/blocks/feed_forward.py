"""The feed-forward of a block: two matrices and an activation, or three and a product."""

from collections.abc import Mapping

from shardbook.forecasting.blocks.linear import linear
from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels


def feed_forward(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, inner: int) -> Value:
    """The dense feed-forward ``name`` of ``inner`` elements."""
    x = ops.gathered_rows(x, setting.shared_stream)
    if not setting.facts.gated:
        middle = ops.pointwise(
            linear(setting, ops, x, weights, f"{name}.up"), setting.facts.activation, saves_result=setting.facts.activation == "relu"
        )
    elif setting.style.swiglu == "kernel":
        middle = ops.gated_kernel(_both(setting, ops, x, weights, name))
    else:
        middle = _gated(setting, ops, x, weights, name, inner)
    del x
    return ops.scattered_rows(linear(setting, ops, middle, weights, f"{name}.down"), setting.shared_stream)


def _both(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str) -> Value:
    """Gate and up as one matrix; where the weights are two, a kernel that fuses them keeps the same bytes."""
    if f"{name}.gate_up.weight" in weights:
        return linear(setting, ops, x, weights, f"{name}.gate_up")
    return ops.joined(linear(setting, ops, x, weights, f"{name}.gate"), linear(setting, ops, x, weights, f"{name}.up"))


def _gated(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, inner: int) -> Value:
    if f"{name}.gate_up.weight" in weights:
        half = setting.rows * inner // setting.tensor
        gate, up = ops.split(linear(setting, ops, x, weights, f"{name}.gate_up"), [half, half])
        return ops.mul(ops.pointwise(gate, setting.facts.activation), up)
    gate = ops.pointwise(linear(setting, ops, x, weights, f"{name}.gate"), setting.facts.activation)
    return ops.mul(gate, linear(setting, ops, x, weights, f"{name}.up"))
