"""The books of a training: its first two steps measured in full (with a budget, all of them), and every step's time.

The second step is the first whose optimizer state exists, so that its peak is the peak of all later ones. Each step is a measurement
of its own: what the plain loop does in between, and what it holds, is not the training's.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shardbook import Engine
from shardbook.document import Exposed, Moved, Shortage, StepTime, TierMemory
from shardbook.events import Event, Traffic, Transfer
from shardbook.forecasting.closed_form import OPTIMIZERS, closed_form
from shardbook.ledger.assemble import Part
from shardbook.ledger.bandwidth import bandwidth
from shardbook.ledger.clocks import together
from shardbook.ledger.counters import counters
from shardbook.ledger.exposed import exposed, step_times
from shardbook.ledger.measurement import Measurement
from shardbook.ledger.timeline import RankTimeline, Timeline, clock_for
from shardbook.structure import ELEMENT_NBYTES

NUM_MEASURED = 2
_NUM_TIMED = 16


class Books:
    """Of one rank. ``others`` gives the tensors of this process that are no part of the training."""

    def __init__(self, engine: Engine, rank: int, device: torch.device, budget: int | None, others: Callable[[], Iterable[Tensor]]) -> None:
        self._engine, self._budget, self._others = engine, budget, others
        self._device = device
        self._timeline = Timeline(rank=rank, num_steps=_NUM_TIMED, clock=clock_for(device.type))
        self._parts: list[Part] = []
        self.sent_nbytes = self.sent_nbytes_per_step = 0
        self._moved: Counter[str] = Counter()
        self._moved_in_last_step: Counter[str] = Counter()
        self.measures = True

    def observe(self, event: Event) -> None:
        """Every event of the engine."""
        self._timeline(event)
        if isinstance(event, Traffic):
            self.sent_nbytes += event.sent_nbytes
        elif isinstance(event, Transfer):
            self._moved[event.link] += event.nbytes

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """One step, measured if it is among those that are.

        Raises:
            BudgetError: the books would hold more than the budget.
        """
        before, moved = self.sent_nbytes, self._moved.copy()
        if not self.measures or (len(self._parts) >= NUM_MEASURED and self._budget is None):
            yield
        else:
            engine = self._engine
            run = Measurement(engine, engine.optimizer, mode="full", budget=self._budget, excluded=self._others(), first_step=number)
            try:
                with run, run.step():
                    yield
            finally:
                self._keep(run.part())
        self.sent_nbytes_per_step = self.sent_nbytes - before
        self._moved_in_last_step = self._moved - moved

    @property
    def shortage(self) -> Shortage | None:
        """What was known when memory ran out."""
        return self._parts[-1].shortage if self._parts else None

    def part(self) -> Part:
        """What there is to tell: of the step with the highest peak, the closed form beside it; counters of the whole run."""
        best = max(self._parts, key=lambda part: part.counters.allocated or 0)
        form = closed_form(self._engine.structure(), self._engine.config, OPTIMIZERS["adamw"])
        return replace(
            best,
            counters=counters(self._device, best.counters.allocated),
            reconciliation=None if best.reconciliation is None else replace(best.reconciliation, closed_form=dict(form)),
            steps=tuple(step for part in self._parts for step in part.steps),
            timeline=None,
            sent_nbytes=self.sent_nbytes,
            sent_nbytes_per_step=self.sent_nbytes_per_step,
            tiers=tuple(self._highest_tiers()),
            moved=tuple(
                Moved(rank=best.rank, link=link, nbytes=nbytes, nbytes_per_step=self._moved_in_last_step[link])
                for link, nbytes in self._moved.items()
            ),
            shortage=None if self.shortage is None else replace(self.shortage, forecast=dict(form)),
        )

    def times(self) -> tuple[list[RankTimeline], tuple[StepTime, ...], tuple[Exposed, ...]]:
        """All ranks' timelines, and what they say. All ranks call it, between steps."""
        units = self._engine.structure().units
        largest = max(sum(sum(flat.numels) * ELEMENT_NBYTES[flat.param] for flat in unit.flats) for unit in units)
        reached = bandwidth(self._engine.transport, largest, device=self._device)
        timelines = together(self._timeline.record())
        return timelines, step_times(timelines, reached), exposed(timelines)

    def _highest_tiers(self) -> Iterator[TierMemory]:
        """Each tier in the measured step in which it held most."""
        found = [tier for part in self._parts for tier in part.tiers]
        for name in dict.fromkeys(tier.tier for tier in found):
            yield max((tier for tier in found if tier.tier == name), key=lambda tier: tier.nbytes)

    def _keep(self, part: Part) -> None:
        kept = max((known.counters.allocated or 0 for known in self._parts), default=-1)
        if self._parts and (part.counters.allocated or 0) <= kept:
            part = replace(part, reconciliation=None, curve=None)  # bounded, however many steps a budget has measured
        self._parts.append(part)
