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
    return _lines(rows, "loss", alt.Scale(domain=[low - room, high + room], nice=False), _LOSS_PIXELS)


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
    return _lines(rows, "relative to the baseline", alt.Scale(type="log", domain=domain, nice=False), _PHASE_PIXELS)


def _lines(rows: Sequence[Mapping[str, Any]], title: str, scale: alt.Scale, height: int) -> Callable[[int], str]:
    names = list(dict.fromkeys(row["name"] for row in rows))
    steps = sorted({row["x"] for row in rows})
    few = len(steps) <= _MAX_POINTS
    ends = [next(row for row in reversed(rows) if row["name"] == name) for name in names]
    axis = alt.Axis(format=".0e", values=_POWERS) if scale["type"] == "log" else alt.Axis(tickCount=5)

    @charts._unchecked
    def draw(width: int) -> str:
        x = alt.X("x:Q", title="step", axis=alt.Axis(values=_ticks(steps, width), format="d"), scale=alt.Scale(nice=False, padding=8))
        y = alt.Y("y:Q", title=title, scale=scale, axis=axis)
        dash = alt.StrokeDash("name:N", scale=alt.Scale(domain=names, range=[list(_DASHES[name]) for name in names]), legend=None)
        point = alt.OverlayMarkDef(color=charts._INK, size=26) if few else False
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


def _ticks(steps: Sequence[int], width: int) -> list[int]:
    """As many steps as have room, evenly taken."""
    room = 16 if width == charts.WIDE else 7
    every = max(1, -(-len(steps) // room))
    return list(steps[::every])
