"""The shape of a decoder, as far as its bytes depend on it. No weights, no torch.

One record describes every family: what a family leaves out is 0, False or None. Names are those of the papers; ``docs/sources.md``
says where each family's facts come from.
"""

from dataclasses import dataclass
from typing import Literal

from shardbook.checks import Check

MOST_LAYERS = 10_000
"""Above it a number of blocks is taken for a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of a block.

    Args:
        count: experts of a block.
        top_k: experts that a token visits.
        ffn: inner elements of one expert.
        shared_ffn: inner elements of the experts that every token visits, together; 0: there are none.
        dense_layers: blocks at the start that have the dense feed-forward instead.
        router_bias: a bias with one element for each expert.
        biases: whether the experts' own matrices have biases.
        shared_gate: whether a gate of ``hidden`` elements weighs what the shared experts give.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    biases: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        check = Check(self)
        for name in ("count", "top_k", "ffn"):
            check.integer(name, least=1, remedy="give a positive size")
        for name in ("shared_ffn", "dense_layers"):
            check.integer(name, least=0, remedy="0: there are none")
        check.done()
        if self.top_k > self.count:
            check.add("top_k", self.top_k, f"1 to count = {self.count}", "a token visits no expert twice")
        check.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): queries, keys and values come from compressed rows.

    Args:
        query_rank: elements of the compressed query; 0: the query is not compressed.
        rank: elements of the compressed keys and values.
        plain_dim: elements of a head without positions.
        rotary_dim: elements of a head with rotary positions; the key's are shared by all heads.
        value_dim: elements of a head's values.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and kinds of a decoder.

    Args:
        family: model type, as in ``config.json`` or the catalog.
        layers: blocks.
        hidden: elements of the residual stream (h).
        heads: query heads (a).
        kv_heads: key and value heads.
        head_dim: elements of a head; ``heads * head_dim`` need not be ``hidden``.
        ffn: inner elements of the dense feed-forward (f).
        vocab: token values (V).
        max_seq: longest sequence; 0 where positions set no limit or none is known.
        tied: the head shares the embedding's matrix.
        norm: RMSNorm has one parameter for each element, LayerNorm two.
        norm_bias: LayerNorm with a bias (MPT has none).
        norm_weight: norms have parameters at all (the first OLMo has none).
        norms_per_block: 2; 4 where attention and feed-forward have a norm behind them as well (Gemma 2 and 3); 1 where both read the
            same normalised row (Phi, Cohere).
        norms_behind: the two norms stand behind attention and feed-forward, not before them (OLMo 2).
        embedding_norm: a norm behind the embedding (BLOOM).
        qk_norm: a norm of queries and keys: over each head, or over all heads at once (OLMo 2).
        gated: SwiGLU or GeGLU: two matrices of ``hidden x ffn`` and their product.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"gelu_new"`` (the same, written out in operators by some) or ``"relu"``.
        parallel: attention and feed-forward run side by side and are added to the stream together.
        qkv_bias, out_bias, ffn_bias, head_bias: which linear layers have a bias.
        fused_qkv: queries, keys and values are one matrix.
        fused_gate_up: gate and up are one matrix; experts always have it so.
        attention_softcap, logit_softcap: scores, logits go through a tanh (Gemma 2).
        positions: where positions enter.
        learned_positions: rows of the table of learned positions; 0: there is no table.
        sinks: one learned number for each head in the softmax (gpt-oss).
        experts: routed experts, or None.
        latent: latent attention, or None.
        dropout: share of elements that training drops; 0 is no dropout at all, and no mask is kept.
        attention_dropout: the same for the weights of attention; None: as ``dropout``.
        implementation: whose code runs the blocks, which decides what autograd keeps; ``""``: the common one for the engine.

    Raises:
        ConfigError: a size below 1, or heads that do not divide.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int = 0
    tied: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norm_weight: bool = True
    norms_per_block: int = 2
    norms_behind: bool = False
    embedding_norm: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    gated: bool = True
    activation: str = "silu"
    parallel: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    attention_softcap: bool = False
    logit_softcap: bool = False
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    learned_positions: int = 0
    sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    dropout: float = 0.0
    attention_dropout: float | None = None
    implementation: str = ""

    def __post_init__(self) -> None:
        check = Check(self)
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            check.integer(name, least=1, remedy="give a positive size")
        check.integer("max_seq", least=0, remedy="0: no limit is known")
        check.done()
        if self.layers > MOST_LAYERS:
            check.add("layers", self.layers, f"an integer from 1 to {MOST_LAYERS}", "no decoder has so many blocks")
        if self.norms_per_block not in (1, 2, 4):
            check.add("norms_per_block", self.norms_per_block, "1, 2 or 4", "2 is usual")
        if self.heads % self.kv_heads:
            check.add("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}", "query heads share key and value heads evenly")
        check.done()
