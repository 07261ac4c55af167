"""A recipe's run and its plain loop under the recorder: what the ranks of :func:`shardbook.train.verify.verify` run.

The run is `loop`'s, step for step; its record takes the place of its books. The plain loop comes after it, in the process of rank 0, which
has then given back all that the run held.
"""

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.config import Precision
from shardbook.errors import ConfigError
from shardbook.recording.record import record
from shardbook.train.baseline import PlainLoop
from shardbook.train.devices import choose_device, process_group
from shardbook.train.loop import Training, build_plain, open_training
from shardbook.train.plain_memory import check_plain_fits
from shardbook.train.prepare import build_batches, read_same_text
from shardbook.train.recipe import Recipe, Sourced, build_recipe
from shardbook.train.seeding import seeding
from shardbook.train.world import ALONE, World, find_world
from shardbook.verifying.callables import RERUNS

RUN = "run"
PLAIN = "plain"

DOUBLE = "fp64"
"""A plain loop that computes and adds in fp64."""

_DOUBLE = Precision(param="fp64", reduce="fp64", grad="fp64", master="fp64")


def record_request(job: Mapping[str, Any]) -> list[float] | None:
    """A rank's part: the run, unless ``job["run"]`` is false; then, on rank 0, each of ``job["variants"]`` of the plain loop.

    What comes back is the loss scale of each step, which ``job["scales"]`` gives where there is no run.
    """
    recipe = build_recipe({}, {name: Sourced(**given) for name, given in job["recipe"].items()})
    world, folder, steps = find_world(os.environ) or ALONE, Path(job["folder"]), int(job["steps"])
    device = choose_device(recipe.run.device, world)
    if job["variants"]:
        _check_fits(recipe, device, job["variants"])
    scales = record_run(recipe, world, device, folder / RUN, steps) if job["run"] else job.get("scales")
    if world.rank == 0:
        for variant in job["variants"]:
            record_plain(recipe, device, folder / variant, steps, scales=scales, variant=variant)
    return scales


def _check_fits(recipe: Recipe, device: torch.device, variants: Sequence[str]) -> None:
    """Before the run, which gives back all that it holds. Every rank comes to the same."""
    remedy = 'compare chosen units, one at a time: units=("blocks.0",), or --units blocks.0'
    check_plain_fits(recipe, device, remedy=remedy, precision=_DOUBLE if DOUBLE in variants else None)


def record_run(recipe: Recipe, world: World, device: torch.device, folder: Path, steps: int) -> list[float]:
    """The first ``steps`` steps of the recipe's run on this rank; the loss scale of each."""
    with process_group(world, device), open_training(recipe, world, device, recorded=True) as training:
        scales = _record(training, folder, steps)
    del training
    gc.collect()
    return scales


def _record(training: Training, folder: Path, steps: int) -> list[float]:
    engine = training.engine
    assert engine.optimizer is not None
    with record(engine.model, engine.optimizer, folder, complete_every=1) as training.recorder:
        scales = [training.step(step).loss_scale for step in range(1, steps + 1)]
    training.recorder = None
    return scales


def record_plain(
    recipe: Recipe, device: torch.device, folder: Path, steps: int, *, scales: Sequence[float] | None = None, variant: str = PLAIN
) -> None:
    """The first ``steps`` steps of the plain loop over all ranks' micro-batches, in this process.

    Args:
        recipe: of the run.
        device: the run's.
        folder: for the record.
        steps: how many.
        scales: the loss scale of each step of the run; None: there is no run.
        variant: :data:`PLAIN`, :data:`DOUBLE`, or the name of one of :data:`shardbook.verifying.callables.RERUNS`.

    Raises:
        ConfigError: the loss scale depends on a run that isn't there; the model is random although it is seeded.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    data, seed = Given(recipe, device), recipe.run.seed
    scales = [1.0] * steps if variant == DOUBLE else scales or _scales(recipe, steps)
    loop = build_plain(recipe, device, _DOUBLE if variant == DOUBLE else None)
    loop.check_repeatable(data.step(1)[0][0], seeding(seed, 1))
    mode = dict(RERUNS).get(variant, nullcontext)
    with record(loop.model if loop.masters is None else InOrder(loop), loop.optimizer, folder, complete_every=1) as loop.recorder:
        for step, scale in enumerate(scales, 1):
            with mode():
                loop.step(data.step(step), scale, seeding(seed, step))


class Given:
    """What every rank of a recipe's run is given, for a process that stands for all of them."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._batches, _ = build_batches(recipe, read_same_text(recipe, ALONE))
        self._num_ranks, self._num_micro, self._device = recipe.run.ranks, recipe.zero.accumulate, device

    def step(self, step: int) -> list[list[tuple[Tensor, ...]]]:
        """``[rank][micro]``; ``step`` counts from 1."""
        return [[self._micro(step, rank, micro) for micro in range(self._num_micro)] for rank in range(self._num_ranks)]

    def _micro(self, step: int, rank: int, micro: int) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self._device) for tensor in self._batches.micro(step - 1, rank, micro, self._num_ranks))


class InOrder(nn.Module):
    """The model's parameters in the optimizer's order, in which a recorder gives the masters their names."""

    def __init__(self, loop: PlainLoop) -> None:
        super().__init__()
        numbers = {id(master): number for number, master in enumerate(loop.masters or ())}
        held = [numbers[id(master)] for group in loop.optimizer.param_groups for master in group["params"]]
        parameters = list(loop.model.parameters())
        self._parameters = {loop.names[number]: parameters[number] for number in held}
        self._buffers = dict(loop.model.named_buffers())


def _scales(recipe: Recipe, steps: int) -> list[float]:
    scale: Any = recipe.zero.effective_loss_scale
    if scale == "dynamic":
        raise ConfigError("zero.loss_scale: a dynamic scale is known to the run alone; give a number to train the plain loop without it")
    return [float(scale)] * steps
