"""What a run is built of: its text, its micro-batches and its model."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shardbook.errors import ConfigError
from shardbook.models.decoder import Decoder, init_weights
from shardbook.models.local import build_local
from shardbook.train.batches import Batches
from shardbook.train.initial import fill_initial
from shardbook.train.recipe import Recipe
from shardbook.train.text import VOCAB, Text, read_text, split
from shardbook.train.world import World


def read_same_text(recipe: Recipe, world: World) -> Text:
    """The recipe's text.

    Raises:
        ConfigError: it can't be read, or the ranks read different bytes; every rank raises then.
    """
    text = read_text(recipe.data.text, recipe.data.limit_nbytes)
    if world.num_ranks > 1:
        digests: list[str | None] = [None] * world.num_ranks
        dist.all_gather_object(digests, text.sha256)
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            remedy = "give all ranks the same files, unchanged while they are read"
            raise ConfigError(f"data.text: rank {different[0]} read other bytes than rank 0 from {text.source}; {remedy}")
    return text


def build_batches(recipe: Recipe, text: Text) -> tuple[Batches, Batches]:
    """Micro-batches to train on, and to validate on.

    Raises:
        ConfigError: the text is too short for the sequence; the model has fewer token values than the text.
    """
    if recipe.model.vocab < VOCAB:
        raise ConfigError(f"model.vocab = {recipe.model.vocab}: a token is a byte, so at least {VOCAB} values are needed")
    train, validation = split(text, recipe.batch.sequence, recipe.data.validation)
    batches = Batches(
        content=train,
        sequence=recipe.batch.sequence,
        micro_batch=recipe.batch.micro_batch,
        accumulate=recipe.zero.accumulate,
        seed=recipe.run.seed,
    )
    return batches, replace(batches, content=validation)


def build_model(recipe: Recipe, device: torch.device) -> nn.Module:
    """The whole model on ``device``, in fp32, with the weights that every model of this recipe has on this kind of device."""
    model = _drawn(recipe, device)
    fill_initial(model, recipe)
    return model


def _drawn(recipe: Recipe, device: torch.device) -> nn.Module:
    if recipe.model_file is not None:
        return build_local(recipe.model_file, vocab=VOCAB, seed=recipe.run.seed).to(device)
    with device:
        return Decoder(recipe.model, recipe.run.seed)


def build_sharded_model(recipe: Recipe, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], None] | None]:
    """The model for an engine, and what initialises a unit of it: our own is on the meta device, so that no rank ever holds it whole.

    Its weights are drawn; :func:`shardbook.train.initial.load_initial` brings those that the recipe begins from.
    """
    if recipe.model_file is not None:
        return _drawn(recipe, device), None
    return _drawn(recipe, torch.device("meta")), init_weights
