"""Measured seconds over sizes, and what lies between them.

A :class:`Curve` has a value at each point of a grid. Between them the logarithm of the seconds is linear in the logarithms of the
sizes, so that a constant rate is met exactly, and so is any power. Above the grid the rate stays what it was at its edge; below it
the last slope goes on, since that is where the fixed cost of a call shows. A single point stands for a constant rate.

>>> curve = Curve(what="copy", dtype="", axes=((1024, 4096),), seconds=(1e-6, 2e-6))
>>> [f"{curve.at(numel):.3e}" for numel in (2048, 40960)]  # half way, and ten times the upper edge
['1.414e-06', '2.000e-05']
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from shardbook.checks import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """See the file's header.

    Args:
        what: what was done, as ``"product.forward"``.
        dtype: in which type; "" where it has none.
        axes: the sizes on each axis, rising.
        seconds: of one call at each point, the last axis running fastest.
        powers: how the seconds grow above the grid on each axis; None: 1 on all.

    Raises:
        ConfigError: axes that do not rise, another number of seconds than of points, or seconds that are not above 0.
    """

    what: str
    dtype: str
    axes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    powers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        if not self.axes or any(not axis or axis[0] < 1 or list(axis) != sorted(set(axis)) for axis in self.axes):
            check.add("axes", self.axes, "sizes of at least 1, rising", "calibrate again")
        elif len(self.seconds) != math.prod(map(len, self.axes)):
            check.add("seconds", len(self.seconds), f"{math.prod(map(len, self.axes))}, one for each point", "calibrate again")
        if any(not 0 < seconds < math.inf for seconds in self.seconds):
            check.add("seconds", min(self.seconds), "numbers above 0", "calibrate again")
        if self.powers is not None and len(self.powers) != len(self.axes):
            check.add("powers", self.powers, "one for each axis", "calibrate again")
        check.done()

    def at(self, *sizes: float) -> float:
        """Seconds of one call of these sizes, one for each axis; 0 where one of them is 0."""
        if min(sizes) <= 0:
            return 0.0
        powers = self.powers or (1.0,) * len(self.axes)
        above, weights = 0.0, list[tuple[tuple[int, float], ...]]()
        for axis, size, power in zip(self.axes, sizes, powers, strict=True):
            inside = float(axis[0]) if len(axis) == 1 else min(size, axis[-1])
            above += power * math.log(size / inside)
            weights.append(_weights(axis, inside))
        total = above
        for corner in product(*weights):
            share = math.prod(weight for _, weight in corner)
            if share:
                total += share * math.log(self.seconds[self._index([index for index, _ in corner])])
        return math.exp(total)

    def _index(self, corner: Sequence[int]) -> int:
        found = 0
        for index, axis in zip(corner, self.axes, strict=True):
            found = found * len(axis) + index
        return found


def _weights(axis: tuple[int, ...], size: float) -> tuple[tuple[int, float], ...]:
    """Neighbouring points and their shares; below the axis the shares of the first two still add up to 1."""
    if len(axis) == 1:
        return ((0, 1.0),)
    right = next((number for number in range(1, len(axis)) if size <= axis[number]), len(axis) - 1)
    left = right - 1
    share = math.log(size / axis[left]) / math.log(axis[right] / axis[left])
    return ((left, 1 - share), (right, share))
