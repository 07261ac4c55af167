"""What single families say in fields of their own. A rule gives fields of the architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardbook.facts.architecture import MOST_LAYERS, Experts, Latent
from shardbook.facts.config_fields import Fields
from shardbook.facts.families import EXPERTS, Family


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; ``found`` are the fields of the architecture so far."""

    fields: Fields
    family: Family
    found: Mapping[str, Any]


def _learned(case: Case) -> dict[str, Any]:
    """GPT-2 and OPT: a table of positions; OPT's begins with two rows that no token uses."""
    extra = 2 if case.fields.has("ffn_dim") else 0
    if case.fields.is_whole:
        case.fields.refuse("word_embed_proj_dim", case.found["hidden"])
    return {"learned_positions": case.found["max_seq"] + extra}


def _gemma2(case: Case) -> dict[str, Any]:
    """Scores and logits go through a tanh; a file says null where they do not."""
    names = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {ours: case.fields.is_left_out(theirs) or case.fields.has(theirs) for ours, theirs in names.items()}


def _gemma3(case: Case) -> dict[str, Any]:
    """As Gemma 2, but a file that says nothing has none."""
    names = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {ours: case.fields.has(theirs) for ours, theirs in names.items()}


def _cohere(case: Case) -> dict[str, Any]:
    """A norm of every head of queries and keys, each with a row of its own."""
    return {"qk_norm": "all" if case.fields.flag("use_qk_norm", False) else "none"}


def _stablelm(case: Case) -> dict[str, Any]:
    """Side by side there is one norm."""
    return {"norms_per_block": 1 if case.found["parallel"] else 2}


def _falcon(case: Case) -> dict[str, Any]:
    """Three generations: one key head or many, one norm or two, rotary positions or ALiBi."""
    new, multi, parallel = (case.fields.flag(name, default) for name, default in _FALCON_FLAGS)
    heads = case.found["heads"]
    stated = case.fields.size(("num_kv_heads", "n_head_kv"), heads) if new else heads
    one = parallel and case.fields.size(("num_ln_in_parallel_attn",), 2 if new else 1) == 1
    return {
        "kv_heads": stated if new else (1 if multi else heads),
        "parallel": parallel or new,
        "norms_per_block": 1 if one else 2,
        "positions": "alibi" if case.fields.flag("alibi", False) else "rope",
    }


_FALCON_FLAGS = (("new_decoder_architecture", False), ("multi_query", True), ("parallel_attn", True))


def _gpt_oss(case: Case) -> dict[str, Any]:
    return {"experts": _experts(case, router_bias=True, biases=True)}


def _sparse(case: Case) -> dict[str, Any]:
    """Mixtral, Qwen and OLMoE: a step and a list say which blocks stay dense; those at the start are modelled."""
    layers, step = case.found["layers"], 1
    if case.fields.has("decoder_sparse_step"):
        step = case.fields.size(("decoder_sparse_step",))
    listed = set(case.fields.whole_numbers("mlp_only_layers"))
    dense = [index for index in range(min(layers, MOST_LAYERS)) if index in listed or (index + 1) % step]
    if dense != list(range(len(dense))):
        case.fields.wrong("mlp_only_layers and decoder_sparse_step leave dense blocks among those with experts, which is not modelled")
        dense = []
    if len(dense) == layers:
        return {}
    return {"experts": _experts(case, dense_layers=len(dense))}


def _deepseek(case: Case) -> dict[str, Any]:
    """Latent attention, and dense blocks before those with experts."""
    latent = Latent(
        query_rank=case.fields.size(("q_lora_rank",)) if case.fields.has("q_lora_rank") else 0,
        rank=case.fields.size(("kv_lora_rank",)),
        plain_dim=case.fields.size(("qk_nope_head_dim",)),
        rotary_dim=case.fields.size(("qk_rope_head_dim",)),
        value_dim=case.fields.size(("v_head_dim",)),
    )
    dense = case.fields.size(("first_k_dense_replace",), case.family.sizes["first_k_dense_replace"], least=0)
    shared = case.fields.size(("n_shared_experts",)) * case.fields.size(("moe_intermediate_size",))
    widths = {"latent": latent, "head_dim": latent.plain_dim + latent.rotary_dim, "kv_heads": case.found["heads"]}
    if dense >= case.found["layers"]:
        return widths
    if case.fields.raw("num_nextn_predict_layers"):
        case.fields.notes.append(
            "num_nextn_predict_layers: blocks that predict further tokens are left out, as transformers leaves them out"
        )
    return {**widths, "experts": _experts(case, shared_ffn=shared, dense_layers=dense)}


def _experts(case: Case, **more: Any) -> Experts | None:
    assert case.family.moe is not None
    inner, shared = case.family.moe
    count, top_k, ffn = case.fields.size(EXPERTS), case.fields.size(("num_experts_per_tok",)), case.fields.size((inner,))
    if shared:
        more = {**more, "shared_ffn": case.fields.size((shared,)), "shared_gate": True}
    if top_k > count and case.fields.is_whole:
        case.fields.wrong(f"num_experts_per_tok = {top_k} is more than {count}, the number of experts")
        return None
    return Experts(count=count, top_k=top_k, ffn=ffn, **more) if case.fields.is_whole else None


RULES: Mapping[str, Callable[[Case], dict[str, Any]]] = {
    "cohere": _cohere,
    "deepseek": _deepseek,
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "learned": _learned,
    "sparse": _sparse,
    "stablelm": _stablelm,
}
