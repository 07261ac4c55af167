"""Deep models from a few of their blocks: what ``sb.simulate`` says is equal, to the byte, to a simulation of all of them."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import shardbook as sb
from benchmarks.models import GPT, GPTConfig
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.simulation.extrapolate import WORTHWHILE

VOCABULARY, WIDTH = 96, 32
DEEP = WORTHWHILE + 2
SAME = ("accounts", "persistent", "peak_allocated", "peak_phase", "peak_where", "sent", "phases", "num_parameters", "warnings", "weights")


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int
    ranks: int
    shape: str = "decoder"
    engine: str = "shardbook"
    precision: str = "fp32"
    accumulate: int = 1
    clip: bool = False
    kernel: str = "fused"
    sequence: int = 16
    depth: int = DEEP
    rank: int = 0

    @property
    def config(self):
        precision = sb.Precision.preset(self.precision)
        return sb.ZeroConfig(
            stage=self.stage, precision=precision, accumulate=self.accumulate, clip_grad_norm=1.0 if self.clip else None
        )  # fmt: skip


CASES = (
    Case(stage=1, ranks=3, rank=2, kernel="foreach"),
    Case(stage=3, ranks=64, shape="gpt", precision="bf16", sequence=64),
)
MORE = (
    Case(stage=2, ranks=4, shape="tied", precision="bf16", kernel="for-loop"),
    Case(stage=3, ranks=4, engine="fsdp2", precision="bf16", clip=True),
    Case(stage=0, ranks=2, precision="bf16", accumulate=2, clip=True),
    Case(stage=3, ranks=64, shape="gpt", accumulate=2),
    *(Case(stage=stage, ranks=ranks, precision=p) for stage in range(4) for ranks in (1, 2, 1024) for p in ("fp32", "bf16", "pure-bf16")),
    *(Case(stage=stage, ranks=2, shape="gpt", sequence=size, depth=23) for stage in range(4) for size in (4, 128)),
    *(Case(stage=stage, ranks=4, engine="fsdp2", accumulate=2, kernel="foreach", depth=33) for stage in (2, 3)),
    Case(stage=0, ranks=2, engine="ddp"),
)


def build(case):
    if case.shape == "gpt":
        return GPT(GPTConfig(layers=case.depth, width=WIDTH, heads=2, vocab=VOCABULARY, sequence=case.sequence))
    sizes = {"layers": case.depth, "width": WIDTH, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": VOCABULARY}
    return Decoder(DecoderConfig(**sizes, tied=case.shape == "tied"))


def batch(case):
    return torch.zeros(2, case.sequence, dtype=torch.long), torch.zeros(2, case.sequence, dtype=torch.long)


def optimizer_of(case, parameters):
    return torch.optim.AdamW(parameters, fused=case.kernel == "fused", foreach=case.kernel == "foreach")


def simulate(case, blocks, make=None):
    return sb.simulate(
        (lambda: build(case)) if make is None else make,
        lambda: batch(case),
        case.config,
        ranks=case.ranks,
        rank=case.rank,
        engine=case.engine,
        optimizer=lambda parameters: optimizer_of(case, parameters),
        blocks=blocks,
    )


def is_extrapolated(told):
    return any("repeated blocks" in sentence for sentence in told.simulated.assumptions)


def assert_same(few, every):
    assert {name: getattr(few, name) for name in SAME} == {name: getattr(every, name) for name in SAME}
    for name in ("first_peak", "later_peak", "first_accounts", "rank"):
        assert getattr(few.simulated, name) == getattr(every.simulated, name)


@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.full), *CASES[1:]], ids=str)
def test_a_few_blocks_say_what_all_of_them_say(case):
    few, every = simulate(case, "auto"), simulate(case, "all")
    assert is_extrapolated(few)
    assert not is_extrapolated(every)
    assert_same(few, every)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_so_they_do_in_every_way_to_train(case):
    few, every = simulate(case, "auto"), simulate(case, "all")
    assert is_extrapolated(few) == (case.engine != "ddp")
    assert_same(few, every)


def test_a_shallow_model_runs_whole():
    assert not is_extrapolated(simulate(Case(stage=3, ranks=2, depth=3), "auto"))


# ---- what is not a line is not drawn as one ------------------------------------------------------------------------------------

CASE = Case(stage=3, ranks=4)


def changed(change):
    def make():
        model = build(CASE)
        change(model.blocks)
        return model

    return make


def wider(blocks):
    blocks[9].feed_forward.up = nn.Linear(WIDTH, 80, bias=True)


def frozen(blocks):
    for parameter in blocks[9].parameters():
        parameter.requires_grad_(False)


def shared(blocks):
    blocks[9].feed_forward = blocks[8].feed_forward


@pytest.mark.parametrize("change", [*(pytest.param(change, marks=pytest.mark.full) for change in (wider, frozen)), shared])
def test_a_block_unlike_the_others(change):
    assert not is_extrapolated(simulate(CASE, "auto", changed(change)))


class Windowed(nn.Module):
    """A block like any other, but for one setting."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).repeat(self.times, 1, 1).tanh().mean(0)


class Stack(nn.Module):
    """``odd``: the one block that has another setting."""

    def __init__(self, odd: int | None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Windowed(50 if number == odd else 2) for number in range(DEEP))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs).flatten(0, 1)[None]
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("odd", [None, 9])
@pytest.mark.full
def test_a_setting_that_one_block_has(odd):
    few, every = (simulate(CASE, blocks, lambda: Stack(odd)) for blocks in ("auto", "all"))
    assert is_extrapolated(few) == (odd is None)
    assert_same(few, every)
