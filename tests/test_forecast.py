"""``sb.forecast``: known figures, laws that hold for any sizes, budgets, verdicts, and mistakes that are named in one line."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook.accounts import Account
from shardbook.errors import ConfigError
from shardbook.facts.architecture import Architecture, Experts
from shardbook.facts.parameters import model_facts
from shardbook.forecasting.closed_form import OPTIMIZERS, closed_form
from shardbook.forecasting.placement import place
from shardbook.forecasting.question import ENGINES
from shardbook.structure import GroupFacts

GB, GIB = 10**9, 2**30
STATE = (Account.PARAM, Account.MASTER, Account.MOMENT)


def decoder(*, experts=None, **sizes):
    given = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 176, "vocab": 512, **sizes}
    return model_facts(Architecture(family="llama", experts=experts, **given), name="decoder", source="a test")


def told(model=None, *, stage=3, precision="bf16", ranks=2, micro_batch=2, sequence=64, accumulate=1, **options):
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision), accumulate=accumulate)
    return sb.forecast(model or decoder(), config, ranks=ranks, micro_batch=micro_batch, sequence=sequence, **options)


# ---- known figures ----------------------------------------------------------------------------------------------------------


def test_seven_billion_parameters_need_112_gb_of_state_and_14_of_weights():
    found = sb.forecast(7e9, ranks=1, convention="2+2+4+8")
    assert (found.persistent, found.state, found.weights) == (112 * GB, 112 * GB, 14 * GB)
    assert found.persistent / GIB == pytest.approx(104.3, abs=0.05)
    assert not found.is_peak
    assert any("activations not modelled" in each for each in found.not_modelled)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_stages_of_the_zero_paper(stage, gigabytes):
    found = sb.forecast(7.5e9, sb.ZeroConfig(stage=stage), ranks=64, convention="2+2+4+8")
    assert found.persistent / GB == pytest.approx(gigabytes, abs=0.05)


@given(numel=st.integers(1, 10**9).map(lambda n: 1024 * n), exponent=st.integers(0, 10))
def test_the_formulas_hold_for_any_number_of_ranks(numel, exponent):
    ranks = 2**exponent
    held = [sb.forecast(numel, sb.ZeroConfig(stage=stage), ranks=ranks, convention="2+2+4+8").persistent for stage in (0, 1, 2, 3)]
    assert held == [16 * numel, 4 * numel + 12 * numel // ranks, 2 * numel + 14 * numel // ranks, 16 * numel // ranks]


@pytest.mark.parametrize(("recompute", "reshard", "gibibytes"), [("none", True, 15.76), ("full", True, 4.63), ("none", False, 27.04)])
def test_fsdp2_of_seven_billion_parameters(recompute, reshard, gibibytes):
    """What FSDP2's own tracker says."""
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 11008, "vocab": 32000}
    config = sb.ZeroConfig(precision=sb.Precision(param="bf16"), recompute=sb.Recompute(policy=recompute))
    found = sb.forecast(
        decoder(**sizes), config, ranks=64, micro_batch=1, sequence=2048, engine="fsdp2", choices=sb.Choices(reshard=reshard)
    )
    assert found.peak_allocated / GIB == pytest.approx(gibibytes, rel=0.03)


# ---- laws -------------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "stage": st.integers(0, 3),
    "precision": st.sampled_from(["fp32", "bf16", "pure-bf16", "2+2+4+8"]),
    "ranks": st.integers(1, 9),
}


@settings(max_examples=25, deadline=None)
@given(micro_batch=st.integers(1, 8), sequence=st.integers(1, 40).map(lambda n: 8 * n), layers=st.integers(1, 6), **SETTINGS)
def test_more_of_anything_never_needs_less(micro_batch, sequence, layers, **setting):
    least = told(decoder(layers=layers), micro_batch=micro_batch, sequence=sequence, **setting).peak_allocated
    assert told(decoder(layers=layers), micro_batch=micro_batch + 1, sequence=sequence, **setting).peak_allocated >= least
    assert told(decoder(layers=layers), micro_batch=micro_batch, sequence=sequence + 8, **setting).peak_allocated >= least
    assert told(decoder(layers=layers + 1), micro_batch=micro_batch, sequence=sequence, **setting).peak_allocated >= least


@settings(max_examples=25, deadline=None)
@given(vocab=st.integers(16, 700), ffn=st.integers(1, 300), tied=st.booleans(), **SETTINGS)
def test_what_persists_is_the_closed_form_of_the_engine(vocab, ffn, tied, stage, precision, ranks):
    model = decoder(vocab=vocab, ffn=ffn, tied=tied)
    found = told(model, stage=stage, precision=precision, ranks=ranks)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision))
    exact = closed_form(place(model, config.precision, GroupFacts(num_ranks=ranks)).structure, config, OPTIMIZERS["adamw"])
    assert {account: found.accounts.get(account, 0) for account in STATE} == {account: exact[account] for account in STATE}
    assert found.persistent == sum(exact[account] for account in STATE)


@settings(max_examples=15, deadline=None)
@given(**SETTINGS)
def test_the_peak_is_the_highest_phase_and_the_sum_of_its_accounts(stage, precision, ranks):
    found = told(stage=stage, precision=precision, ranks=ranks)
    later = [phase for phase in found.phases if not phase.first]
    assert found.peak_allocated == sum(found.accounts.values()) == max(phase.nbytes for phase in later)
    assert found.peak_phase in {phase.phase for phase in later} >= {"forward", "backward", "step"}
    assert found.peak_allocated > found.persistent


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_holds_less_than_the_one_before(precision):
    held = [told(stage=stage, precision=precision, ranks=8).persistent for stage in (0, 1, 2, 3)]
    assert held == sorted(held, reverse=True)
    assert held[3] < held[0] / 7


def test_the_first_step_has_no_moments_before_its_end():
    found = told(decoder(vocab=16384), ranks=1)
    first = {phase.phase: phase for phase in found.phases if phase.first}
    assert "MOMENT" not in first["backward"].accounts
    assert first["step"].accounts["MOMENT"] == found.accounts["MOMENT"]


def test_recomputation_frees_activations_and_nothing_that_persists():
    without = told(decoder(layers=12), micro_batch=8)
    config = sb.ZeroConfig(precision=sb.Precision(param="bf16"), recompute=sb.Recompute(policy="full"))
    found = sb.forecast(decoder(layers=12), config, ranks=2, micro_batch=8, sequence=64)
    assert found.persistent == without.persistent
    assert found.accounts["ACTIVATION"] < without.accounts["ACTIVATION"] / 2


def test_tensor_and_expert_parallel_degrees_divide_what_they_divide():
    alone, shared = told(decoder(), ranks=4), told(decoder(), ranks=8, tensor=2)
    assert shared.persistent < 0.6 * alone.persistent
    experts = Experts(count=8, top_k=2, ffn=176)
    whole = told(decoder(experts=experts), ranks=4, stage=0).persistent
    parts = told(decoder(experts=experts), ranks=4, stage=0, expert=4).persistent
    assert parts < 0.5 * whole


# ---- a person's own figures -------------------------------------------------------------------------------------------------


def test_activations_are_the_bottleneck_once_state_is_cut():
    def dominant(state):
        return sb.forecast(7e9, ranks=1, convention="2+2+4+8", state=state, activations=20 * GIB).dominant

    assert dominant(60 * GIB) != "ACTIVATION"
    assert dominant(10 * GIB) == "ACTIVATION"


def test_budgets_replace_their_terms_and_no_others():
    plain = told()
    assert told(activations=123).accounts == {**plain.accounts, "ACTIVATION": 123}
    assert told(state=1000).persistent == 1000
    found = told(state=1000, activations=2000, temporary=4000)
    assert found.peak_allocated == 7000
    assert found.accounts["WORKSPACE"] == 4000


def test_verdicts():
    found = told()
    assert found.fits(found.peak_allocated) == "fits"
    assert found.fits(found.peak_allocated - 1) == "does not fit"
    on_device = sb.forecast("llama-3.1-8b", ranks=8, micro_batch=1, sequence=2048, device="h100-80gb")
    low, high = on_device.needed
    assert low < high
    assert [on_device.fits(nbytes) for nbytes in (low - 1, (low + high) // 2, high)] == ["does not fit", "too close to call", "fits"]
    assert sb.forecast(7e9, ranks=1).fits(10**15) == "too close to call"  # state alone is no peak


def test_every_field_is_in_the_json():
    found = told()
    read = json.loads(found.to_json())
    assert read["accounts"] == dict(found.accounts)
    assert read["convention"]["name"] == found.convention.name
    assert {"phases", "above", "holdings", "terms", "not_modelled", "inputs"} <= set(read)


# ---- mistakes ---------------------------------------------------------------------------------------------------------------

BATCH = {"micro_batch": 1, "sequence": 64}
MISTAKES = {
    "no ranks": ({"ranks": 0}, ("ranks = 0",)),
    "negative ranks": ({"ranks": -4}, ("ranks = -4",)),
    "half a rank": ({"ranks": 1.5}, ("ranks = 1.5",)),
    "absurd ranks": ({"ranks": 10**9}, ("ranks = 1000000000", "1e+07")),
    "no micro-batch": ({"micro_batch": 0, "sequence": 64}, ("micro_batch = 0",)),
    "no sequence": ({"micro_batch": 1, "sequence": -64}, ("sequence = -64",)),
    "only a micro-batch": ({"micro_batch": 1}, ("sequence",)),
    "only a sequence": ({"sequence": 64}, ("micro_batch",)),
    "ranks that do not divide": ({"ranks": 6, "tensor": 4, **BATCH}, ("ranks = 6", "multiple of tensor")),
    "heads that do not divide": ({"ranks": 6, "tensor": 3}, ("tensor = 3", "4 heads")),
    "experts where there are none": ({"ranks": 4, "expert": 2}, ("expert = 2", "no experts")),
    "a sequence that does not divide": ({"ranks": 4, "context": 4, "micro_batch": 1, "sequence": 66}, ("sequence = 66", "context")),
    "an unknown engine": ({"ranks": 1, "engine": "deepsped"}, ("engine = 'deepsped'", "deepspeed")),
    "an unknown device": ({"ranks": 1, "device": "h100-80g"}, ("h100-80g", "h100-80gb")),
    "an unknown convention": ({"ranks": 1, "convention": "2+2+much"}, ("2+2+much",)),
    "a negative budget": ({"ranks": 1, "activations": -1}, ("activations = -1",)),
    "an absurd budget": ({"ranks": 1, "state": 10**20}, ("state = ",)),
    "no config": ({"ranks": 1, "config": {"stage": 3}}, ("config = ", "ZeroConfig")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_in_one_line(name):
    options, parts = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        sb.forecast(decoder(), **{"ranks": 1, **options})
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


MODELS = {
    "a name that is nearly right": ("llama-3.1-8", ("llama-3.1-8b",)),
    "nothing like a model": ("zzz", ("zzz",)),
    "no parameters": (0, ("0",)),
    "negative parameters": (-7e9, ("-7",)),
    "not a number": (float("nan"), ("nan",)),
    "something else": ([7e9], ("[7",)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_none_is_named_in_one_line(name):
    model, parts = MODELS[name]
    with pytest.raises(ConfigError) as caught:
        sb.forecast(model, ranks=1)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_files_that_are_no_model(tmp_path):
    for text, part in (("{", "JSON"), ("[]", "list"), ('{"model_type": "llama"}', "hidden_size")):
        file = tmp_path / "config.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=part) as caught:
            sb.forecast(str(file), ranks=1)
        assert "\n" not in str(caught.value)


def test_a_sequence_longer_than_the_models():
    with pytest.raises(ConfigError, match=r"sequence = 2048: .*1024"):
        sb.forecast("gpt2", ranks=1, micro_batch=1, sequence=2048)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_what_it_left_out_rather_than_nothing(engine):
    found = sb.forecast("llama-3.1-8b", ranks=8, engine=engine)
    assert not found.is_peak
    assert found.not_modelled
    assert found.fits(10**15) == "too close to call"
