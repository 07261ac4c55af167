"""The training of one rank, in the order in which it happens: build, step after step, validate, document.

Every rank runs the same calls; what only rank 0 does (the plain loop, the words on the terminal) is none of them.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardbook import Engine, Precision, Recorder, StepReport, __version__
from shardbook.document import RunDocument
from shardbook.ledger.assemble import Part, document_of
from shardbook.ledger.chrome import write_trace
from shardbook.recording.replicas import Replicas
from shardbook.train.baseline import PlainLoop
from shardbook.train.books import Books
from shardbook.train.compare import Comparison
from shardbook.train.initial import load_initial
from shardbook.train.optimizer import build_optimizer, build_scheduler
from shardbook.train.plain_memory import check_plain_fits
from shardbook.train.prepare import build_batches, build_model, build_sharded_model, read_same_text
from shardbook.train.recipe import Recipe
from shardbook.train.seeding import seeding
from shardbook.train.settings import TRACE_FILE
from shardbook.train.world import World

_T = TypeVar("_T")

Done = tuple[torch.Tensor, Any, tuple[torch.Tensor, torch.Tensor]]
"""Loss, weight and data of a micro-batch."""


class Training:
    """One rank's run. Build it inside the process group, by :func:`open_training`, which also ends it."""

    def __init__(self, recipe: Recipe, world: World, device: torch.device, *, recorded: bool = False) -> None:
        """``recorded``: for the record of the run, which takes the place of its books."""
        self.recipe, self.world, self.device = recipe, world, device
        self.text = read_same_text(recipe, world)
        self._batches, self._validation = build_batches(recipe, self.text)
        compared = recipe.run.check_baseline
        if (compared or recorded) and device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # or two plain runs would differ from each other already
        model, init = build_sharded_model(recipe, device)
        optimizer = build_optimizer(model.named_parameters(), recipe.optimizer)
        scheduler = build_scheduler(optimizer, recipe.optimizer, recipe.run.steps)
        self.engine = Engine(model, optimizer, recipe.zero, scheduler=scheduler, init=init, device=device)
        load_initial(self.engine, recipe)
        self.comparison = Comparison(self.engine, compared, self._build_plain() if compared and world.rank == 0 else None)
        self.books = Books(self.engine, world.rank, device, None if recorded else recipe.run.budget, self._plain_tensors)
        self.books.measures = not recorded
        self.recorder: Recorder | None = None
        self.after_backward: Callable[[int, int], None] = _nothing
        self._replicas = Replicas(self.engine) if recipe.run.check_replicas else None
        self._losses: list[float | None] = []
        self._skipped: list[int] = []
        self._num_tokens, self._seconds = 0, 0.0

    def step(self, step: int) -> StepReport:
        """Step ``step``, counted from 1: micro-batches forward and backward, the engine's step, then the plain loop's word."""
        start = time.perf_counter()
        seed = seeding(self.recipe.run.seed, step)
        done: list[Done] = []
        with self.books.step(step):
            for micro in range(self.recipe.zero.accumulate):
                batch = self.micro(step, self.world.rank, micro)
                seed(self.world.rank, micro)
                loss_sum, num_tokens = self.engine(*batch)
                self.engine.backward(loss_sum, weight=num_tokens)
                if self.recorder is not None:
                    done.append((loss_sum.detach(), num_tokens, batch))
                    self.after_backward(step, micro)
                del loss_sum, num_tokens, batch
            if self.recorder is not None:
                _record(self.recorder, done)
            report = self.engine.step()
            applied = report.applied
        self._seconds += time.perf_counter() - start
        self._losses.append(report.loss if report.loss is not None and math.isfinite(report.loss) else None)
        self._num_tokens += int(report.weight)
        if not applied:
            self._skipped.append(step)
        self._compare(step, report)
        if self._replicas is not None and step % self.recipe.run.check_replicas == 0:
            self._replicas.check(step)
        return report

    def told(self) -> dict[str, Any]:
        """What the run has to tell so far, as plain data: for the one that goes on from here."""
        return {"losses": self._losses, "skipped": self._skipped, "num_tokens": self._num_tokens, "seconds": self._seconds}

    def tell_on(self, told: Mapping[str, Any]) -> None:
        """The inverse of :meth:`told`."""
        self._losses, self._skipped = list(told["losses"]), list(told["skipped"])
        self._num_tokens, self._seconds = told["num_tokens"], told["seconds"]

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

    def micro(self, step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of any rank's micro-batch, on this rank's device; ``step`` counts from 1."""
        inputs, targets = self._batches.micro(step - 1, rank, micro, self.world.num_ranks)
        return inputs.to(self.device), targets.to(self.device)

    def batches(self, step: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """``[rank][micro]``: everything that a step is given."""
        micro = range(self.recipe.zero.accumulate)
        return [[self.micro(step, rank, j) for j in micro] for rank in range(self.world.num_ranks)]

    def _build_plain(self) -> PlainLoop:
        remedy = "drop run.check_baseline; shardbook verify --units compares chosen units, one at a time"
        check_plain_fits(self.recipe, self.device, remedy=remedy)
        plain = build_plain(self.recipe, self.device)
        plain.check_repeatable(self.micro(1, 0, 0), seeding(self.recipe.run.seed, 1))
        return plain

    def _plain_tensors(self) -> list[torch.Tensor]:
        return [] if self.comparison.plain is None else self.comparison.plain.tensors()

    def _compare(self, step: int, report: StepReport) -> None:
        if step > self.recipe.run.check_baseline:
            return
        batches = self.batches(step) if self.comparison.plain else []
        self.comparison.after(step, batches, report, seeding(self.recipe.run.seed, step))


def _nothing(step: int, micro: int) -> None:
    """What is done after each micro-batch where nobody asks for anything."""


def _record(recorder: Recorder, done: Sequence[Done]) -> None:
    """What this rank's micro-batches came to, each sum from left to right."""
    loss, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for loss_sum, num_tokens, _ in done:
        loss, weight = loss + loss_sum.double().cpu(), weight + num_tokens.double().cpu()
    recorder.step(loss=loss, weight=weight, batch=[batch for _, _, batch in done])


def build_plain(recipe: Recipe, device: torch.device, precision: Precision | None = None, *, reduces_each: bool | None = None) -> PlainLoop:
    """The plain loop of a recipe, or one in another precision, or with its sums nested otherwise than the run's."""
    settings, steps = recipe.optimizer, recipe.run.steps
    return PlainLoop(
        build_model(recipe, device),
        recipe.zero if precision is None else replace(recipe.zero, precision=precision, loss_scale=None),
        lambda named: build_optimizer(named, settings),
        lambda optimizer: build_scheduler(optimizer, settings, steps),
        reduces_each=reduces_each,
    )


@contextmanager
def open_training(recipe: Recipe, world: World, device: torch.device, *, recorded: bool = False) -> Generator[Training]:
    """A :class:`Training` that counts what it sends, and whose engine is closed whatever happens."""
    training = Training(recipe, world, device, recorded=recorded)
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
