"""The plain loop of ``--check-baseline``: that it is plain PyTorch, and that it sees a single bit."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardbook.config import Precision, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.ledger.counters import peak_resident_nbytes, resident_nbytes
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.train.baseline import PlainLoop
from shardbook.train.compare import Comparison
from shardbook.train.optimizer import build_optimizer, build_scheduler
from shardbook.train.seeding import seed_forward, seeding
from shardbook.train.settings import OptimizerSettings

SIZES = DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, ffn=16, vocab=32)
SETTINGS = OptimizerSettings(warmup=1)


def plain(config=None):
    make = lambda named: build_optimizer(named, SETTINGS)  # noqa: E731
    return PlainLoop(Decoder(SIZES), config or ZeroConfig(), make, lambda optimizer: build_scheduler(optimizer, SETTINGS, 10))


def batches(ranks, micro):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(0, 32, (2, 5), generator=generator)  # noqa: E731
    return [[(draw(), draw()) for _ in range(micro)] for _ in range(ranks)]


def test_one_step_is_the_step_people_write():
    made, model, given = plain(ZeroConfig(clip_grad_norm=0.1)), Decoder(SIZES), batches(2, 1)
    report = made.step(given, 1.0)
    optimizer = build_optimizer(model.named_parameters(), SETTINGS)
    weight = 20
    loss = sum(model(*micro)[0] for rank in given for micro in rank) / weight
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert report.weight == weight
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.clip_factor == pytest.approx(0.1 / norm.item(), rel=1e-4)
    for mine, theirs in zip(made.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_two_orders_of_the_sums_are_two():
    given = batches(3, 3)
    once, each = plain(ZeroConfig(stage=1, accumulate=3)), plain(ZeroConfig(stage=3, accumulate=3))
    for loop in (once, each):
        for _ in range(3):
            loop.step(given, 1.0)
    pairs = list(zip(once.model.parameters(), each.model.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16", "pure-bf16", "2+2+4+8", "fp16"])
def test_types_are_the_conventions(name):
    precision = Precision.preset(name)
    made = plain(ZeroConfig(precision=precision))
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float16 if name == "fp16" else torch.bfloat16}
    assert (made.masters is None) == (name == "pure-bf16")
    assert made.step(batches(1, 1), 2.0).applied


def test_a_step_that_is_not_finite_changes_nothing():
    made = plain()
    before = [parameter.clone() for parameter in made.model.parameters()]
    given = batches(1, 1)
    with torch.no_grad():
        made.model.norm.weight[0] = float("inf")
    assert not made.step(given, 1.0).applied
    for name, was in zip(made.names[:-2], before, strict=False):
        assert torch.equal(dict(made.model.named_parameters())[name], was)


def test_a_single_bit_is_seen_and_described():
    made = plain()
    theirs = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    assert made.first_difference(1, iter(theirs.items())) is None
    theirs["norm.weight"].view(torch.int32)[3] ^= 1
    assert made.first_difference(1, iter(theirs.items())) == "step 1: norm.weight: 1 of 16 elements differ, by 1.19e-07 at most"
    theirs["norm.weight"] = torch.ones(16)
    theirs["norm.weight"][0] = -0.0
    made.model.norm.weight.data[0] = 0.0
    assert "norm.weight: 0 of 16 elements differ" in (made.first_difference(2, iter(theirs.items())) or "")  # but bits do


def test_parameters_that_are_missing_or_too_many_are_a_difference():
    made = plain()
    theirs = [(name, parameter.detach()) for name, parameter in made.model.named_parameters()]
    assert "head.weight: missing in the run" in (made.first_difference(1, iter(theirs[:-1])) or "")
    assert "embedding.weight: no parameter of the plain loop, or read twice" in (made.first_difference(1, iter([*theirs, theirs[0]])) or "")


def test_reported_numbers_are_compared_too():
    made = plain()
    report = made.step(batches(1, 1), 1.0)
    assert made.report_difference(1, report, report) is None
    other = SimpleNamespace(**{**vars(report), "grad_norm": report.grad_norm * (1 + 1e-15)})
    assert "grad_norm is" in (made.report_difference(1, report, other) or "")


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, inputs, targets):
        return nn.functional.dropout(self.weight).sum() * random.random() * inputs.float().mean(), targets.numel()


class Dropping(Uneven):
    def forward(self, inputs, targets):
        return nn.functional.dropout(self.weight).sum() * inputs.float().mean(), torch.tensor(targets.numel())


def test_what_cannot_be_compared_is_refused():
    loop = PlainLoop(Uneven(), ZeroConfig(), lambda named: build_optimizer(named, SETTINGS), lambda _: None)
    with pytest.raises(ConfigError, match="the same batch gives two losses although torch's generators were seeded alike"):
        loop.check_repeatable(batches(1, 1)[0][0], seeding(0, 1))
    with pytest.raises(ConfigError, match=r"leave zero.precision.keep out"):
        plain(ZeroConfig(precision=Precision(param="bf16", keep={"*.norm": "fp32"})))


def test_masks_follow_from_the_place_in_the_run():
    """Neither from what was drawn before, nor from the order in which ranks and micro-batches are computed."""
    given, reports = batches(2, 2), []
    for disturbed in (False, True):
        loop = PlainLoop(
            Dropping(),
            ZeroConfig(accumulate=2),
            lambda named: build_optimizer(named, SETTINGS),
            lambda one: build_scheduler(one, SETTINGS, 9),
        )
        loop.check_repeatable(given[0][0], seeding(0, 1))
        if disturbed:
            torch.rand(7)
        reports.append([loop.step(given, 1.0, seeding(0, step)).loss for step in (1, 2)])
    assert reports[0] == reports[1]
    draws = []
    for place in [(0, 1, 0, 0), (1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)]:
        seed_forward(*place)
        draws.append(torch.rand(1).item())
    assert len(set(draws)) == 5


def test_a_rank_without_the_plain_loop_still_reads_everything():
    read = []
    engine = SimpleNamespace(full_parameters=lambda: (read.append(name) or (name, torch.zeros(1)) for name in "ab"))
    comparison = Comparison(engine, 2, None)
    comparison.start()
    comparison.after(1, [], SimpleNamespace())
    comparison.after(3, [], SimpleNamespace())
    assert read == ["a", "b"] * 2
    assert Comparison(engine, 0, None).verdict() is None


# ---- memory ---------------------------------------------------------------------------------------------------------------


def test_resident_memory_is_the_process():
    assert 2**24 < resident_nbytes() <= peak_resident_nbytes() < 2**36
