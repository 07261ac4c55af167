"""The few pieces of HTML that the page is made of. Every function escapes the text it is given, and gives markup back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from shardbook.report.charts import NARROW, WIDE
from shardbook.report.colours import ACCOUNTS


def text(tag: str, words: str, kind: str = "") -> str:
    """An element with words in it.

    >>> text("p", "a < b", "soft")
    '<p class="soft">a &lt; b</p>'
    """
    return f'<{tag} class="{kind}">{escape(words)}</{tag}>' if kind else f"<{tag}>{escape(words)}</{tag}>"


def section(title: str, parts: Iterable[str]) -> str:
    """A part of the page under its title; nothing at all where there are no parts."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str, *, numbers: Iterable[int] = (), sums: int = 0, colours: bool = False
) -> str:
    """A table in a box that scrolls.

    Args:
        heads: of the columns.
        rows: cells, the first of which names its row.
        caption: what the table shows.
        numbers: which columns are set to the right.
        sums: how many rows at the end are sums.
        colours: whether each row's name is an account and gets its colour.
    """
    right = set(numbers)
    opening = '<table class="figures">' if right else "<table>"
    head = "".join(f'<th scope="col"{_kind(at, right)}>{escape(word)}</th>' for at, word in enumerate(heads))
    kinds = ["" if at < len(rows) - sums else ' class="sum"' for at in range(len(rows))]
    body = "\n".join(f"<tr{kind}>{_cells(row, right, colours=colours)}</tr>" for kind, row in zip(kinds, rows, strict=True))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">{opening}\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def picture(draw: Callable[[int], str], description: str, caption: str, legend: str = "") -> str:
    """A picture, drawn for wide and for narrow pages, with its description for those who don't see it."""
    drawn = "".join(f'<div class="{kind}">{draw(width)}</div>' for kind, width in (("wide", WIDE), ("narrow", NARROW)))
    return (
        f'<figure>{legend}<div class="picture" role="img" aria-label="{escape(description)}">{drawn}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def legend(colours: Mapping[str, str]) -> str:
    """Names with their colours."""
    return '<ul class="legend">' + "".join(f"<li>{_swatch(colour)}{escape(name)}</li>" for name, colour in colours.items()) + "</ul>"


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """The figures that are read first: what, how much, and a remark."""
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}<small>{escape(remark)}</small></dd></div>" for name, figure, remark in facts
    )
    return f'<dl class="cards">{inside}</dl>' if inside else ""


def _cells(row: Sequence[str], right: set[int], *, colours: bool) -> str:
    mark = _swatch(ACCOUNTS[row[0]]) if colours and row[0] in ACCOUNTS else ""
    first = f'<th scope="row"{_kind(0, right, row[0])}>{mark}{escape(row[0])}</th>'
    return first + "".join(f"<td{_kind(at, right, cell)}>{escape(cell)}</td>" for at, cell in enumerate(row[1:], start=1))


def _kind(at: int, right: set[int], cell: str = "") -> str:
    if at in right:
        return ' class="number"'
    return ' class="words"' if len(cell) > 34 else ""


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{escape(colour)}"></span>'
