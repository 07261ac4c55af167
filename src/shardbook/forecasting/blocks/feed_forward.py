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
        middle = _activated(setting, ops, linear(setting, ops, x, weights, f"{name}.up"))
    elif setting.style.swiglu == "kernel":
        middle = ops.gated_kernel(_both(setting, ops, x, weights, name))
    else:
        middle = _gated(setting, ops, x, weights, name, inner)
    del x
    return ops.scattered_rows(linear(setting, ops, middle, weights, f"{name}.down"), setting.shared_stream)


def _activated(setting: Setting, ops: Kernels, x: Value) -> Value:
    """An activation in one kernel, or GPT-2's GELU operator by operator: ``0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))``."""
    name = setting.facts.activation
    if name != "gelu_new" or setting.style.gelu_new == "kernel":
        return ops.pointwise(x, name, saves_result=name == "relu")
    half = ops.mul_const(x, label="half of x")
    tanh = ops.pointwise(ops.mul_const(ops.add(x, ops.mul_const(ops.power(x, 3)))), "tanh", saves_result=True)
    return ops.mul(half, ops.add_const(tanh))


def _both(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str) -> Value:
    """Gate and up as one matrix; where the weights are two, a kernel that fuses them keeps the same bytes."""
    if f"{name}.gate_up.weight" in weights:
        return linear(setting, ops, x, weights, f"{name}.gate_up")
    return ops.joined(linear(setting, ops, x, weights, f"{name}.gate"), linear(setting, ops, x, weights, f"{name}.up"))


def _gated(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, inner: int) -> Value:
    if f"{name}.gate_up.weight" in weights:
        half = setting.rows * inner // setting.tensor
        gate, up = ops.split(linear(setting, ops, x, weights, f"{name}.gate_up"), [half, half])
        return ops.mul(_activated(setting, ops, gate), up)
    gate = _activated(setting, ops, linear(setting, ops, x, weights, f"{name}.gate"))
    return ops.mul(gate, linear(setting, ops, x, weights, f"{name}.up"))
