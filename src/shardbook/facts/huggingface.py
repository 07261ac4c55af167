"""Facts from a model's ``config.json``, without transformers: the families that ``families.py`` lists.

>>> tiny = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
>>> facts_of({**tiny, "vocab_size": 256}, "tiny").num_parameters
115008
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from shardbook.errors import ConfigError
from shardbook.facts import families
from shardbook.facts.architecture import Architecture
from shardbook.facts.config_fields import Fields
from shardbook.facts.families import FAMILIES, Family
from shardbook.facts.family_rules import RULES, Case
from shardbook.facts.model import MOST_PARAMETERS, ModelFacts
from shardbook.facts.parameters import model_facts

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def facts(path: Path) -> ModelFacts:
    """Facts of the model that a ``config.json`` describes; ``path`` is the file or its folder.

    Raises:
        ConfigError: no such file, no model's configuration, an unknown family, or fields missing or wrong: one line.
    """
    path = _file(path)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return facts_of(_read(path), name or str(path), where=str(path))


def facts_of(mapping: Mapping[str, Any], name: str, *, where: str = "") -> ModelFacts:
    """Facts from the fields of a ``config.json``.

    Args:
        mapping: the fields; ``model_type`` names the family.
        name: how to call the model.
        where: what messages begin with; ``name`` if left out.

    Raises:
        ConfigError: an unknown family, or fields missing or wrong: one line.
    """
    where = where or name
    kind = mapping.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f'{where}: has no "model_type", so it is no model\'s config.json')
    inner = mapping.get("text_config")
    if kind == "gemma3" and isinstance(inner, Mapping):
        found = facts_of({"model_type": "gemma3_text", **cast("Mapping[str, Any]", inner)}, name, where=where)
        return replace(found, notes=(*found.notes, "the text tower alone: what sees images is left out"))
    if kind not in FAMILIES:
        raise ConfigError(f"{where}: model_type = {kind!r} is not modelled; {_nearest(kind)}")
    fields = Fields(mapping, kind, where)
    architecture = _architecture(fields, FAMILIES[kind], kind, where)
    if mapping.get("quantization_config") is not None:
        fields.notes.append("quantization_config is left aside: the facts are of the model as it is trained, unquantised")
    made = model_facts(architecture, name=name, source=f"{kind} config: {where}", notes=tuple(fields.notes))
    if made.num_parameters > MOST_PARAMETERS:
        many = f"{made.num_parameters:.1e} parameters, more than {MOST_PARAMETERS:.0e}"
        raise ConfigError(f"{where}: describes {many}; look for a slip in its sizes")
    return made


def _architecture(fields: Fields, family: Family, kind: str, where: str) -> Architecture:
    sizes = _sizes(fields, family)
    limit = fields.size(families.LIMIT, family.limit)
    found: dict[str, Any] = {"max_seq": limit, **sizes, **family.fixed}
    for name, (source, default) in family.flags.items():
        found[name] = fields.flag(source, default)
    found["tied"] = fields.flag("tie_word_embeddings", family.tied)
    found["activation"] = _activation(fields, family)
    found["dropout"] = fields.share(families.DROPOUT, family.dropout)
    found["attention_dropout"] = fields.share(families.ATTENTION_DROPOUT, family.dropout if kind == "gpt2" else 0.0)
    for name, allowed in family.refused.items():
        fields.refuse(name, allowed)
    if family.special:
        found.update(RULES[family.special](Case(fields, family, found)))
    fields.done()
    try:
        return Architecture(family=kind, implementation="transformers", **found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def _sizes(fields: Fields, family: Family) -> dict[str, int]:
    hidden = fields.size(families.HIDDEN)
    heads = fields.size(families.HEADS, family.sizes.get("num_attention_heads"))
    given = family.own_head_dim and fields.has("head_dim")
    if not given and family.head_dim is None and hidden % heads and fields.is_whole:
        fields.wrong(f"{families.HEADS[0]} = {heads} does not divide {families.HIDDEN[0]} = {hidden}")
    width = family.head_dim if family.head_dim is not None else max(1, hidden // heads)
    kv_heads = heads
    if fields.has("num_key_value_heads") or (family.kv_heads is not None and fields.raw("num_key_value_heads") is None):
        kv_heads = fields.size(("num_key_value_heads",), family.kv_heads)
    return {
        "layers": fields.size(families.LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": fields.size(("head_dim",), width) if given or family.head_dim is not None else width,
        "ffn": fields.size(families.FFN) if not family.ffn or _has_any(fields, families.FFN) else family.ffn * hidden,
        "vocab": fields.size(families.VOCAB, family.sizes.get("vocab_size")),
    }


def _has_any(fields: Fields, names: tuple[str, ...]) -> bool:
    return any(fields.has(name) for name in names)


def _activation(fields: Fields, family: Family) -> str:
    name = fields.text(families.ACTIVATION, family.activation)
    if name not in _ACTIVATIONS:
        fields.notes.append(f"the activation {name!r} is counted as GELU's")
    return _ACTIVATIONS.get(name, "gelu")


def _nearest(kind: str) -> str:
    close = get_close_matches(kind.lower(), list(FAMILIES), n=3, cutoff=0.5)
    return f"nearest: {', '.join(close)}" if close else f"known are {', '.join(FAMILIES)}"


def _shown(path: Path) -> str:
    return str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."


def _file(path: Path) -> Path:
    try:
        return path / "config.json" if path.is_dir() else path
    except OSError:  # reading it says why
        return path


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_shown(path)}: can't be read ({error.strerror}); give a model's config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({' '.join(str(error).split())}); give a model's config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, so it is no model's config.json")
    return cast("dict[str, Any]", found)
