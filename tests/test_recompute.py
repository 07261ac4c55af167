"""Recomputation against the plain loop, bit for bit, and what it does to gathers and to memory.

The default suite runs a selection in which every pair of values of two fields meets; ``-m full`` every model of the zoo at every stage.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardbook as sb
from shardbook.accounts import Account, Tier
from shardbook.engine.engine import Engine
from shardbook.events import Booking, Event, Traffic, Transfer
from tests import ranks
from tests.equality import OPTIMIZERS, PRECISIONS, RECOMPUTES, Case
from tests.pairwise import pairwise
from tests.test_engine_equality import FIELDS, allowed, check
from tests.zoo import ZOO

KINDS = [name for name in RECOMPUTES if name != "none"]
WITHOUT_BLOCKS = ("minus_zero", "strided", "passes_through", "no_blocks", "one_layer", "huge_layer")
REFUSED = ("in_place_input",)

SELECTION = [
    Case(**row)
    for row in pairwise(
        {
            **{name: values for name, values in FIELDS.items() if name not in ("scheduled", "weighted", "optimizer")},
            "entry": [
                "dropout", "nested", "tied", "block_twice", "frozen", "tuples", "keywords", "buffers", "checkpoint_part", "recurrent",
            ],
            "num_ranks": [2],
            "precision": ["fp32", "bf16"],
            "recompute": KINDS,
        },
        allowed,
    )
]  # fmt: skip


@pytest.mark.ranks
def test_equals_the_plain_loop() -> None:
    check(SELECTION)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("entry", sorted({*ZOO} - {*WITHOUT_BLOCKS, *REFUSED}))
def test_whole_product(entry: str, num_ranks: int) -> None:
    kinds = [(stage, recompute) for stage in range(4) for recompute in KINDS]
    rows = [
        {
            "entry": entry, "num_ranks": num_ranks, "stage": stage, "recompute": recompute, "precision": precision,
            "optimizer": "adamw_plain" if entry == "gaps" else sorted(OPTIMIZERS)[index % len(OPTIMIZERS)], "clip": index % 2 == 0,
            "accumulate": 3 if index % 2 and precision in ("fp32", "bf16") else 1, "empty": index % 3 == 0 and num_ranks > 1,
        }
        for index, (stage, recompute) in enumerate(kinds)
        for precision in sorted(PRECISIONS)
    ]  # fmt: skip
    check([Case(**row) for row in rows if allowed(row)])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("offload", ["optimizer", "params", "both"])
def test_equals_the_plain_loop_with_offload(offload: str) -> None:
    stages = (1, 2, 3) if offload == "optimizer" else (3,)
    check(
        [
            Case(entry=entry, num_ranks=2, stage=stage, precision=precision, offload=offload, recompute=recompute)
            for entry in ("dropout", "tied")
            for stage in stages
            for precision in ("fp32", "bf16")
            for recompute in KINDS
        ]
    )


# ---- gathers and memory --------------------------------------------------------------------------------------------------


class Books:
    """What is where, and what has moved."""

    def __init__(self) -> None:
        self.held: Counter[tuple[Account, Tier]] = Counter()
        self.most: Counter[tuple[Account, Tier]] = Counter()
        self.moved: Counter[tuple[str, str]] = Counter()
        self.gathers: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Booking):
            key = (event.account, event.tier)
            self.held[key] += event.nbytes
            self.most[key] = max(self.most[key], self.held[key])
        elif isinstance(event, Transfer):
            self.moved[event.link, event.unit] += event.nbytes
        elif isinstance(event, Traffic) and event.kind == "gather":
            self.gathers[event.unit] += 1


class Feed(nn.Module):
    """Much is saved in it, and only its input has to be."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def feeds(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Feed() for _ in range(depth)))


def engine_of(model: nn.Module, recompute: str = "full", **settings: Any) -> Engine:
    settings = {"stage": 3, "recompute": sb.Recompute(**RECOMPUTES[recompute]), **settings}
    return sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), sb.ZeroConfig(**settings))


def observed_step(stage: int, recompute: str) -> Books:
    """The books of a second step."""
    engine, books = engine_of(feeds(), recompute, stage=stage), Books()
    for step in range(2):
        inputs = torch.ones(64, 64)
        if step:
            with engine.observe(books):
                engine.backward(engine(inputs).square().sum())
                engine.step()
        else:
            engine.backward(engine(inputs).square().sum())
            engine.step()
    engine.close()
    return books


@pytest.mark.ranks
def test_a_unit_is_gathered_as_often_as_without_and_other_accounts_are_the_same() -> None:
    for stage in (0, 3):
        plain = ranks.call(2, observed_step, stage, "none")
        for kind in KINDS:
            for before, after in zip(plain, ranks.call(2, observed_step, stage, kind), strict=True):
                assert after.gathers == before.gathers
                assert sum(after.gathers.values()) == (2 * 6 if stage == 3 else 0)
                mine = (Account.ACTIVATION, Account.WORKSPACE)
                assert {key: value for key, value in after.most.items() if key[0] not in mine} == {
                    key: value for key, value in before.most.items() if key[0] not in mine
                }


def measured(recompute: str) -> tuple[dict[str, int], int]:
    """The books at the peak of a measured step whose activations weigh most, and that peak."""
    model = feeds()
    config = sb.ZeroConfig(stage=0, recompute=sb.Recompute(**RECOMPUTES[recompute]))
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-9), config)
    with sb.measure(model, engine.optimizer) as run:
        for _ in range(3):
            loss = engine(torch.ones(4096, 64)).square().sum()
            engine.backward(loss)
            del loss
            engine.step()
    engine.close()
    found = run.document().reconciliations[0]
    assert sum(found.books.values()) == found.allocated
    return dict(found.books), found.allocated


def test_activations_go_down_and_every_byte_of_a_recomputing_step_is_in_an_account() -> None:
    before, peak = measured("none")
    for kind in KINDS:
        books, allocated = measured(kind)
        assert books["UNACCOUNTED"] == 0, kind
        assert books["ACTIVATION"] < before["ACTIVATION"] * (0.75 if kind in ("second", "selective") else 0.5), kind
        assert allocated < peak, kind
        assert books["PARAM"] == before["PARAM"]
