"""A causal language model from a ``config.json`` on this machine, built by transformers, with the contract of this package.

Nothing is downloaded: only the configuration is read, the weights are drawn. The repository's own code (``auto_map``) is
never run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.models.decoder import summed_loss


class LocalModel(nn.Module):
    """A transformers model whose ``forward(inputs, targets)`` gives ``(loss_sum, num_tokens)``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy in fp32, and how many targets count (those that aren't ``-100``)."""
        return summed_loss(self.model(input_ids=inputs, use_cache=False).logits, targets)


def build_local(path: Path, *, vocab: int, seed: int) -> LocalModel:
    """Builds the model that ``path`` describes, in fp32, with weights drawn from ``seed``.

    Args:
        path: a ``config.json``, or the folder that holds it.
        vocab: token values the data has; the model must know at least as many.
        seed: seeds torch's default generator for the weights; its state is put back afterwards.

    Raises:
        ConfigError: no such file, not a model's configuration, a class transformers doesn't have, or no transformers here.
    """
    path = path / "config.json" if path.is_dir() else path
    facts = read_config(path)
    transformers = _transformers(path)
    try:
        config = transformers.AutoConfig.for_model(**facts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # each model's class checks its own fields, with exceptions of its own kinds
        what = f"{path}: transformers {transformers.__version__} can't build a causal language model from it"
        raise ConfigError(f"{what}: {_reason(error)}") from error
    known = getattr(config, "vocab_size", None)
    if not isinstance(known, int) or known < vocab:
        raise ConfigError(f"{path}: vocab_size = {known}: the data has token values below {vocab}; use a model with at least as many")
    return LocalModel(model.float())


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a ``config.json``, or of the one in a folder.

    Raises:
        ConfigError: no such file, or no model's configuration.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); give a model's config.json") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); give a model's config.json") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
        raise ConfigError(f'{path}: has no "model_type", so it is no model\'s config.json')
    return facts


def _reason(error: Exception) -> str:
    """What went wrong in one line, without the list of every model that transformers knows."""
    text = " ".join(str(error).split())
    for listing in (" Should contain one of", " Model type should be one of"):
        text = text.split(listing)[0]
    return text if len(text) <= 300 else f"{text[:300]}..."


def _transformers(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path}: building it needs the transformers package, which is not here: pip install 'shardbook[hf]'; "
            "or leave the file out to train shardbook's own decoder"
        ) from error
    return transformers
