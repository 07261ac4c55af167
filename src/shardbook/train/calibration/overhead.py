"""What a call costs beside its work: of an operator under autograd, of a unit in the engine, of a block that is computed again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.config import Offload, Recompute, ZeroConfig
from shardbook.engine.engine import Engine
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Attention, Decoder, FeedForward, RMSNorm
from shardbook.train.calibration.clock import Clock, quartile

_OPERATORS, _WIDTH = 64, 8
_FEW, _MANY = 4, 20
_WARM_STEPS, _STEPS = 8, 25
_PIECES = 4
"""Pieces of a unit on each rank: as many as a chunk of a block has, about."""
_NOWHERE = Offload()
_EVICTING_NBYTES = 4 << 20


def operators(clock: Clock) -> Mapping[str, float]:
    """Seconds of one operator on next to nothing, with the node that autograd keeps of it, and of that node's backward."""
    x = torch.ones(_WIDTH, device=clock.device, requires_grad=True)
    scale = torch.ones(_WIDTH, device=clock.device)

    def forward() -> Tensor:
        value: Tensor = x
        for _ in range(_OPERATORS):
            value = value * scale
        return value.sum()

    both = clock.usual(lambda: torch.autograd.grad(forward(), x))
    alone = clock.usual(forward)
    one, other = clock.mean([alone / _OPERATORS, (both - alone) / _OPERATORS])
    return {"operator.forward": one, "operator.backward": max(other, one / 10)}


class _Tiny(nn.Module):
    """Blocks with next to nothing in them: what they cost an engine is the engine's."""

    def __init__(self, blocks: int, weights: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(weights) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _Block(nn.Module):
    def __init__(self, weights: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(weights))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def units(clock: Clock) -> Mapping[str, float]:
    """Seconds of a unit of the engine in forward, in backward and in the step, where it is gathered and where it stays."""
    found: dict[str, float] = {}
    stages: tuple[tuple[str, Literal[1, 3]], ...] = (("stay", 1), ("gathered", 3))
    for name, stage in stages:
        few, many = (_phases(clock, stage, blocks) for blocks in (_FEW, _MANY))
        for phase, of_many, of_few in zip(("forward", "backward", "step"), many, few, strict=True):
            found[f"unit.{phase}.{name}"] = max(1e-6, (of_many - of_few) / (_MANY - _FEW))
    return dict(zip(found, clock.mean(list(found.values())), strict=True))


def pieces(clock: Clock, folder: Path) -> float:
    """Seconds that a piece of a parameter costs where it comes from a disk for its step, beside what is read, written and stepped on."""
    return _away(clock, Offload(optimizer="disk", path=folder)) / _PIECES


def away(clock: Clock) -> Mapping[str, float]:
    """Seconds that a unit costs more where it is stepped on by itself, on the host."""
    return {"unit.step.host": _away(clock, Offload(optimizer="host"))}


def _away(clock: Clock, offload: Offload) -> float:
    """Of a unit's step, beside that of one that is stepped on with all others where it is."""
    weights = _PIECES * (dist.get_world_size() if dist.is_initialized() else 1)
    found = [_phases(clock, 1, blocks, weights, there)[2] for there in (offload, Offload()) for blocks in (_MANY, _FEW)]
    more = (found[0] - found[1]) - (found[2] - found[3])
    return clock.mean([max(1e-6, more / (_MANY - _FEW))])[0]


def _phases(clock: Clock, stage: Literal[1, 3], blocks: int, weights: int = 2, offload: Offload = _NOWHERE) -> list[float]:
    """Seconds of forward, backward and step."""
    model = _Tiny(blocks, weights).to(clock.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = ZeroConfig(stage=stage, units=[_Block], offload=offload)
    engine = Engine(model, optimizer, config)
    x = torch.ones(64, device=clock.device, requires_grad=True)
    times: list[list[float]] = [[], [], []]
    for _ in range(_WARM_STEPS + _STEPS):
        loss: list[Tensor] = []
        work: tuple[Callable[[], Any], ...] = (
            lambda loss=loss: loss.append(engine(x)),
            lambda loss=loss: engine.backward(loss.pop()),
            engine.step,
        )
        clock.meet()
        for kept, one in zip(times, work, strict=True):
            kept.append(clock.once(one))
    engine.close()
    return [quartile(kept[_WARM_STEPS:]) for kept in times]


def recomputation(clock: Clock) -> Mapping[str, float]:
    """Seconds of a block that is computed again, beside its operators': of next to nothing in it, which leaves those calls.

    Between them memory is copied, as in a real block, so that what the calls themselves need is not in the inner caches; that costs the
    first run as much as the second.
    """
    layers, sequence = 8, 8
    memory = torch.zeros(2, _EVICTING_NBYTES, dtype=torch.uint8, device=clock.device)
    tokens = torch.zeros(1, sequence, dtype=torch.int64, device=clock.device)
    seconds: dict[str, float] = {}
    forward = 0.0

    def evict(*_: Any) -> None:
        memory[0].copy_(memory[1])

    for policy in ("none", "full", "selective"):
        model = Decoder(DecoderConfig(vocab=16, layers=layers, width=16, heads=2, kv_heads=2, ffn=32)).to(clock.device)
        for module in model.modules():
            if isinstance(module, Attention | FeedForward | RMSNorm):
                module.register_forward_pre_hook(evict)
        config = ZeroConfig(stage=1, recompute=Recompute(policy=policy))
        engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-3), config)
        both: list[float] = []
        firsts: list[float] = []
        for _ in range(_WARM_STEPS + _STEPS):
            loss: list[Tensor] = []
            firsts.append(clock.alone(lambda loss=loss, engine=engine: loss.append(engine(tokens, tokens)[0])))
            both.append(firsts[-1] + clock.alone(lambda loss=loss, engine=engine: engine.backward(loss.pop())))
            engine.step()
        engine.close()
        seconds[policy] = quartile(both[_WARM_STEPS:]) / layers
        forward = forward or quartile(firsts[_WARM_STEPS:]) / layers
    found = {f"recompute.{policy}": max(1e-6, seconds[policy] - seconds["none"] - forward) for policy in ("full", "selective")}
    return dict(zip(found, clock.mean(list(found.values())), strict=True))
