"""Jobs for ranks that train a small chain of units, with delays put in by hand: the timelines of all ranks, and how long the delay was."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.ledger.clocks import together
from shardbook.ledger.timeline import RankTimeline, Timeline

DEPTH, WIDTH = 5, 64
WARM_STEPS, NUM_STEPS = 3, 7


class _Pause(torch.autograd.Function):
    """Takes time in forward and in backward, without needing a core: ranks on a small machine do not get in each other's way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], float], backward: Callable[[], float]) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.backward_seconds())
        return grads[0], None, None


class Block(nn.Module):
    """Work of a set length, and one more pause where it is put in."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seconds = seconds
        self.more = {"forward": 0.0, "backward": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return _Pause.apply(x, lambda: self.seconds + self.more["forward"], lambda: self.seconds + self.more["backward"])  # type: ignore[no-any-return]


class Chain(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Slow:
    """A collective that takes longer: complete no sooner than ``seconds`` after it was started."""

    def __init__(self, pending: Any, seconds: float) -> None:
        self._pending, self._until = pending, time.perf_counter() + seconds

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))


def slow_messages(engine: Any, kind: str, unit: str, seconds: float, how: str) -> None:
    """Let one unit's messages of one kind go ``late`` from this rank (it stands while they do), or take longer to ``arrive``."""
    transport = engine._transport
    original = transport.reduce if kind == "reduce" else transport.gather

    def patched(full: Tensor, own: Tensor, channel: Any, *rest: Any) -> Any:
        chosen = channel.name == unit and kind in ("reduce", *rest)
        if chosen and how == "late":
            time.sleep(seconds)
        pending = original(full, own, channel, *rest)
        return _Slow(pending, seconds) if chosen and how == "arrive" else pending

    setattr(transport, "reduce" if kind == "reduce" else "gather", patched)


def train(stage: int, work: float, put_in: Callable[[Any, int], None] | None = None, **options: Any) -> list[RankTimeline]:
    """Warm up, put the delay in, and train on."""
    import torch.distributed as dist

    import shardbook as sb

    torch.manual_seed(7)
    model = Chain(work)
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sb.ZeroConfig(stage=stage, **options))
    rank = dist.get_rank() if dist.is_initialized() else 0
    timeline = Timeline(rank=rank, num_steps=NUM_STEPS - 1)
    for _ in range(WARM_STEPS):
        _step(engine)
    if put_in is not None:
        put_in(engine, rank)
    with engine.observe(timeline):
        for _ in range(NUM_STEPS):
            _step(engine)
    found = together(timeline.record())
    engine.close()
    return found


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, WIDTH)).square().sum(), weight=2)
    engine.step()


def in_rank(stage: int, work: float, culprit: int, where: str, unit: int, seconds: float, **options: Any) -> list[RankTimeline]:
    """One rank's own work of one unit takes longer."""

    def put_in(engine: Any, rank: int) -> None:
        if rank == culprit:
            engine.model.blocks[unit].more[where] = seconds

    return train(stage, work, put_in, **options)


def in_messages(
    stage: int, work: float, culprits: tuple[int, ...], kind: str, unit: int, seconds: float, how: str, **options: Any
) -> list[RankTimeline]:
    """One unit's messages take longer, from some ranks."""

    def put_in(engine: Any, rank: int) -> None:
        if rank in culprits:
            slow_messages(engine, kind, f"blocks.{unit}", seconds, how)

    return train(stage, work, put_in, **options)
