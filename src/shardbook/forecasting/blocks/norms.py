"""LayerNorm and RMSNorm, as the codes write them."""

from collections.abc import Mapping

from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels


def norm(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, columns: int | None = None) -> Value:
    """The norm ``name`` of ``x``, over ``columns`` (the whole residual stream by default)."""
    columns = columns or setting.facts.hidden
    rows = x.numel // columns
    weight = weights.get(f"{name}.weight")
    if setting.facts.norm == "layer":
        return ops.layer_norm(x, weight, weights.get(f"{name}.bias"), rows, fp32_statistics=setting.on_cuda)
    assert weight is not None
    kind = setting.style.rms
    if kind == "module":
        kind = "kernel" if setting.on_cuda else "composed"
    if kind == "kernel":
        return ops.rms_norm(x, weight, rows)
    wide = ops.to(x, 4)
    scale = ops.pointwise(ops.mean_last(ops.power(wide), rows), "rsqrt", saves_result=True)
    normed = ops.mul_row(wide, scale, rows)
    del wide, scale
    if kind == "composed":
        return ops.to(ops.mul_row(normed, weight, weight.numel), x.width)
    return ops.mul_row(ops.to(normed, x.width), weight, weight.numel)
