"""A stack of bytes as one line of block characters. Neighbours differ in their pattern, so that it can be read without colour."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from rich.text import Text

from shardbook.report.colours import account_colour

PATTERNS = "█▒▓░"
"""In the order of the stack; the legend shows each part's own."""

_LIMIT, _FREE = "┃", "·"


def pattern(number: int) -> str:
    """Of the part with this number in a stack."""
    return PATTERNS[number % len(PATTERNS)]


def swatch(account: str, number: int) -> Text:
    """What the part looks like in the bar."""
    return Text(pattern(number) * 2, style=account_colour(account))


def bar(parts: Mapping[str, int], width: int, limit: int | None = None) -> Text:
    """The parts laid end to end over ``width`` characters; with ``limit``, a line across at so many bytes.

    The whole width is the stack or the limit, whichever is more. A part that is too small for a character has none.

    >>> bar({"PARAM": 3, "MOMENT": 1}, 8).plain, bar({"PARAM": 2}, 8, limit=4).plain, bar({"PARAM": 8}, 8, limit=4).plain
    ('██████▒▒', '████···┃', '████┃███')
    """
    whole = max(sum(parts.values()), limit or 0, 1)
    drawn = Text()
    for number, (account, cells) in enumerate(zip(parts, _cells(list(parts.values()), whole, width), strict=True)):
        drawn.append(pattern(number) * cells, style=account_colour(account))
    drawn.append(_FREE * (width - len(drawn)))
    if limit is None:
        return drawn
    at = min(width - 1, round(limit / whole * width))
    return Text.assemble(drawn[:at], (_LIMIT, "bold"), drawn[at + 1 :])


def labels(parts: Mapping[str, int], width: int, limit: int | None = None) -> str:
    """The names that fit under their parts.

    >>> labels({"PARAM": 3, "MOMENT": 1}, 8)
    'PARAM'
    """
    whole = max(sum(parts.values()), limit or 0, 1)
    cells = list(_cells(list(parts.values()), whole, width))
    return "".join((name if len(name) < count else "").ljust(count) for name, count in zip(parts, cells, strict=True)).rstrip()


def _cells(amounts: Sequence[int], whole: int, width: int) -> Iterator[int]:
    """Characters of each part; the ends are rounded and not the parts, so that nothing adds up wrongly."""
    ends = [round(end / whole * width) for end in accumulate(amounts)]
    return (end - begin for begin, end in zip([0, *ends], ends, strict=False))
