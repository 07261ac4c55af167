"""Quantiles that bounds are made of. Standard library only.

A bound is exceeded by rounding alone with a probability of :data:`CHANCE` at most, all comparisons of a verdict together.
"""

import math
from functools import cache

CHANCE = 1e-6

_UNIT_ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def unit_roundoff(dtype: str | None) -> float:
    """Largest relative error of one rounding to a type, by torch's name or the short one; 0 where it isn't a floating type.

    >>> unit_roundoff("bf16") == 2**-8, unit_roundoff("float32") == 2**-24
    (True, True)
    """
    return max((_UNIT_ROUNDOFFS.get(_SHORT.get(one, one), 0.0) for one in (dtype or "").split("+")), default=0.0)


def estimate_factor(num: int, chance: float) -> float:
    """How far above a distance its estimate from ``num`` projections may be.

    >>> round(estimate_factor(8, 1e-6), 2)
    2.31
    """
    return math.sqrt(f_quantile(num, 10**6, chance))


def normal_deviations(chance: float) -> float:
    """λ with P(|sum of roundings| > λ · their root of squares) below ``chance``, by Hoeffding: independent, of mean zero, bounded.

    >>> round(normal_deviations(1e-6), 2)
    5.39
    """
    return math.sqrt(2.0 * math.log(2.0 / chance))


@cache
def f_quantile(above: int, below: int, chance: float) -> float:
    """Value that an F-distributed variable (degrees of freedom ``above`` and ``below``) exceeds with probability ``chance``.

    >>> round(f_quantile(8, 8, 0.05), 3), round(f_quantile(8, 32, 0.01), 3)
    (3.438, 3.127)
    """
    low, high = 0.0, 1.0
    while _exceeds(high, above, below) > chance:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeds(middle, above, below) > chance else (low, middle)
    return high


def poisson_quantile(mean: float, chance: float) -> int:
    """Smallest count that a Poisson variable exceeds with a probability below ``chance``; normal tail where the mean is large.

    >>> poisson_quantile(1e-3, 1e-6), poisson_quantile(4.0, 1e-6)
    (1, 17)
    """
    if mean > 200:
        return math.ceil(mean + normal_deviations(chance) * math.sqrt(mean) + 3)
    term = total = math.exp(-mean)
    count = 0
    while 1.0 - total > chance and count < 1000:
        count += 1
        term *= mean / count
        total += term
    return count


def _exceeds(value: float, above: int, below: int) -> float:
    return _incomplete_beta(below / (below + above * value), below / 2, above / 2)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised, by Lentz's continued fraction (Numerical Recipes, section 6.4)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1.0 - front * _beta_fraction(1.0 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 300):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / (1.0 + factor * d or tiny)
            c = 1.0 + factor / c or tiny
            value *= d * c
        if abs(d * c - 1.0) < 1e-14:
            break
    return value
