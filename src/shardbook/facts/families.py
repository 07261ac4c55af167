"""What the decoder families of transformers have in common and what they differ in, as data. Checked against transformers 5.24.

``tests/test_facts_huggingface.py`` builds each family on the meta device and compares the number of parameters, the largest block and
the largest tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
VOCAB = ("vocab_size",)
LIMIT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation")
DROPOUT = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout")
ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One ``model_type``.

    Args:
        fixed: fields of the architecture that no configuration changes.
        tied, kv_heads, head_dim, activation, limit, dropout: transformers' defaults where a file leaves them out; None: every query head
            has keys of its own, and heads divide the stream.
        own_head_dim: whether the code reads ``head_dim`` at all.
        ffn: inner elements as a multiple of the stream, where a file may leave them out; 0: a file must say them.
        flags: field of the architecture -> (field of the file, transformers' default).
        sizes: transformers' defaults for sizes that published files are known to leave out.
        moe: the blocks have experts: field of an expert's inner elements, and of those of the shared ones.
        refused: field -> the only value that is modelled.
        special: name of the rule for what the other fields cannot say.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    own_head_dim: bool = True
    activation: str = "silu"
    limit: int = 2048
    dropout: float = 0.0
    ffn: int = 0
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict[str, tuple[str, bool]])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    moe: tuple[str, str] | None = None
    refused: Mapping[str, Any] = field(default_factory=dict[str, Any])
    special: str = ""


_BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
_GPT: dict[str, Any] = {"norm": "layer", "gated": False}
_ATTENTION_BIAS = {"qkv_bias": ("attention_bias", False), "out_bias": ("attention_bias", False)}
_LLAMA_BIASES = {**_ATTENTION_BIAS, "ffn_bias": ("mlp_bias", False)}
_GEMMA = Family(tied=True, head_dim=256, activation="gelu_pytorch_tanh", limit=8192, flags=_ATTENTION_BIAS)
_GPT_J: dict[str, Any] = {**_GPT, "norms_per_block": 1, "parallel": True, "ffn_bias": True, "head_bias": True}

FAMILIES: Mapping[str, Family] = {
    "bloom": Family(
        fixed={**_GPT, **_BIASES, "fused_qkv": True, "positions": "alibi", "embedding_norm": True, "max_seq": 0},
        tied=True,
        own_head_dim=False,
        activation="gelu_pytorch_tanh",
        ffn=4,
    ),
    "cohere": Family(
        fixed={"norm": "layer", "norm_bias": False, "norms_per_block": 1, "parallel": True},
        tied=True,
        limit=8192,
        flags=_ATTENTION_BIAS,
        special="cohere",
    ),
    "deepseek_v2": Family(flags=_LLAMA_BIASES, moe=("moe_intermediate_size", ""), sizes={"first_k_dense_replace": 0}, special="deepseek"),
    "deepseek_v3": Family(
        kv_heads=128,
        limit=4096,
        flags=_ATTENTION_BIAS,
        moe=("moe_intermediate_size", ""),
        sizes={"first_k_dense_replace": 3},
        special="deepseek",
    ),
    "falcon": Family(
        fixed={**_GPT, "fused_qkv": True},
        tied=True,
        own_head_dim=False,
        activation="gelu",
        ffn=4,
        flags={"qkv_bias": ("bias", False), "out_bias": ("bias", False), "ffn_bias": ("bias", False)},
        special="falcon",
    ),
    "gemma": replace(_GEMMA, kv_heads=16),
    "gemma2": replace(_GEMMA, fixed={"norms_per_block": 4}, kv_heads=4, special="gemma2"),
    "gemma3_text": replace(
        _GEMMA,
        limit=131072,
        fixed={"norms_per_block": 4, "qk_norm": "head"},
        kv_heads=4,
        sizes={"num_attention_heads": 8, "vocab_size": 262208},
        special="gemma3",
    ),
    "gpt2": Family(
        fixed={**_GPT, **_BIASES, "fused_qkv": True, "positions": "learned"},
        tied=True,
        own_head_dim=False,
        activation="gelu_new",
        limit=1024,
        dropout=0.1,
        ffn=4,
        special="learned",
    ),
    "gpt_neox": Family(
        fixed={**_GPT, "fused_qkv": True, "ffn_bias": True},
        own_head_dim=False,
        activation="gelu",
        flags={
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
            "parallel": ("use_parallel_residual", True),
        },
    ),
    "gpt_oss": Family(
        fixed={"sinks": True},
        kv_heads=8,
        head_dim=64,
        limit=131072,
        flags={"qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True)},
        moe=("intermediate_size", ""),
        special="gpt_oss",
    ),
    "gptj": Family(fixed=_GPT_J, own_head_dim=False, activation="gelu_new", ffn=4),
    "granite": Family(flags=_LLAMA_BIASES),
    "llama": Family(flags=_LLAMA_BIASES),
    "mistral": Family(kv_heads=8, limit=131072),
    "mixtral": Family(kv_heads=8, limit=131072, moe=("intermediate_size", ""), special="sparse"),
    "mpt": Family(
        fixed={**_GPT, "norm_bias": False, "fused_qkv": True, "positions": "alibi"},
        tied=True,
        own_head_dim=False,
        activation="gelu",
        ffn=4,
        refused={"expansion_ratio": 4, "no_bias": True},
    ),
    "olmo": Family(fixed={"norm": "layer", "norm_weight": False}, flags=_ATTENTION_BIAS),
    "olmo2": Family(fixed={"qk_norm": "all", "norms_behind": True}, flags=_ATTENTION_BIAS),
    "olmoe": Family(fixed={"qk_norm": "all"}, limit=4096, flags=_ATTENTION_BIAS, moe=("intermediate_size", ""), special="sparse"),
    "opt": Family(
        fixed={**_GPT, "positions": "learned"},
        tied=True,
        own_head_dim=False,
        activation="relu",
        dropout=0.1,
        flags={"qkv_bias": ("enable_bias", True), "out_bias": ("enable_bias", True), "ffn_bias": ("enable_bias", True)},
        refused={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        special="learned",
    ),
    "phi": Family(fixed={**_GPT_J, "qkv_bias": True, "out_bias": True}, activation="gelu_new", refused={"qk_layernorm": False}),
    "phi3": Family(fixed={"fused_qkv": True, "fused_gate_up": True}, limit=4096),
    "qwen2": Family(fixed={"qkv_bias": True}, kv_heads=32, limit=32768),
    "qwen2_moe": Family(
        kv_heads=16,
        limit=32768,
        flags={"qkv_bias": ("qkv_bias", True)},
        moe=("moe_intermediate_size", "shared_expert_intermediate_size"),
        special="sparse",
    ),
    "qwen3": Family(fixed={"qk_norm": "head"}, kv_heads=32, head_dim=128, limit=32768, flags=_ATTENTION_BIAS),
    "qwen3_moe": Family(
        fixed={"qk_norm": "head"}, kv_heads=4, limit=32768, flags=_ATTENTION_BIAS, moe=("moe_intermediate_size", ""), special="sparse"
    ),
    "smollm3": Family(tied=True, kv_heads=4, limit=32768, flags=_LLAMA_BIASES),
    "stablelm": Family(
        fixed={"norm": "layer"},
        kv_heads=32,
        own_head_dim=False,
        limit=4096,
        flags={"qkv_bias": ("use_qkv_bias", False), "parallel": ("use_parallel_residual", False)},
        refused={"qk_layernorm": False},
        special="stablelm",
    ),
    "starcoder2": Family(
        fixed=_GPT,
        tied=True,
        kv_heads=2,
        activation="gelu_pytorch_tanh",
        limit=4096,
        flags={"qkv_bias": ("use_bias", True), "out_bias": ("use_bias", True), "ffn_bias": ("use_bias", True)},
    ),
}
