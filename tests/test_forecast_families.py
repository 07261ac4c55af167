"""Every family under every engine, and what a configuration says that no engine does yet."""

import pytest

import shardbook as sb
from shardbook.accounts import Account
from shardbook.facts import catalog

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
    moved = {account: kept.accounts[account] for account in (Account.MASTER, Account.MOMENT)}
    assert told.host == moved
    assert told.peak_allocated == kept.peak_allocated - sum(moved.values())
    assert "staging buffers of offload" in told.not_modelled
