"""A verdict on the terminal."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardbook.report import verdict_words as words
from shardbook.verifying.verdict import PhaseResult, Verdict

_STYLES = {"identical": "bold green", "within_rounding": "bold green", "different": "bold red"}
_BEYOND = "bold red"


def show(verdict: Verdict, console: Console) -> None:
    """Prints a verdict, part by part."""
    for part in parts(verdict):
        console.print(part)
        console.print()


def parts(verdict: Verdict) -> Iterator[RenderableType]:
    """What is printed, top to bottom; what the verdict has nothing of is left out."""
    lines = [words.where(verdict), *(f"{name}: {text}" for name, text in words.facts(verdict))]
    yield Text("\n").join([Text(words.headline(verdict), style=_STYLES[verdict.kind]), *map(Text, filter(None, lines))])
    if verdict.ranking:
        yield _ranking(verdict)
    if verdict.losses:
        yield _losses(verdict)
    if verdict.phases:
        yield Group(_grid(verdict), Text(words.KEY, style="dim"))
        yield from _details(verdict)
    if verdict.notes:
        yield Text("\n".join(f"note: {note}" for note in verdict.notes))


def _ranking(verdict: Verdict) -> Table:
    table = Table(title="what explains it, likeliest first", title_justify="left", show_lines=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("sure", justify="right", no_wrap=True)
    table.add_column("evidence, and what usually helps", overflow="fold")
    for one in words.hypotheses(verdict):
        table.add_row(escape(one.rule), one.confidence, Text.assemble(one.evidence, "\n", ("mend: ", "bold"), one.mend))
    return table


def _losses(verdict: Verdict) -> Table:
    table = Table(title="losses", title_justify="left")
    for name in ("step", "candidate", "baseline", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in words.loss_rows(verdict):
        table.add_row(*row)
    return table


def _grid(verdict: Verdict) -> Table:
    phases, rows = words.grid_rows(verdict)
    table = Table(title="deviation by step and phase", title_justify="left")
    for name in ("step", *phases):
        table.add_column(name, justify="right", no_wrap=True)
    for step, found in rows:
        table.add_row(step, *map(_cell, found))
    return table


def _cell(one: PhaseResult | None) -> Text:
    return Text(words.cell(one), style=_BEYOND if one is not None and one.exceeds else "")


def _details(verdict: Verdict) -> Iterator[Table]:
    step, rows = words.detail_rows(verdict)
    if not rows:
        return
    table = Table(title=f"deviation against bound, {step}", title_justify="left")
    for at, name in enumerate(words.DETAIL_HEADS):
        table.add_column(name, justify="right" if at in (1, 2, 3, 5) else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row), style=_BEYOND if row[1].endswith("!") else "")
    yield table
