"""Pictures of a verdict: both losses over the steps, and a phase's deviation against its bound."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from shardbook.report import charts
from shardbook.report.verdict_words import by_place
from shardbook.verifying.verdict import Phase, Verdict

CANDIDATE, BASELINE = "candidate", "baseline"
DEVIATION, BOUND = "deviation", "bound"
_DASHES = {CANDIDATE: (1, 0), DEVIATION: (1, 0), BASELINE: (5, 4), BOUND: (5, 4)}
_LOSS_PIXELS, _PHASE_PIXELS = 220, 140
_POWERS = [10.0**power for power in range(-20, 20, 2)]
_MAX_POINTS = 60
"""A point on each step of a line up to so many steps; above, the line alone."""


def losses(verdict: Verdict) -> Callable[[int], str]:
    """Both objectives over the steps; what was not recorded, or is not finite, is left out."""
    rows = [
        {"name": name, "x": step, "y": value}
        for step, candidate, baseline in verdict.losses
        for name, value in ((CANDIDATE, candidate), (BASELINE, baseline))
        if value is not None and abs(value) < float("inf")
    ]
    values = [float(row["y"]) for row in rows]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.15 or abs(high) * 0.1 or 1.0
    y = alt.Y(
        "y:Q",
        title="loss",
        scale=alt.Scale(domain=[low - room, high + room], nice=False),
        axis=alt.Axis(tickCount=5, format=".2f" if high >= 0.1 else ".1e"),
    )
    return _lines(rows, _steps(verdict), y, _LOSS_PIXELS)


def deviations(verdict: Verdict, phase: Phase) -> Callable[[int], str]:
    """A phase's largest deviation in each step, and its bound there, on a logarithmic axis, where 0 has no place and is left out."""
    rows = [
        {"name": name, "x": step, "y": value}
        for (step, found), one in sorted(by_place(verdict).items())
        if found == phase
        for name, value in ((DEVIATION, one.deviation), (BOUND, one.bound))
        if 0 < value < float("inf")
    ]
    values = [float(row["y"]) for row in rows]
    domain = [min(values, default=0.1) / 8, max(values, default=1.0) * 8]
    y = alt.Y(
        "y:Q",
        title="relative to the baseline",
        scale=alt.Scale(type="log", domain=domain, nice=False),
        axis=alt.Axis(format=".0e", values=_POWERS),
    )
    return _lines(rows, _steps(verdict), y, _PHASE_PIXELS)


def _steps(verdict: Verdict) -> list[int]:
    return sorted({step for step, _, _ in verdict.losses} | {one.step for one in verdict.phases})


def _lines(rows: Sequence[Mapping[str, Any]], steps: Sequence[int], y: alt.Y, height: int) -> Callable[[int], str]:
    """One line for each name, over all ``steps`` of the verdict, so that pictures below one another have one axis."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    ends = [next(row for row in reversed(rows) if row["name"] == name) for name in names]
    domain = [steps[0], max(steps[-1], steps[0] + 1)] if steps else [0, 1]

    @charts._unchecked
    def draw(width: int) -> str:
        x = alt.X("x:Q", title="step", axis=_step_axis(steps, width), scale=alt.Scale(domain=domain, nice=False, padding=8))
        dash = alt.StrokeDash("name:N", scale=alt.Scale(domain=names, range=[list(_DASHES[name]) for name in names]), legend=None)
        point = alt.OverlayMarkDef(color=charts._INK, size=26) if len(steps) <= _MAX_POINTS else False
        line = alt.Chart(charts._data(rows)).mark_line(color=charts._INK, strokeWidth=1.8, point=point).encode(x=x, y=y, strokeDash=dash)
        return charts._svg(alt.layer(line, *_names(ends, x, y)), width, height)

    return draw


def _names(ends: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y) -> Iterable[alt.Chart]:
    """Each line's name at its end: the higher line's above it, the other's below."""
    by_height = sorted(ends, key=lambda row: row["y"])
    for at, row in enumerate(by_height):
        above = at == len(by_height) - 1
        mark = alt.Chart(charts._data([row])).mark_text(
            color=charts._INK, fontSize=12, align="right", baseline="bottom" if above else "top", dy=-6 if above else 6
        )
        yield mark.encode(x=x, y=y, text="name:N")


def _step_axis(steps: Sequence[int], width: int) -> alt.Axis:
    """Each step where they have room, else round ones."""
    room = 16 if width == charts.WIDE else 7
    return alt.Axis(values=list(steps), format="d") if len(steps) <= room else alt.Axis(tickCount=room // 2, format="d")
