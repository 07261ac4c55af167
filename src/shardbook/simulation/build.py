"""Models for a simulation from what is known of them: shardbook's own decoder where the facts are its own, or a transformers class.

>>> from shardbook.facts.find import resolve
>>> not_own(resolve("llama-2-7b").architecture), not_own(resolve("gpt2").architecture)[:2]
((), ('norm = layer', 'gated = False'))
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.facts.architecture import Architecture
from shardbook.facts.model import ModelFacts
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder

WAYS = "two ways out: the model's config.json with transformers installed (pip install 'shardbook[hf]'), or file.py:build"

# What shardbook's decoder is, by the names of the facts; sizes apart.
_OWN: dict[str, Any] = {
    "experts": None,
    "latent": None,
    "norm": "rms",
    "norm_weight": True,
    "norms_per_block": 2,
    "norms_behind": False,
    "embedding_norm": False,
    "qk_norm": "none",
    "gated": True,
    "activation": "silu",
    "parallel": False,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "head_bias": False,
    "fused_qkv": False,
    "fused_gate_up": False,
    "attention_softcap": False,
    "logit_softcap": False,
    "positions": "rope",
    "sinks": False,
    "dropout": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What ``simulate`` takes of a model, and in words whose code it is."""

    build_model: Callable[[], nn.Module]
    build_batch: Callable[[], Any]
    code: str


def parts_of(facts: ModelFacts, *, micro_batch: int, sequence: int, path: Path | None = None, implementation: str = "") -> Parts:
    """Model and batch from facts.

    Args:
        facts: what is known.
        micro_batch: sequences in a batch.
        sequence: tokens in each.
        path: the ``config.json`` or its folder that the facts come from; None: they are the catalog's.
        implementation: ``"shardbook"`` or ``"transformers"``; ``""``: the latter for a ``config.json`` where it is installed, since that
            is the code which such a file is for; else the former.

    Raises:
        ConfigError: nothing here can build it; names the facts that stand against it, and the ways out.
    """
    build_batch = tokens(micro_batch, sequence)
    if implementation not in ("", "shardbook", "transformers"):
        allowed = "shardbook or transformers with --simulate, which runs code that is here"
        raise ConfigError(f"implementation = {implementation!r}: allowed is {allowed}; leave it out, or give file.py:build")
    if path is not None and implementation != "shardbook" and (implementation or find_spec("transformers") is not None):
        from shardbook.models.local import build_local

        return Parts(build_model=lambda: build_local(path, vocab=1, seed=0), build_batch=build_batch, code="transformers")
    if implementation == "transformers":
        raise ConfigError(f"{facts.name}: transformers builds a model from its config.json, and none was given; {WAYS}")
    config = decoder_config(facts)
    return Parts(build_model=lambda: Decoder(config), build_batch=build_batch, code="shardbook's own decoder")


def decoder_config(facts: ModelFacts) -> DecoderConfig:
    """The sizes of shardbook's own decoder that has these facts.

    Raises:
        ConfigError: only a count is known, or the model is another one; names what it has that ours has not.
    """
    a = facts.architecture
    if a is None:
        raise ConfigError(f"{facts.name}: a number of parameters says nothing of the operators, so there is nothing to run; {_named()}")
    if faults := not_own(a):
        raise ConfigError(f"{facts.name}: shardbook's own decoder is none of this kind ({', '.join(faults)}); {WAYS}")
    return DecoderConfig(
        vocab=a.vocab, layers=a.layers, width=a.hidden, heads=a.heads, kv_heads=a.kv_heads, ffn=a.ffn, tied=a.tied
    )  # fmt: skip


def not_own(architecture: Architecture) -> tuple[str, ...]:
    """The facts in which a model differs from shardbook's own decoder, as ``name = value``; none: it is one."""
    found = [(name, getattr(architecture, name)) for name, ours in _OWN.items() if getattr(architecture, name) != ours]
    if architecture.experts is not None:
        found = [("experts", architecture.experts.count), *(fault for fault in found if fault[0] != "experts")]
    if architecture.latent is not None:
        found = [("latent", "yes"), *(fault for fault in found if fault[0] != "latent")]
    wide = architecture.heads * architecture.head_dim
    if wide != architecture.hidden:
        found.append((f"heads * head_dim = {wide}, hidden", architecture.hidden))
    elif architecture.head_dim % 2:
        found.append(("head_dim", f"{architecture.head_dim}, which is odd"))
    return tuple(f"{name} = {value}" for name, value in found)


def tokens(micro_batch: int, sequence: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Inputs and targets of one call: two tensors ``[micro_batch, sequence]`` of token numbers."""

    def build_batch() -> tuple[Tensor, Tensor]:
        shape = (micro_batch, sequence)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    return build_batch


def _named() -> str:
    return "name a model of the catalog (llama-2-7b), its config.json, or file.py:build"
