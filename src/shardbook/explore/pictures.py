"""The notebook's pictures and tables, as markup: those of the report, in the same colours and by the same rules."""

from collections.abc import Mapping, Sequence

from shardbook.accounts import Account
from shardbook.explore.stacks import Bar, draw
from shardbook.forecasting.result import NOT_A_PEAK, Forecast, Holding
from shardbook.report import charts, markup
from shardbook.report.charts import Line
from shardbook.report.colours import NEUTRAL, account_colour
from shardbook.report.forecast_figures import Case, amount, both, device_memory, held, saved, scale_for, verdict
from shardbook.report.forecast_words import bottleneck_lines, gb, needed_line, peak_line
from shardbook.tables.reconciliation import in_order
from shardbook.tables.sizes import percent, place

_DASHES = {"stage 0": (), "stage 1": (10, 4), "stage 2": (5, 4), "stage 3": (2, 3)}
_SAVED, _SENT = "saved by partitioning", "sent per step"
_COLOURS = {_SAVED: account_colour("PARAM"), _SENT: NEUTRAL}


def cards(forecast: Forecast) -> str:
    """What is read first."""
    facts: list[tuple[str, str, str]] = []
    if forecast.is_peak:
        facts.append(("peak of a rank", both(forecast.peak_allocated), _when(forecast)))
    else:
        facts.append(("persistent on a rank", both(forecast.persistent), NOT_A_PEAK))
    if device_memory(forecast) is not None:
        facts.append((f"on {forecast.inputs.get('device')}", verdict(forecast), needed_line(forecast)))
    facts.append(("training state, whole", both(forecast.state), f"weights alone {gb(forecast.weights)}"))
    facts.append(("sent per rank and step", both(forecast.sent), f"{_SAVED} {both(saved(forecast))}"))
    return markup.cards(facts)


def _when(forecast: Forecast) -> str:
    if forecast.peak_phase == "given":
        return "by the figures that were given"
    return f"in {place(forecast.peak_phase, forecast.peak_where)}"


def moving_bottleneck(forecast: Forecast) -> str:
    """Which account is largest, what would shrink it, and which is largest then."""
    lines = [peak_line(forecast), *bottleneck_lines(forecast), *(f"not modelled: {line}" for line in forecast.not_modelled)]
    return "".join(markup.text("p", line) for line in [*lines, *(f"note: {line}" for line in forecast.warnings)])


def residence(forecast: Forecast) -> str:
    """What of the state is partitioned, and what every rank still has whole."""
    total, here = sum(one.total for one in forecast.holdings), held(forecast)
    scale = scale_for(total)
    rows = [(one.account, scale.in_decimal(one.total), scale.in_decimal(one.here), _lies(one, forecast)) for one in forecast.holdings]
    rows.append(("state", scale.in_decimal(total), scale.in_decimal(here), f"{percent(here, total)} here"))
    heads = ("account", f"whole model, {scale.decimal_unit}", f"on this rank, {scale.decimal_unit}", "how it lies")
    return markup.table(heads, rows, "what is partitioned, and what is still replicated", numbers=(1, 2), sums=1, colours=True)


def _lies(one: Holding, forecast: Forecast) -> str:
    if not one.total:
        cast = one.account == Account.PARAM and forecast.convention.term(Account.PARAM).is_cast(forecast.stage)
        return "cast from the master" if cast else "not kept"
    return f"partitioned over {one.partitions:,}" if one.partitions > 1 else "replicated"


def by_ranks(found: Mapping[str, Sequence[tuple[int, int]]], limit: int | None = None) -> str:
    """State on a rank against the number of ranks."""
    scale = scale_for(max((nbytes for points in found.values() for _, nbytes in points), default=0))
    drawn = [
        Line(name=name, points=[(ranks, nbytes / scale.decimal) for ranks, nbytes in points], dash=_DASHES.get(name, ()))
        for name, points in found.items()
    ]
    last = {name: points[-1] for name, points in found.items()}
    said = "; ".join(f"{name} on {ranks:,} ranks: {both(nbytes)}" for name, (ranks, nbytes) in last.items())
    across = "" if limit is None else f" The line across is the device's {both(limit)}."
    below = f"State on a rank, gradients included: {NOT_A_PEAK}. Both axes are logarithmic.{across}"
    level = None if limit is None else limit / scale.decimal
    return markup.picture(charts.lines(drawn, ("ranks", f"{scale.decimal_unit} per rank"), level), said, below)


def saved_and_sent(cases: Sequence[Case]) -> str:
    """Capacity beside throughput: what partitioning saves a rank, and what the rank sends for it in a step."""
    known = [(case.label, case.forecast) for case in cases if case.forecast is not None]
    bars = [
        Bar(label=f"{label}, {part}", parts={part: nbytes})
        for label, one in known
        for part, nbytes in ((_SAVED, saved(one)), (_SENT, one.sent))
    ]
    scale = scale_for(max((held(one) + saved(one) for _, one in known), default=0))
    rows = [
        (label, *(amount(nbytes / scale.decimal, scale.digits) for nbytes in (held(one), saved(one), one.sent))) for label, one in known
    ]
    heads = ("stage", *(f"{kind}, {scale.decimal_unit}" for kind in ("held", "saved", "sent")))
    table = markup.table(heads, rows, "state held and saved, and bytes sent per step, per rank", numbers=(1, 2, 3))
    return draw(bars, "These are bytes, not seconds.", names=_COLOURS) + table


def differences(forecast: Mapping[str, int], measured: Mapping[str, int]) -> str:
    """Account by account, forecast beside measurement."""
    accounts = [account for account in in_order({*forecast, *measured}) if forecast.get(account, 0) or measured.get(account, 0)]
    scale = scale_for(max(sum(forecast.values()), sum(measured.values())))
    rows = [(account, *_compared(forecast.get(account, 0), measured.get(account, 0), scale.decimal)) for account in accounts]
    rows.append(("peak", *_compared(sum(forecast.values()), sum(measured.values()), scale.decimal)))
    heads = ("account", *(f"{kind}, {scale.decimal_unit}" for kind in ("forecast", "measured", "difference")), "")
    return markup.table(heads, rows, "forecast beside measurement", numbers=(1, 2, 3, 4), sums=1, colours=True)


def _compared(forecast: int, measured: int, unit: float) -> tuple[str, str, str, str]:
    difference = forecast - measured
    share = f"{difference / measured:+.1%}" if measured else ""
    return amount(forecast / unit, 3), amount(measured / unit, 3), f"{difference / unit:+,.3f}", share
