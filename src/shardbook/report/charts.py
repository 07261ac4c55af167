"""Pictures of a run document, as SVG that takes its ink and paper from the page around it.

Text and lines are drawn in ``currentColor`` and outlines in ``var(--paper)``, so one picture serves light and dark. Each picture
is drawn twice, for a wide and a narrow page: text that is scaled down with a picture can't be read. Stacks are summed up here
and not by the drawing library, so that their order is always that of the accounts.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from shardbook.document import Curve, StepMemory
from shardbook.report.colours import NEUTRAL, account_colour
from shardbook.report.curve import Stretch, instants, layers, phases, units

WIDE, NARROW = 880, 340
"""Pixels of a picture on a wide and on a narrow page."""

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_INK, _PAPER = "currentColor", "var(--paper)"
_INSTANTS = 400
_ROW_PIXELS = 26
_TEXT_PIXELS = 26


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a horizontal bar, from ``begin`` to ``end`` in the picture's unit."""

    row: str
    part: str
    begin: float
    end: float
    colour: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line through ``points``, (x, y) in the picture's units, with its name at its end. ``dash``: pixels drawn and left out, by turns."""

    name: str
    points: Sequence[tuple[float, float]]
    dash: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A tick across one bar."""

    row: str
    at: float


def _unchecked(draw: Callable[[int], str]) -> Callable[[int], str]:
    """Without the checks of every row against the schema, which take most of the time: none of it depends on what a document says."""

    def quick(width: int) -> str:
        with schemapi.debug_mode(False):
            return draw(width)

    return quick


def stack(row: str, parts: Iterable[tuple[str, float, str]]) -> list[Segment]:
    """(part, amount, colour) laid end to end; nothing is drawn of an amount of nothing."""
    segments: list[Segment] = []
    begin = 0.0
    for part, amount, colour in parts:
        if amount:
            segments.append(Segment(row=row, part=part, begin=begin, end=begin + amount, colour=colour))
            begin += amount
    return segments


def bars(segments: Sequence[Segment], axis: str, marks: Sequence[Mark] = ()) -> Callable[[int], str]:
    """Horizontal bars, in the order in which their rows come first; ``axis`` names what is measured, and its unit."""
    rows = list(dict.fromkeys(segment.row for segment in segments))

    @_unchecked
    def draw(width: int) -> str:
        label = alt.Axis(title=None, labelLimit=int(width * 0.42), ticks=False, domain=False, grid=False)
        y = alt.Y("row:N", sort=rows, axis=label, scale=alt.Scale(paddingInner=0.3, paddingOuter=0.2))
        layer = [
            alt.Chart(_data(vars(segment) for segment in segments))
            .mark_bar(stroke=_INK, strokeWidth=0.5, strokeOpacity=0.7)
            .encode(y=y, x=_amount("begin:Q", axis, width), x2="end:Q", color=_colour())
        ]
        if marks:
            ticks = alt.Chart(_data(vars(mark) for mark in marks)).mark_tick(color=_INK, thickness=3, size=_ROW_PIXELS)
            layer.append(ticks.encode(y=y, x="at:Q"))
        return _svg(alt.layer(*layer), width, _ROW_PIXELS * len(rows) + 10)

    return draw


def over_a_step(curve: Curve, scale: float, unit: str) -> Callable[[int], str]:
    """The accounts stacked over one step, the allocator's line on top, phases and units in strips above."""
    kept = instants(curve, _INSTANTS)
    top = max(curve.allocated, default=0) / scale or 1.0
    begin, end = (curve.seconds[0], curve.seconds[-1]) if curve.seconds else (0.0, 1.0)

    @_unchecked
    def draw(width: int) -> str:
        x = alt.X("ms:Q", title="milliseconds from the step's begin", scale=alt.Scale(domain=[begin * 1e3, end * 1e3], nice=False))
        heights = alt.Scale(domain=[0, top * 1.2], nice=False)
        y = alt.Y("low:Q", title=unit, scale=heights, axis=alt.Axis(values=_ticks(top)))
        area = alt.Chart(_data(_stack_rows(curve, kept, scale))).mark_area(interpolate="step-after", stroke=_INK, strokeWidth=0.3)
        line = alt.Chart(_data({"ms": curve.seconds[at] * 1e3, "low": curve.allocated[at] / scale} for at in kept))
        layer = [
            area.encode(x=x, y=y, y2="high:Q", color=_colour(), detail="account:N"),
            line.mark_line(interpolate="step-after", color=_INK, strokeWidth=1.6 if width == WIDE else 1.0).encode(x=x, y=y),
        ]
        pixels = (width - 70) / ((end - begin) or 1.0)
        for stretches, low, high in ((phases(curve), 1.12, 1.19), (units(curve), 1.04, 1.11)):
            layer += _strip(stretches, (low * top, high * top), pixels, (x, y))
        return _svg(alt.layer(*layer), width, 330 if width == WIDE else 280)

    return draw


def by_step(steps: Sequence[StepMemory], scale: float, unit: str) -> Callable[[int], str]:
    """The peak of each step: a bar for the rank with the largest, a tick for the rank with the smallest. The first one is darker."""
    numbers = sorted({step.step for step in steps})
    peaks = {number: [step.peak_allocated / scale for step in steps if step.step == number] for number in numbers}
    rows = [{"step": n, "high": max(peaks[n]), "low": min(peaks[n]), "solid": 1.0 if n == numbers[0] else 0.55} for n in numbers]

    @_unchecked
    def draw(width: int) -> str:
        chart = alt.Chart(_data(rows))
        x = alt.X("step:O", title="step", axis=alt.Axis(labelAngle=0, labelOverlap=True))
        wide_bar = min(48.0, (width - 80) / max(1, len(rows)) * 0.7)
        bar = chart.mark_bar(color=NEUTRAL, size=wide_bar, stroke=_INK, strokeWidth=0.5)
        opacity = alt.Opacity("solid:Q", scale=None, legend=None)
        tick = chart.mark_tick(color=_INK, thickness=2, size=wide_bar)
        layer = [bar.encode(x=x, y=alt.Y("high:Q", title=unit), opacity=opacity), tick.encode(x=x, y="low:Q")]
        return _svg(alt.layer(*layer), width, 180)

    return draw


def lines(found: Sequence[Line], axes: tuple[str, str], level: float | None = None) -> Callable[[int], str]:
    """Lines over two logarithmic axes, whose names are ``axes``; ``level`` is a horizontal line across all of them."""
    rows: list[dict[str, Any]] = [{"name": line.name, "x": x, "y": y} for line in found for x, y in line.points]
    names = [{"name": line.name, "x": x, "y": y} for line in found for x, y in line.points[len(line.points) * 2 // 3 :][:1]]
    dashes = alt.Scale(domain=[line.name for line in found], range=[list(line.dash) or [1, 0] for line in found])
    ticks = sorted({x for line in found for x, _ in line.points})
    powers = [10.0**power for power in range(-6, 9)]

    @_unchecked
    def draw(width: int) -> str:
        values = ticks if width == WIDE else ticks[::2]
        x = alt.X("x:Q", title=axes[0], scale=alt.Scale(type="log", base=2, nice=False), axis=alt.Axis(values=values, format=",d"))
        y = alt.Y("y:Q", title=axes[1], scale=alt.Scale(type="log"), axis=alt.Axis(values=powers, format="~g"))
        line = alt.Chart(_data(rows)).mark_line(color=_INK, strokeWidth=2, point=alt.OverlayMarkDef(color=_INK, size=22))
        name = alt.Chart(_data(names)).mark_text(color=_INK, fontSize=12, align="left", baseline="bottom", dy=-4)
        layer = [
            line.encode(x=x, y=y, strokeDash=alt.StrokeDash("name:N", scale=dashes, legend=None)),
            name.encode(x=x, y=y, text="name:N"),
        ]
        if level is not None:
            layer.append(alt.Chart(_data([{"y": level}])).mark_rule(color=_INK, strokeWidth=3).encode(y=y))
        return _svg(alt.layer(*layer), width, 260)

    return draw


def in_colour(amounts: Mapping[str, int], scale: float) -> list[tuple[str, float, str]]:
    """Accounts as parts of a stack, in their order and colours."""
    return [(account, nbytes / scale, account_colour(account)) for account, nbytes in amounts.items()]


def byte_scale(largest: float) -> tuple[float, str]:
    """What to divide bytes by, and the unit that gives.

    >>> byte_scale(5e6), byte_scale(2**33)
    ((1048576.0, 'MiB'), (1073741824.0, 'GiB'))
    """
    return (2.0**30, "GiB") if largest >= 2**31 else (2.0**20, "MiB") if largest >= 2**20 else (2.0**10, "KiB")


def _stack_rows(curve: Curve, kept: Sequence[int], scale: float) -> Iterable[Mapping[str, Any]]:
    for account, points in layers(curve, kept):
        for seconds, low, high in points:
            colour = account_colour(account)
            yield {"account": account, "ms": seconds * 1e3, "low": low / scale, "high": high / scale, "colour": colour}


def _strip(stretches: Sequence[Stretch], heights: tuple[float, float], pixels: float, axes: tuple[alt.X, alt.Y]) -> list[alt.Chart]:
    """Boxes in a row with the names that fit into them; ``pixels`` is how wide a second is."""
    low, high = heights
    boxes = [
        {"ms": one.begin * 1e3, "until": one.end * 1e3, "low": low, "high": high, "solid": 0.16 if at % 2 else 0.32}
        for at, one in enumerate(stretches)
    ]
    names = [
        {"ms": (one.begin + one.end) / 2 * 1e3, "low": (low + high) / 2, "name": _fitting(one.name, (one.end - one.begin) * pixels)}
        for one in stretches
    ]
    if not boxes:
        return []
    x, y = axes
    rect = alt.Chart(_data(boxes)).mark_rect(color=NEUTRAL)
    text = alt.Chart(_data(names)).mark_text(color=_INK, fontSize=11, baseline="middle")
    return [
        rect.encode(x=x, x2="until:Q", y=y, y2="high:Q", opacity=alt.Opacity("solid:Q", scale=None, legend=None)),
        text.encode(x=x, y=y, text="name:N"),
    ]


def _fitting(name: str, pixels: float) -> str:
    """A name, its last part, or nothing: whichever is the most that fits; 6.5 pixels a letter are enough."""
    return next((words for words in (name, name.rpartition(".")[2]) if 6.5 * len(words) + 4 <= pixels), "")


def _ticks(top: float) -> list[float]:
    """Round values from 0 to ``top``, so that the axis ends below the strips."""
    rough = top / 5
    magnitude = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
    step = next((factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough), rough)
    return [step * at for at in range(int(top / step) + 1)]


def _amount(field: str, title: str, width: int) -> alt.X:
    return alt.X(field, title=title, axis=alt.Axis(tickCount=8 if width == WIDE else 4))


def _colour() -> alt.Color:
    return alt.Color("colour:N", scale=None, legend=None)


def _data(rows: Iterable[Mapping[str, Any]]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])


def _svg(chart: alt.LayerChart | alt.FacetChart, width: int, height: int) -> str:
    """The picture's source: no size of its own but a shape, and no identifiers that another picture on the page has too."""
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    done = (
        chart.properties(width=width, height=height, background="transparent", autosize=fit)
        .configure(aria=False, font=_FONT, padding=2)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=_INK,
            titleColor=_INK,
            tickColor=_INK,
            domainColor=_INK,
            gridColor=_INK,
            gridOpacity=0.16,
            domainOpacity=0.5,
            tickOpacity=0.5,
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
        )
    )
    return _themed(vl_convert.vegalite_to_svg(done.to_dict(validate=False)))


def _themed(svg: str) -> str:
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 aria-hidden="true" focusable="false"', svg, count=1)
    svg = re.sub(r'\s(role|aria-roledescription|pointer-events|class)="[^"]*"', "", svg)
    # A hundredth of a pixel is enough; what stands between tags is text.
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0]), svg)
