"""From whatever a person has to the facts of a model.

>>> resolve("7e9").num_parameters, resolve("1.5B").num_parameters, resolve("gpt2").num_parameters
(7000000000, 1500000000, 124439808)
"""

import os
import re
from numbers import Integral
from pathlib import Path
from typing import Any

from shardbook.errors import ConfigError
from shardbook.facts import catalog, huggingface, module
from shardbook.facts.model import ModelFacts

ALLOWED = "a number of parameters (7e9, 7B), a name of the catalog, a config.json or its folder, or an nn.Module"
_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def resolve(model: Any) -> ModelFacts:
    """Facts from a :class:`ModelFacts`, a count, a name of the catalog, the path of a ``config.json`` or an ``nn.Module``.

    A text is read as a count, then as a name, then as a path; ``./name`` is always a path. ``7B`` is 7·10^9.

    Raises:
        ConfigError: it is none of these, or there is something wrong with it; one line.
    """
    if isinstance(model, ModelFacts):
        return model
    if isinstance(model, float):
        return ModelFacts.of_count(model)
    if isinstance(model, Integral) and not isinstance(model, bool):  # numpy's numbers as well
        return ModelFacts.of_count(int(model))
    if isinstance(model, os.PathLike):
        return huggingface.facts(Path(model))
    if isinstance(model, str):
        return _from_text(model.strip())
    if module.is_module(model):
        return module.facts(model)
    raise ConfigError(f"model = {_short(model)}: allowed is {ALLOWED}; a {type(model).__name__} was given")


def _from_text(text: str) -> ModelFacts:
    if not text:
        raise ConfigError(f"model = '': allowed is {ALLOWED}; for example llama-3.1-8b")
    count = parse_count(text)
    if count is not None:
        return ModelFacts.of_count(count)
    if text.lower() in catalog.rows():
        return catalog.facts(text)
    if _is_path(text):
        return huggingface.facts(Path(text))
    near = catalog.nearest_names(text, list(catalog.rows()))
    raise ConfigError(f"model = {_short(text)}: allowed is {ALLOWED}; there is no such name or file; {near}")


def parse_count(text: str) -> float | None:
    """The number that a text writes, with the suffixes K, M, B and T; None: it is no number.

    >>> parse_count("7B"), parse_count("1_000"), parse_count("-3"), parse_count("llama")
    (7000000000, 1000.0, -3.0, None)
    """
    found = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmbt])", text.strip(), re.IGNORECASE)
    if found is not None:
        return round(float(found[1]) * _SCALES[found[2].lower()])
    try:
        return float(text)
    except ValueError:
        return None


def _is_path(text: str) -> bool:
    if "/" in text or os.sep in text or text.endswith(".json"):
        return True
    try:
        return Path(text).exists()
    except OSError:  # longer than a name may be
        return False


def _short(value: Any) -> str:
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
