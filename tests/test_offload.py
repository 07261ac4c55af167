"""Offload to the host against the plain loop, bit for bit, and where the bytes are meanwhile.

The default suite runs a selection in which every pair of values of two fields meets; ``-m full`` every model of the zoo at every stage.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardbook as sb
from shardbook.accounts import Account, Tier
from shardbook.engine.host_step import host_threads, planned_threads, prefer_fused
from shardbook.errors import ConfigError, UsageError
from tests.equality import OPTIMIZERS, PRECISIONS, Case
from tests.pairwise import pairwise
from tests.test_engine_equality import FIELDS, allowed, check
from tests.tier_books import Books
from tests.zoo import ZOO


def possible(row: dict[str, Any]) -> bool:
    """Optimizers leave the device where they are divided, parameters where they are released."""
    offload, stage = row.get("offload", "none"), row.get("stage", 3)
    return allowed(row) and (offload == "none" or stage >= 1) and (offload in ("none", "optimizer", "disk") or stage == 3)


SELECTION = [
    Case(**row)
    for row in pairwise(
        {
            **{name: values for name, values in FIELDS.items() if name not in ("scheduled", "weighted", "ahead")},
            "entry": ["plain", "tied", "experts", "frozen"],
            "num_ranks": [2],
            "stage": [1, 2, 3],
            "offload": ["optimizer", "params", "both"],
        },
        possible,
    )
]


@pytest.mark.ranks
def test_equals_the_plain_loop() -> None:
    check(SELECTION)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(("entry", "num_ranks"), [(entry, 1 + index % 3) for index, entry in enumerate(sorted(ZOO))])
def test_whole_product(entry: str, num_ranks: int) -> None:
    """Every stage and place, with types that take turns."""
    kinds = [(stage, offload) for stage in (1, 2, 3) for offload in ("optimizer", "params", "both")]
    rows = [
        {
            "entry": entry, "num_ranks": num_ranks, "stage": stage, "offload": offload, "precision": precision,
            "optimizer": "adamw_plain" if entry == "gaps" else sorted(OPTIMIZERS)[index % len(OPTIMIZERS)],
            "accumulate": 3 if index % 2 and precision in ("fp32", "bf16") else 1, "empty": index % 3 == 0 and num_ranks > 1,
        }
        for index, (stage, offload) in enumerate(kinds)
        for precision in sorted(PRECISIONS)[(index + num_ranks) % 3 :: 3]
    ]  # fmt: skip
    check([Case(**row) for row in rows if possible(row)])


def trained(stage: int, offload: sb.Offload, precision: str = "fp32", accumulate: int = 1) -> tuple[Books, int, int]:
    """The books of a second step, the elements that it held, and the largest unit's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision), offload=offload, accumulate=accumulate)
    engine, books = sb.Engine(model, optimizer, config), Books()
    for step in range(2):
        if step == 1:
            books.moved.clear()
        for _ in range(accumulate):
            inputs = torch.ones(2, 64)
            if step == 0:
                engine.backward(engine(inputs).float().sum())
            else:
                with engine.observe(books):
                    engine.backward(engine(inputs).float().sum())
                books.held.clear()
        if step == 0:
            engine.step()
        else:
            with engine.observe(books):
                engine.step()
    numel = sum(flat.layout.shard_numel for unit in engine._units for flat in unit.flats)
    largest = max(flat.layout.shard_numel for unit in engine._units for flat in unit.flats)
    engine.close()
    return books, numel, largest


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_host_holds_and_what_crosses_the_link(stage: int, precision: str) -> None:
    books, numel, largest = trained(stage, sb.Offload(optimizer="host"), precision)
    wide, narrow = (2 if precision == "pure-bf16" else 4), (4 if precision == "fp32" else 2)
    assert books.held[Account.MASTER, Tier.HOST] == wide * numel
    assert books.most[Account.GRAD, Tier.HOST] == wide * numel
    assert books.held[Account.GRAD, Tier.HOST] == 0
    assert books.most[Account.GRAD, Tier.DEVICE] <= 2 * wide * largest
    assert not books.most[Account.MASTER, Tier.DEVICE]
    assert not books.most[Account.MOMENT, Tier.DEVICE]
    assert books.held[Account.PARAM, Tier.DEVICE] == (0 if stage == 3 else narrow * numel)
    assert books.held[Account.MOMENT, Tier.HOST] >= 2 * wide * numel
    assert books.moved["device to host"] == wide * numel
    # stages 1 and 2 get their new values after the step; at stage 3 every gather, in forward and in backward, is filled from the host
    assert books.moved["host to device"] == (2 if stage == 3 else 1) * narrow * numel


def test_parameters_alone_rest_on_the_host_and_are_stepped_on_a_unit_at_a_time() -> None:
    books, numel, largest = trained(3, sb.Offload(params="host"))
    assert books.held[Account.PARAM, Tier.HOST] == 4 * numel
    assert not books.held[Account.PARAM, Tier.DEVICE]
    assert books.held[Account.MOMENT, Tier.DEVICE] >= 8 * numel
    assert books.most[Account.WORKSPACE, Tier.DEVICE] <= 8 * (1 << 18) + 4 * largest
    assert books.moved == {"host to device": 3 * 4 * numel, "device to host": 4 * numel}


def test_a_skipped_step_changes_nothing_and_the_next_one_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    engine = sb.Engine(model, torch.optim.Adam(model.parameters()), sb.ZeroConfig(stage=3, offload=sb.Offload(optimizer="host")))
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.backward(engine(torch.full((2, 8), float("inf"))).sum())
    assert not engine.step().applied
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    engine.backward(engine(torch.ones(2, 8)).sum())
    assert engine.step().applied
    assert not any(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    engine.close()


def test_hooks_and_schedulers_see_one_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[str] = []
    config = sb.ZeroConfig(stage=2, offload=sb.Offload(optimizer="host"))
    engine = sb.Engine(model, optimizer, config, scheduler=scheduler)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append(f"after {len(optimizer.state)}"))
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert seen == ["before", "after 4"]
    with pytest.raises(UsageError, match=r"engine\.step"):
        optimizer.step()
    engine.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stage": 0, "offload": sb.Offload(optimizer="host")}, r"offload\.optimizer = .host.*at stage 0.*use stage 1, 2 or 3"),
        ({"stage": 2, "offload": sb.Offload(params="host")}, r"offload\.params = .host.*at stage 2.*use stage 3"),
    ],
)  # fmt: skip
def test_what_a_stage_does_not_have_is_refused_when_built(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sb.ZeroConfig(**wrong)


def saved(stage: int, offload: sb.Offload, seed: int) -> sb.Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 7))
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset("bf16"), offload=offload)
    return sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)


def steps(engine: sb.Engine, first: int, stop: int) -> list[tuple[float | None, float]]:
    found: list[tuple[float | None, float]] = []
    for step in range(first, stop):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(5, 40)).float().square().sum(), weight=5)
        report = engine.step()
        found.append((report.loss, report.grad_norm))
    return found


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("there", "here"), [("none", "host"), ("host", "none"), ("host", "host")])
def test_a_checkpoint_does_not_know_where_states_lived(tmp_path: Path, there: Any, here: Any, warm: bool) -> None:
    first = saved(3, sb.Offload(optimizer=there), seed=0)
    steps(first, 0, 2)
    first.save(tmp_path / "checkpoint")
    expected = steps(first, 2, 4)
    second = saved(2, sb.Offload(optimizer=here), seed=1)
    steps(second, 7, 8 if warm else 7)
    second.load(tmp_path / "checkpoint")
    assert steps(second, 2, 4) == expected
    first.close()
    second.close()


def test_the_engine_says_what_rests_where() -> None:
    engine = saved(3, sb.Offload(optimizer="host", params="host"), seed=0)
    assert "offload: master and moments rest on the host, reduced gradients on the host (host)\n" in engine.describe()
    engine.close()
    engine = saved(3, sb.Offload(params="host"), seed=0)
    assert "offload: parameter shards rest on the host (host)\n" in engine.describe()
    engine.close()
    engine = saved(3, sb.Offload(), seed=0)
    assert "offload" not in engine.describe()
    engine.close()


def test_beside_a_gpu_the_host_steps_with_the_fused_kernel_unless_told_otherwise() -> None:
    weight = nn.Parameter(torch.ones(4))
    for options, expected in (({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"capturable": True}, None)):
        optimizer = torch.optim.AdamW([weight], **options)
        prefer_fused(optimizer)
        assert optimizer.param_groups[0]["fused"] is expected
    assert planned_threads(1) >= planned_threads(2) >= 1
    before = torch.get_num_threads()
    with host_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
