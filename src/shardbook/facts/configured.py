"""The architecture of a module that carries its configuration: shardbook's own decoder, and models of transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from shardbook.errors import ConfigError
from shardbook.facts import huggingface
from shardbook.facts.architecture import Architecture

Found = tuple[Architecture | None, tuple[str, ...]]


def architecture(model: Any, count: int) -> Found:
    """What the configuration of a module says, if it has one; ``count``: elements of the module's parameters."""
    for wrapped in _wrapped(model):
        config = getattr(wrapped, "config", None)
        if type(config).__name__ == "DecoderConfig":
            return of_decoder(config), ()
        if callable(getattr(config, "to_dict", None)) and isinstance(getattr(config, "model_type", None), str):
            return _of_transformers(wrapped, config, count)
    return None, ()


def of_decoder(config: Any) -> Architecture:
    """Shardbook's own decoder, from its ``DecoderConfig``."""
    return Architecture(
        family="shardbook",
        layers=config.layers,
        hidden=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.width // config.heads,
        ffn=config.ffn,
        vocab=config.vocab,
        tied=config.tied,
        implementation="shardbook",
    )


def _of_transformers(model: Any, config: Any, count: int) -> Found:
    mapping = cast("Mapping[str, Any]", config.to_dict())
    try:
        described = huggingface.facts_of(mapping, type(model).__name__)
    except ConfigError as error:
        return None, (str(error),)
    found = described.architecture
    assert found is not None
    notes: tuple[str, ...] = ()
    if described.num_parameters != count:
        outside = "the units are the module's, the activations those of the model that its config describes"
        notes = (f"the module has {count:,} parameters, its config describes {described.num_parameters:,}: {outside}",)
    return replace(found, implementation="transformers"), notes


def _wrapped(model: Any) -> Iterator[Any]:
    """The module, and what it wraps and adds nothing to: one child, no parameters of its own."""
    seen = 0
    while seen < 8:
        yield model
        children = list(model.children())
        if len(children) != 1 or any(True for _ in model.named_parameters(recurse=False)):
            return
        model, seen = children[0], seen + 1
