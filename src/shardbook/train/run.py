"""One rank's run from its recipe to ``run.json``: what :mod:`shardbook.train.rank` and the ``train`` command call."""

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardbook.document import RunDocument, write_atomically
from shardbook.train.devices import choose_device, process_group
from shardbook.train.keeping import Keeping, asked_to_end
from shardbook.train.loop import open_training
from shardbook.train.near import bind
from shardbook.train.recipe import Recipe, Sourced, build_recipe
from shardbook.train.settings import RUN_FILE
from shardbook.train.terminal import EngineWords, Reporter
from shardbook.train.world import ALONE, World, find_world


def run_request(request: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> int:
    """:func:`run` with a recipe that came from another process, as :meth:`Recipe.request` wrote it."""
    recipe = build_recipe({}, {name: Sourced(value=given["value"], origin=given["origin"]) for name, given in request.items()})
    world = find_world(os.environ) or ALONE
    return run(recipe, replace(world, started_by="shardbook"), as_json=as_json)  # elastic's variables are torchrun's


def run(recipe: Recipe, world: World, *, as_json: bool) -> int:
    """Trains as the recipe says. The exit code: 0, or 1 if the plain loop disagreed."""
    device = choose_device(recipe.run.device, world)
    binding = bind(world, device)
    reporter = Reporter(recipe, as_json=as_json, silent=world.rank != 0)
    logging.getLogger("shardbook").addHandler(EngineWords(reporter))
    with process_group(world, device) as backend, open_training(recipe, world, device) as training:
        ranks = f"{world.num_ranks} on {device.type}, backend {backend}, started by {world.started_by}; {binding}"
        reporter.begin({"data": training.text.describe(), "ranks": ranks, "engine": _summary(training.engine.describe())})
        keeping = Keeping(training)
        done = keeping.resume()
        if done >= recipe.run.steps:
            if world.rank == 0:
                reporter.say(f"all {done} steps are done already; nothing is left to train")
            return 0
        training.comparison.start()
        try:
            with reporter.progress(done), asked_to_end(saves=recipe.run.save_every > 0) as asked:
                for step in range(done + 1, recipe.run.steps + 1):
                    reporter.step(step, training.step(step), device)
                    if keeping.after(step, ends=asked()):
                        if world.rank == 0:
                            reporter.say(f"SIGTERM: saved after step {step}; --resume auto goes on from there")
                        return 128 + signal.SIGTERM
        except Exception:
            if (document := training.document_of_shortage()) is not None:
                write_atomically(recipe.run.out / RUN_FILE, document.to_json())
            raise
        document = training.document(training.validate())
    if world.rank == 0:
        _finish(recipe, reporter, document)
    return 0 if document.baseline is None or document.baseline.identical else 1


def _summary(description: str) -> str:
    """The engine's words about the whole; unit by unit and piece by piece would be hundreds of lines."""
    return "\n       ".join(line for line in description.splitlines() if not line.startswith(" "))


def _finish(recipe: Recipe, reporter: Reporter, document: RunDocument) -> None:
    path = recipe.run.out / RUN_FILE
    write_atomically(path, document.to_json())
    reporter.finish(document, path)
