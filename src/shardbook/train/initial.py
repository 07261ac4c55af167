"""Weights that a run begins from: ``run.init_from``, as transformers writes them or as ``shardbook checkpoint export`` does.

For shardbook's own decoder those of a Llama are taken under its names, once a ``config.json`` beside them has been compared.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from torch import nn

from shardbook import Engine
from shardbook.checkpoint.foreign import find_tensors
from shardbook.checkpoint.foreign_names import Asked
from shardbook.checkpoint.import_weights import fill_module
from shardbook.errors import ConfigError
from shardbook.models.llama import check_same_model, theirs_to_ours
from shardbook.models.local import LocalModel
from shardbook.train.recipe import Recipe


def load_initial(engine: Engine, recipe: Recipe) -> None:
    """Into the run's engine; all ranks call it. Nothing where the recipe begins from drawn weights.

    Raises:
        ConfigError: they can't be read, or are of another model.
    """
    if recipe.run.init_from is not None:
        engine.load_weights(recipe.run.init_from, rename=_rename(recipe, engine.model, recipe.run.init_from))


def fill_initial(module: nn.Module, recipe: Recipe, *, under: str = "") -> None:
    """The same values into a whole model, or into one of its modules (``under``: what its names begin with then).

    Raises:
        ConfigError: as :func:`load_initial`.
    """
    if recipe.run.init_from is not None:
        asked = Asked(rename=_rename(recipe, module, recipe.run.init_from, under=under))
        fill_module(module, recipe.run.init_from, asked, under=under)


def _rename(recipe: Recipe, model: nn.Module, path: Path, *, under: str = "") -> dict[str, str]:
    names = find_tensors(path).keys()
    if any(under + name in names for name, _ in model.named_parameters(remove_duplicate=False)):
        return {}  # an export's, under the model's own names
    if recipe.model_file is None:
        return _of_llama(recipe, names, path)
    inner = model.model if isinstance(model, LocalModel) else model
    base = str(getattr(inner, "base_model_prefix", ""))
    has_base = not base or any(name.startswith(f"{base}.") for name in names)
    return {"": "model." if has_base else f"model.{base}."}  # some files hold the model without its head, whose names are shorter


def _of_llama(recipe: Recipe, names: Iterable[str], path: Path) -> dict[str, str]:
    beside = (path if path.is_dir() else path.parent) / "config.json"
    rename = theirs_to_ours(names, recipe.model.layers)
    if rename and beside.is_file():
        try:
            facts: Any = json.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{beside}: can't be read ({error}); take it away, or give a model's config.json") from error
        check_same_model(recipe.model, cast(dict[str, Any], facts) if isinstance(facts, dict) else {}, str(beside))
    return rename
