"""Freezing and thawing while training: as in plain torch, whatever the stage, and without memory for what is frozen."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardbook as sb
from shardbook.errors import ConfigError
from tests import ranks, zoo
from tests.equality import as_integers

SWITCHES: dict[int, dict[str, bool]] = {
    0: {"embedding.weight": False, "blocks.1": False},
    2: {"embedding.weight": True, "blocks.1": True},
    4: {"blocks.0": False, "head": False},
    6: {"blocks.0": True},
}


def switch(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        for prefix, value in SWITCHES.get(step, {}).items():
            if name.startswith(prefix):
                parameter.requires_grad_(value)


def summed(model: nn.Module, num_ranks: int, step: int) -> float:
    """Every rank's gradient, added in rank order into ``.grad`` and divided by the total weight."""
    total: dict[str, torch.Tensor] = {}
    weight = 0.0
    for rank in range(num_ranks):
        batch = zoo.tokens(rank, step, 0)
        zoo.cross_entropy(zoo.call_model(model, batch), batch).backward()
        weight += float(batch.weight)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = parameter.grad if name not in total else total[name] + parameter.grad
            parameter.grad = None
    scale = torch.tensor(1 / weight, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.grad = total[name] * scale if name in total else None
    return weight


def freezing_and_thawing(rank: int, num_ranks: int, stages: tuple[int, ...]) -> list[str]:
    """Train with parameters switched on and off; returns what differs from plain torch."""
    torch.manual_seed(1)
    first = zoo.plain()
    switch(first, 0)
    faults: list[str] = []
    for stage in stages:
        model, plain = copy.deepcopy(first), copy.deepcopy(first)
        optimizer, plain_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
        engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage))
        for step in range(8):
            for each in (model, plain):
                switch(each, step)
            batch = zoo.tokens(rank, step, 0)
            engine.backward(zoo.cross_entropy(zoo.call_model(engine, batch), batch), weight=batch.weight)
            engine.step()
            summed(plain, num_ranks, step)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        ours = engine.state_dict()
        if rank == 0:
            theirs = plain.state_dict()
            faults += [f"stage {stage}: {name}" for name in theirs if not torch.equal(as_integers(ours[name]), as_integers(theirs[name]))]
        engine.close()
    return faults


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_switching_requires_grad_is_as_in_plain_torch(num_ranks: int) -> None:
    assert sum(ranks.call(num_ranks, job, (0, 1, 2, 3)), []) == []


def job(stages: tuple[int, ...]) -> list[str]:
    import torch.distributed as dist

    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return freezing_and_thawing(rank, num_ranks, stages)


def frozen_bytes() -> dict[str, int]:
    """Bytes by account where everything but the head is frozen, after a step."""
    model = zoo.plain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    engine = sb.Engine(model, torch.optim.Adam(model.parameters()), sb.ZeroConfig(stage=2, precision=sb.Precision(param="bf16")))
    live: dict[str, int] = {}

    def observer(event: Any) -> None:
        if hasattr(event, "account"):
            live[str(event.account)] = live.get(str(event.account), 0) + event.nbytes

    with engine.observe(observer):
        batch = zoo.tokens(0, 0, 0)
        engine.backward(zoo.cross_entropy(zoo.call_model(engine, batch), batch), weight=batch.weight)
        engine.step()
    engine.close()
    return live


def test_frozen_parameters_have_no_gradient_master_or_moment_bytes() -> None:
    live = frozen_bytes()
    trained = sum(-(-parameter.numel() // 64) * 64 for name, parameter in zoo.plain().named_parameters() if name.startswith("head"))
    assert live["MASTER"] == 4 * trained
    assert live["MOMENT"] <= 8 * trained + 4 * 2
    assert not live.get("GRAD")
    assert not live.get("GRAD_FULL")


def test_thawing_what_no_group_holds_is_refused() -> None:
    model = zoo.plain()
    model.requires_grad_(False)
    head = [parameter.requires_grad_() for name, parameter in model.named_parameters() if name.startswith("head")]
    engine = sb.Engine(model, torch.optim.SGD(head, lr=0.1), sb.ZeroConfig(stage=2))
    next(parameter for name, parameter in model.named_parameters() if not name.startswith("head")).requires_grad_()
    with pytest.raises(ConfigError, match="in no parameter group"):
        zoo.call_model(engine, zoo.tokens(0, 0, 0))
    engine.close()
