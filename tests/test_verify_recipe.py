"""``verify`` of a recipe: shardbook's run and its plain loop have the same bits, and a run with a fault has not."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardbook as sb
from shardbook.errors import ConfigError
from shardbook.train.loop import open_training
from shardbook.train.plain_memory import check_plain_fits, plain_need
from shardbook.train.recipe import Recipe, Sourced, build_recipe
from shardbook.train.recorded import PLAIN, RUN, record_plain, record_training
from shardbook.train.world import World
from shardbook.verifying.judge import judge
from tests import faults, ranks
from tests.pairwise import pairwise

STEPS = 3
CPU = torch.device("cpu")
TINY = {
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 48, "batch.sequence": 24,
    "batch.micro_batch": 2, "run.device": "cpu", "run.steps": 8, "zero.clip_grad_norm": 0.5, "optimizer.warmup": 2,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


def recipe_of(text: str, **values: object) -> Recipe:
    given = {**TINY, "data.text": text, **{name.replace("__", "."): value for name, value in values.items()}}
    return build_recipe({}, {name: Sourced(value=value, origin="test") for name, value in given.items()})


def run_on_this_rank(request: dict, folder: str) -> list:
    """A job: what :func:`shardbook.train.recorded.record_run` does inside a process group that is there."""
    recipe = build_recipe({}, {name: Sourced(**given) for name, given in request.items()})
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    world = World(rank=rank, num_ranks=num_ranks, local_rank=rank, num_local_ranks=num_ranks, started_by="test", variables={})
    with open_training(recipe, world, CPU, recorded=True) as training:
        return list(record_training(training, Path(folder) / RUN, STEPS))


def verdict_of(recipe: Recipe, folder: Path, reports: list) -> sb.Verdict:
    record_plain(recipe, CPU, folder / PLAIN, STEPS, reports=reports)
    return judge(sb.Record.open(folder / RUN), sb.Record.open(folder / PLAIN), steps=STEPS)


def verified(recipe: Recipe) -> sb.Verdict:
    with tempfile.TemporaryDirectory() as folder:
        reports = ranks.call(recipe.run.ranks, run_on_this_rank, recipe.request(), folder)[0]
        return verdict_of(recipe, Path(folder), reports)


FEW = [
    {"zero__stage": 1, "zero__accumulate": 2},
    {"zero__stage": 3, "zero__precision": "bf16", "zero__accumulate": 2},
]
FIELDS = {
    "zero__stage": (0, 1, 2, 3),
    "zero__precision": ("fp32", "bf16", "pure-bf16"),
    "zero__accumulate": (1, 2, 3),
    "run__ranks": (1, 2, 3, 4),
}
MANY = pairwise(FIELDS, lambda row: row.get("zero__precision") != "pure-bf16" or row.get("zero__accumulate", 1) == 1)
"""Bits in the whole product are ``tests/test_engine_equality.py``'s matter, verdicts on 200 other loops ``make evidence-verify``'s."""


@pytest.mark.ranks
@pytest.mark.parametrize("values", [*FEW, *(pytest.param(values, marks=pytest.mark.full) for values in MANY)], ids=str)
def test_the_run_and_its_plain_loop_are_identical(text, values):
    found = verified(recipe_of(text, **values))
    assert found.kind == "identical", str(found)
    assert found.num_steps == STEPS
    assert {one.phase for one in found.phases} >= {"data", "forward", "backward", "clip", "update", "state"}


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_clipping_is_part_of_it(text, clip):
    values = {} if clip is None else {"zero__clip_grad_norm": clip}
    recipe = recipe_of(text, **values)
    assert verified(recipe).kind == "identical"


WRONG = ["gradients are averaged over ranks", "only one rank's gradient counts", "a second micro-batch replaces the first",
         "the weight leaves out a rank", "masters are copied from rounded weights"]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("fault", [WRONG[0], *(pytest.param(name, marks=pytest.mark.full) for name in WRONG[1:])])
def test_a_run_with_a_fault_is_different(text, tmp_path, fault):
    recipe = recipe_of(text, zero__stage=1, zero__accumulate=2, zero__precision="bf16", optimizer__warmup=0)
    job = (run_on_this_rank.__module__, run_on_this_rank.__qualname__, (recipe.request(), str(tmp_path)), {})
    ended = ranks.fresh_ranks(2, faults.under_fault, fault, *job)
    calls, error, reports = ended[0].value
    assert calls, f"{fault}: nothing called it"
    assert not error, error
    found = verdict_of(recipe, tmp_path, reports)
    assert found.kind == "different", str(found)
    assert found.step in (0, 1)


@pytest.mark.ranks
@pytest.mark.full
def test_a_recipes_file_alone_is_enough(text, tmp_path):
    path = tmp_path / "recipe.toml"
    table = "[model]\nlayers = 1\nwidth = 32\nheads = 2\nkv_heads = 1\nffn = 48\n[batch]\nsequence = 24\nmicro_batch = 2\n"
    path.write_text(f'{table}[data]\ntext = "{text}"\n[zero]\nstage = 2\nclip_grad_norm = 0.5\n[run]\ndevice = "cpu"\nsteps = 2\n')
    found = sb.verify(path, steps=5, folder=tmp_path / "kept")
    assert found.kind == "identical", str(found)
    assert found.num_steps == 2  # the run has no more
    assert found.candidate == f"{path}: shardbook, stage 2, 2 ranks"
    assert found.baseline == f"{path}: plain loop, one process, the micro-batches of 2 ranks"
    assert sb.Record.open(tmp_path / "kept" / "run").engine == "shardbook stage 2"
    assert sb.Verdict.from_json(found.to_json()) == found


# ---- records, and what is refused ------------------------------------------------------------------------------------------


def recorded(path: Path, steps: int, lr: float = 0.1) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with sb.record(model, optimizer, path) as recorder:
        for step in range(steps):
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            recorder.step(loss=loss, batch=batch)
            optimizer.step()
    return path


def test_two_records_are_compared(tmp_path):
    one, same, other = recorded(tmp_path / "a", 4), recorded(tmp_path / "b", 4), recorded(tmp_path / "c", 4, lr=0.2)
    assert sb.verify(one, str(same)).kind == "identical"
    assert sb.verify(one, same).num_steps == 4
    assert sb.verify(sb.Record.open(one), same, steps=2).num_steps == 2
    assert sb.verify(other, one).kind == "different"


def test_a_callable_is_run_for_its_record(tmp_path):
    baseline = recorded(tmp_path / "a", 3)
    assert sb.verify(lambda path: recorded(path, 3), baseline, steps=3).kind == "identical"
    assert sb.verify(lambda path, steps: recorded(path, steps, lr=0.3), baseline, steps=3).kind == "different"


@pytest.mark.full
def test_a_callable_as_baseline_is_run_again(tmp_path):
    found = sb.verify(lambda path: recorded(path, 3), lambda path: recorded(path, 3), steps=3)
    assert found.kind == "identical"
    assert "runs of the baseline in other orders and precisions" in found.bound_origin


@pytest.mark.full
@pytest.mark.ranks
def test_a_record_is_compared_with_a_recipes_plain_loop(text, tmp_path):
    recipe = recipe_of(text, zero__stage=1, zero__accumulate=2)
    ranks.call(2, run_on_this_rank, recipe.request(), str(tmp_path))
    assert sb.verify(tmp_path / RUN, recipe, steps=STEPS).kind == "identical"
    other = recipe_of(text, zero__stage=1, zero__accumulate=2, optimizer__weight_decay=0.0)
    assert sb.verify(tmp_path / RUN, other, steps=STEPS).kind == "different"


@pytest.mark.full
@pytest.mark.ranks
def test_a_plain_loop_in_double_precision_is_within_rounding(text):
    found = sb.verify(recipe_of(text, zero__stage=3, zero__accumulate=2), steps=STEPS, precision="fp64")
    assert found.kind == "within_rounding", str(found)
    assert "plain loop in fp64" in found.baseline


def test_different_numbers_of_steps_are_refused_with_the_remedy(tmp_path):
    one, other = recorded(tmp_path / "a", 2), recorded(tmp_path / "b", 7)
    with pytest.raises(ConfigError, match="the candidate's record has 2 steps, the baseline's 7; record 5 steps of the candidate, or"):
        sb.verify(one, other)
    assert sb.verify(one, other, steps=2).num_steps == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"candidate": "a"}, "a record says nothing of what it should have been; give a baseline beside it"),
        ({"candidate": print}, "a callable says nothing of what it should have been"),
        ({"candidate": None, "baseline": "a"}, "candidate = None: allowed is a recipe, a record, or a callable"),
        ({"candidate": 3, "baseline": "a"}, "int is neither a recipe nor a record nor a callable"),
        ({"candidate": "a", "baseline": "b", "steps": 0}, "steps = 0: allowed is a whole number from 1 up"),
        ({"candidate": "a", "baseline": "b", "precision": "fp64"}, "of a recipe's plain loop alone"),
        ({"candidate": "a", "baseline": "b", "precision": "fp8"}, "precision = 'fp8': allowed is 'fp64', or None"),
        ({"candidate": "a", "baseline": "b", "units": ["x"]}, "units: of a recipe against its own plain loop alone"),
        ({"candidate": "a", "baseline": print, "reruns": ["c"]}, "reruns: of a baseline that is a record"),
        ({"candidate": "nowhere.toml"}, "nowhere.toml: cannot be read"),
        ({"candidate": "nowhere", "baseline": "b"}, "nowhere: no record"),
    ],
)
def test_what_cannot_be_verified_is_refused(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        sb.verify(**arguments)


# ---- memory -----------------------------------------------------------------------------------------------------------------


def test_the_plain_loop_needs_what_its_tensors_have(text):
    recipe = recipe_of(text, zero__precision="bf16")
    need, numel = plain_need(recipe), recipe.model.num_parameters
    assert (need.parameters, need.masters, need.moments, need.gradients) == (2 * numel, 4 * numel, 8 * numel, (2 + 3 * 4) * numel)
    assert need.activations is not None
    assert need.activations > 0
    assert plain_need(recipe_of(text)).masters == 0


def test_a_plain_loop_that_does_not_fit_is_refused_before_anything_is_built(text):
    recipe = recipe_of(text, model__layers=80, model__width=16384, model__heads=128, model__kv_heads=8, model__ffn=65536)
    with pytest.raises(ConfigError) as caught:
        check_plain_fits(recipe, CPU, remedy="compare chosen units")
    said = str(caught.value)
    assert said.startswith(f"the plain loop needs {plain_need(recipe).total:,} bytes (")
    assert "GiB) (parameters " in said
    assert said.endswith("are free in the memory of this machine: compare chosen units")
    check_plain_fits(recipe_of(text), CPU, remedy="")
