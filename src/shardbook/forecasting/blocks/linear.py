"""A linear layer by its name, divided among tensor-parallel devices as its weight says."""

from collections.abc import Mapping

from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels


def linear(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str) -> Value:
    """``x`` times the weight ``name``, which is already this device's part; low-rank adapters beside it where it has any."""
    weight = weights[f"{name}.weight"]
    out = ops.linear(x, weight, setting.rows, weights.get(f"{name}.bias"))
    if f"{name}.adapter_a" not in weights:
        return out
    down = ops.linear(x, weights[f"{name}.adapter_a"], setting.rows)
    return ops.add(out, ops.mul_const(ops.linear(down, weights[f"{name}.adapter_b"], setting.rows), label="scaled adapter"))
