"""Attention: queries, keys and values, positions, the kernel, and the way out."""

from collections.abc import Mapping, Sequence

from shardbook.forecasting.blocks.linear import linear
from shardbook.forecasting.blocks.norms import norm
from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels


def attend(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, shared: Sequence[Value] = ()) -> Value:
    """The attention ``name`` of a block on its normed input; ``shared``: tables of positions that all layers use."""
    x = ops.gathered_rows(x, setting.shared_stream)
    parts = _latent(setting, ops, x, weights, name) if setting.facts.latent else _grouped(setting, ops, x, weights, name, shared)
    del x
    mixed = _kernel(setting, ops, parts)
    del parts
    return ops.scattered_rows(linear(setting, ops, mixed, weights, f"{name}.out"), setting.shared_stream)


def shared_tables(setting: Setting, ops: Kernels, width: int) -> Sequence[Value]:
    """Cosines and sines of whole heads, ``width`` bytes an element, made once for all layers."""
    facts = setting.facts
    if facts.positions != "rope" or setting.style.rotary != "rotate_half":
        return ()
    return [ops.new(setting.sequence * facts.head_dim, width, what) for what in ("cosines", "sines")]


def _grouped(
    setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, shared: Sequence[Value]
) -> tuple[Value, Value, Value]:
    facts, rows = setting.facts, setting.rows
    tables = shared or _tables(setting, ops)
    if f"{name}.qkv.weight" in weights:
        queries, keys = (rows * count * facts.head_dim // setting.tensor for count in (facts.heads, facts.kv_heads))
        query, key, value = ops.split(linear(setting, ops, x, weights, f"{name}.qkv"), [queries, keys, keys])
    elif setting.style.rotary == "rotate_half":
        query, key, value = (linear(setting, ops, x, weights, f"{name}.{part}") for part in ("query", "key", "value"))
    else:
        query = _placed(setting, ops, linear(setting, ops, x, weights, f"{name}.query"), weights, f"{name}.query_norm", tables)
        key = _placed(setting, ops, linear(setting, ops, x, weights, f"{name}.key"), weights, f"{name}.key_norm", tables)
        return query, key, linear(setting, ops, x, weights, f"{name}.value")
    turned = _placed(setting, ops, query, weights, f"{name}.query_norm", tables)
    return turned, _placed(setting, ops, key, weights, f"{name}.key_norm", tables), value


def _placed(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str, tables: Sequence[Value]) -> Value:
    """Normed, if the family does that, and turned by its position."""
    if f"{name}.weight" in weights:
        weight = weights[f"{name}.weight"]
        x = norm(setting, ops, x, weights, name, columns=setting.facts.head_dim if setting.facts.qk_norm == "head" else weight.numel)
    return _rotate(setting, ops, x, tables) if setting.facts.positions == "rope" else x


def _tables(setting: Setting, ops: Kernels) -> list[Value]:
    """Cosines and sines, where each layer makes its own."""
    facts = setting.facts
    if facts.positions != "rope" or setting.style.rotary not in ("halves", "shared"):
        return []
    half = setting.sequence * facts.head_dim // 2 if setting.style.rotary == "halves" else 0
    return [ops.new(half, 4, "cosines"), ops.new(half, 4, "sines")]


def _rotate(setting: Setting, ops: Kernels, x: Value, tables: Sequence[Value]) -> Value:
    kind = setting.style.rotary
    if kind == "kernel":
        return ops.pointwise_in_place(x, "rotated")
    if kind == "complex":
        return ops.to(ops.mul_const(ops.to(x, 4)), x.width)
    cos, sin = tables
    if kind == "rotate_half":
        return ops.add(ops.mul_const(x, cos), ops.mul_const(ops.rolled(x), sin))
    left, right = ops.split(ops.to(x, 4), [x.numel // 2, x.numel // 2])
    first = ops.sub(ops.mul_const(left, cos), ops.mul_const(right, sin))
    return ops.to(ops.cat((first, ops.add(ops.mul_const(right, cos), ops.mul_const(left, sin)))), x.width)


def _latent(setting: Setting, ops: Kernels, x: Value, weights: Mapping[str, Weight], name: str) -> tuple[Value, Value, Value]:
    """DeepSeek-V2's: queries and keys of ``plain + rotary`` elements a head, values of ``value`` elements."""
    facts, latent, rows = setting.facts, setting.facts.latent, setting.rows
    assert latent is not None
    heads = facts.heads // setting.tensor
    if latent.query_rank:
        query = linear(setting, ops, x, weights, f"{name}.query_down")
        query = norm(setting, ops, query, weights, f"{name}.query_norm", columns=latent.query_rank)
        query = linear(setting, ops, query, weights, f"{name}.query_up")
    else:
        query = linear(setting, ops, x, weights, f"{name}.query")
    plain, turned = ops.split(query, [rows * heads * latent.plain_dim, rows * heads * latent.rotary_dim])
    query = ops.cat((plain, ops.mul_const(turned)))
    down, position = ops.split(linear(setting, ops, x, weights, f"{name}.kv_down"), [rows * latent.rank, rows * latent.rotary_dim])
    up = linear(setting, ops, norm(setting, ops, down, weights, f"{name}.kv_norm", columns=latent.rank), weights, f"{name}.kv_up")
    plain, value = ops.split(up, [rows * heads * latent.plain_dim, rows * heads * latent.value_dim])
    key = ops.cat((plain, ops.expanded(ops.mul_const(position), rows * heads * latent.rotary_dim)))
    return query, key, ops.copy(value, "values")


def _kernel(setting: Setting, ops: Kernels, parts: tuple[Value, Value, Value]) -> Value:
    facts = setting.facts
    heads = facts.heads // setting.tensor
    value_dim = facts.latent.value_dim if facts.latent else facts.head_dim
    if setting.attention == "eager":
        scores = setting.micro_batch * heads * setting.sequence * setting.sequence
        dropout = facts.dropout if facts.attention_dropout is None else facts.attention_dropout
        return ops.eager_attention(
            parts,
            scores=scores,
            out=setting.rows * heads * value_dim,
            dropout=dropout,
            wide=setting.style.softmax == "fp32",
            on_cuda=setting.on_cuda,
        )
    return ops.attention(parts, rows=setting.rows, heads=heads, head_dim=value_dim, sequence=setting.sequence, on_cuda=setting.on_cuda)
