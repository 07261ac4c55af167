"""Forecasts beside each other on the terminal: the four stages, or the values of a sweep."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardbook.forecasting.result import NOT_A_PEAK, Forecast
from shardbook.report.forecast_figures import Case, Scale, held, saved, scale_for, verdict

Column = tuple[str, Callable[[Scale, Forecast], str]]

_STATE: Sequence[Column] = (
    ("state", lambda scale, forecast: scale.in_decimal(held(forecast))),
    ("saved", lambda scale, forecast: scale.in_decimal(saved(forecast))),
    ("sent", lambda scale, forecast: scale.in_decimal(forecast.sent)),
)
_PEAK: Sequence[Column] = (("peak", lambda scale, forecast: scale.in_decimal(forecast.peak_allocated)),)


def stages_table(stages: Sequence[Case], current: int, *, peaks: bool) -> RenderableType:
    """What each stage holds, what it saves, and what it sends for that; ``peaks`` adds the peak and the verdict."""
    marked = [
        Case(label=f"{case.label} <" if case.label == str(current) else case.label, forecast=case.forecast, why=case.why) for case in stages
    ]
    if not peaks:  # one that the engine has not was not asked about
        marked = [case for case in marked if case.forecast is not None]
    return beside("stage", marked, "state held and saved by each stage, bytes sent per step", peaks=peaks)


def cases_table(name: str, cases: Sequence[Case]) -> RenderableType:
    """One row for each value of a sweep."""
    return beside(name, cases, f"{name} from {cases[0].label} to {cases[-1].label}", peaks=True)


def beside(name: str, cases: Sequence[Case], title: str, *, peaks: bool) -> RenderableType:
    """One row for each case."""
    known = [case.forecast for case in cases if case.forecast is not None]
    has_peaks = peaks and any(one.is_peak for one in known)
    columns = [*_STATE, *(_PEAK if has_peaks else ())]
    largest = (max(held(one) + saved(one), one.sent, one.peak_allocated if has_peaks else 0) for one in known)
    scale = scale_for(max(largest, default=0))
    table = Table(title=escape(f"{title}, {scale.decimal_unit} per rank"), title_justify="left")
    table.add_column(escape(name.replace("_", "-")), no_wrap=True)
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    judged = peaks and any(verdict(one) for one in known)
    if judged:
        table.add_column("verdict")
    for case in cases:
        if case.forecast is not None:
            cells = [column(scale, case.forecast) for _, column in columns]
            table.add_row(escape(case.label), *cells, *([verdict(case.forecast)] if judged else []))
    lines = [Text(_refused(name, case)) for case in cases if case.forecast is None]
    return Group(table, *([] if has_peaks else [Text(NOT_A_PEAK)]), *lines)


def _refused(name: str, case: Case) -> str:
    """The reason behind the setting, which the reason itself begins with as a rule.

    >>> _refused("stage", Case(label="1", forecast=None, why="stage = 1: allowed is 3"))
    'stage 1: allowed is 3'
    """
    label = case.label.removesuffix(" <")
    return f"{name} {label}: {case.why.removeprefix(f'{name} = {label}: ')}"
