"""From an architecture to its parameters, by unit.

Names and order are those of shardbook's own decoder; what another family has on top stands where its code has it. Units are found
as the engine finds them: each block; the embedding and the head where they hold at least 1/64 of all elements; the rest is the root's.

>>> from shardbook.facts.architecture import Architecture
>>> tiny = Architecture(family="llama", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=32)
>>> [(unit.name, unit.numel) for unit in units_of(tiny)]
[('root', 8), ('embedding', 256), ('blocks.0', 592), ('blocks.1', 592), ('head', 256)]
"""

from collections.abc import Iterable, Iterator
from math import prod

from shardbook.facts.architecture import Architecture, Experts, Latent
from shardbook.facts.model import ModelFacts, ParameterFacts, UnitParameters

Shape = tuple[int, ...]
Named = tuple[str, Shape]

LARGE = 1 / 64
"""The engine gathers an embedding or a head by itself from this share of all elements on."""


def model_facts(architecture: Architecture, *, name: str, source: str, notes: tuple[str, ...] = ()) -> ModelFacts:
    """Everything that follows from an architecture, in fp32 and trained as a whole."""
    units = units_of(architecture)
    count = sum(unit.numel for unit in units)
    return ModelFacts(name=name, source=source, num_parameters=count, units=units, architecture=architecture, notes=notes)


def units_of(architecture: Architecture, *, large: float = LARGE) -> tuple[UnitParameters, ...]:
    """Units, the root first, the others in the order of registration.

    Args:
        architecture: whose parameters are wanted.
        large: share of all elements from which an embedding or head is a unit of its own; 0: always (FSDP2 as torchtitan wraps it).
    """
    outer, blocks = _outer(architecture), _blocks(architecture)
    if architecture.layers == 1 and large > 0:  # nothing repeats, so the engine sees no blocks
        first = [each for each in outer if _module(each) in _FIRST]
        inside = [(each.name, each.shape) for each in blocks[0].parameters]
        return (_unit("root", [*first, *inside, *(each for each in outer if each not in first)]),)
    least = large * (_numel(outer) + sum(block.numel for block in blocks))
    own = [_module(each) for each in outer if each[0] in _MODULES and prod(each[1]) >= least]
    apart = {name: _unit(name, [each for each in outer if _module(each) == name]) for name in own}
    root = _unit("root", [each for each in outer if _module(each) not in own])
    head = [apart.pop("head")] if "head" in apart else []
    return (root, *apart.values(), *blocks, *head)


def _blocks(architecture: Architecture) -> list[UnitParameters]:
    """Every block as a unit. Blocks of one kind share their shapes, so that hundreds cost little."""
    dense = architecture.experts.dense_layers if architecture.experts is not None else 0
    first, last = block_shapes(architecture, 0), block_shapes(architecture, architecture.layers - 1)
    prefixes = [f"blocks.{index}" for index in range(architecture.layers)]
    return [_unit(name, first if index < dense else last, prefix=f"{name}.") for index, name in enumerate(prefixes)]


def block_shapes(architecture: Architecture, index: int) -> tuple[Named, ...]:
    """Name inside the block and shape of each parameter of block ``index``, in the order of registration."""
    a = architecture
    norm = tuple(_norm(a, a.hidden))
    before, behind = a.norms_per_block >= 1 and not a.norms_behind, a.norms_per_block == 4 or a.norms_behind
    found = [*_under("attention_norm", norm if before else ()), *_under("attention", _attention(a))]
    found += _under("attention_post_norm", norm if behind else ())
    found += _under("feed_forward_norm", norm if a.norms_per_block >= 2 and not a.norms_behind else ())
    if a.experts is None or index < a.experts.dense_layers:
        found += _under("feed_forward", _feed_forward(a, a.ffn))
    else:
        found += _under("feed_forward", _routed(a, a.experts))
    return (*found, *_under("feed_forward_post_norm", norm if behind else ()))


def active_parameters(architecture: Architecture) -> int:
    """Elements that one token meets: everything but the experts that it does not visit."""
    total = sum(unit.numel for unit in units_of(architecture))
    experts = architecture.experts
    if experts is None:
        return total
    routed = _numel(entry for entry in _routed(architecture, experts) if entry[0].startswith("experts."))
    idle = routed // experts.count * (experts.count - experts.top_k)
    return total - idle * max(0, architecture.layers - experts.dense_layers)


_MODULES = ("embedding.weight", "positions.weight", "head.weight")
_FIRST = ("embedding", "positions", "embedding_norm")


def _outer(a: Architecture) -> list[Named]:
    """Everything outside of the blocks, in the order of registration."""
    found: list[Named] = [("embedding.weight", (a.vocab, a.hidden))]
    found += [("positions.weight", (a.learned_positions, a.hidden))] if a.learned_positions else []
    found += _under("embedding_norm", _norm(a, a.hidden) if a.embedding_norm else ())
    found += _under("norm", _norm(a, a.hidden))
    head = list(_linear("head", a.hidden, a.vocab, bias=a.head_bias))
    return found + (head[1:] if a.tied else head)


def _module(entry: Named) -> str:
    """The module that a parameter outside of the blocks belongs to."""
    return entry[0].rpartition(".")[0]


def _norm(a: Architecture, width: int) -> Iterator[Named]:
    if a.norm_weight:
        yield "weight", (width,)
        if a.norm == "layer" and a.norm_bias:
            yield "bias", (width,)


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _attention(a: Architecture) -> Iterator[Named]:
    if a.latent is not None:
        yield from _latent_attention(a, a.latent)
        return
    queries, shared = a.heads * a.head_dim, a.kv_heads * a.head_dim
    if a.sinks:
        yield "sinks", (a.heads,)
    if a.fused_qkv:
        yield from _linear("qkv", a.hidden, queries + 2 * shared, bias=a.qkv_bias)
    else:
        for name, width in (("query", queries), ("key", shared), ("value", shared)):
            yield from _linear(name, a.hidden, width, bias=a.qkv_bias)
    yield from _linear("out", queries, a.hidden, bias=a.out_bias)
    if a.qk_norm != "none":
        yield "query_norm.weight", (a.head_dim if a.qk_norm == "head" else queries,)
        yield "key_norm.weight", (a.head_dim if a.qk_norm == "head" else shared,)


def _latent_attention(a: Architecture, latent: Latent) -> Iterator[Named]:
    queries = a.heads * (latent.plain_dim + latent.rotary_dim)
    if latent.query_rank:
        yield from _linear("query_down", a.hidden, latent.query_rank, bias=a.qkv_bias)
        yield "query_norm.weight", (latent.query_rank,)
        yield from _linear("query_up", latent.query_rank, queries)
    else:
        yield from _linear("query", a.hidden, queries)
    yield from _linear("kv_down", a.hidden, latent.rank + latent.rotary_dim, bias=a.qkv_bias)
    yield "kv_norm.weight", (latent.rank,)
    yield from _linear("kv_up", latent.rank, a.heads * (latent.plain_dim + latent.value_dim))
    yield from _linear("out", a.heads * latent.value_dim, a.hidden, bias=a.out_bias)


def _feed_forward(a: Architecture, inner: int) -> Iterator[Named]:
    if a.gated and a.fused_gate_up:
        yield from _linear("gate_up", a.hidden, 2 * inner, bias=a.ffn_bias)
    else:
        for name in ("gate", "up") if a.gated else ("up",):
            yield from _linear(name, a.hidden, inner, bias=a.ffn_bias)
    yield from _linear("down", inner, a.hidden, bias=a.ffn_bias)


def _routed(a: Architecture, experts: Experts) -> Iterator[Named]:
    """Router, the experts' matrices stacked as transformers 5 keeps them, and the experts that every token visits."""
    inner = 2 * experts.ffn if a.gated else experts.ffn
    yield from _linear("router", a.hidden, experts.count, bias=experts.router_bias)
    yield "experts.gate_up", (experts.count, inner, a.hidden)
    if experts.biases:
        yield "experts.gate_up_bias", (experts.count, inner)
    yield "experts.down", (experts.count, a.hidden, experts.ffn)
    if experts.biases:
        yield "experts.down_bias", (experts.count, a.hidden)
    if experts.shared_ffn:
        yield from _under("shared", _feed_forward(a, experts.shared_ffn))
    if experts.shared_gate:
        yield from _linear("shared_gate", a.hidden, 1)


def _under(name: str, entries: Iterable[Named]) -> list[Named]:
    return [(f"{name}.{inside}", shape) for inside, shape in entries]


def _numel(entries: Iterable[Named]) -> int:
    return sum(prod(shape) for _, shape in entries)


def _unit(name: str, entries: Iterable[Named], prefix: str = "") -> UnitParameters:
    return UnitParameters(name=name, parameters=tuple(ParameterFacts(name=f"{prefix}{inside}", shape=shape) for inside, shape in entries))
