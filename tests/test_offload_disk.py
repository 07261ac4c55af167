"""Master and optimizer state on a disk against the plain loop, bit for bit; what lies and moves where; what is refused."""

import gc
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardbook as sb
from shardbook.accounts import Account, Tier
from shardbook.engine import disk
from shardbook.errors import ConfigError
from shardbook.tiers import direct
from tests import ranks
from tests.equality import Case
from tests.pairwise import pairwise
from tests.test_engine_equality import FIELDS, check
from tests.test_offload import possible
from tests.tier_books import Books

ON_DISK: dict[str, list[Any]] = {
    "num_ranks": [2],
    "stage": [1, 2, 3],
    "offload": ["disk", "disk-both"],
    "entry": ["tied", "experts", "frozen"],
}
FEW = {name: FIELDS[name] for name in ("accumulate", "clip")}
FEW |= {"precision": ["fp32", "bf16", "pure-bf16"], "optimizer": ["adam", "adamw_fused", "adamw_foreach", "sgd", "sgd_momentum"]}
SELECTION = [Case(**row) for row in pairwise({**FEW, **ON_DISK, "entry": ["tied", "experts"]}, possible)]
MORE = [
    Case(**row) for row in pairwise({**{name: FIELDS[name] for name in FIELDS if name not in ("weighted", "ahead")}, **ON_DISK}, possible)
]


@pytest.mark.ranks
def test_equals_the_plain_loop() -> None:
    check(SELECTION)


@pytest.mark.full
@pytest.mark.ranks
def test_equals_the_plain_loop_with_everything_else() -> None:
    check(MORE)


def built(path: Path, stage: int = 3, precision: str = "fp32", *, make: Any = None, **config: Any) -> sb.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = (make or torch.optim.AdamW)(model.parameters())
    offload = sb.Offload(optimizer="disk", path=path, **config.pop("homes", {}))
    with mock.patch.object(disk, "_LEAST_NUMEL", 64):
        return sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision), offload=offload, **config))


def step(engine: sb.Engine, value: float = 1.0) -> sb.StepReport:
    engine.backward(engine(torch.full((2, 64), value)).float().sum())
    return engine.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_lies_and_moves_where(tmp_path: Path, stage: int, precision: str) -> None:
    engine, books = built(tmp_path, stage, precision), Books()
    step(engine)
    with engine.observe(books):
        before = books.held.copy()
        step(engine)
    flats = [flat for unit in engine._units for flat in unit.flats]
    numel = sum(flat.layout.shard_numel for flat in flats)
    wide, narrow = (2 if precision == "pure-bf16" else 4), (4 if precision == "fp32" else 2)
    assert books.held[Account.MASTER, Tier.DISK] == wide * numel
    assert books.held[Account.MOMENT, Tier.DISK] == 2 * wide * numel
    assert books.most[Account.GRAD, Tier.HOST] == wide * numel
    assert books.held[Account.PARAM, Tier.DEVICE] == narrow * numel
    assert not any(books.most[account, tier] for account in (Account.MASTER,) for tier in (Tier.DEVICE, Tier.HOST))
    assert books.held[Account.MOMENT, Tier.HOST] == 4 * sum(len(flat.pieces) for flat in flats)  # "step"
    assert books.moved["disk to host"] == books.moved["host to disk"] == 3 * wide * numel
    assert books.moved["host to device"] == narrow * numel
    assert books.held == before
    slots = engine._context.disk._slot_nbytes
    assert slots % 4096 == 0
    assert before[Account.WORKSPACE, Tier.HOST] == 3 * (slots + 4096) + wide  # and what pieces are while they are away
    assert slots < 3 * wide * numel / 8  # small beside what they serve
    engine.close()


def test_nothing_of_the_state_stays_in_memory(tmp_path: Path) -> None:
    engine = built(tmp_path)
    step(engine)
    assert engine.optimizer is not None
    assert {key for state in engine.optimizer.state.values() for key in state} == {"step"}
    pieces = [piece.parameter for unit in engine._units for flat in unit.flats for piece in flat.pieces]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert all(bool(torch.isnan(piece).all()) for piece in pieces)
    engine.close()


def test_a_skipped_step_reads_and_writes_nothing(tmp_path: Path) -> None:
    engine, books = built(tmp_path), Books()
    step(engine)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with engine.observe(books):
        assert not step(engine, float("inf")).applied
    assert not books.moved["disk to host"]
    assert not books.moved["host to disk"]
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    assert step(engine).applied
    engine.close()


def same_as_in_memory(tmp_path: Path, use: Any, **how: Any) -> None:
    """What ``use`` leaves of an engine on a disk and of one in memory."""
    found = []
    for place in ("disk", "none"):
        engine = built(tmp_path, **how)
        if place == "none":
            engine.close()
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
            config = {name: value for name, value in how.items() if name not in ("make", "precision")}
            precision = sb.Precision.preset(how.get("precision", "fp32"))
            engine = sb.Engine(
                model, (how.get("make") or torch.optim.AdamW)(model.parameters()), sb.ZeroConfig(precision=precision, **config)
            )
        use(engine)
        found.append({name: value.clone() for name, value in engine.state_dict().items()})
        engine.close()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_changed_by_hand(tmp_path: Path, stage: int, precision: str) -> None:
    def use(engine: sb.Engine) -> None:
        step(engine)
        with engine.gathered(write_back=True):
            engine.model[1].weight.data[3] += 0.5
        step(engine)

    same_as_in_memory(tmp_path, use, stage=stage, precision=precision)


def test_state_from_before_the_engine_goes_on(tmp_path: Path) -> None:
    def stepped(parameters: Any) -> torch.optim.Optimizer:
        kept = list(parameters)
        optimizer = torch.optim.Adam(kept, lr=0.01)
        for parameter in kept:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    same_as_in_memory(tmp_path, step, stage=2, make=stepped)


def test_frozen_parameters_that_are_thawed(tmp_path: Path) -> None:
    def frozen(parameters: Any) -> torch.optim.Optimizer:
        kept = list(parameters)
        kept[2].requires_grad_(False)
        return torch.optim.AdamW(kept, lr=0.01)

    def use(engine: sb.Engine) -> None:
        step(engine)
        engine.model[2].weight.requires_grad_(True)
        step(engine)
        step(engine)

    same_as_in_memory(tmp_path, use, stage=3, make=frozen)


def test_gradients_by_name_are_whole(tmp_path: Path) -> None:
    engine = built(tmp_path)
    assert max(len(flat.chunks) for unit in engine._units for flat in unit.flats) > 4
    engine.backward(engine(torch.ones(2, 64)).sum())
    with engine.grads() as gradients:
        assert {name: value.numel() for name, value in gradients.items()} == {f"{index}.weight": 4096 for index in range(4)}
    engine.step()
    engine.close()


def test_threads_and_space_end_with_the_engine(tmp_path: Path) -> None:
    def running() -> int:
        return sum(thread.name.startswith("shardbook disk") for thread in threading.enumerate())

    before = running()
    engine = built(tmp_path)
    step(engine)
    descriptor = engine._context.disk._file._descriptor
    assert running() == before + 2
    assert os.fstat(descriptor).st_nlink == 0
    engine.close()
    assert running() == before
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    del engine
    gc.collect()


def refused(path: Path) -> str:
    """A job: on rank 1 the disk is full."""
    import torch.distributed as dist

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    if dist.get_rank() == 1:
        with mock.patch.object(direct.os, "posix_fallocate", full), pytest.raises(ConfigError) as found:
            built(path)
    else:
        with pytest.raises(ConfigError) as found:
            built(path)
    return str(found.value)


@pytest.mark.ranks
def test_a_disk_that_is_full_on_one_rank_is_known_on_all_when_built(tmp_path: Path) -> None:
    first, second = ranks.call(2, refused, tmp_path, seconds=60)
    assert "rank 1 can't keep its state there" in first
    assert "MiB of" in second
    assert "No space left on device" in second


def test_a_missing_parent_is_refused_when_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its parent is missing"):
        built(tmp_path / "one" / "two")


@pytest.mark.parametrize(("numel", "chunk"), [(10**10, 1 << 22), (1 << 24, 1 << 20), (1000, 1 << 14)])
def test_chunks_are_small_beside_the_model(numel: int, chunk: int) -> None:
    assert disk.planned_numel(numel) == chunk


def recorded(path: Path, place: str, factor: float = 1.0) -> Path:
    engine = built(path, precision="bf16")
    if place == "none":
        engine.close()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        engine = sb.Engine(model, torch.optim.AdamW(model.parameters()), sb.ZeroConfig(precision=sb.Precision.preset("bf16")))
    assert engine.optimizer is not None
    with sb.record(engine.model, engine.optimizer, path / f"{place}-{factor}") as recorder:
        for number in range(2):
            torch.manual_seed(number)
            inputs = torch.randn(8, 64)
            loss = engine(inputs).float().pow(2).sum() * factor
            engine.backward(loss, weight=8)
            recorder.step(loss=loss, weight=8, batch=inputs)
            engine.step()
    engine.close()
    return path / f"{place}-{factor}"


def test_a_record_holds_what_is_on_the_disk(tmp_path: Path) -> None:
    in_memory = recorded(tmp_path, "none")
    assert sb.verify(recorded(tmp_path, "disk"), in_memory).kind == "identical"
    assert sb.verify(recorded(tmp_path, "disk", 1.01), in_memory).kind == "different"
