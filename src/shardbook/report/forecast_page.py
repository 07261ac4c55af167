"""A forecast as one page: no script, no request, everything inside."""

from collections.abc import Iterator, Sequence

from shardbook.forecasting.result import NOT_A_PEAK, Forecast
from shardbook.report import markup
from shardbook.report.forecast_charts import caption, description, legend, stacks
from shardbook.report.forecast_figures import ABOVE, Case, amount, both, device_memory, held, partitions, saved, scale_for, stacked, verdict
from shardbook.report.forecast_simulated import ITEM_HEADS, WITNESS_HEADS, item_rows, simulated_lines, witness_rows
from shardbook.report.forecast_words import (
    bottleneck_lines,
    gb,
    heading,
    left_out_line,
    needed_line,
    phase_words,
    phases_worth_saying,
    setting_line,
    size_lines,
    tier_lines,
    traffic_line,
    verdict_line,
)
from shardbook.report.html import frame
from shardbook.tables.sizes import percent, place


def page(forecast: Forecast, cases: Sequence[Case], name: str) -> str:
    """The whole page; ``cases`` are settings beside each other, ``name`` what is varied."""
    lines = (heading(forecast), setting_line(forecast), f"convention in force: {forecast.convention.describe()}")
    header = [*(markup.text("p", line, "soft") for line in lines if line), markup.cards(_cards(forecast))]
    sections = (
        _accounts(forecast),
        _simulation(forecast, cases),
        _beside(forecast, cases, name),
        _phases(forecast),
        _above(forecast),
        _left_out(forecast),
        _terms(forecast),
    )
    return frame(f"{forecast.model}: will it fit?", header, sections)


def _cards(forecast: Forecast) -> Iterator[tuple[str, str, str]]:
    weights, state = gb(forecast.weights), both(forecast.state)
    if forecast.is_peak:
        yield "peak of a rank", both(forecast.peak_allocated), place(forecast.peak_phase, forecast.peak_where)
    else:
        yield "persistent on a rank", both(forecast.persistent), NOT_A_PEAK
    yield "training state, whole", state, f"weights alone {weights}"
    yield "sent per rank and step", both(forecast.sent), f"saved by partitioning: {both(saved(forecast))}"
    if device_memory(forecast) is not None:
        yield str(forecast.inputs.get("device") or "the device"), verdict(forecast), needed_line(forecast)


def _accounts(forecast: Forecast) -> str:
    asked = [Case(label=forecast.model, forecast=forecast)]
    drawn = markup.picture(stacks(asked, device_memory(forecast)), description(asked), caption(forecast), markup.legend(legend(asked)))
    rows = [
        (account, *_sizes(nbytes), percent(nbytes, forecast.peak_allocated), partitions(forecast, account))
        for account, nbytes in stacked(forecast).items()
        if account != ABOVE
    ]
    rows.append(("peak" if forecast.is_peak else "state", *_sizes(forecast.peak_allocated), "100.0%", ""))
    table = markup.table(("account", "GB", "GiB", "share", "ranks"), rows, "by account", numbers=(1, 2, 3), sums=1, colours=True)
    words = [verdict_line(forecast), *size_lines(forecast), *bottleneck_lines(forecast), traffic_line(forecast)]
    return markup.section("By account", [drawn, table, *(markup.text("p", line) for line in words if line)])


def _simulation(forecast: Forecast, cases: Sequence[Case]) -> str:
    if forecast.simulated is None:
        return ""
    scale = scale_for(forecast.peak_allocated)
    parts = [markup.text("p", line) for line in simulated_lines(forecast, forecast.simulated)]
    for closed_form in (case.forecast for case in cases if case.forecast is not None and case.forecast.simulated is None):
        rows = list(witness_rows(forecast, closed_form, scale))
        title = f"two witnesses, {scale.decimal_unit}"
        parts.append(markup.table(WITNESS_HEADS, rows, title, numbers=(1, 2, 3), sums=1, colours=True))
    heads = (scale.decimal_unit, *ITEM_HEADS[1:])
    rows = list(item_rows(forecast.simulated.items, scale))
    parts.append(markup.table(heads, rows, "largest storages at the peak", numbers=(0,)))
    return markup.section("Simulation", parts)


def _beside(forecast: Forecast, cases: Sequence[Case], name: str) -> str:
    known = [(case.label, case.forecast) for case in cases if case.forecast is not None]
    if not known:
        return ""
    drawn = markup.picture(stacks(cases, device_memory(forecast)), description(cases), caption(forecast), markup.legend(legend(cases)))
    heads = (name, "state GB", "saved GB", "sent GB", "peak GB" if forecast.is_peak else "persistent GB", "verdict")
    rows = [
        (label, *(amount(nbytes / 1e9, 3) for nbytes in (held(one), saved(one), one.sent, one.peak_allocated)), verdict(one))
        for label, one in known
    ]
    refused = [markup.text("p", f"{case.label}: {case.why}") for case in cases if case.forecast is None]
    table = markup.table(heads, rows, "state held and saved, bytes sent per step, per rank", numbers=(1, 2, 3, 4))
    return markup.section(f"Side by side: {name}", [drawn, table, *refused])


def _phases(forecast: Forecast) -> str:
    rows = [(phase_words(phase), *_sizes(phase.nbytes)) for phase in phases_worth_saying(forecast)]
    table = markup.table(("phase", "GB", "GiB"), rows, "highest instant of each phase", numbers=(1, 2)) if rows else ""
    return markup.section("Phases", [table])


def _above(forecast: Forecast) -> str:
    rows = [
        (line.name, amount(line.low / 1e9, 3), amount(line.high / 1e9, 3), "yes" if line.validated else "not validated", line.source)
        for line in forecast.above
    ]
    heads = ("", "at least GB", "at most GB", "validated", "source")
    return markup.section("Above the allocator", [markup.table(heads, rows, "on top of live tensors", numbers=(1, 2)) if rows else ""])


def _left_out(forecast: Forecast) -> str:
    lines = [*tier_lines(forecast)]
    lines += [*(left_out_line(line) for line in forecast.not_modelled), *(f"warning: {line}" for line in forecast.warnings)]
    return markup.section("What to know", [markup.text("p", line) for line in lines])


def _terms(forecast: Forecast) -> str:
    rows = [(term.account, both(term.nbytes), term.formula, term.source) for term in forecast.terms]
    heads = ("account", "bytes", "formula", "source")
    return markup.section("Every term", [markup.table(heads, rows, "formula and source", colours=True) if rows else ""])


def _sizes(nbytes: int) -> tuple[str, str]:
    return amount(nbytes / 1e9, 3), amount(nbytes / 2**30, 3)
