"""A decoder without a configuration that is known, recognised from its modules and the shapes of its matrices.

What is looked for: one list of equal blocks whose linear layers are queries, keys and values (one matrix or three), the way out of
attention, and a feed-forward of two or three matrices; one norm or two; an embedding and a head over the same vocabulary. Whatever does
not fit, or does not sum to the parameters of the module, is not modelled: better nothing than a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardbook.errors import ConfigError
from shardbook.facts.architecture import Architecture
from shardbook.facts.kinds import is_kind
from shardbook.facts.parameters import units_of

_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead")
_KV_HEADS = ("num_kv_heads", "n_kv_heads", "kv_heads", "num_key_value_heads", "n_kv_head", "num_query_groups")
_LIMITS = ("max_seq_len", "max_seq", "block_size", "sequence", "max_position_embeddings", "context_length")
_ACTIVATIONS = {"GELU": "gelu", "SiLU": "silu", "ReLU": "relu"}
_SILENT = ("Dropout", "GELU", "SiLU", "ReLU", "Identity")


@dataclass(frozen=True, slots=True)
class _Linear:
    """``name`` inside the block."""

    name: str
    inputs: int
    outputs: int
    bias: bool


def architecture(model: Any, count: int) -> tuple[Architecture | None, tuple[str, ...]]:
    """The architecture, if the module is such a decoder of ``count`` elements, and what was assumed."""
    try:
        found = _recognised(model)
    except (_NotRecognisedError, ConfigError) as error:
        return None, (f"the architecture was not recognised: {error}",)
    total = sum(unit.numel for unit in units_of(found))
    if total != count:
        return None, (f"the architecture was not recognised: what was found has {total:,} parameters, the module {count:,}",)
    whose = f"what autograd keeps as in {found.implementation}'s blocks"
    assumed = f"{found.positions} positions, {found.activation}, each block once and in order, {whose}"
    return found, (f"recognised from modules and shapes; assumed: {assumed}",)


class _NotRecognisedError(Exception):
    """Says in a few words what did not fit."""


def _recognised(model: Any) -> Architecture:
    name, blocks = _blocks(model)
    outside = {key: module for key, module in model.named_modules() if key and not f"{key}.".startswith(f"{name}.")}
    outer = _outer(model, outside)
    block = _block(blocks[0], int(outer["hidden"]))
    found = {**outer, **block, "layers": len(blocks), "max_seq": _limit(model, outer)}
    implementation = "gpt" if not found["gated"] else "shardbook"
    sizes = _heads(model, blocks[0], found)
    return Architecture(family=type(model).__name__, implementation=implementation, **sizes)


def _blocks(model: Any) -> tuple[str, list[Any]]:
    lists = [
        (name, list(module.children()))
        for name, module in model.named_modules()
        if is_kind(module, "ModuleList", "Sequential") and _are_equal(list(module.children()))
    ]
    outermost = [(name, blocks) for name, blocks in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(outermost) != 1:
        raise _NotRecognisedError(f"{len(outermost)} lists of equal blocks, where one is looked for")
    return outermost[0]


def _are_equal(blocks: Sequence[Any]) -> bool:
    kinds = {(type(block), tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())) for block in blocks}
    return len(blocks) > 0 and len(kinds) == 1 and bool(next(iter(kinds))[1]) and any(True for _ in blocks[0].children())


def _outer(model: Any, outside: Mapping[str, Any]) -> dict[str, Any]:
    """What stands outside of the blocks: embeddings, positions, head."""
    heads = [module for module in outside.values() if is_kind(module, "Linear")]
    embeddings = [module for module in outside.values() if is_kind(module, "Embedding")]
    if len(heads) != 1 or not embeddings:
        raise _NotRecognisedError(f"{len(heads)} linear layers and {len(embeddings)} embeddings outside of the blocks")
    head = heads[0]
    tokens = [each for each in embeddings if each.num_embeddings == head.out_features and each.embedding_dim == head.in_features]
    if not tokens:
        raise _NotRecognisedError("no embedding has the shape of the head")
    rest = [each for each in embeddings if each is not tokens[0]]
    if len(rest) > 1:
        raise _NotRecognisedError(f"{len(embeddings)} embeddings")
    rows = int(rest[0].num_embeddings) if rest else _position_rows(model, int(head.in_features))
    return {
        "hidden": int(head.in_features),
        "vocab": int(head.out_features),
        "tied": head.weight is tokens[0].weight,
        "head_bias": head.bias is not None,
        "positions": "learned" if rows else "rope",
        "learned_positions": rows,
    }


def _position_rows(model: Any, hidden: int) -> int:
    """Rows of a table of positions that is a bare parameter of the model itself."""
    tables = [parameter for name, parameter in model.named_parameters(recurse=False) if "pos" in name]
    return int(tables[0].shape[-2]) if len(tables) == 1 and tables[0].dim() >= 2 and int(tables[0].shape[-1]) == hidden else 0


def _block(block: Any, hidden: int) -> dict[str, Any]:
    leaves = {name: module for name, module in block.named_modules() if not any(True for _ in module.children())}
    linears = [
        _Linear(name, int(module.in_features), int(module.out_features), module.bias is not None)
        for name, module in leaves.items()
        if is_kind(module, "Linear")
    ]
    others = {name: module for name, module in leaves.items() if not is_kind(module, "Linear", *_SILENT)}
    return {**_attention_and_feed_forward(linears, hidden), **_norms(others, hidden), **_small(leaves)}


def _attention_and_feed_forward(linears: Sequence[_Linear], hidden: int) -> dict[str, Any]:
    """Tries every split of the layers into attention, then feed-forward, and the other way round."""
    for cut in (2, 4):
        for attention, rest in ((linears[:cut], linears[cut:]), (linears[-cut:], linears[:-cut])):
            found, forward = _attention(attention, hidden), _feed_forward(rest, hidden)
            if found is not None and forward is not None and len(attention) == cut:
                return {**found, **forward}
    shapes = ", ".join(f"{each.inputs}x{each.outputs}" for each in linears) or "none"
    raise _NotRecognisedError(f"the linear layers of a block ({shapes}) are no attention and feed-forward")


def _attention(linears: Sequence[_Linear], hidden: int) -> dict[str, Any] | None:
    *into, out = linears if linears else (_Linear("", 0, 0, False),)
    if out.outputs != hidden or any(each.inputs != hidden for each in into):
        return None
    if len(into) == 1:
        shared, odd = divmod(into[0].outputs - out.inputs, 2)
        fits = not odd and 0 < shared <= out.inputs
    else:
        fits = len(into) == 3 and into[0].outputs == out.inputs and into[1].outputs == into[2].outputs <= out.inputs
        shared = into[1].outputs if fits else 0
    if not fits or len({each.bias for each in into}) > 1:
        return None
    biases = {"qkv_bias": into[0].bias, "out_bias": out.bias}
    return {"queries": out.inputs, "shared": shared, "fused_qkv": len(into) == 1, **biases}


def _feed_forward(linears: Sequence[_Linear], hidden: int) -> dict[str, Any] | None:
    up = [each for each in linears if each.inputs == hidden and each.outputs != hidden]
    down = [each for each in linears if each.outputs == hidden and each.inputs != hidden]
    if len(linears) not in (2, 3) or len(down) != 1 or len(up) != len(linears) - 1 or len({each.bias for each in linears}) > 1:
        return None
    inner = down[0].inputs
    fused = len(up) == 1 and up[0].outputs == 2 * inner
    if not fused and any(each.outputs != inner for each in up):
        return None
    return {"ffn": inner, "gated": len(up) == 2 or fused, "fused_gate_up": fused, "ffn_bias": down[0].bias}


def _norms(others: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Norms of the stream, by their classes' names; every other leaf with parameters is unknown."""
    norms = [module for module in others.values() if "norm" in type(module).__name__.lower()]
    strange = [type(module).__name__ for module in others.values() if module not in norms and any(True for _ in module.parameters())]
    if strange or not norms:
        raise _NotRecognisedError(f"{strange[0]} in a block" if strange else "no norm in a block")
    shapes = {tuple(tuple(parameter.shape) for parameter in norm.parameters()) for norm in norms}
    if len(shapes) > 1 or any(shape != (hidden,) for shape in next(iter(shapes))):
        raise _NotRecognisedError("norms of different shapes")
    num = len(next(iter(shapes)))
    kind = "rms" if "rms" in type(norms[0]).__name__.lower() else "layer"
    return {"norms_per_block": len(norms), "norm": kind, "norm_bias": num == 2, "norm_weight": num > 0}


def _small(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Activation and dropout, where they are modules."""
    named = [_ACTIVATIONS[base] for module in leaves.values() for base in _ACTIVATIONS if is_kind(module, base)]
    rates = [float(module.p) for module in leaves.values() if is_kind(module, "Dropout")]
    return {"activation": named[0] if named else "", "dropout": max(rates, default=0.0)}


def _heads(model: Any, block: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """The rest: how the widths of attention divide into heads."""
    rest = {name: value for name, value in found.items() if name not in ("queries", "shared")}
    queries, shared = int(found["queries"]), int(found["shared"])
    places = [*block.modules(), getattr(model, "config", None), model]
    heads = next((value for place in places for name in _HEADS if (value := _count(place, name)) and queries % value == 0), None)
    if heads is None:
        raise _NotRecognisedError(f"no attribute says how many heads divide {queries}: looked for {', '.join(_HEADS)}")
    width = queries // heads
    stated = next((value for place in places for name in _KV_HEADS if (value := _count(place, name))), None)
    kv_heads, odd = divmod(shared, width)
    if odd or (stated is not None and stated != kv_heads):
        raise _NotRecognisedError(f"keys of {shared} elements are no whole number of heads of {width}")
    usual = "silu" if rest["gated"] else "gelu"
    return {**rest, "activation": rest["activation"] or usual, "heads": heads, "kv_heads": kv_heads, "head_dim": width}


def _limit(model: Any, outer: Mapping[str, Any]) -> int:
    places = (getattr(model, "config", None), model)
    return int(outer["learned_positions"]) or next((value for place in places for name in _LIMITS if (value := _count(place, name))), 0)


def _count(place: Any, name: str) -> int:
    value = getattr(place, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
