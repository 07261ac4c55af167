"""A step of a trainer, with the ledger looking on: what it writes of it is what it would write of a real one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardbook.document import RunDocument
from shardbook.ledger.heights import Height
from shardbook.ledger.measurement import Measurement
from shardbook.simulation.memory import FakeMemory
from shardbook.simulation.trainers import Trainer


@dataclass(frozen=True, kw_only=True)
class Observed:
    """``heights``: the highest instants of the device, by phase, or finely by unit and operator.

    ``after``: tier (``device``, ``host``, ``disk``) to account to bytes when the step is over. ``host``: account to bytes of the host's
    memory when that held most.
    """

    document: RunDocument
    heights: tuple[Height, ...]
    after: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]


def observe(trainer: Trainer, build_batch: Callable[[], Any], memory: FakeMemory, *, accumulate: int, finely: bool) -> Observed:
    """Take a step and write it down; ``finely``: heights of each unit and operator."""
    run = Measurement(trainer.model, trainer.optimizer, mode="full", memory=memory)
    with run:
        take_step(trainer, build_batch, accumulate)
    heights = run.heights(finely=finely)
    trainer.settle()
    after = {tier: run.ledger.held(tier) for tier in ("device", "host", "disk")}
    return Observed(document=run.document(), heights=tuple(heights), after=after, host=run.ledger.highest("host"))


def take_step(trainer: Trainer, build_batch: Callable[[], Any], accumulate: int) -> None:
    """All micro-batches of a step, and the step."""
    for number in range(accumulate):
        batch = build_batch()
        trainer.micro_batch(batch, last=number == accumulate - 1)
        del batch
    trainer.step()
