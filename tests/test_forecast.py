"""``sb.forecast``: figures of the papers, what must hold for every answer, and what is refused in one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbook as sb
from shardbook.accounts import Account
from shardbook.facts import catalog
from shardbook.forecasting.closed_form import closed_form
from shardbook.forecasting.question import ask
from shardbook.forecasting.state import state_of

BF16 = sb.Precision(param="bf16")
GIB = 2**30
STAGES = {"shardbook": 3, "deepspeed": 2, "fsdp2": 3, "ddp": 0, "megatron": 1}


def asked(model="gpt2", *, stage=3, ranks=4, micro_batch=2, sequence=256, precision=BF16, **more):
    return sb.forecast(
        model, sb.ZeroConfig(stage=stage, precision=precision), ranks=ranks, micro_batch=micro_batch, sequence=sequence, **more
    )


@pytest.mark.parametrize("stage, gigabytes", [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_the_papers_figures(stage, gigabytes):
    assert sb.forecast(7.5e9, sb.ZeroConfig(stage=stage), ranks=64, convention="2+2+4+8").persistent == gigabytes * 1e9


def test_weights_alone_beside_training_state():
    told = sb.forecast(7e9, ranks=1, convention="2+2+4+8")
    assert (told.weights, told.state, told.persistent) == (14_000_000_000, 112_000_000_000, 112_000_000_000)
    assert told.not_modelled[0] == "activations not modelled: give --activations or an architecture"


def test_the_bottleneck_moves():
    before = sb.forecast(7e9, ranks=8, convention="2+2+4+8", state=60 * GIB, activations=20 * GIB)
    after = sb.forecast(7e9, ranks=8, convention="2+2+4+8", state=10 * GIB, activations=20 * GIB)
    assert before.dominant == Account.MOMENT
    assert before.next_dominant == after.dominant == Account.ACTIVATION
    assert sum(before.accounts.values()) == before.peak_allocated == 80 * GIB


def test_a_tracker_of_fsdp2_says_the_same():
    """torch's FSDPMemTracker on a Llama 7B, 64 ranks, sequence 2048: 15.76 GiB, recomputed 4.63, not resharded 27.04."""
    told = {
        "kept": asked("llama-2-7b", ranks=64, micro_batch=1, sequence=2048, engine="fsdp2"),
        "recomputed": sb.forecast(
            "llama-2-7b", sb.ZeroConfig(precision=BF16, recompute=sb.Recompute(policy="full")), ranks=64, micro_batch=1, sequence=2048,
            engine="fsdp2",
        ),
        "not resharded": asked("llama-2-7b", ranks=64, micro_batch=1, sequence=2048, engine="fsdp2", choices=sb.Choices(reshard=False)),
    }  # fmt: skip
    found = {name: round(one.peak_allocated / GIB, 2) for name, one in told.items()}
    assert found == {"kept": 15.76, "recomputed": 4.63, "not resharded": 27.04}


@pytest.mark.parametrize("engine", STAGES)
@pytest.mark.parametrize(
    "model", ["gpt2", "llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "deepseek-v2-lite", "gpt-oss-20b", "olmo2-7b", "opt-1.3b"]
)
def test_every_family_under_every_engine(model, engine):
    told = asked(model, stage=STAGES[engine], engine=engine, ranks=8, micro_batch=1, sequence=128)
    assert told.is_peak
    assert sum(told.accounts.values()) == told.peak_allocated
    assert min(told.accounts.values()) > 0
    assert told.accounts[told.dominant] == max(told.accounts.values())
    assert told.sent > 0
    named = catalog.facts(model)
    assert (told.largest_unit[1], told.largest_tensor[1]) == (named.largest_unit.numel, named.largest_tensor.numel)


@given(
    stage=st.integers(0, 3),
    ranks=st.integers(1, 300),
    precision=st.sampled_from(["fp32", "bf16", "pure-bf16", "2+2+4+8"]),
    optimizer=st.sampled_from(["adamw", "sgd", "sgd-momentum"]),
)
@settings(max_examples=40, deadline=None)
def test_the_peak_holds_what_the_closed_form_says(stage, ranks, precision, optimizer):
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision))
    choices = sb.Choices(optimizer=optimizer)
    told = sb.forecast("smollm2-135m", config, ranks=ranks, micro_batch=1, sequence=64, choices=choices)
    question = ask("smollm2-135m", config, engine="shardbook", convention=None, device=None, choices=choices, ranks=ranks)
    placement, exact = state_of(question).placement, {holding.account: holding.here for holding in told.holdings}
    assert placement is not None
    for account in (Account.PARAM, Account.MASTER, Account.MOMENT):
        assert told.accounts.get(account, 0) == exact[account]
    assert told.persistent == exact[Account.PARAM] + exact[Account.MASTER] + exact[Account.MOMENT]
    if optimizer == "adamw":
        form = closed_form(placement.structure, config)
        assert all(exact[account] == form[account] for account in exact)


@given(micro_batch=st.integers(1, 16), sequence=st.integers(1, 64), more=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_more_tokens_never_take_less(micro_batch, sequence, more):
    told = [asked(micro_batch=batch, sequence=length * 16).peak_allocated for batch, length in
            ((micro_batch, sequence), (micro_batch + more, sequence), (micro_batch, min(64, sequence + more)))]  # fmt: skip
    assert told[0] <= min(told[1:])


def test_micro_batches_between_first_and_last_are_alike():
    config = sb.ZeroConfig(stage=2, precision=BF16, accumulate=3)
    three, many = (
        sb.forecast("gpt2", sb.ZeroConfig(stage=2, precision=BF16, accumulate=times), ranks=4, micro_batch=1, sequence=64)
        for times in (config.accumulate, 10**6)
    )
    assert three.accounts == many.accounts
    assert many.sent > three.sent


def test_what_is_offloaded_is_on_the_host():
    kept = asked("gpt2")
    config = sb.ZeroConfig(precision=BF16, offload=sb.Offload(optimizer="host"))
    told = sb.forecast("gpt2", config, ranks=4, micro_batch=2, sequence=256)
    moved = {account: kept.accounts[account] for account in (Account.MASTER, Account.MOMENT)}
    assert told.host == moved
    assert told.peak_allocated == kept.peak_allocated - sum(moved.values())
    assert "staging buffers of offload" in told.not_modelled


def test_three_verdicts():
    told = asked("gpt2", device="a100-40gb")
    low, high = told.needed
    assert [told.fits(memory) for memory in (high, (low + high) // 2, low - 1)] == ["fits", "too close to call", "does not fit"]
    assert all(not line.validated for line in told.above)
    state = sb.forecast("gpt2", ranks=4, device="a100-40gb")
    assert state.fits(2**40) == "too close to call"  # only what persists is known


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"model": "llama-3.1-9b"}, ["llama-3.1-9b", "llama-3.1-8b"]),
        ({"model": -7e9}, ["model = -7000000000.0", "7e9"]),
        ({"model": 0}, ["model", "0"]),
        ({"model": 1e30}, ["model", "1e+30"]),
        ({"model": "no/such/config.json"}, ["no/such/config.json"]),
        ({"device": "h100-90gb"}, ["h100-90gb", "h100-80gb"]),
        ({"ranks": 0}, ["ranks = 0"]),
        ({"ranks": 10**9}, ["ranks", "1e+07"]),
        ({"ranks": 6, "tensor": 4}, ["ranks = 6", "multiple of tensor * context = 4", "nearest is 8"]),
        ({"tensor": 8, "ranks": 8}, ["tensor = 8", "12 heads"]),
        ({"expert": 2}, ["expert = 2", "no experts"]),
        ({"micro_batch": -1}, ["micro_batch = -1"]),
        ({"micro_batch": None}, ["micro_batch = None", "sequence = 64", "both"]),
        ({"sequence": 4096}, ["sequence = 4096", "1024"]),
        ({"sequence": 7, "context": 2}, ["sequence = 7", "multiple of context = 2"]),
        ({"engine": "fsdp3"}, ["fsdp3", "fsdp2"]),
        ({"engine": "ddp", "config": sb.ZeroConfig(stage=3)}, ["stage = 3", "ddp"]),
        ({"convention": "2+2"}, ["2+2", "2+2+4+8"]),
        ({"activations": -1}, ["activations = -1"]),
        ({"state": 10**30}, ["state", "1e+18"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_named_in_one_line(wrong, named):
    given_ = {"model": "gpt2", "ranks": 4, "micro_batch": 1, "sequence": 64, **wrong}
    with pytest.raises(ValueError) as refused:
        sb.forecast(given_.pop("model"), **given_)
    message = str(refused.value)
    assert "\n" not in message
    assert all(part in message for part in named), message
