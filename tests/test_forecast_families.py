"""Every family under every engine, and what a configuration says that no engine does yet."""

import pytest

import shardbook as sb
from shardbook.accounts import Account
from shardbook.facts import catalog
from shardbook.facts.architecture import Architecture, Experts
from shardbook.facts.parameters import model_facts

BF16 = sb.Precision(param="bf16")
STAGES = {"shardbook": 3, "deepspeed": 2, "fsdp2": 3, "ddp": 0, "megatron": 1}


def asked(model="gpt2", *, stage=3, ranks=4, micro_batch=2, sequence=256, precision=BF16, **more):
    return sb.forecast(
        model, sb.ZeroConfig(stage=stage, precision=precision), ranks=ranks, micro_batch=micro_batch, sequence=sequence, **more
    )


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
    state = {account: kept.accounts[account] for account in (Account.MASTER, Account.MOMENT)}
    assert {account: told.host[account] for account in state} == told.between["host"] == state
    assert Account.MASTER not in told.accounts
    assert Account.MOMENT not in told.accounts
    assert told.peak_allocated == kept.peak_allocated - sum(state.values())
    assert told.host[Account.GRAD] == state[Account.MASTER]  # both in fp32
    assert told.moved == {"device to host": told.host[Account.GRAD], "host to device": state[Account.MASTER]}  # in bf16, twice
    assert "staging buffers of offload" not in told.not_modelled


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_number_of_parameters_is_offloaded_as_well(stage, place, tmp_path):
    path = tmp_path if place == "disk" else None
    config = sb.ZeroConfig(stage=stage, precision=BF16, offload=sb.Offload(optimizer=place, path=path))
    told = sb.forecast(8e9, config, ranks=4)
    share = 2 * 10**9
    param = 2 * share if place == "disk" else 0  # a master on a disk is no source of gathers
    assert told.between.get("device", {}) == ({"PARAM": 16 * 10**9} if stage < 3 else {"PARAM": param} if param else {})
    assert told.between[place] == {"MASTER": 4 * share, "MOMENT": 8 * share}
    assert told.host == {**(told.between["host"] if place == "host" else {}), "GRAD": 4 * share}
    assert told.persistent == sum(told.between.get("device", {}).values())


def test_megatron_holds_its_state_from_the_beginning_of_a_step_to_its_end():
    """Gradients lie in a buffer that is made once: 2 + 4 bytes a parameter whole, 12 over the ranks."""
    told = asked("llama-3.2-1b", stage=1, engine="megatron", ranks=8, micro_batch=1, sequence=128)
    numel = catalog.facts("llama-3.2-1b").num_parameters
    assert told.accounts[Account.PARAM] + told.accounts[Account.GRAD] == 6 * numel
    assert told.accounts[Account.MASTER] + told.accounts[Account.MOMENT] == 12 * numel // 8
    between = next(peak for peak in told.phases if peak.phase == "between" and not peak.first)
    assert between.accounts[Account.GRAD] == 4 * numel


def test_what_a_token_visits_is_kept_as_often_as_it_visits():
    """Inputs of the experts' two products, gate before and behind its activation, and up: top_k (h + 4 f) elements a token and block."""
    one, more = (
        asked(mixture(top_k), stage=0, ranks=1, micro_batch=16, sequence=128, precision=sb.Precision()).accounts[Account.ACTIVATION]
        for top_k in (1, 3)
    )
    block = 4 * 16 * 128 * (3 - 1) * (64 + 4 * 32)  # fp32, tokens, visits
    assert 3 * block <= more - one <= 6 * block  # of four blocks the last is partly freed; weights of the visits come on top


def mixture(top_k):
    experts = Experts(count=4, top_k=top_k, ffn=32)
    sizes = Architecture(family="mixtral", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=32, vocab=128, experts=experts)
    return model_facts(sizes, name="mixture", source="a test")


def test_norms_are_whole_on_every_tensor_parallel_device():
    told = asked("llama-3.2-1b", stage=0, engine="megatron", ranks=2, tensor=2, micro_batch=1, sequence=128)
    facts = catalog.facts("llama-3.2-1b")
    norms = sum(parameter.numel for parameter in facts.parameters() if "norm" in parameter.name)
    assert norms
    assert told.accounts[Account.PARAM] == 2 * ((facts.num_parameters - norms) // 2 + norms)
