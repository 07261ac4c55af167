"""Recipes: what overrides what, where each value came from, and what is refused with which words."""

import json

import pytest

from shardbook.errors import ConfigError
from shardbook.train.recipe import COMMAND_LINE, DEFAULT, DERIVED, Sourced, build_recipe, known_names, read_recipe
from shardbook.train.world import find_world, first_host


def make(tmp_path, text="", **options):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    given = {name.replace("__", "."): Sourced(value=value, origin=COMMAND_LINE) for name, value in options.items()}
    return build_recipe(read_recipe(path), given), str(path)


def refused(tmp_path, text="", **options):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, text, **options)
    return str(caught.value)


def test_the_command_line_overrides_the_file_and_every_value_knows_its_origin(tmp_path):
    recipe, path = make(tmp_path, "[model]\nlayers = 2\n[run]\nsteps = 5\n[zero]\nstage = 1\n", run__steps=7)
    assert (recipe.model.layers, recipe.run.steps, recipe.zero.stage) == (2, 7, 1)
    origins = {name: recipe.origin(name) for name in ("model.layers", "run.steps", "zero.stage", "model.width", "batch.global_batch")}
    assert origins == {
        "model.layers": path,
        "run.steps": COMMAND_LINE,
        "zero.stage": path,
        "model.width": DEFAULT,
        "batch.global_batch": DERIVED,
    }


def test_a_preset_on_the_command_line_replaces_the_files_whole_table(tmp_path):
    text = '[zero.precision]\nparam = "bf16"\nkeep = {"*.norm" = "fp32"}\n'
    recipe, path = make(tmp_path, text)
    assert dict(recipe.zero.precision.keep) == {"*.norm": "fp32"}
    assert recipe.origin("zero.precision.param") == path
    recipe, _ = make(tmp_path, text, zero__precision="fp16")
    assert recipe.zero.precision.param == "fp16"
    assert dict(recipe.zero.precision.keep) == {}
    assert recipe.origin("zero.precision.param") == COMMAND_LINE


def test_a_recipe_travels_as_json(tmp_path):
    recipe, _ = make(tmp_path, '[data]\ntext = "somewhere"\n[zero]\nprecision = "bf16"\n', run__out="there", batch__global_batch=32)
    request = json.loads(json.dumps(recipe.request()))
    again = build_recipe({}, {name: Sourced(**given) for name, given in request.items()})
    assert again == recipe
    assert json.loads(json.dumps(again.dump())) == recipe.dump()
    assert recipe.dump()["run.out"] == {"value": "there", "origin": COMMAND_LINE}


def test_everything_in_force_is_listed():
    listed = set(build_recipe({}, {}).values())
    assert {"model.width", "zero.stage", "zero.precision.param", "zero.offload.path", "run.seed", "optimizer.warmup"} <= listed
    assert listed <= set(known_names())


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("[model]\nlayrs = 2", "model.layers"),
        ("[zero]\nstge = 2", "zero.stage"),
        ("[zero.precision]\nparm = 'bf16'", "zero.precision.param"),
        ("[batch]\naccumulate = 2", "zero.accumulate"),
        ("[run]\nlearning_rate = 0.1", "optimizer.learning_rate"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path, key, nearest):
    assert f'the nearest is "{nearest}"' in refused(tmp_path, key)


def test_an_unknown_table_and_a_misplaced_value_are_named(tmp_path):
    assert "write [optimizer] and its keys below it" in refused(tmp_path, "[optimiser]\nbeta1 = 0.9")
    assert "write [model] and its keys below it" in refused(tmp_path, "model = 3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[zero]\nstage = 4", "zero.stage = 4 (PATH): allowed is 0, 1, 2 or 3"),
        ("[model]\nlayers = 'two'", "model.layers = 'two' (PATH): allowed is an integer from 1 up"),
        ("[optimizer]\nbeta1 = 1", "optimizer.beta1 = 1 (PATH)"),
        ("[optimizer]\nlearning_rate = true", "optimizer.learning_rate = True (PATH)"),
        ("[zero.precision]\nparam = 'bf17'", "zero.precision.param = 'bf17' (PATH)"),
        ("[zero]\nprecision = 'bf18'", "bf18"),
        ("[run]\nport = 70000", "run.port = 70000 (PATH)"),
        ("[data]\ntext = 3", "data.text = 3 (PATH)"),
        ("[batch]\nmicro_batch = 0", "batch.micro_batch = 0 (PATH)"),
        ("[model]\nconfig = 'c.json'\nwidth = 64", "model.width (PATH): no effect beside model.config"),
        ("[model", "is not TOML"),
    ],
)
def test_wrong_values_are_refused_with_their_origin(tmp_path, text, said):
    assert said.replace("PATH", str(tmp_path / "recipe.toml")) in refused(tmp_path, text)


def test_all_faults_come_at_once(tmp_path):
    message = refused(tmp_path, "[model]\nlayers = 0\n[zero]\nstage = 9\n", run__steps=0)
    assert len(message.splitlines()) == 3
    assert "run.steps = 0 (command line)" in message


@pytest.mark.parametrize(
    ("options", "micro_batch", "accumulate", "global_batch", "derived"),
    [
        ({}, 4, 1, 8, ("batch.global_batch",)),
        ({"batch__micro_batch": 3, "zero__accumulate": 2}, 3, 2, 12, ("batch.global_batch",)),
        ({"batch__global_batch": 24, "batch__micro_batch": 3}, 3, 4, 24, ("zero.accumulate",)),
        ({"batch__global_batch": 24, "zero__accumulate": 2}, 6, 2, 24, ("batch.micro_batch",)),
        ({"batch__global_batch": 24}, 4, 3, 24, ("batch.micro_batch", "zero.accumulate")),
        ({"batch__global_batch": 6}, 3, 1, 6, ("batch.micro_batch", "zero.accumulate")),
        ({"batch__global_batch": 24, "batch__micro_batch": 4, "zero__accumulate": 3}, 4, 3, 24, ()),
    ],
)
def test_the_missing_batch_number_is_derived(tmp_path, options, micro_batch, accumulate, global_batch, derived):
    recipe, _ = make(tmp_path, **options)
    assert (recipe.batch.micro_batch, recipe.zero.accumulate, recipe.batch.global_batch) == (micro_batch, accumulate, global_batch)
    assert recipe.derived == derived


def test_batch_numbers_that_contradict_each_other_are_all_shown(tmp_path):
    message = refused(tmp_path, "[batch]\nmicro_batch = 4\n", zero__accumulate=2, batch__global_batch=24)
    for part in (
        f"micro_batch = 4 ({tmp_path}",
        "accumulate = 2 (command line)",
        "ranks = 2 (default)",
        "= 16",
        "global_batch = 24 (command line)",
    ):
        assert part in message
    message = refused(tmp_path, batch__global_batch=12, batch__micro_batch=4)
    assert "accumulate not given" in message
    assert "global_batch = 16" in message
    assert "global_batch = 7 (command line)" in refused(tmp_path, batch__global_batch=7)


# ---- who started the ranks ------------------------------------------------------------------------------------------------


def test_nobody_started_anything():
    assert find_world({}) is None
    assert find_world({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # an sbatch script is no rank


def test_torchrun_is_joined():
    world = find_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert world is not None
    assert (world.rank, world.num_ranks, world.local_rank, world.num_local_ranks, world.started_by) == (3, 4, 1, 2, "torchrun")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT not"),
        ({"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK = 'zero'"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "no node list"),
    ],
)
def test_half_a_world_is_refused(environment, said):
    with pytest.raises(ConfigError, match=said):
        find_world(environment)


def test_slurm_is_joined_on_the_first_node_and_a_port_all_ranks_know():
    common = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "n[03-04]",
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    worlds = [find_world(common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}) for rank in range(8)]
    assert all(world is not None for world in worlds)
    assert {(world.variables["MASTER_ADDR"], world.variables["MASTER_PORT"]) for world in worlds if world} == {("n03", "18456")}
    assert [world.local_rank for world in worlds if world] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert worlds[5].num_local_ranks == 4


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("a,b", "a"), ("gpu[3,5-7]", "gpu3"), ("n-[001-004].cluster,m2", "n-001.cluster"), ("rack1-n[09-10]", "rack1-n09")],
)
def test_the_first_host(nodes, host):
    assert first_host(nodes) == host
