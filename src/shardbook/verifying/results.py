"""Comparisons of one phase as results: of one thing, and the worst of many."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardbook.verifying.closeness import Closeness
from shardbook.verifying.verdict import Phase, PhaseResult

_SAME_NORM = 2.0**-18
"""Relative. A norm is added up in single precision, of pieces in another order than of the whole."""


def result(number: int, phase: Phase, name: str | None, one: Closeness, bound: float, rank: int | None = None) -> PhaseResult:
    """Of one tensor. Of a norm alone the same number is all that can be had, as far as single precision adds it up."""
    same = one.same if one.same is not None else one.rest is None and one.apart <= _SAME_NORM * one.other
    deviation = 0.0 if same else one.distance
    return PhaseResult(
        step=number, phase=phase, parameter=name, rank=rank, deviation=deviation, bound=bound, same_bits=same, num_compared=1
    )


def worst(
    number: int, phase: Phase, ones: Mapping[str, Closeness], limits: Mapping[str, float], wholes: Mapping[str, float] | None = None
) -> PhaseResult:
    """Of many parameters the one that is farthest beyond its bound, or nearest to it. ``wholes``: what deviations are relative to."""
    results = [result(number, phase, name, one, limits[name]) for name, one in ones.items()]
    if wholes is not None:
        results = [replace(one, deviation=ones[one.parameter or ""].apart / (wholes[one.parameter or ""] or 1.0)) for one in results]
    if not results:
        return PhaseResult(step=number, phase=phase)
    far = max(results, key=size)
    return PhaseResult(
        step=number, phase=phase, parameter=far.parameter if far.deviation else None, deviation=far.deviation, bound=far.bound,
        same_bits=all(one.same_bits for one in results), num_compared=len(results),
    )  # fmt: skip


def size(one: PhaseResult) -> tuple[bool, float]:
    """What is sorted by: whether it is beyond its bound, and by how much."""
    if math.isnan(one.deviation):
        return True, math.inf
    return one.exceeds, one.deviation / one.bound if one.bound else one.deviation


def worst_of(found: Iterable[PhaseResult]) -> list[PhaseResult]:
    """One result for each phase: the worst, with the number of all."""
    kept: dict[str, PhaseResult] = {}
    for one in found:
        known = kept.get(one.phase)
        if known is None or size(one) > size(known):
            kept[one.phase] = one
    return list(kept.values())
