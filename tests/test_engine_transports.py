"""The transport of NCCL and of large groups, on gloo: the same bits where it adds in order, rounding where the backend adds, and labels
that are compared before anything is applied."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from shardbook.errors import DivergenceError
from tests import ranks, zoo
from tests.equality import as_integers


def train(config: sb.ZeroConfig, *, empty: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Three steps of two micro-batches, one of them without data on the last rank; final parameters and norms."""
    torch.manual_seed(1)
    model = zoo.plain()
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    rank, norms = dist.get_rank(), []
    for step in range(3):
        for micro in range(config.accumulate):
            if empty and step == 1 and micro == 1 and rank == dist.get_world_size() - 1:
                engine.backward(None)
                continue
            batch = zoo.tokens(rank, step, micro)
            engine.backward(zoo.cross_entropy(zoo.call_model(engine, batch), batch), weight=batch.weight)
        norms.append(engine.step().grad_norm)
    values = dict(engine.state_dict())
    engine.close()
    return values, norms


def all_to_all(*arguments: Any) -> Any:
    """A stand-in for ``connect``: collectives that add in rank order, as on NCCL."""
    from shardbook.engine import comm

    group, watch, journal = arguments[:3]
    return comm.Collectives(group, dist.new_group(list(range(dist.get_world_size()))), watch, journal, ordered=True)


def transports(stage: int, precision: str) -> list[str]:
    """Faults: what differs between the transports."""
    from shardbook.engine import engine as module

    config = {"stage": stage, "accumulate": 2, "clip_grad_norm": 1.0, "precision": sb.Precision.preset(precision)}
    messages, norms = train(sb.ZeroConfig(**config), empty=True)
    original = module.connect
    module.connect = all_to_all
    try:
        collectives, other_norms = train(sb.ZeroConfig(**config), empty=True)
    finally:
        module.connect = original
    native, _ = train(sb.ZeroConfig(reduction="native", **config), empty=True)
    faults = [] if norms == other_norms else [f"norms {norms} and {other_norms}"]
    for name, value in messages.items():
        if not torch.equal(as_integers(value), as_integers(collectives[name])):
            faults.append(f"{name} differs in bits between messages and collectives")
        if not torch.allclose(value.float(), native[name].float(), rtol=2**-6 if precision == "bf16" else 1e-3, atol=1e-4):
            faults.append(f"{name} is far from what the backend's own reduction gives")
    return faults


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_transports_train_alike(stage: int, precision: str) -> None:
    assert sum(ranks.call(3, transports, stage, precision), []) == []


class Swapping(nn.Module):
    """Three blocks of the same size; ``swap`` exchanges the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(3))
        self.swap = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        for block in (first, third, second) if self.swap else (first, second, third):
            x = block(x)
        return x


def swapped() -> str:
    """One rank goes through equal blocks in another order, so that collectives match in size but not in unit."""
    from shardbook.engine import engine as module

    torch.manual_seed(1)
    model = Swapping()
    original = module.connect
    module.connect = all_to_all
    try:
        engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3, prefetch=sb.Prefetch(ahead=0)))
        model.swap = dist.get_rank() == 1
        engine.backward(engine(torch.ones(2, 3, zoo.WIDTH)).sum())
        engine.step()
    except DivergenceError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        module.connect = original
    return "applied"


def test_units_of_the_same_size_are_not_taken_for_each_other() -> None:
    for told in ranks.call(2, swapped):
        assert told.startswith("DivergenceError")
        assert "headers differ" in told
