"""Micro-batches of several ranks under real engines: the same data, the divisors of the step, and types that only the engine knows."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from benchmarks.models import SMALL, build
from tests import ranks

pytestmark = pytest.mark.ranks
STEPS, ACCUMULATE = 2, 2


def batch(rank: int, step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * place + rank)
    tokens = torch.randint(0, SMALL.vocab, (place + 1, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(dist.get_rank() if dist.is_initialized() else 0, step, place) for place in range(ACCUMULATE)]


def under_shardbook(path: str, stage: int, param: str, given: bool) -> None:
    model = build(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = sb.Precision(param=param)
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, accumulate=ACCUMULATE, precision=precision))
    with sb.record(engine, None, path) as recorder:
        for step in range(STEPS):
            losses, weights = [], []
            for inputs, targets in micro_batches(step):
                weights.append(torch.tensor(targets.numel()) if given else None)
                losses.append(engine(inputs, targets=targets) * (targets.numel() if given else 1))
                engine.backward(losses[-1], weight=weights[-1])
            recorder.step(loss=losses, weight=weights if given else 2, batch=micro_batches(step))
            engine.step()
    engine.close()


def under_torch(path: str, name: str) -> None:
    model = build(SMALL)
    if name == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    wrapped = nn.parallel.DistributedDataParallel(model) if name == "ddp" else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    with sb.record(wrapped, optimizer, path) as recorder:
        for step in range(STEPS):
            for inputs, targets in micro_batches(step):
                loss = wrapped(inputs, targets=targets) / ACCUMULATE
                loss.backward()
            recorder.step(loss=loss, batch=micro_batches(step))
            optimizer.step()
            optimizer.zero_grad()


def recorded(num_ranks: int, job, *args) -> sb.Record:
    with tempfile.TemporaryDirectory() as folder:
        ranks.call(num_ranks, job, str(Path(folder) / "a"), *args)
        record = sb.Record.open(Path(folder) / "a")
        record.all = list(record.steps())[1:]
        return record


def check(record: sb.Record, num_ranks: int, factors: list[float]) -> None:
    """Each rank's forwards are of what it was given, and nothing of them is taken for a parameter."""
    assert len(record.all) == STEPS
    for step in record.all:
        assert step.missing == []
        assert "output" not in step.phases
        assert len(step.micro_batches) == len(step.given) == num_ranks
        for mine, given in zip(step.micro_batches, step.given, strict=True):
            assert [one.inputs for one in mine] == list(given)
            assert [one.num_rows for one in mine] == [1, 2]
            assert [one.learning_rates for one in mine] == [(0.01,)] * ACCUMULATE
            assert [one.output.numel for one in mine] == [1, 1]
            assert [one.output_gradient.total for one in mine] == factors
        assert len({facts.hash for mine in step.given for pair in mine for facts in pair}) == 4 * num_ranks


@pytest.mark.parametrize("stage", [2, 3])
def test_shardbook_says_what_it_will_divide_by(stage):
    record = recorded(2, under_shardbook, stage, "fp32", True)
    check(record, 2, [8.0, 16.0])  # a mean by its number of tokens
    assert [step.divisors for step in record.all] == [(24.0, 24.0)] * STEPS  # (1 + 2) rows of 8 tokens
    assert [step.weights for step in record.all] == [(24.0, 24.0)] * STEPS
    assert record.manifest["compute"] == "float32"


def test_without_weights_a_micro_batch_counts_one_and_fp16_is_scaled():
    record = recorded(2, under_shardbook, 3, "fp16", False)
    assert [step.divisors for step in record.all] == [(2.0**17, 2.0**17)] * STEPS  # two micro-batches times the first loss scale
    check(record, 2, [2.0**16] * ACCUMULATE)
    assert record.manifest["compute"] == "float16"


@pytest.mark.parametrize(("name", "compute"), [("ddp", "float32"), ("fsdp2", "bfloat16")])
def test_ddp_and_fsdp2(name, compute):
    record = recorded(2, under_torch, name)
    check(record, 2, [1 / ACCUMULATE] * ACCUMULATE)
    assert {divisor for step in record.all for divisor in step.divisors} == {None}
    assert record.manifest["compute"] == compute


def test_one_rank_has_the_micro_batches_of_a_plain_loop():
    engine, plain = recorded(1, under_shardbook, 1, "fp32", False), recorded(1, under_torch, "plain")
    for a, b in zip(engine.all, plain.all, strict=True):
        assert a.given == b.given
        assert a.data == b.data
        assert [one.inputs for one in a.micro_batches[0]] == [one.inputs for one in b.micro_batches[0]]
    assert [one.output for one in engine.all[0].micro_batches[0]] == [one.output for one in plain.all[0].micro_batches[0]]
