"""A recipe's run and its plain loop under the recorder: what the ranks of :func:`shardbook.train.verify.verify` run.

The run is `loop`'s, step for step; its record takes the place of its books. The plain loop comes after it, in the process of rank 0, which
has then given back all that the run held.
"""

import gc
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
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
from shardbook.train.sampled import Capture, UnitLoop, captured
from shardbook.train.seeding import seeding
from shardbook.train.world import ALONE, World, find_world
from shardbook.verifying.callables import RERUNS

RUN = "run"
PLAIN = "plain"
AGAIN = "again"
"""The same once more, which has other bits where kernels are not deterministic."""

DOUBLE = "fp64"
"""A plain loop that computes and adds in fp64."""

_DOUBLE = Precision(param="fp64", reduce="fp64", grad="fp64", master="fp64")


Report = Mapping[str, Any]
"""What the engine said of a step: ``loss`` (NaN where it has none), ``weight``, ``grad_norm``, ``loss_scale``."""


def record_request(job: Mapping[str, Any]) -> Sequence[Report]:
    """A rank's part: the run, if ``job["run"]``; then, on rank 0, each of ``job["variants"]`` of the plain loop, or of that of each unit.

    The engine's reports come back. ``job["reports"]`` has them where there is no run; empty: there has been none.
    """
    recipe = build_recipe({}, {name: Sourced(**given) for name, given in job["recipe"].items()})
    recipe = replace(recipe, run=replace(recipe.run, check_baseline=0, check_replicas=0))  # what they would find is found here
    world, folder, steps = find_world(os.environ) or ALONE, Path(job["folder"]), int(job["steps"])
    device = choose_device(recipe.run.device, world)
    units, reports = job["units"], job["reports"]
    if not units and job["variants"]:
        _check_fits(recipe, device, job["variants"])
    if job["run"]:
        reports = record_run(recipe, world, device, folder, steps, units=units)
    for variant in job["variants"] if world.rank == 0 else ():
        if units:
            record_units(recipe, device, folder, units, reports=reports, variant=variant)
        else:
            record_plain(recipe, device, folder / variant, steps, reports=reports, variant=variant)
    return reports


def _check_fits(recipe: Recipe, device: torch.device, variants: Sequence[str]) -> None:
    """Before the run, which gives back all that it holds. Every rank comes to the same."""
    remedy = 'compare chosen units, one at a time: units=("blocks.0",), or --units blocks.0'
    check_plain_fits(recipe, device, remedy=remedy, precision=_DOUBLE if DOUBLE in variants else None)


def record_run(recipe: Recipe, world: World, device: torch.device, folder: Path, steps: int, *, units: Sequence[str] = ()) -> list[Report]:
    """The first ``steps`` steps of the recipe's run on this rank, and what goes into ``units``."""
    with process_group(world, device), open_training(recipe, world, device, recorded=True) as training:
        captures = [Capture(training.engine.model, unit, folder_of(folder, index), world.rank) for index, unit in enumerate(units)]
        reports = record_training(training, folder / RUN, steps, captures)
        for capture in captures:
            capture.close()
    del training
    gc.collect()
    return reports


def record_training(training: Training, folder: Path, steps: int, captures: Sequence[Capture] = ()) -> list[Report]:
    """The first ``steps`` steps of a training that has not begun, which must have been opened as ``recorded``."""
    engine = training.engine
    assert engine.optimizer is not None

    def write(step: int, micro: int) -> None:
        for capture in captures:
            capture.write(step, micro)

    training.after_backward = write
    reports: list[Report] = []
    with record(engine.model, engine.optimizer, folder, complete_every=1) as training.recorder:
        for step in range(1, steps + 1):
            told = training.step(step)
            loss = math.nan if told.loss is None else told.loss
            reports.append({"loss": loss, "weight": told.weight, "grad_norm": told.grad_norm, "loss_scale": told.loss_scale})
    training.recorder = None
    return reports


def record_plain(
    recipe: Recipe, device: torch.device, folder: Path, steps: int, *, reports: Sequence[Report] = (), variant: str = PLAIN
) -> None:
    """The first ``steps`` steps of the plain loop over all ranks' micro-batches, in this process.

    Args:
        recipe: of the run.
        device: the run's.
        folder: for the record.
        steps: how many.
        reports: the engine's, for the loss scale of each step; empty: there is no run.
        variant: :data:`PLAIN`, :data:`AGAIN`, :data:`DOUBLE`, or the name of one of :data:`shardbook.verifying.callables.RERUNS`.

    Raises:
        ConfigError: the loss scale depends on a run that isn't there; the model is random although it is seeded.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    data, seed = Given(recipe, device), recipe.run.seed
    scales = [1.0] * steps if variant == DOUBLE else [report["loss_scale"] for report in reports] or _scales(recipe, steps)
    loop = build_plain(recipe, device, _DOUBLE if variant == DOUBLE else None)
    loop.check_repeatable(data.step(1)[0][0], seeding(seed, 1))
    mode = dict(RERUNS).get(variant, nullcontext)()  # one for all steps, as it draws on
    with record(InOrder(loop), loop.optimizer, folder, complete_every=1) as loop.recorder:
        for step, scale in enumerate(scales, 1):
            with mode:
                loop.step(data.step(step), scale, seeding(seed, step))


def record_units(
    recipe: Recipe, device: torch.device, folder: Path, units: Sequence[str], *, reports: Sequence[Report], variant: str = PLAIN
) -> None:
    """The plain loop of each unit, one after the other, over what the run has written down of it: to ``unit-k/variant``."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    mode = dict(RERUNS).get(variant, nullcontext)()  # one for all steps, as it draws on
    for index, unit in enumerate(units):
        place, loop = folder_of(folder, index), UnitLoop(recipe, unit, device)
        with record(InOrder(loop), loop.optimizer, place / variant, complete_every=1) as loop.recorder:
            for step, report in enumerate(reports, 1):
                batches = captured(place, step, recipe.run.ranks, recipe.zero.accumulate)
                with mode:
                    loop.reported(report).step(batches, report["loss_scale"])


def folder_of(folder: Path, index: int) -> Path:
    """Of what is known of one of the chosen units."""
    return folder / f"unit-{index}"


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
    """What a recorder is shown: a loop's parameters under their names, in the optimizer's order, in which it gives masters their names."""

    def __init__(self, loop: PlainLoop) -> None:
        super().__init__()
        numbers = {id(held): number for number, held in enumerate(loop.masters or loop.model.parameters())}
        held = [numbers[id(master)] for group in loop.optimizer.param_groups for master in group["params"]]
        parameters = list(loop.model.parameters())
        self._parameters = {loop.names[number]: parameters[number] for number in held}
        self._buffers = dict(loop.model.named_buffers())
        self._calls: list[nn.Module] = [loop.model]  # in a list, as a module is no part of another there
        loop.call = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, so that a recorder sees what goes in and what comes out."""
        return self._calls[0](*args, **kwargs)


def _scales(recipe: Recipe, steps: int) -> list[float]:
    scale: Any = recipe.zero.effective_loss_scale
    if scale == "dynamic":
        raise ConfigError("zero.loss_scale: a dynamic scale is known to the run alone; give a number to train the plain loop without it")
    return [float(scale)] * steps
