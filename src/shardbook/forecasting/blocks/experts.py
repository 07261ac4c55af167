"""Routed experts: a router, copies of the tokens for the experts that they visit, and the sum of what comes back.

The load is taken to be even: every expert sees ``rows * top_k / count`` tokens. What an uneven load adds on the device that has the
busiest expert is not modelled.
"""

from collections.abc import Mapping

from shardbook.forecasting.blocks.feed_forward import feed_forward
from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels


def route(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str) -> Value:
    """The feed-forward of a block with experts."""
    experts, rows = setting.facts.experts, setting.rows
    assert experts is not None
    x = ops.gathered_rows(x, setting.shared_stream)
    visits = rows * experts.top_k
    logits = ops.linear(x, weights[f"{name}.router.weight"], rows, weights.get(f"{name}.router.bias"))
    chosen = ops.chosen(ops.pointwise(ops.to(logits, 4), "router softmax", saves_result=True), visits)
    del logits
    copies = ops.picked(x, visits * setting.facts.hidden)
    inner = ops.grouped_linear(copies, weights[f"{name}.experts.gate_up"], visits, 2 * experts.ffn if setting.facts.gated else experts.ffn)
    if setting.facts.gated:
        gate, up = ops.split(inner, [visits * experts.ffn] * 2)
        inner = ops.mul(ops.pointwise(gate, setting.facts.activation), up)
        del gate, up
    else:
        inner = ops.pointwise(inner, setting.facts.activation)
    back = ops.grouped_linear(inner, weights[f"{name}.experts.down"], visits, setting.facts.hidden)
    del inner, copies
    total = ops.combined(ops.mul_row(back, ops.to(chosen, back.width), visits), x.numel)
    del back, chosen
    if experts.shared_ffn:
        total = ops.add(total, feed_forward(setting, ops, x, weights, f"{name}.shared", experts.shared_ffn))
    return ops.scattered_rows(total, setting.shared_stream)
