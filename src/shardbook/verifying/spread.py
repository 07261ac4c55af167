"""How far runs of the baseline in other orders and precisions are from it: what bounds are made of."""

from collections.abc import Mapping, Sequence

from shardbook.recording.read import Record
from shardbook.verifying.case import Facts, norm_of
from shardbook.verifying.pairing import Names, match, objective, pairs

Distances = Mapping[tuple[int, str], Mapping[str, Sequence[float]]]
"""(step, phase) -> parameter -> relative distance in each run. Gradients are relative to `Bounds.whole`. Of no parameter: ``loss``, the
objective, and ``factor``, the one factor on all gradients."""


def distances(baseline: Record, reruns: Sequence[Record], steps: int) -> Distances:
    """Of gradients and updates in complete steps.

    Raises:
        RecordError: a run of another model.
    """
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for rerun in reruns:
        names = match(rerun, baseline)
        for pair in pairs(rerun, baseline, steps):
            if pair.number and pair.complete:
                _add(found, Facts(pair, names, ("found", "found"), (rerun, baseline)), names)
    return found


def _add(found: dict[tuple[int, str], dict[str, list[float]]], facts: Facts, names: Names) -> None:
    gradient, losses = facts.gradient, [objective(step) for step in facts.sides]
    if losses[0] is not None and losses[1]:
        _append(found, facts.number, "loss", "", abs(losses[0] / losses[1] - 1.0))
    if facts.gradients is not None:
        _append(found, facts.number, "factor", "", abs(facts.gradients.ratio - 1.0))
    total = sum(one.numel for one in gradient.values()) or 1
    norm = norm_of(facts.pair.baseline.phases.get("gradient", {}))
    for name in names.common:
        if name in gradient:
            whole = max(gradient[name].other, norm * (gradient[name].numel / total) ** 0.5)
            if whole:
                _append(found, facts.number, "gradient", name, gradient[name].apart / whole)
        if name in facts.update and facts.update[name].other:
            _append(found, facts.number, "update", name, facts.update[name].distance)


def _append(found: dict[tuple[int, str], dict[str, list[float]]], number: int, phase: str, name: str, value: float) -> None:
    found.setdefault((number, phase), {}).setdefault(name, []).append(value)
