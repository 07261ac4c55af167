"""What two runs differ by in a phase, held against the baseline's weights: decay is a multiple of them."""

from collections.abc import Mapping

from shardbook.recording.prints import Fingerprint
from shardbook.verifying.case import Facts, updates
from shardbook.verifying.closeness import Closeness, Together, together


def residuals(facts: Facts, phase: str) -> dict[str, Closeness]:
    """Difference of gradients, of what is stepped on, or of updates, as a multiple of the weights before; parameters that differ only."""
    before = facts.pair.baseline.phases.get("before", {})
    mine, theirs = (_projections(facts, side, phase) for side in (0, 1))
    found: dict[str, Closeness] = {}
    for name in facts.names.common:
        weights = before[name].projections if name in before else None
        if name not in mine or name not in theirs or weights is None or not before[name].norm:
            continue
        if phase == "update" and name in facts.weight and facts.weight[name].same:
            continue
        difference = [a - b for a, b in zip(mine[name], theirs[name], strict=True)]
        found[name] = Closeness.of_projections(difference, weights, before[name].numel)
    return {name: one for name, one in found.items() if one.norm}


def multiple(found: Mapping[str, Closeness], known_to: float = 0.1) -> Together | None:
    """The one factor, where its standard error is at most ``known_to`` of it."""
    both = together(found.values())
    return None if both is None or both.error > known_to * abs(both.ratio) else both


def _projections(facts: Facts, side: int, phase: str) -> dict[str, tuple[float, ...]]:
    step = facts.sides[side]
    if phase == "update":
        return updates(step)
    divisor = facts.divisors[side] if phase == "gradient" else 1.0
    prints: Mapping[str, Fingerprint] = step.phases.get(phase, {})
    return {name: tuple(value / divisor for value in one.projections) for name, one in prints.items() if one.projections is not None}
