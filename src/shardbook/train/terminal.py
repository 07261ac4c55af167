"""What a run says: settings once, progress while it goes on, a table at the end. Rank 0 speaks, the others are silent."""

import logging
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardbook import StepReport
from shardbook.document import RunDocument
from shardbook.ledger.counters import resident_nbytes
from shardbook.tables.reconciliation import reconciliation_table
from shardbook.train.recipe import DEFAULT, Recipe

_LINES = 12
"""Progress lines where there is no terminal to draw a bar on."""


class Reporter:
    """Words for people go to stdout, or to stderr where stdout carries the JSON document; the bar always goes to stderr."""

    def __init__(self, recipe: Recipe, *, as_json: bool, silent: bool) -> None:
        self._recipe, self._as_json, self._silent = recipe, as_json, silent
        self._console = Console(stderr=as_json, quiet=silent, soft_wrap=True, highlight=False)
        self._bar: Progress | None = None
        self._last = time.perf_counter()

    def begin(self, facts: Mapping[str, str]) -> None:
        """What is in force and where each value came from; then each fact behind its name."""
        self._console.print(settings_table(self._recipe))
        for name, text in facts.items():
            self._console.print(f"[bold]{name}[/] {escape(text)}")

    @contextmanager
    def progress(self, done: int = 0) -> Generator[None]:
        """A bar while the block runs, or plain lines where stderr is no terminal."""
        self._last = time.perf_counter()
        if self._silent or not sys.stderr.isatty():
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as self._bar:
            self._bar.add_task("training", total=self._recipe.run.steps, completed=done)
            yield
        self._bar = None

    def step(self, step: int, report: StepReport, device: torch.device) -> None:
        """One step is done; one that was not applied is always said."""
        if self._silent:
            return
        now = time.perf_counter()
        rate, self._last = report.weight / (now - self._last), now
        if not report.applied:
            what = "the loss" if report.nonfinite in (None, "loss") else f"the gradient of {report.nonfinite}"
            self.say(f"step {step}: not applied: {what} is not finite; the parameters are as before")
        words = f"loss {_loss(report.loss)}  {rate:,.0f} tokens/s  {_memory(device)}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=words)
        elif step in (1, self._recipe.run.steps) or step % max(1, self._recipe.run.steps // _LINES) == 0:
            self.say(f"step {step}/{self._recipe.run.steps}  {words}")

    def finish(self, document: RunDocument, path: Path) -> None:
        """The table at the end, or the document itself."""
        if self._as_json:
            print(document.to_json(), end="", flush=True)
        self._console.print(result_table(document, path))
        self._console.print(reconciliation_table(document))
        if document.baseline is not None:
            same = f"[green]bit-identical for {document.baseline.steps} steps[/]"
            words = same if document.baseline.identical else f"[red]first differs at[/] {escape(document.baseline.difference or '')}"
            self._console.print(f"[bold]plain loop[/] {words}")

    def say(self, line: str) -> None:
        """One line on stderr, above the bar if there is one; any rank may."""
        (self._bar.console if self._bar is not None else Console(stderr=True, soft_wrap=True, highlight=False)).print(escape(line))


class EngineWords(logging.Handler):
    """What the engine has to say, put above the bar; not that a step was not applied, which the loop says once and by number."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Says one record."""
        if record.module != "step":
            self._reporter.say(f"shardbook: {record.getMessage()}")


def settings_table(recipe: Recipe) -> Table:
    """One row for each table of the recipe; what is not a default says where it came from."""
    table = Table(title="in force (what says nothing is a default)", show_header=False, title_justify="left")
    rows: dict[str, list[str]] = {}
    for name, value in recipe.values().items():
        head, _, rest = name.partition(".")
        origin = recipe.origin(name)
        shown = escape(f"{rest}={'none' if value is None else value}") + ("" if origin == DEFAULT else f" [cyan]({escape(origin)})[/]")
        rows.setdefault(head, []).append(shown)
    for head, cells in rows.items():
        table.add_row(f"[bold]{head}[/]", "  ".join(cells))
    return table


def result_table(document: RunDocument, path: Path) -> Table:
    """What came of it. Each counter of memory stands in a line of its own, as they mean different things."""
    table = Table(show_header=False)
    finite = [loss for loss in document.losses if loss is not None]
    table.add_row("loss, first and last", f"{_loss(document.losses[0])} -> {_loss(document.losses[-1])} nats per token")
    table.add_row("validation loss", f"{_loss(document.validation_loss)} nats per token")
    if len(finite) < len(document.losses) or document.skipped_steps:
        table.add_row("steps not applied", ", ".join(map(str, document.skipped_steps)) or "none")
    table.add_row("parameters", f"{document.num_parameters:,}")
    table.add_row("tokens", f"{document.num_tokens:,} in {document.seconds:.1f} s, {document.num_tokens / document.seconds:,.0f} a second")
    for memory in document.memory:
        table.add_row(
            f"rank {memory.rank}: allocator peak", "not measured" if memory.peak_allocated is None else nbytes(memory.peak_allocated)
        )
        if memory.peak_reserved is not None:
            table.add_row(f"rank {memory.rank}: reserved peak", nbytes(memory.peak_reserved))
        note = ", the plain loop's included" if memory.includes_baseline else ""
        table.add_row(f"rank {memory.rank}: resident peak", nbytes(memory.peak_resident) + note)
    table.add_row("allocator peak is", document.allocator)
    table.add_row("sent by a rank, a step", nbytes(document.sent_nbytes_per_step))
    table.add_row("sent by all ranks, in all", nbytes(sum(document.sent_nbytes)))
    table.add_row("convention", escape(document.convention))
    table.add_row("written to", escape(str(path)))
    return table


def nbytes(count: int) -> str:
    """Bytes for people: the number, and MiB.

    >>> nbytes(3 * 2**20)
    '3,145,728 bytes (3.0 MiB)'
    """
    return f"{count:,} bytes ({count / 2**20:,.1f} MiB)"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"allocated {torch.cuda.memory_allocated(device) / 2**20:,.0f} MiB"
    return f"resident {resident_nbytes() / 2**20:,.0f} MiB"
