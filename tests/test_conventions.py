"""Conventions: the figures of DESIGN section 8 to the byte, the formulas for any N, and what a person may write."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardbook.accounts import Account
from shardbook.config import Precision
from shardbook.errors import ConfigError
from shardbook.forecasting.conventions import ACCOUNTS, PRESETS, Convention, Share

PARAM, GRAD, MASTER, MOMENT = ACCOUNTS


def held(name: str, numel: int, stage: int, ranks: int) -> int:
    return sum(one.here for one in Convention.parse(name).holdings(numel, numel, stage, ranks))


def test_seven_billion_parameters_are_112_gb():
    nbytes = PRESETS["2+2+4+8"].state(7_000_000_000)
    assert nbytes == 112 * 10**9
    assert round(nbytes / 2**30, 1) == 104.3


def test_the_zero_papers_figure_on_64_ranks():
    assert [held("2+2+4+8", 7_500_000_000, stage, 64) for stage in range(4)] == [
        120_000_000_000,
        31_406_250_000,
        16_640_625_000,
        1_875_000_000,
    ]


# name -> bytes per parameter replicated, and bytes that are divided by N, at each stage asked for
FORMULAS = {
    ("2+2+4+8", 0): (16, 0),
    ("2+2+4+8", 1): (4, 12),
    ("2+2+4+8", 2): (2, 14),
    ("2+2+4+8", 3): (0, 16),
    ("deepspeed-bf16", 2): (2, 14),
    ("deepspeed-bf16-fp32-grads", 0): (18, 0),
    ("deepspeed-bf16-fp32-grads", 3): (0, 18),
    ("deepspeed-fp32", 0): (16, 0),
    ("deepspeed-fp32", 1): (8, 12),
    ("deepspeed-fp32", 3): (0, 20),
    ("megatron-bf16", 0): (18, 0),
    ("megatron-bf16-distributed", 1): (6, 12),
    ("megatron-bf16-distributed", 3): (6, 12),
    ("fp32", 0): (16, 0),
    ("fp32", 3): (0, 16),
    ("pure-bf16", 0): (8, 0),
    ("adam-8bit", 0): (10, 0),
    ("pure-bf16-8bit", 0): (6, 0),
    ("sgd", 0): (8, 0),
    ("sgd-momentum", 1): (8, 4),
    ("fsdp2-fp32", 3): (0, 16),
    ("fsdp2-bf16", 3): (0, 16),
    ("fsdp2-pure-bf16", 3): (0, 8),
    ("ddp-fp32", 0): (16, 0),
    ("ddp-amp", 3): (16, 0),
    ("ddp-pure-bf16", 0): (8, 0),
    ("shardbook-fp32", 2): (4, 12),
    ("shardbook-bf16", 0): (18, 0),
    ("shardbook-bf16", 1): (6, 12),
    ("shardbook-bf16", 2): (2, 16),
    ("shardbook-bf16", 3): (0, 16),
    ("shardbook-2+2+4+8", 3): (0, 16),
    ("shardbook-pure-bf16", 3): (0, 8),
}


@pytest.mark.parametrize(("name", "stage"), FORMULAS)
@given(ranks=st.integers(1, 20_000), share=st.integers(1, 10**9))
def test_formulas_hold_for_any_number_of_ranks(name, stage, ranks, share):
    replicated, divided = FORMULAS[name, stage]
    numel = share * ranks  # so that nothing is rounded up
    assert held(name, numel, stage, ranks) == replicated * numel + divided * share


@given(numel=st.integers(1, 10**12), ranks=st.integers(1, 20_000), stage=st.integers(0, 3))
def test_ranks_together_hold_the_whole_and_less_than_one_element_each_beyond(numel, ranks, stage):
    for one in PRESETS["2+2+4+8"].holdings(numel, numel, stage, ranks):
        width = one.total // numel
        assert one.total <= one.here * one.partitions < one.total + width * one.partitions


def test_shardbooks_own_at_stage_3_hold_12_between_steps_and_4_more_until_the_step():
    convention = PRESETS["shardbook-bf16"]
    between = convention.holdings(8000, 8000, 3, 8, between_steps=True)
    assert sum(one.here for one in between) == 12 * 1000
    assert sum(one.here for one in convention.holdings(8000, 8000, 3, 8)) == 16 * 1000


def test_deepspeed_frees_gradients_with_the_step_but_for_stage_3s_flat_buffer():
    def between(name: str, stage: int) -> int:
        here = {one.account: one.here for one in PRESETS[name].holdings(8000, 8000, stage, 8, between_steps=True)}
        return here[GRAD]

    assert [between("deepspeed-bf16", stage) for stage in range(4)] == [0, 0, 0, 2 * 1000]
    assert between("deepspeed-bf16-fp32-grads", 1) == 4 * 8000  # BF16_Optimizer's flat buffer


def test_deepspeed_has_a_master_in_fp32_from_stage_1_on():
    convention = PRESETS["deepspeed-fp32"]
    assert [convention.nbytes_per_parameter(MASTER, stage, ranks=4) for stage in range(4)] == [0, 1, 1, 1]
    assert "no master below stage 1" in convention.describe()


def test_frozen_parameters_have_no_gradient_master_or_moment_and_stay_when_trained_ones_rest_in_the_master():
    here = {one.account: one.here for one in PRESETS["shardbook-bf16"].holdings(8000, 800, 3, 8)}
    assert here == {"PARAM": 2 * 900, "GRAD": 4 * 100, "MASTER": 4 * 100, "MOMENT": 8 * 100}
    assert PRESETS["2+2+4+8"].state(8000, 800) == 2 * 8000 + 14 * 800


@pytest.mark.parametrize(("optimizer", "nbytes"), [("adamw", 8), ("adamw-8bit", 2), ("sgd", 0), ("sgd-momentum", 4)])
def test_moments_are_those_of_the_optimizer(optimizer, nbytes):
    assert Convention.of_precision(Precision(param="bf16"), optimizer).term(MOMENT).nbytes == nbytes


def test_moments_have_the_type_of_what_is_stepped_on():
    assert PRESETS["pure-bf16"].with_optimizer("sgd-momentum").term(MOMENT).nbytes == 2
    expected = Share(account=MOMENT, nbytes=4, partitioned_from=1, what="of sgd-momentum")
    assert PRESETS["fp32"].with_optimizer("sgd-momentum").term(MOMENT) == expected


def test_numbers_are_parameters_gradients_master_moments():
    assert [term.nbytes for term in Convention.parse("2+2+4+2").terms] == [2, 2, 4, 2]
    assert [term.nbytes for term in Convention.parse(" 4+4+8 ").terms] == [4, 4, 0, 8]
    assert Convention.parse("2+2+0.5+1.25").total == 5.75


def test_edits_change_bytes_and_stages_one_term_at_a_time():
    edited = Convention.parse("deepspeed-bf16, grad=4@1, moment=2, master=0@never")
    assert [term.nbytes for term in edited.terms] == [2, 4, 0, 2]
    assert [term.partitioned_from for term in edited.terms] == [3, 1, None, 1]
    assert edited.name == "deepspeed-bf16,grad=4@1,moment=2,master=0@never"
    assert PRESETS["deepspeed-bf16"].total == 16  # the preset itself is as it was


@pytest.mark.parametrize("name", [*PRESETS, "4+4+8", "2+2+4+8,grad=4"])
def test_every_convention_says_in_one_line_what_it_is_and_what_it_models(name):
    convention = Convention.parse(name)
    line = convention.describe()
    assert line.startswith(f"{name}: {convention.total:g} bytes per parameter = parameters ")
    assert "\n" not in line
    assert (convention.models and convention.models in line) or line.endswith("your own figures")
    if name in PRESETS:
        assert convention.name == name
        assert convention.models
        assert convention.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2+2", "three or four numbers"),
        ("2+2+4+8+1", "three or four numbers"),
        ("2+2+four+8", "'four'"),
        ("2+2++8", "a number of bytes"),
        ("2+2+-4+8", "-4"),
        ("2+2+inf+8", "number of bytes"),
        ("2+2+nan+8", "number of bytes"),
        ("2+2+4+800", "800"),
        ("deepsped-bf16", 'the nearest is "deepspeed-bf16"'),
        ("", "numbers"),
        ("fp32,gradient=4", 'the nearest is "grad"'),
        ("fp32,grad", 'write for example "grad=4"'),
        ("fp32,grad=x", "'x'"),
        ("fp32,grad=4@5", "'5'"),
    ],
)
def test_what_is_no_convention_is_refused_in_one_line(text, said):
    with pytest.raises(ConfigError) as raised:
        Convention.parse(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_terms_are_all_there_and_in_order():
    terms = PRESETS["fp32"].terms
    with pytest.raises(ConfigError, match="PARAM \\+ GRAD \\+ MASTER \\+ MOMENT"):
        Convention(name="half", terms=terms[:2])
    with pytest.raises(ConfigError, match="ACTIVATION"):
        Share(account=Account.ACTIVATION, nbytes=2, partitioned_from=None)
    with pytest.raises(ConfigError, match="held_from"):
        Share(account=Account.MASTER, nbytes=2, partitioned_from=None, held_from=4)


def test_another_version_of_a_peer_is_named():
    convention = PRESETS["deepspeed-bf16"]
    assert convention.other_version(lambda name: {"deepspeed": "0.19.8"}[name]) is None
    assert "0.20.0 is installed" in (convention.other_version(lambda name: "0.20.0") or "")
    assert PRESETS["fsdp2-bf16"].other_version(lambda name: "2.13.0+cpu") is None
    assert PRESETS["2+2+4+8"].other_version(lambda name: "9") is None


def test_bytes_per_parameter_of_one_account():
    assert PRESETS["2+2+4+8"].nbytes_per_parameter(MASTER, stage=1, ranks=8) == 0.5
    assert PRESETS["2+2+4+8"].nbytes_per_parameter(GRAD, stage=1, ranks=8) == 2
    assert PRESETS["shardbook-bf16"].nbytes_per_parameter(PARAM, stage=3, ranks=8) == 0
    assert math.isclose(PRESETS["2+2+4+8"].per_rank(3, 3), 16 / 3)
