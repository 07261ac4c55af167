"""``shardbook train``: the main job."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from shardbook.checkpoint.foreign import find_tensors
from shardbook.document import RunDocument, write_atomically
from shardbook.errors import ConfigError
from shardbook.report.console import shortage_table
from shardbook.train.recipe import COMMAND_LINE, Recipe, Sourced, build_recipe, read_recipe
from shardbook.train.settings import RUN_FILE
from shardbook.train.text import read_text, split
from shardbook.train.world import ALONE, World, find_world

NO_TORCH = "training needs torch, which is not here: pip install 'shardbook[train]'"

_FAILURE_FILE = "failure.txt"


def _option(name: str, text: str, metavar: str) -> Any:
    """How an option for the recipe's value ``name`` reads in the help: its default is the recipe's, typed nowhere else."""
    default = _DEFAULTS.get(name)
    hint = "" if default is None else f"(default: {default})"
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=hint)


_DEFAULTS = build_recipe({}, {}).values()

_NAMES: Mapping[str, str] = {
    "stage": "zero.stage",
    "ranks": "run.ranks",
    "steps": "run.steps",
    "micro_batch": "batch.micro_batch",
    "sequence": "batch.sequence",
    "accumulate": "zero.accumulate",
    "global_batch": "batch.global_batch",
    "precision": "zero.precision",
    "clip": "zero.clip_grad_norm",
    "recompute": "zero.recompute.policy",
    "recompute_every": "zero.recompute.every",
    "recompute_offload": "zero.recompute.offload",
    "offload_optimizer": "zero.offload.optimizer",
    "offload_params": "zero.offload.params",
    "offload_path": "zero.offload.path",
    "lr": "optimizer.learning_rate",
    "layers": "model.layers",
    "width": "model.width",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "ffn": "model.ffn",
    "tied": "model.tied",
    "config": "model.config",
    "text": "data.text",
    "seed": "run.seed",
    "check_baseline": "run.check_baseline",
    "check_replicas": "run.check_replicas",
    "out": "run.out",
    "port": "run.port",
    "device": "run.device",
    "budget": "run.budget",
    "save_every": "run.save_every",
    "save_async": "run.save_async",
    "keep": "run.keep",
    "resume": "run.resume",
    "init_from": "run.init_from",
}
"""Option to the dotted name of the recipe's value that it sets."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Every option overrides the recipe's value; what neither gives is a default. What is in force is printed first."""

    recipe: Annotated[Path | None, _option("", "recipe: tables [model] [data] [optimizer] [batch] [zero] [run]", "TOML")] = None
    stage: Annotated[int | None, _option("zero.stage", "sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 all", "0-3")] = None
    ranks: Annotated[int | None, _option("run.ranks", "data-parallel ranks on this machine", "N")] = None
    steps: Annotated[int | None, _option("run.steps", "optimizer steps", "N")] = None
    micro_batch: Annotated[int | None, _option("batch.micro_batch", "sequences in one forward of one rank", "N")] = None
    sequence: Annotated[int | None, _option("batch.sequence", "tokens in a sequence", "N")] = None
    accumulate: Annotated[int | None, _option("zero.accumulate", "micro-batches of one rank in a step", "N")] = None
    global_batch: Annotated[int | None, _option("", "sequences in a step over all ranks; the number left out is derived", "N")] = None
    precision: Annotated[str | None, _option("", "fp32, bf16, fp16, pure-bf16 or 2+2+4+8 (default: fp32)", "NAME")] = None
    clip: Annotated[float | None, _option("zero.clip_grad_norm", "largest norm of the gradient (default: none)", "NORM")] = None
    recompute: Annotated[str | None, _option("zero.recompute.policy", "activations computed again: none, full, selective", "POLICY")] = None
    recompute_every: Annotated[int | None, _option("zero.recompute.every", "in every k-th block", "K")] = None
    recompute_offload: Annotated[bool, _option("", "the inputs that recomputation keeps rest on the host", "")] = False
    offload_optimizer: Annotated[str | None, _option("zero.offload.optimizer", "where its state lives: none, host, disk", "PLACE")] = None
    offload_params: Annotated[str | None, _option("zero.offload.params", "where shards live, at stage 3: none, host", "PLACE")] = None
    offload_path: Annotated[Path | None, _option("", "folder for --offload-optimizer disk", "PATH")] = None
    lr: Annotated[float | None, _option("optimizer.learning_rate", "learning rate after the warmup", "RATE")] = None
    layers: Annotated[int | None, _option("model.layers", "blocks of the decoder", "N")] = None
    width: Annotated[int | None, _option("model.width", "elements of the residual stream", "N")] = None
    heads: Annotated[int | None, _option("model.heads", "query heads", "N")] = None
    kv_heads: Annotated[int | None, _option("model.kv_heads", "key and value heads", "N")] = None
    ffn: Annotated[int | None, _option("model.ffn", "inner elements of the feed-forward", "N")] = None
    tied: Annotated[bool, _option("", "the head shares the embedding's matrix", "")] = False
    untied: Annotated[bool, _option("", "the head has a matrix of its own (default)", "")] = False
    config: Annotated[Path | None, _option("", "build this config.json with transformers instead of the decoder", "JSON")] = None
    text: Annotated[Path | None, _option("", "file or folder of text (default: the Python standard library's sources)", "PATH")] = None
    seed: Annotated[int | None, _option("run.seed", "of the weights and of the data's order", "N")] = None
    check_baseline: Annotated[int | None, _option("run.check_baseline", "train the plain loop beside it for so many steps", "STEPS")] = None
    check_replicas: Annotated[int | None, _option("run.check_replicas", "compare all ranks' parameters every so many steps", "STEPS")] = (
        None
    )
    out: Annotated[Path | None, _option("run.out", "folder for run.json", "PATH")] = None
    port: Annotated[int | None, _option("run.port", "of the ranks' rendezvous (default: a free one)", "PORT")] = None
    device: Annotated[str | None, _option("run.device", "auto, cpu or cuda", "NAME")] = None
    budget: Annotated[str | None, _option("", "end the run, and say what was held, when a rank crosses it (default: none)", "8GiB")] = None
    save_every: Annotated[int | None, _option("run.save_every", "steps from one checkpoint to the next; 0: none", "STEPS")] = None
    save_async: Annotated[bool, _option("", "write checkpoints while the training goes on, from a copy in host memory", "")] = False
    keep: Annotated[int | None, _option("run.keep", "checkpoints that are kept, the last ones", "N")] = None
    resume: Annotated[str | None, _option("", "go on from a checkpoint; auto: the last in --out, if any (default: begin)", "PATH")] = None
    init_from: Annotated[
        Path | None, _option("", "begin from these weights: safetensors, as transformers or export wrote them", "PATH")
    ] = None
    json: Annotated[bool, _option("", "print run.json on stdout and everything else on stderr", "")] = False

    def given(self) -> dict[str, Sourced]:
        """What was said on the command line, by the recipe's dotted names."""
        if self.tied and self.untied:
            raise ConfigError("--tied and --untied contradict each other; leave one of them out")
        values = {option: getattr(self, option) for option in _NAMES}
        values["tied"] = self.tied if self.tied or self.untied else None
        values |= {name: getattr(self, name) or None for name in ("save_async", "recompute_offload")}
        return {_NAMES[option]: Sourced(value=value, origin=COMMAND_LINE) for option, value in values.items() if value is not None}


def train(options: Annotated[TrainOptions, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Train a decoder on real text under ZeRO, on local ranks or on those that torchrun or SLURM started."""
    world = find_world(os.environ)
    file = read_recipe(options.recipe) if options.recipe is not None else {}
    recipe = build_recipe(file, _with_ranks(options.given(), file, world))
    _check(recipe, world)
    if find_spec("torch") is None:
        return _fail(NO_TORCH)
    from shardbook.train.room import check_host_room

    check_host_room(recipe, world)
    if world is None and recipe.run.ranks > 1:
        return _launch(recipe, as_json=options.json)
    from shardbook.train.rank import run_here

    return run_here(recipe, world or ALONE, as_json=options.json)


def _with_ranks(given: Mapping[str, Sourced], file: Mapping[str, Sourced], world: World | None) -> dict[str, Sourced]:
    """Where ranks are there already, their number is what was started."""
    if world is None:
        return dict(given)
    asked = given.get("run.ranks") or file.get("run.ranks")
    if asked is not None and asked.value != world.num_ranks:
        raise ConfigError(
            f"run.ranks = {asked.value!r} ({asked.origin}), but {world.started_by} started {world.num_ranks}; leave run.ranks out"
        )
    return {**given, "run.ranks": Sourced(value=world.num_ranks, origin=world.started_by)}


def _check(recipe: Recipe, world: World | None) -> None:
    """What can be known to fail before a process is started: a port nobody needs, the text, and the folder of the run."""
    if recipe.run.port is not None and (world is not None or recipe.run.ranks == 1):
        why = f"{world.started_by} has started the ranks" if world is not None else "a rank alone meets nobody"
        raise ConfigError(f"run.port = {recipe.run.port} ({recipe.origin('run.port')}): no effect, as {why}; leave it out")
    if recipe.run.init_from is not None:
        find_tensors(recipe.run.init_from)
    split(read_text(recipe.data.text, recipe.data.limit_nbytes), recipe.batch.sequence, recipe.data.validation)
    try:
        recipe.run.out.mkdir(parents=True, exist_ok=True)
        (recipe.run.out / _FAILURE_FILE).unlink(missing_ok=True)  # an earlier run's
    except OSError as error:
        raise ConfigError(
            f"run.out = {str(recipe.run.out)!r}: can't be made ({error.strerror}); give a folder that can be written"
        ) from error


def _launch(recipe: Recipe, *, as_json: bool) -> int:
    from shardbook.train.launch import LaunchError, launch

    began = time.time()
    try:
        return launch({"task": "train", "recipe": recipe.request(), "json": as_json}, ranks=recipe.run.ranks, port=recipe.run.port)
    except LaunchError as error:
        where = ""
        if error.trace and error.exit_code != 2:
            path = recipe.run.out / _FAILURE_FILE
            write_atomically(path, error.trace)
            where = f"; the whole traceback is in {path}"
        _tell_shortage(recipe.run.out / RUN_FILE, began)
        return _fail(f"{error}{where}", error.exit_code)


def _tell_shortage(path: Path, began: float) -> None:
    """A rank that ran out of memory has written down what it knew."""
    if path.is_file() and path.stat().st_mtime >= began:
        document = RunDocument.from_json(path.read_text(encoding="utf-8"))
        if document.shortage is not None:
            Console(stderr=True, soft_wrap=True).print(shortage_table(document.shortage))


def _fail(message: str, code: int = 1) -> int:
    print(f"shardbook: {message}", file=sys.stderr, flush=True)
    return code
