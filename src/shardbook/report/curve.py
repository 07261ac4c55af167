"""A curve of memory over one step made small enough to draw: fewer instants, merged phases."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardbook.document import Curve
from shardbook.tables.reconciliation import in_order


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What went on for a while, in seconds from the step's begin."""

    name: str
    begin: float
    end: float


def instants(curve: Curve, count: int) -> list[int]:
    """At most about ``count`` indices of the curve: first, last, and the lowest and highest of equally long stretches between.

    What is kept was there: no instant is averaged, and the peak always stays.
    """
    total = len(curve.seconds)
    if total <= count:
        return list(range(total))
    kept = {0, total - 1}
    step = -(-2 * total // count)
    for begin in range(0, total, step):
        stretch = range(begin, min(begin + step, total))
        kept |= {max(stretch, key=lambda at: curve.allocated[at]), min(stretch, key=lambda at: curve.allocated[at])}
    return sorted(kept)


def layers(curve: Curve, kept: Sequence[int]) -> list[tuple[str, list[tuple[float, int, int]]]]:
    """The stack: account, and for each instant (seconds, bytes beneath it, bytes up to its top)."""
    floor = [0] * len(kept)
    stack: list[tuple[str, list[tuple[float, int, int]]]] = []
    for account in in_order(curve.accounts):
        tops = [low + curve.accounts[account][at] for low, at in zip(floor, kept, strict=True)]
        stack.append((account, [(curve.seconds[at], low, top) for at, low, top in zip(kept, floor, tops, strict=True)]))
        floor = tops
    return stack


def phases(curve: Curve) -> list[Stretch]:
    """The outermost spans by phase; neighbours of one phase are one stretch."""
    merged: list[Stretch] = []
    for phase, _, begin, end in _outermost(curve):
        if merged and merged[-1].name == phase:
            merged[-1] = Stretch(name=phase, begin=merged[-1].begin, end=max(merged[-1].end, end))
        else:
            merged.append(Stretch(name=phase, begin=begin, end=end))
    return merged


def units(curve: Curve) -> list[Stretch]:
    """The spans that belong to a unit and lie in no other unit's, so that they don't overlap."""
    found: list[Stretch] = []
    for _, unit, begin, end in sorted(curve.spans, key=lambda span: (span[2], -span[3])):
        if not unit or (found and end <= found[-1].end):
            continue
        if found and begin < found[-1].end:
            begin = found[-1].end
        if found and found[-1].name == unit and begin == found[-1].end:
            found[-1] = Stretch(name=unit, begin=found[-1].begin, end=end)
        else:
            found.append(Stretch(name=unit, begin=begin, end=end))
    return found


def _outermost(curve: Curve) -> list[tuple[str, str, float, float]]:
    found: list[tuple[str, str, float, float]] = []
    for span in sorted(curve.spans, key=lambda one: (one[2], -one[3])):
        if not found or span[3] > found[-1][3]:
            found.append(span)
    return found
