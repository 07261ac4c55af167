"""Pictures of forecasts: a stack by account for each of several settings, with the device's limit across them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from shardbook.forecasting.result import NOT_A_PEAK, Forecast
from shardbook.report import charts
from shardbook.report.charts import Mark, Segment
from shardbook.report.colours import account_colour
from shardbook.report.forecast_figures import Case, both, device_memory, scale_for, stacked
from shardbook.tables.reconciliation import in_order

_INK, _PAPER, _SOFT = "#1b1f24", "#ffffff", "#59636e"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_EDGE, _LINE, _SWATCH = 16, 20, 12
_LETTER_PIXELS = 7.0


def stacks(cases: Sequence[Case], limit: int | None = None) -> Callable[[int], str]:
    """A horizontal stack by account for each case, in their order; ``limit`` bytes are a line across all of them.

    Cases without a forecast are left out: there is nothing to draw of them.
    """
    known = [(case.label, case.forecast) for case in cases if case.forecast is not None]
    scale = scale_for(max([sum(stacked(one).values()) for _, one in known] + [limit or 0], default=0))
    segments: list[Segment] = []
    for label, one in known:
        segments += charts.stack(label, ((part, nbytes / scale.decimal, account_colour(part)) for part, nbytes in stacked(one).items()))
    marks = [Mark(row=label, at=limit / scale.decimal) for label, _ in known] if limit else []
    return charts.bars(segments, f"{scale.decimal_unit} per rank", marks)


def legend(cases: Sequence[Case]) -> Mapping[str, str]:
    """The parts of the stacks in their order, with their colours."""
    found = {part for case in cases if case.forecast is not None for part in stacked(case.forecast)}
    return {part: account_colour(part) for part in in_order(found)}


def caption(forecast: Forecast) -> str:
    """What the stacks are, and what the line across them is."""
    what = "Live bytes at the peak of a step, by account." if forecast.is_peak else f"State that persists: {NOT_A_PEAK}."
    limit = device_memory(forecast)
    device = forecast.inputs.get("device") or "the device"
    return what if limit is None else f"{what} The line across is {device}'s {both(limit)}."


def description(cases: Sequence[Case]) -> str:
    """The picture for those who don't see it."""
    return "; ".join(f"{case.label}: {both(sum(stacked(case.forecast).values()))}" for case in cases if case.forecast is not None)


def standalone(forecast: Forecast, cases: Sequence[Case], title: str, width: int = charts.WIDE) -> str:
    """The stacks as an SVG file of their own: title, picture, legend and caption, dark on white, whatever shows it."""
    picture = stacks(cases, device_memory(forecast))(width)
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
    inner_width, inner_height = (float(box[1]), float(box[2])) if box else (float(width), 200.0)
    whole = inner_width + 2 * _EDGE
    top = _EDGE + 2 * _LINE
    inside = [_text(_EDGE, _EDGE + 14, title, size=17)]
    placed = picture.replace("<svg", f'<svg x="{_EDGE}" y="{top}" width="{inner_width}" height="{inner_height}"', 1)
    inside.append(placed.replace("currentColor", _INK).replace("var(--paper)", _PAPER))
    drawn, bottom = _legend(legend(cases), whole, top + inner_height + _LINE)
    inside += drawn
    for line in _broken(caption(forecast), int((whole - 2 * _EDGE) / _LETTER_PIXELS)):
        inside.append(_text(_EDGE, bottom, line, colour=_SOFT))
        bottom += _LINE
    size = f'width="{whole:g}" height="{bottom:g}" viewBox="0 0 {whole:g} {bottom:g}"'
    heading = f"<title>{escape(title)}</title><desc>{escape(description(cases))}</desc>"
    paper = f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{heading}{paper}{"".join(inside)}</svg>\n'


def _legend(colours: Mapping[str, str], width: float, y: float) -> tuple[list[str], float]:
    """Swatches and names in as many rows as they need, and where the next line stands."""
    drawn: list[str] = []
    x = float(_EDGE)
    for name, colour in colours.items():
        needed = _SWATCH + 6 + _LETTER_PIXELS * 1.2 * len(name) + 14
        if x + needed > width and x > _EDGE:
            x, y = float(_EDGE), y + _LINE
        square = f'x="{x:g}" y="{y - 10:g}" width="{_SWATCH}" height="{_SWATCH}" fill="{colour}" stroke="{_SOFT}"'
        drawn += [f"<rect {square}/>", _text(x + _SWATCH + 6, y, name)]
        x += needed
    return drawn, y + _LINE + 4


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = _INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-family="{_FONT}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _broken(words: str, letters: int) -> Iterator[str]:
    line = ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > letters:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line
