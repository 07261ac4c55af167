"""The open models that are known by name: ``models.csv`` holds their sizes, the tables here what their families have in common.

>>> facts("Llama-3.1-8B").num_parameters
8030261248
"""

import csv
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from shardbook.errors import ConfigError
from shardbook.facts.architecture import Architecture, Experts, Latent
from shardbook.facts.model import ModelFacts
from shardbook.facts.parameters import model_facts

_BIASES: Mapping[str, Any] = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
_GPT: Mapping[str, Any] = {"norm": "layer", "gated": False, "positions": "learned", **_BIASES}
_GPT2: Mapping[str, Any] = {**_GPT, "activation": "gelu_tanh", "fused_qkv": True}
_GEMMA: Mapping[str, Any] = {"norms_per_block": 4, "activation": "gelu_tanh"}
_PHI3: Mapping[str, Any] = {"fused_qkv": True, "fused_gate_up": True}

# What the rows of a family share; families that are not named are Llama's.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt3": _GPT2,
    "opt": {**_GPT, "activation": "relu"},
    "qwen2.5": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "gemma-2": {**_GEMMA, "attention_softcap": True, "logit_softcap": True},
    "gemma-3": {**_GEMMA, "qk_norm": "head"},
    "phi-3": _PHI3,
    "phi-4": _PHI3,
    "olmo2": {"qk_norm": "all", "norms_behind": True},
    "gpt-oss": {"qkv_bias": True, "out_bias": True, "sinks": True},
}
_KIND_OF = {"qwen3-30b": "qwen3", "qwen3-235b": "qwen3", "gemma-3-4b": "gemma-3", "gemma-3-12b": "gemma-3", "gemma-3-27b": "gemma-3"}
_EXTRA_POSITIONS = {"opt": 2}
"""OPT's table of positions begins with two rows that no token uses."""

# DeepSeek: rank of the compressed query, experts that every token visits, dense blocks at the start.
_DEEPSEEK = {"deepseek-v2-lite": (0, 2, 1), "deepseek-v2": (1536, 2, 1), "deepseek-v3": (1536, 1, 3)}
_LATENT: Mapping[str, int] = {"rank": 512, "plain_dim": 128, "rotary_dim": 64, "value_dim": 128}


def names() -> tuple[str, ...]:
    """Every name of the catalog, family by family."""
    return tuple(row["name"] for row in rows().values())


def facts(name: str) -> ModelFacts:
    """A model of the catalog; upper and lower case are the same.

    Raises:
        ConfigError: the catalog has no such model; names the nearest.
    """
    row = rows().get(name.strip().lower())
    if row is None:
        raise ConfigError(f"model = {name!r}: the catalog has no such model; {nearest_names(name, list(rows()))}")
    notes = (row["notes"],) if row["notes"] else ()
    return model_facts(architecture(row), name=row["name"], source=f"catalog: {row['source']}", notes=notes)


def nearest_names(name: str, known: list[str]) -> str:
    """A remedy with up to three names that resemble what was written."""
    low = name.strip().lower()
    close = get_close_matches(low, known, n=3, cutoff=0.5) or [each for each in known if each.startswith(low[:4])][:3]
    return f"nearest: {', '.join(close)}" if close else f"known are {', '.join(known[:6])} and {len(known) - 6} more"


def architecture(row: Mapping[str, str]) -> Architecture:
    """What one row of the catalog describes."""
    kind, name = _KIND_OF.get(row["family"], row["family"]), row["name"]
    common = dict(_KINDS.get(kind, {}))
    max_seq = int(row["max_seq"])
    if common.get("positions") == "learned":
        common["learned_positions"] = max_seq + _EXTRA_POSITIONS.get(kind, 0)
    if name in _DEEPSEEK:
        common["latent"] = Latent(query_rank=_DEEPSEEK[name][0], **_LATENT)
    sizes = {field: int(row[field]) for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    return Architecture(family=row["family"], **sizes, max_seq=max_seq, tied=row["tied"] == "True", experts=_experts(row), **common)


def _experts(row: Mapping[str, str]) -> Experts | None:
    count, name = int(row["experts"]), row["name"]
    if not count:
        return None
    inner = int(row["moe_ffn"])
    _, shared, dense = _DEEPSEEK.get(name, (0, 0, 0))
    biased = row["family"] == "gpt-oss"
    return Experts(
        count=count,
        top_k=int(row["top_k"]),
        ffn=inner,
        shared_ffn=shared * inner,
        dense_layers=dense,
        router_bias=biased,
        biases=biased,
    )


@cache
def rows() -> Mapping[str, Mapping[str, str]]:
    """``models.csv`` by lower-case name."""
    text = Path(__file__).with_name("models.csv").read_text(encoding="utf-8")
    return {row["name"].lower(): row for row in csv.DictReader(text.splitlines())}
