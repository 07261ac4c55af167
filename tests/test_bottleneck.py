"""The moving bottleneck: what is largest, what to turn for it, and what is largest then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardbook.accounts import Account
from shardbook.errors import ConfigError
from shardbook.forecasting.bottleneck import ON, Situation, dominant, next_turn, path, split_state, step_forward, turns
from shardbook.forecasting.conventions import PRESETS

GIB = 2**30
LEDGER = PRESETS["2+2+4+8"]


def situation(accounts, **fields):
    return Situation(accounts=accounts, convention=fields.pop("convention", LEDGER), **fields)


def with_state(state, activations, stage=0, ranks=64, **fields):
    accounts = {**split_state(state, LEDGER, stage, ranks), "ACTIVATION": activations}
    return situation(accounts, stage=stage, ranks=ranks, **fields)


@given(nbytes=st.integers(0, 10**13), stage=st.integers(0, 3), ranks=st.integers(1, 5000), name=st.sampled_from(sorted(PRESETS)))
def test_a_given_state_is_split_without_losing_a_byte(nbytes, stage, ranks, name):
    assert sum(split_state(nbytes, PRESETS[name], stage, ranks).values()) == nbytes


def test_a_given_state_is_split_as_the_stage_holds_it():
    assert split_state(31_406_250_000, LEDGER, stage=1, ranks=64) == {
        "PARAM": 15_000_000_000,
        "GRAD": 15_000_000_000,
        "MASTER": 468_750_000,
        "MOMENT": 937_500_000,
    }


def test_with_the_state_cut_to_10_gib_activations_are_the_main_component():
    assert dominant(with_state(60 * GIB, 20 * GIB).accounts) == "MOMENT"
    assert dominant(with_state(10 * GIB, 20 * GIB).accounts) == "ACTIVATION"


def test_partitioning_the_state_moves_the_bottleneck_to_the_activations():
    found = step_forward(with_state(60 * GIB, 20 * GIB))
    assert found is not None
    assert (found.lever, found.account) == ("ZeRO stage 1", "MOMENT")
    assert found.freed == 30 * GIB * 63 // 64
    assert dominant(found.accounts_after) == "ACTIVATION"


def test_each_stage_frees_what_it_partitions_and_stage_3_gathers_units():
    accounts = {"PARAM": 1600, "GRAD": 1600, "GRAD_FULL": 800, "MASTER": 200, "MOMENT": 400}
    one = situation(accounts, stage=1, ranks=16, engine="shardbook", unit_nbytes=100, ahead=1)
    two, three = (turn for turn in turns(one) if turn.effect.name.startswith("ZeRO"))
    assert two.effect.freed == {"GRAD": 1500, "GRAD_FULL": 750}
    assert three.effect.freed == {"PARAM": 1500, "GRAD": 1500, "GRAD_FULL": 750, "GATHERED": -200}
    assert next_turn(one) == three  # the largest account is PARAM, and stage 2 leaves it as it is


def test_the_next_stage_that_frees_nothing_of_the_largest_account_is_passed_over_for_more_ranks():
    held = situation({"MASTER": 1000, "PARAM": 10}, stage=1, ranks=8)
    found = step_forward(held)
    assert found is not None
    assert (found.lever, found.freed) == ("twice as many ranks", 500)


def test_stage_3_of_a_cast_master_frees_all_parameters_and_adds_gathered_units():
    held = situation({"PARAM": 8000}, convention=PRESETS["shardbook-bf16"], stage=2, ranks=8, engine="shardbook", unit_nbytes=50, ahead=1)
    turn = next_turn(held)
    assert turn is not None
    assert turn.effect.freed == {"PARAM": 8000, "GATHERED": -100}
    assert turn.after.accounts == {"PARAM": 0, "GATHERED": 100}
    assert turn.after.stage == 3


def test_activations_are_recomputed_first_and_halved_after_that():
    held = situation({"ACTIVATION": 3200, "PARAM": 10}, stage=3, ranks=8, num_units=32, micro_batch=4, phase="backward")
    steps = list(path(held))
    assert [step.lever for step in steps[:2]] == [
        "recompute each unit in backward (torch.utils.checkpoint)",
        "half the micro-batch, twice as many",
    ]
    assert [step.accounts_after["ACTIVATION"] for step in steps[:3]] == [100, 50, 25]
    assert all(step.account == "ACTIVATION" for step in steps[:3])


def test_recomputation_leaves_the_loss_end_alone():
    held = situation({"ACTIVATION": 1000}, num_units=10, on=["chunked-loss"], loss={"ACTIVATION": 500})
    found = step_forward(held)
    assert found is not None
    assert found.accounts_after == {"ACTIVATION": 1000 - 450}


def test_a_loss_in_chunks_comes_before_recomputation():
    held = situation({"ACTIVATION": 1000, "WORKSPACE": 900}, num_units=10, loss={"ACTIVATION": 800, "WORKSPACE": 800})
    turn = next_turn(held)
    assert turn is not None
    assert turn.effect.freed == {"ACTIVATION": 700, "WORKSPACE": 700}
    assert not turn.after.loss


@pytest.mark.parametrize(
    ("accounts", "fields", "lever"),
    [
        ({"WORKSPACE": 900}, {"phase": "step"}, "optimizer with fused=True"),
        ({"COMM": 900}, {"engine": "deepspeed"}, "smaller reduce_bucket_size and allgather_bucket_size"),
        ({"GATHERED": 900}, {"engine": "fsdp2", "on": ["no-reshard"], "stage": 3}, "reshard_after_forward=True"),
        ({"GATHERED": 900}, {"engine": "shardbook", "ahead": 1, "unit_nbytes": 300, "stage": 3}, "no prefetch"),
        ({"MOMENT": 900}, {"engine": "shardbook", "ranks": 1}, "optimizer state on the host"),
    ],
)
def test_each_account_has_its_lever_and_once_it_is_turned_it_is_gone(accounts, fields, lever):
    turn = next_turn(situation(accounts, **fields))
    assert turn is not None
    assert turn.effect.name == lever
    assert lever not in [later.effect.name for later in turns(turn.after)]


def test_where_nothing_is_left_nothing_is_said():
    assert step_forward(situation({"ACTIVATION": 100}, micro_batch=1)) is None
    assert step_forward(situation({})) is None
    assert dominant({}) == ""


@given(
    accounts=st.dictionaries(st.sampled_from([str(account) for account in Account]), st.integers(0, 10**12), max_size=8),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 1024),
    engine=st.sampled_from(["shardbook", "deepspeed", "fsdp2", "ddp", "convention"]),
    on=st.sets(st.sampled_from(ON)),
    units=st.integers(0, 100),
    phase=st.sampled_from(["", "forward", "backward", "step"]),
)
def test_no_lever_frees_more_than_there_is(accounts, stage, ranks, engine, on, units, phase):
    held = situation(accounts, stage=stage, ranks=ranks, engine=engine, on=on, num_units=units, micro_batch=4, phase=phase, ahead=1)
    for turn in turns(held):
        assert all(nbytes <= accounts.get(account, 0) for account, nbytes in turn.effect.freed.items()), turn.effect
        assert all(nbytes >= 0 for nbytes in turn.after.accounts.values())
    for step in path(held):
        assert step.freed > 0


def test_what_is_unknown_is_refused():
    with pytest.raises(ConfigError, match="fuzed"):
        situation({}, on=["fuzed"])
    with pytest.raises(ConfigError, match="stage"):
        situation({}, stage=4)
