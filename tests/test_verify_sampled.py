"""A plain loop of one unit: the bits of the whole run's, from what went into it; and what can't be taken apart."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from shardbook.errors import ConfigError
from shardbook.train.loop import open_training
from shardbook.train.recipe import Recipe, Sourced, build_recipe
from shardbook.train.recipe_verdict import OfUnit
from shardbook.train.recorded import PLAIN, RUN, folder_of, record_training, record_units
from shardbook.train.sampled import Capture, check_unit
from shardbook.train.world import World
from shardbook.verifying.judge import judge
from tests import faults, ranks
from tests.test_verify_recipe import CPU, STEPS, recipe_of, text

pytestmark = pytest.mark.full

__all__ = ["text"]  # a fixture


def run_with_units(request: dict, folder: str, units: list[str]) -> list:
    """A job: the run on this rank, and what goes into the units."""
    recipe = build_recipe({}, {name: Sourced(**given) for name, given in request.items()})
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local_ranks=num_ranks, started_by="test", variables={})
    with open_training(recipe, world, CPU, recorded=True) as training:
        captures = [Capture(training.engine.model, unit, folder_of(Path(folder), index), rank) for index, unit in enumerate(units)]
        reports = record_training(training, Path(folder) / RUN, STEPS, captures)
        for capture in captures:
            capture.close()
    return list(reports)


def verdicts_of(recipe: Recipe, folder: Path, units: list[str], reports: list) -> list[sb.Verdict]:
    record_units(recipe, CPU, folder, units, reports=reports)
    run = sb.Record.open(folder / RUN)
    plain = [sb.Record.open(folder_of(folder, index) / PLAIN) for index in range(len(units))]
    return [judge(OfUnit(run, unit), OfUnit(one, unit), steps=STEPS) for unit, one in zip(units, plain, strict=True)]


UNITS = ["blocks.1", "blocks.0.feed_forward", "head"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("stage", "precision", "accumulate"),
    [(3, "bf16", 2), *(pytest.param(s, p, a, marks=pytest.mark.full) for s in range(4) for p in ("fp32", "bf16") for a in (1, 3))],
)
def test_units_computed_again_have_the_runs_bits(text, stage, precision, accumulate):
    recipe = recipe_of(text, zero__stage=stage, zero__precision=precision, zero__accumulate=accumulate)
    with tempfile.TemporaryDirectory() as folder:
        reports = ranks.call(2, run_with_units, recipe.request(), folder, UNITS)[0]
        found = verdicts_of(recipe, Path(folder), UNITS, reports)
    for unit, one in zip(UNITS, found, strict=True):
        assert one.kind == "identical", f"{unit}: {one}"
        assert {phase.phase for phase in one.phases} >= {"backward", "clip", "update", "state"}
    assert max(one.num_compared for one in found[0].phases) == 9


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["only one rank's gradient counts", "the scale is applied twice"])
def test_a_fault_in_the_run_is_seen_in_a_unit(text, tmp_path, fault):
    recipe = recipe_of(text, zero__stage=2, optimizer__warmup=0)
    job = (run_with_units.__module__, run_with_units.__qualname__, (recipe.request(), str(tmp_path), ["blocks.1"]), {})
    calls, error, reports = ranks.fresh_ranks(2, faults.under_fault, fault, *job)[0].value
    assert calls
    assert not error, error
    (found,) = verdicts_of(recipe, tmp_path, ["blocks.1"], reports)
    assert found.kind == "different"
    assert found.step == 1


@pytest.mark.full
@pytest.mark.ranks
def test_units_of_a_recipe(text):
    found = sb.verify(recipe_of(text), steps=2, units=["blocks.0", "embedding"])
    assert found.kind == "identical"
    assert found.num_steps == 2
    assert found.notes[0].startswith("only blocks.0, embedding computed again, ")
    with pytest.raises(ConfigError, match="units = 'blocks': it is never called itself, as a list of modules isn't"):
        sb.verify(recipe_of(text), steps=2, units=["blocks"])


@pytest.mark.full
@pytest.mark.ranks
def test_a_unit_with_dropout_has_the_same_masks(text, tmp_path):
    sizes = (
        '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64, "resid_pdrop": 0.1, '
        '"attn_pdrop": 0.1, "bos_token_id": null, "eos_token_id": null}'
    )
    (tmp_path / "config.json").write_text(sizes)
    given = {"model.config": str(tmp_path), "data.text": text, "batch.sequence": 24, "batch.micro_batch": 2, "run.device": "cpu"}
    recipe = build_recipe({}, {name: Sourced(value=value, origin="test") for name, value in given.items()})
    assert sb.verify(recipe, steps=2, units=["model.transformer.h.1"]).kind == "identical"


# ---- what is refused -------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Gives something that has no gradient to write down."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> object:
        return {1, 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.odd, self.none = nn.Linear(2, 2), Odd(), nn.Tanh()
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.one(x))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "units = '': the model has no such module; it has one, odd, tied"),
        ("two", "units = 'two': the model has no such module; it has one, odd, tied"),
        ("none", "this module has no parameters to compare"),
        ("one", "units = 'one': its parameters are also tied.weight"),
    ],
)
def test_a_unit_must_stand_for_itself(name, said):
    with pytest.raises(ConfigError, match=said):
        check_unit(Model(), name)


def test_what_cannot_be_written_down_is_refused(tmp_path):
    model = Model()
    model.tied = nn.Linear(2, 2)
    twice, odd, unused = (Capture(model, name, tmp_path, 0) for name in ("one", "odd", "tied"))
    with pytest.raises(ConfigError, match="units = 'one': it is called twice in a micro-batch"):
        model(torch.ones(1, 2))
    with pytest.raises(ConfigError, match="units = 'odd': it takes or gives a set, of which nothing can be written down"):
        model.odd(torch.ones(2))
    twice.close()
    odd.close()
    with pytest.raises(ConfigError, match="units = 'tied': it is never called itself"):
        unused.close()
