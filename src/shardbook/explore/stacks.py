"""Stacks of bytes as boxes of a page: as wide as the page is, in its ink, and drawn at once.

The drawing library takes some 0.1 seconds for each picture, which is nothing in a report and too much behind a knob that is turned.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardbook.forecasting.result import Forecast
from shardbook.report import markup
from shardbook.report.colours import account_colour
from shardbook.report.forecast_charts import caption
from shardbook.report.forecast_figures import Case, both, device_memory, stacked
from shardbook.tables.reconciliation import in_order

_TICKS = 4
_LETTER = 0.0115
"""Share of the picture that a letter takes where it is wide; a box that is too narrow has its name in the legend alone."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stack: parts to bytes. They are laid end to end in the order of the accounts, as in every picture."""

    label: str
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From 0 to ``end`` bytes, with a tick at each of ``ticks``, which are told in ``unit`` of ``divisor`` bytes."""

    end: float
    ticks: Sequence[float]
    divisor: float
    unit: str


def draw(
    bars: Sequence[Bar], words: str, limit: int | None = None, *, names: Mapping[str, str] | None = None, per: str = " per rank"
) -> str:
    """Stacks over one axis.

    Args:
        bars: from top to bottom.
        words: stand below the picture.
        limit: bytes; a line across all of them.
        names: part to colour for parts that are no accounts.
        per: of what the axis says bytes.
    """
    axis = axis_for(max([bar.nbytes for bar in bars] + [limit or 0], default=0))
    parts = in_order({part for bar in bars for part, nbytes in bar.parts.items() if nbytes})
    colours = {part: (names or {}).get(part) or account_colour(part) for part in parts}
    line = f'<div class="sb-limit" style="left:{100 * limit / axis.end:.2f}%"></div>' if limit else ""
    rows = "".join(_row(bar, axis, colours, line) for bar in bars)
    ticks = "".join(f'<span style="left:{100 * tick / axis.end:.2f}%">{tick / axis.divisor:g}</span>' for tick in axis.ticks)
    said = "; ".join(f"{bar.label}: {both(bar.nbytes)}" for bar in bars)
    return (
        f'<figure class="sb-stacks">{markup.legend(colours)}<div role="img" aria-label="{escape(said)}">{rows}'
        f'<div class="sb-axis" aria-hidden="true">{ticks}</div></div>'
        f"<figcaption>{axis.unit}{per}. {escape(words)}</figcaption></figure>"
    )


def of_forecast(forecast: Forecast, others: Sequence[Bar] = ()) -> str:
    """One rank by account with the device's limit across, and others below it."""
    return draw([Bar(label="a rank", parts=stacked(forecast)), *others], caption(forecast), device_memory(forecast))


def of_cases(cases: Sequence[Case]) -> str:
    """A stack for each case; refused ones are named under the picture."""
    known = [(case.label, case.forecast) for case in cases if case.forecast is not None]
    refused = "".join(markup.text("p", f"{case.label}: {case.why}", "soft") for case in cases if case.forecast is None)
    if not known:
        return refused
    first = known[0][1]
    return draw([Bar(label=label, parts=stacked(one)) for label, one in known], caption(first), device_memory(first)) + refused


def axis_for(largest: int) -> Axis:
    """The shortest axis with round ticks that holds so many bytes.

    >>> axis = axis_for(112 * 10**9)
    >>> axis.end / axis.divisor, len(axis.ticks), axis.unit
    (150.0, 4, 'GB')
    """
    largest = max(largest, 1)
    divisor, unit = next(
        ((size, name) for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= size), (1.0, "B")
    )
    rough = largest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    count = max(1, math.ceil(largest / step - 1e-9))
    return Axis(end=step * count, ticks=[step * at for at in range(count + 1)], divisor=divisor, unit=unit)


def _row(bar: Bar, axis: Axis, colours: Mapping[str, str], line: str) -> str:
    boxes = "".join(_box(part, nbytes, nbytes / axis.end, colours[part]) for part in colours if (nbytes := bar.parts.get(part, 0)))
    name = f'<div class="sb-name"><span>{escape(bar.label)}</span><span class="sb-total">{escape(both(bar.nbytes))}</span></div>'
    return f'<div class="sb-row">{name}<div class="sb-bar">{boxes}{line}</div></div>'


def _box(part: str, nbytes: int, share: float, colour: str) -> str:
    ink = "#000" if _is_light(colour) else "#fff"
    name = escape(part) if share >= _LETTER * (len(part) + 1) else ""
    style = f"width:{100 * share:.3f}%;background:{colour};color:{ink}"
    return f'<div class="sb-box" style="{style}" title="{escape(part)}: {escape(both(nbytes))}"><span>{name}</span></div>'


def _is_light(colour: str) -> bool:
    """Whether black is easier to read on it than white (relative luminance, roughly)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 125
