"""shardbook's decoder as transformers knows it: a Llama. Names of its parameters there, and its ``config.json``. No torch here.

The arithmetic is Llama's: halves of a head are rotated against each other, the norm is taken in fp32, one feed-forward gates the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from shardbook.errors import ConfigError
from shardbook.models.config import DecoderConfig

_ENDS = {"embedding.": "model.embed_tokens.", "norm.": "model.norm.", "head.": "lm_head."}
_BLOCK = {
    "attention_norm.": "input_layernorm.", "attention.query.": "self_attn.q_proj.", "attention.key.": "self_attn.k_proj.",
    "attention.value.": "self_attn.v_proj.", "attention.out.": "self_attn.o_proj.", "feed_forward_norm.": "post_attention_layernorm.",
    "feed_forward.gate.": "mlp.gate_proj.", "feed_forward.up.": "mlp.up_proj.", "feed_forward.down.": "mlp.down_proj.",
}  # fmt: skip


def beginnings(layers: int) -> dict[str, str]:
    """What a parameter's name begins with here, and in transformers' Llama.

    >>> beginnings(1)["blocks.0.attention.query."]
    'model.layers.0.self_attn.q_proj.'
    """
    blocks = {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for layer in range(layers) for ours, theirs in _BLOCK.items()}
    return {**_ENDS, **blocks}


def theirs_to_ours(names: Iterable[str], layers: int) -> dict[str, str]:
    """The beginnings that these names of a Llama have, and what stands in their place here; empty where they are no Llama's."""
    known, names = {theirs: ours for ours, theirs in beginnings(layers).items()}, list(names)
    return {theirs: ours for theirs, ours in known.items() if any(name.startswith(theirs) for name in names)}


def config_json(config: DecoderConfig, sequence: int) -> dict[str, Any]:
    """What transformers builds the same model from. ``sequence``: tokens it was trained on at once; bytes have no special tokens."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab, "hidden_size": config.width,
        "intermediate_size": config.ffn, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_width, "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base}, "max_position_embeddings": sequence,
        "tie_word_embeddings": config.tied, "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def check_same_model(config: DecoderConfig, facts: Mapping[str, Any], source: str) -> None:
    """That a ``config.json`` describes this decoder, in all that shapes of weights don't show.

    Raises:
        ConfigError: it is of another model; each difference with the recipe's name.
    """
    if facts.get("model_type") != "llama":
        raise ConfigError(
            f"{source}: model_type is {facts.get('model_type')!r}, and shardbook's decoder is a Llama; train it with --config {source}"
        )
    faults = [
        f"{theirs} is {found!r}, and model.{name} is {asdict(config)[name]!r}"
        for name, theirs, found in _described(facts)
        if found is not None and found != asdict(config)[name]
    ]
    rotary: Any = _rotary(facts).get("rope_type", "default")
    faults += [f"rope_type is {rotary!r}, and shardbook's decoder has no other than 'default'"] if rotary != "default" else []
    faults += [f"{name} is true, and shardbook's decoder has none" for name in ("attention_bias", "mlp_bias") if facts.get(name)]
    if facts.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act is {facts['hidden_act']!r}, and shardbook's decoder has 'silu'")
    if faults:
        raise ConfigError(f"{source}: {'; '.join(faults)}; give the model its sizes, or train it with --config {source}")


def _described(facts: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """(name here, name there, value there) of what both have; defaults are Llama's own."""
    names = {
        "vocab": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "ffn": "intermediate_size",
    }  # fmt: skip
    found = [(name, theirs, facts.get(theirs)) for name, theirs in names.items()]
    found.append(("kv_heads", "num_key_value_heads", facts.get("num_key_value_heads") or facts.get("num_attention_heads")))
    found.append(("norm_eps", "rms_norm_eps", facts.get("rms_norm_eps", 1e-6)))
    found.append(("rope_base", "rope_theta", float(_rotary(facts).get("rope_theta", 10_000.0))))
    return [*found, ("tied", "tie_word_embeddings", facts.get("tie_word_embeddings", False))]


def _rotary(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotation, under their newer or their older names."""
    older: Any = facts.get("rope_scaling") or {}
    theta = {"rope_theta": facts["rope_theta"]} if "rope_theta" in facts else {}
    kind = {"rope_type": older["type"]} if "type" in older else {}
    return {**theta, **kind, **older, **(facts.get("rope_parameters") or {})}
