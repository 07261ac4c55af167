"""The training of one rank, in the order in which it happens: build, step after step, validate, document.

Every rank runs the same calls; what only rank 0 does (the plain loop, the words on the terminal) is none of them.
"""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from shardbook import Engine, StepReport, __version__
from shardbook.document import RunDocument
from shardbook.ledger.assemble import Part, document_of
from shardbook.ledger.chrome import write_trace
from shardbook.train.baseline import PlainLoop
from shardbook.train.books import Books
from shardbook.train.compare import Comparison
from shardbook.train.optimizer import build_optimizer, build_scheduler
from shardbook.train.prepare import build_batches, build_model, build_sharded_model, read_same_text
from shardbook.train.recipe import Recipe
from shardbook.train.settings import TRACE_FILE
from shardbook.train.world import World

_T = TypeVar("_T")


class Training:
    """One rank's run. Build it inside the process group, by :func:`open_training`, which also ends it."""

    def __init__(self, recipe: Recipe, world: World, device: torch.device) -> None:
        self.recipe, self.world, self.device = recipe, world, device
        self.text = read_same_text(recipe, world)
        self._batches, self._validation = build_batches(recipe, self.text)
        compared = recipe.run.check_baseline
        if compared and device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # or two plain runs would differ from each other already
        model, init = build_sharded_model(recipe, device)
        optimizer = build_optimizer(model.named_parameters(), recipe.optimizer)
        scheduler = build_scheduler(optimizer, recipe.optimizer, recipe.run.steps)
        self.engine = Engine(model, optimizer, recipe.zero, scheduler=scheduler, init=init, device=device)
        self.comparison = Comparison(self.engine, compared, self._build_plain() if compared and world.rank == 0 else None)
        self.books = Books(self.engine, world.rank, device, recipe.run.budget, self._plain_tensors)
        self._losses: list[float | None] = []
        self._skipped: list[int] = []
        self._num_tokens, self._seconds = 0, 0.0

    def step(self, step: int) -> StepReport:
        """Step ``step``, counted from 1: micro-batches forward and backward, the engine's step, then the plain loop's word."""
        start = time.perf_counter()
        with self.books.step(step):
            for micro in range(self.recipe.zero.accumulate):
                loss_sum, num_tokens = self.engine(*self._micro(step, self.world.rank, micro))
                self.engine.backward(loss_sum, weight=num_tokens)
                del loss_sum, num_tokens
            report = self.engine.step()
            applied = report.applied
        self._seconds += time.perf_counter() - start
        self._losses.append(report.loss if report.loss is not None and math.isfinite(report.loss) else None)
        self._num_tokens += int(report.weight)
        if not applied:
            self._skipped.append(step)
        self._compare(step, report)
        return report

    @torch.no_grad()
    def validate(self) -> float | None:
        """Nats per token over held-out text; every rank runs as many micro-batches, and each token counts once."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.engine.model.eval()
        for batch in self._validation.in_order(self.world.rank, self.world.num_ranks, self.recipe.data.validation_batches):
            loss_sum, num_tokens = self.engine(*(tensor.to(self.device) for tensor in batch))
            total += torch.stack((loss_sum.double(), num_tokens.double()))
        self.engine.model.train()
        if self.world.num_ranks > 1:
            dist.all_reduce(total)
        loss_sum, num_tokens = total.tolist()
        return loss_sum / num_tokens if math.isfinite(loss_sum) and num_tokens else None

    def document(self, validation_loss: float | None) -> RunDocument:
        """What there is to tell, and the timelines beside it as ``trace.json``. Every rank calls it; rank 0's is whole."""
        parts = _gather(self.books.part(), self.world)
        timelines, times, waits = self.books.times()
        if self.world.rank == 0:
            write_trace(self.recipe.run.out / TRACE_FILE, timelines)
        return replace(self._document(parts, ()), validation_loss=validation_loss, times=times, exposed=waits)

    def document_of_shortage(self) -> RunDocument | None:
        """What this rank knew when its memory ran out; None: it did not. No other rank is asked."""
        if self.books.shortage is None:
            return None
        return self._document([self.books.part()], [f"memory ran out on rank {self.world.rank}: of this rank alone"])

    def _document(self, parts: Sequence[Part], notes: Sequence[str]) -> RunDocument:
        """What the ranks have measured, and what the training knows of itself."""
        found = document_of(parts, notes)
        compared = self.recipe.run.check_baseline > 0
        return replace(
            found,
            convention=self.recipe.zero.precision.describe(),
            settings=self.recipe.dump(),
            versions={"shardbook": __version__, **found.versions},
            data=self.text.describe(),
            losses=tuple(self._losses),
            skipped_steps=tuple(self._skipped),
            num_tokens=self._num_tokens,
            seconds=self._seconds,
            memory=tuple(replace(memory, includes_baseline=memory.rank == 0 and compared) for memory in found.memory),
            baseline=self.comparison.verdict(),
        )

    def _micro(self, step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self._batches.micro(step - 1, rank, micro, self.world.num_ranks)
        return inputs.to(self.device), targets.to(self.device)

    def _build_plain(self) -> PlainLoop:
        settings, steps = self.recipe.optimizer, self.recipe.run.steps
        plain = PlainLoop(
            build_model(self.recipe, self.device),
            self.recipe.zero,
            lambda named: build_optimizer(named, settings),
            lambda optimizer: build_scheduler(optimizer, settings, steps),
        )
        plain.check_repeatable(self._micro(1, 0, 0))
        return plain

    def _plain_tensors(self) -> list[torch.Tensor]:
        return [] if self.comparison.plain is None else self.comparison.plain.tensors()

    def _compare(self, step: int, report: StepReport) -> None:
        if step > self.recipe.run.check_baseline:
            return
        ranks, micro = range(self.world.num_ranks), range(self.recipe.zero.accumulate)
        batches = [[self._micro(step, r, j) for j in micro] for r in ranks] if self.comparison.plain else []
        self.comparison.after(step, batches, report)


@contextmanager
def open_training(recipe: Recipe, world: World, device: torch.device) -> Generator[Training]:
    """A :class:`Training` that counts what it sends, and whose engine is closed whatever happens."""
    training = Training(recipe, world, device)
    try:
        with training.engine.observe(training.books.observe):
            yield training
    finally:
        training.engine.close()


def _gather(mine: _T, world: World) -> list[_T]:
    """Every rank's, by rank."""
    if world.num_ranks == 1:
        return [mine]
    found: list[_T | None] = [None] * world.num_ranks
    dist.all_gather_object(found, mine)
    return [entry for entry in found if entry is not None]
