"""A forecast on the terminal, part by part."""

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_advice import advised
from shardbook.report.forecast_bar import bar, labels, swatch
from shardbook.report.forecast_beside import cases_table, stages_table
from shardbook.report.forecast_figures import ABOVE, Case, Scale, both, device_memory, partitions, scale_for, stacked
from shardbook.report.forecast_simulated import ITEM_HEADS, WITNESS_HEADS, item_rows, simulated_lines, witness_rows, witness_words
from shardbook.report.forecast_words import (
    bottleneck_lines,
    heading,
    left_out_line,
    peak_line,
    phase_words,
    phases_worth_saying,
    setting_line,
    size_lines,
    tier_lines,
    title,
    traffic_line,
    verdict_line,
)
from shardbook.tables.sizes import percent

__all__ = ["explained", "show", "show_sweep"]


def show(
    forecast: Forecast, console: Console, stages: Sequence[Case] = (), *, compare: bool = False, beside: Forecast | None = None
) -> None:
    """Prints a forecast; ``stages`` are the four stages, whose peaks ``compare`` shows as well. ``beside``: another witness."""
    for part in parts(forecast, console.width, stages, compare=compare, beside=beside):
        console.print(part)
    console.print()


def parts(
    forecast: Forecast, width: int, stages: Sequence[Case] = (), *, compare: bool = False, beside: Forecast | None = None
) -> Iterator[RenderableType]:
    """What is printed, top to bottom."""
    yield from asked(forecast)
    yield Text()
    yield stack(forecast, width)
    yield accounts_table(forecast)
    yield Text(peak_line(forecast), style="bold")
    yield from simulation(forecast, beside)
    if forecast.phases:
        yield phases_table(forecast)
    if forecast.above:
        yield above_table(forecast)
    if words := verdict_line(forecast):
        yield Text(words, style="bold")
    yield from (Text(line) for line in bottleneck_lines(forecast))
    yield Text(traffic_line(forecast))
    yield from advised(forecast)
    if stages:
        yield stages_table(stages, forecast.stage, peaks=compare)
    yield from remarks(forecast)


def asked(forecast: Forecast) -> Iterator[RenderableType]:
    """Model, engine, setting, convention, and sizes that no setting changes."""
    name = title(forecast)
    yield Text.assemble((f"{name}  " if name else "", "bold"), heading(forecast))
    for line in (setting_line(forecast), f"convention in force: {forecast.convention.describe()}", *size_lines(forecast)):
        if line:
            yield Text(line)


def show_sweep(name: str, cases: Sequence[Case], forecast: Forecast, console: Console) -> None:
    """Prints one row for each value; ``forecast`` is that of the first, and says what all have in common."""
    first = Text(f"the lines above are those of {name.replace('_', '-')} {cases[0].label}", style="italic")
    for part in (*asked(forecast), first, Text(), cases_table(name, cases), *remarks(forecast)):
        console.print(part)


def stack(forecast: Forecast, width: int) -> RenderableType:
    """The bar, and under it the names that fit."""
    found, limit = stacked(forecast), device_memory(forecast)
    lines = [bar(found, width, limit)]
    if names := labels(found, width, limit):
        lines.append(Text(names))
    if limit is not None:
        lines.append(Text(f"┃ the device's {both(limit)}"))
    return Group(*lines)


def accounts_table(forecast: Forecast) -> Table:
    """Account by account: bytes, share of the whole, and how it lies on the ranks."""
    scale, whole = scale_for(forecast.peak_allocated), forecast.peak_allocated
    table = Table()
    table.add_column("", no_wrap=True)
    table.add_column("account", no_wrap=True)
    for head in (scale.decimal_unit, scale.binary_unit, "share"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    found = stacked(forecast)
    for number, (account, nbytes) in enumerate(found.items()):
        if account != ABOVE:
            cells = (*_amounts(scale, nbytes), percent(nbytes, whole), partitions(forecast, account))
            table.add_row(swatch(account, number), escape(account), *cells)
    for account in _elsewhere(forecast):
        table.add_row("", escape(account), *_amounts(scale, 0), "", partitions(forecast, account))
    table.add_section()
    table.add_row("", "peak" if forecast.is_peak else "state", *_amounts(scale, whole), percent(whole, whole), "")
    if beyond := found.get(ABOVE):
        table.add_row(swatch(ABOVE, len(found) - 1), "above it", *_amounts(scale, beyond), "", "at least")
    return table


def simulation(forecast: Forecast, closed_form: Forecast | None) -> Iterator[RenderableType]:
    """What a simulation says besides, and both witnesses beside each other; nothing for a closed form."""
    if forecast.simulated is None:
        return
    scale = scale_for(forecast.peak_allocated)
    yield from (Text(line) for line in simulated_lines(forecast, forecast.simulated))
    if closed_form is not None:
        rows = list(witness_rows(forecast, closed_form, scale))
        yield _table(f"two witnesses, {scale.decimal_unit}", WITNESS_HEADS, rows, right=WITNESS_HEADS[1:], last_apart=True)
        if words := witness_words(closed_form):
            yield Text(words)
    heads = (scale.decimal_unit, *ITEM_HEADS[1:])
    yield _table("largest storages at the peak", heads, list(item_rows(forecast.simulated.items, scale)), right=heads[:1])


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str], last_apart: bool = False) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for number, row in enumerate(rows):
        if last_apart and number == len(rows) - 1:
            table.add_section()
        table.add_row(*(escape(cell) for cell in row))
    return table


def phases_table(forecast: Forecast) -> Table:
    """The highest instant of each phase; the peak's own is marked."""
    scale = scale_for(forecast.peak_allocated)
    table = Table(title="highest instant of each phase", title_justify="left")
    table.add_column("phase", overflow="fold")
    for head in (scale.decimal_unit, scale.binary_unit, "of peak"):
        table.add_column(head, justify="right", no_wrap=True)
    for phase in phases_worth_saying(forecast):
        table.add_row(escape(phase_words(phase)), *_amounts(scale, phase.nbytes), percent(phase.nbytes, forecast.peak_allocated))
    return table


def above_table(forecast: Forecast) -> Table:
    """What comes on top of live tensors, each line an interval that says whether anybody has held it against a device."""
    scale = scale_for(max(line.high for line in forecast.above))
    table = Table(title=f"above the allocator, {scale.decimal_unit}", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("between", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for line in forecast.above:
        between = f"{scale.in_decimal(line.low)} - {scale.in_decimal(line.high)}"
        table.add_row(escape(line.name), between, escape(line.source if line.validated else f"not validated; {line.source}"))
    return table


def explained(forecast: Forecast) -> RenderableType:
    """Every term with its formula and its source."""
    lines: list[RenderableType] = [Text("every term", style="italic")]
    for term in forecast.terms:
        lines.append(Text.assemble((term.account, "bold"), f"  {both(term.nbytes)}"))
        lines.append(Padding(Text(f"{term.formula}\nsource: {term.source}"), (0, 0, 0, 4)))
    return Group(*lines)


def remarks(forecast: Forecast) -> Iterator[RenderableType]:
    """What else must be known: memory of the host, what is left out, warnings."""
    yield from (Text(line) for line in tier_lines(forecast))
    yield from (Text(left_out_line(line)) for line in forecast.not_modelled)
    yield from (Text(f"warning: {line}", style="bold") for line in forecast.warnings)


def _amounts(scale: Scale, nbytes: int) -> tuple[str, str]:
    return scale.in_decimal(nbytes), scale.in_binary(nbytes)


def _elsewhere(forecast: Forecast) -> list[str]:
    """Accounts with something to hold that hold nothing at the peak."""
    return [one.account for one in forecast.holdings if one.total and not forecast.accounts.get(one.account)]
