"""The end of the model: logits over the vocabulary, and cross-entropy."""

from collections.abc import Mapping

from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight, given
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.walk import Walk


def loss_of(setting: Setting, walk: Walk, normed: Value, weights: Mapping[str, Weight]) -> Value:
    """The loss of the final norm's result, whole, in pieces of the sequence, or by a kernel that never has all logits."""
    ops = walk.ops
    head = weights.get("head.weight", weights["embedding.weight"])
    bias = weights.get("head.bias")
    normed = ops.gathered_rows(normed, setting.shared_stream)
    if setting.loss == "fused":
        return walk.unit(head.unit, lambda x: _fused(setting, ops, x, head), normed)
    if setting.loss == "chunked":
        pieces = walk.units(head.unit, lambda x: _chunks(setting, ops, x, head, bias), normed)
        del normed
        return _chunked_losses(setting, ops, pieces)
    logits = walk.unit(head.unit, lambda x: ops.linear(given(x), head, setting.rows, bias), normed)
    del normed
    if setting.style.loss_outside:
        walk.leave_model(logits)
    if setting.style.holds_logits:
        walk.held.append(logits)
    return _entropy(setting, ops, logits, setting.rows)


def _entropy(setting: Setting, ops: Kernels, logits: Value, rows: int) -> Value:
    wide = ops.to(logits, 4) if setting.style.logits == "fp32" else logits
    if setting.style.loss == "kernel":
        return ops.fused_cross_entropy(wide, rows)
    if setting.style.loss == "own-kernel":
        return ops.narrow_cross_entropy(wide, rows)
    return ops.cross_entropy(wide, rows)


def _chunks(setting: Setting, ops: Kernels, x: Value | None, head: Weight, bias: Weight | None) -> list[Value]:
    """Logits piece by piece of the sequence; each piece is a linear layer of its own."""
    x = given(x)
    rows = -(-setting.rows // setting.loss_chunks)
    parts = ops.split(x, [x.numel // setting.loss_chunks] * setting.loss_chunks)
    return [ops.linear(part, head, rows, bias) for part in parts]


def _chunked_losses(setting: Setting, ops: Kernels, pieces: list[Value]) -> Value:
    """Each piece's loss in fp32: its wide copy and log-probabilities are there together, for all pieces in turn."""
    rows = -(-setting.rows // setting.loss_chunks)
    losses = [_entropy(setting, ops, piece, rows) for piece in pieces]
    total = losses[0]
    for loss in losses[1:]:
        total = ops.add(total, loss)
    return total


def _fused(setting: Setting, ops: Kernels, x: Value | None, head: Weight) -> Value:
    """A kernel that computes the gradients of its input and of the head in forward, a piece of the rows at a time (Liger Kernel)."""
    return ops.fused_linear_cross_entropy(given(x), head, setting.rows)
