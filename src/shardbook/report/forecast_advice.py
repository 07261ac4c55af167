"""Seconds of a step, and the ways to hold less of it on the device, on the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardbook.forecasting.result import Advice, Forecast
from shardbook.report.forecast_figures import gb_signed, seconds_words


def advised(forecast: Forecast) -> Iterator[RenderableType]:
    """Nothing where the step was not timed."""
    advice = forecast.advice
    if advice is None:
        return
    asked = advice.way(advice.asked)
    lanes = ", ".join(f"{name} {seconds_words(seconds)}" for name, seconds in asked.lanes.items() if seconds)
    yield Text(f"a step takes {seconds_words(asked.seconds)}: {lanes}")
    yield ways_table(advice)
    if reasons := list(dict.fromkeys(way.why_not for way in advice.ways if way.why_not)):
        yield Text(f"can't run here: {reasons[0]}")
    yield from (Text(line, style="bold") for line in advice.words)


def ways_table(advice: Advice) -> Table:
    """Each way with what it costs and frees; the one that was asked about is marked."""
    table = Table(title="capacity or throughput", title_justify="left")
    table.add_column("", overflow="fold")
    for head in ("step", "cost", "frees"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for way in advice.ways:
        cost = "" if way is advice.ways[0] else f"{way.cost:+.1%}"
        freed = "" if way is advice.ways[0] else gb_signed(way.freed)
        name = f"{way.name} (asked)" if way.is_asked else way.name
        table.add_row(escape(name), seconds_words(way.seconds), cost, freed, "can't run here" if way.why_not else way.fits)
    return table
