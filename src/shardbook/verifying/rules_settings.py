"""Learning rates, weight decay and the optimizer's constants: as the parameter groups say, and as what it did shows."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardbook.verifying.case import Case
from shardbook.verifying.closeness import Closeness
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding
from shardbook.verifying.residuals import multiple, residuals
from shardbook.verifying.settings import setting_difference

_EXACT = 1e-6


def per_micro_batch(case: Case) -> Iterator[Finding]:
    """The schedule goes on within a step."""
    inside = [_rates_inside(case, side) for side in (0, 1)]
    if inside[0] > 1 and inside[1] <= 1:
        yield Finding(
            "schedule.per_micro_batch", CERTAIN,
            f"step {case.here.number}: the learning rate changed {inside[0] - 1} times between the micro-batches of one step",
        )  # fmt: skip
    name, numbers = _different_rate(case), {case.per_rank, max(case.num_micro_batches)}
    if name is None:
        return
    mine, theirs = ([step[name] for step in case.rates[side]] for side in (0, 1))
    for speed in sorted(number for number in numbers if number > 1):
        for start in (0, speed - 1, 1, -1):
            hits = [(at, start + speed * at) for at in range(len(mine)) if 0 <= start + speed * at < len(theirs)]
            if len(hits) > 1 and all(_same(mine[at], theirs[place]) for at, place in hits) and _differ(mine):
                yield Finding(
                    "schedule.per_micro_batch", CERTAIN - 0.01,
                    f"the learning rate of step t is the baseline's of step {speed}·t: the schedule advances with each micro-batch",
                )  # fmt: skip
                return
    speed = _speed(mine, theirs)
    if speed is not None and any(abs(speed - number) < 0.2 * number for number in numbers if number > 1):
        yield Finding("schedule.per_micro_batch", LIKELY, f"the learning rate moves {speed:.2f} times as fast as the baseline's")


def offset(case: Case) -> Iterator[Finding]:
    """The baseline's schedule, some steps earlier or later."""
    name = _different_rate(case)
    if name is not None:
        mine, theirs = ([step[name] for step in case.rates[side]] for side in (0, 1))
        for by in (1, -1, 2, -2, 3, -3, 4, -4):
            hits = [(at, at + by) for at in range(len(mine)) if 0 <= at + by < len(theirs)]
            if hits and all(_same(mine[at], theirs[place]) for at, place in hits) and (len(hits) > 1 or abs(by) == 1):
                sure = CERTAIN if len(hits) > 1 else LIKELY
                when = f"{abs(by)} step{'s' if abs(by) > 1 else ''} {'later' if by > 0 else 'earlier'}"
                yield Finding("schedule.offset", sure, f"the learning rate of every step is the one that the baseline has {when}")
                return
        speed = _speed(mine, theirs)
        if speed is not None and abs(speed - 1.0) < 1e-3:
            yield Finding(
                "schedule.offset",
                LIKELY,
                f"the learning rate moves as fast as the baseline's, from {mine[0]:.6g} instead of {theirs[0]:.6g}",
            )
            return
        at = case.here.number - 1
        yield Finding(
            "schedule.offset", PLAUSIBLE, f"step {case.here.number}: the learning rate is {mine[at]:.6g} instead of {theirs[at]:.6g}"
        )
        return
    found = case.here.updates
    if case.at("update") and found is not None and found.rest < 1e-3 and abs(found.ratio - 1) > 1e-4 and _stepped_same(case):
        yield Finding(
            "schedule.offset", PLAUSIBLE,
            f"step {case.here.number}: from the same gradients every update is {found.ratio:.5g} times the baseline's",
        )  # fmt: skip


def decay(case: Case) -> Iterator[Finding]:
    """By the settings; else by what of an update, or of a gradient, is a multiple of the weights."""
    differs = {name: pair for name, pair in _both(case, "weight_decay").items() if setting_difference(*pair)}
    if differs:
        yield _by_settings(case, differs)
    coupled = {name: pair for name, pair in _both(case, "decoupled_weight_decay").items() if bool(pair[0]) != bool(pair[1])}
    if coupled:
        way = (
            "added to the gradient, and the moments divide it away"
            if not next(iter(coupled.values()))[0]
            else "decoupled from the gradient"
        )
        yield Finding("decay.missing", PLAUSIBLE + 0.1, f"step {case.here.number}: decay is {way}, unlike the baseline's")
    yield from _between_steps(case)
    yield from _by_weights(case)


def _by_settings(case: Case, differs: Mapping[str, tuple[Any, Any]]) -> Finding:
    step, both = case.here.number, _both(case, "weight_decay")
    decaying = [name for name, (_, theirs) in both.items() if theirs]
    mine, theirs = next(iter(differs.values()))
    name = next(iter(differs))
    if all(not differs[one][1] for one in differs):
        return Finding("decay.wrong_group", CERTAIN, f"step {step}: {name} decays by {mine:g}; {_count(differs)} that should not")
    if all(not differs[one][0] and differs[one][1] for one in differs):
        if set(differs) == set(decaying):
            return Finding(
                "decay.missing", CERTAIN, f"step {step}: weight_decay is 0 where the baseline has {theirs:g}, in all of its groups"
            )
        return Finding("decay.wrong_group", CERTAIN, f"step {step}: {name} doesn't decay; {_count(differs)} that should, by {theirs:g}")
    if any(not one[0] or not one[1] for one in differs.values()):
        return Finding(
            "decay.wrong_group",
            CERTAIN,
            f"step {step}: {name} decays by {mine:g} instead of {theirs:g}; {_count(differs)} in the wrong group",
        )
    ratio = mine / theirs
    if all(abs(a / b - 2) < 1e-6 for a, b in differs.values()):
        return Finding("decay.twice", CERTAIN, f"step {step}: weight_decay is {mine:g}, twice the baseline's {theirs:g}")
    rule = "decay.twice" if ratio > 1 else "decay.missing"
    return Finding(rule, PLAUSIBLE, f"step {step}: weight_decay is {mine:g}, in the baseline {theirs:g}")


def _count(differs: Mapping[str, Any]) -> str:
    return f"{len(differs)} parameter{'' if len(differs) == 1 else 's'}"


def _between_steps(case: Case) -> Iterator[Finding]:
    """Weights that are a little smaller than the last step left them, all of a parameter alike."""
    here = case.here
    if here.previous is None or not case.at("state"):
        return
    ended, before = here.previous.candidate.phases.get("weight", {}), here.pair.candidate.phases.get("before", {})
    changed = [name for name in here.before if here.changed(0, name) and not here.changed(1, name)]
    both = [Closeness.of(before[name], ended[name]) for name in changed if before[name].is_complete and ended[name].is_complete]
    shrunk = [one for one in both if one.rest is not None and one.rest < 1e-4 and 0.5 < one.ratio < 1.0]
    if both and len(shrunk) == len(both):
        decaying = any(group.get("weight_decay") for group in here.settings(1).values())
        yield Finding(
            "decay.twice" if decaying else "decay.wrong_group", LIKELY + 0.08,
            f"step {here.number}: {changed[0]} is {shrunk[0].ratio:.6g} times what the last step left, {len(changed) - 1} others too: "
            f"decay beside the optimizer's",
        )  # fmt: skip


def _by_weights(case: Case) -> Iterator[Finding]:
    """What the two runs differ by, held against the weights themselves: all decaying parameters together, and all others."""
    phases = (
        ["update"] if case.at("update", "state") else ["gradient", "stepped"] if case.at("forward", "backward", "reduce", "clip") else []
    )
    decaying = {name for name, group in case.here.settings(1).items() if group.get("weight_decay")}
    for phase in phases:
        found = residuals(case.here, phase)
        added = -1.0 if phase == "update" else 1.0  # decay takes away from weights, and is added to gradients
        outside = multiple({name: one for name, one in found.items() if name not in decaying})
        inside = multiple({name: one for name, one in found.items() if name in decaying})
        text = f"step {case.here.number}: what the {phase}s of parameters that {{}} differ by is {{:.4g}} times their weights"
        if outside is not None and outside.ratio * added > 0:
            rule = "decay.wrong_group" if decaying else "decay.twice"
            yield Finding(rule, LIKELY + 0.08, text.format("should not decay", outside.ratio))
        elif inside is not None:
            rule = "decay.twice" if inside.ratio * added > 0 else "decay.missing"
            yield Finding(rule, LIKELY + 0.08, text.format("decay", inside.ratio))


def betas(case: Case) -> Iterator[Finding]:
    """By the settings; else moments that are a constant multiple of the baseline's, from the same gradients."""
    for key in ("betas", "momentum", "alpha", "dampening"):
        for name, (mine, theirs) in _both(case, key).items():
            if setting_difference(mine, theirs):
                yield Finding("optimizer.betas", CERTAIN, f"step {case.here.number}: {key} are {mine} instead of {theirs} ({name})")
                return
    if not _stepped_same(case) or not case.at("update", "state"):
        return
    for key, ones in case.here.states.items():
        ratios = [one.ratio for one in ones.values() if one.other and not one.same]
        mean = sum(ratios) / len(ratios) if ratios else 1.0
        # a brief print's norm is rounded to single precision
        if len(ratios) > 1 and abs(mean - 1) > 1e-5 and max(abs(one / mean - 1) for one in ratios) < max(1e-5, 0.05 * abs(mean - 1)):
            yield Finding(
                "optimizer.betas", LIKELY + 0.06,
                f"step {case.here.number}: from the same gradients {key} is {mean:.6g} times the baseline's in every parameter",
            )  # fmt: skip
        elif len(ratios) > 1 and max(abs(one - 1) for one in ratios) > 0.02:
            yield Finding(
                "optimizer.betas", PLAUSIBLE, f"step {case.here.number}: from the same gradients {key} is {mean:.4g} times the baseline's"
            )


def eps(case: Case) -> Iterator[Finding]:
    """By the settings; else updates that differ from the same gradients and moments."""
    for name, (mine, theirs) in _both(case, "eps").items():
        if setting_difference(mine, theirs):
            yield Finding("optimizer.eps", CERTAIN, f"step {case.here.number}: eps is {mine:g} instead of {theirs:g} ({name})")
            return
    states = [one.same or abs(one.ratio - 1.0) < case.here.near for ones in case.here.states.values() for one in ones.values() if one.other]
    rates = any(setting_difference(*pair) for key in ("lr", "weight_decay") for pair in _both(case, key).values())
    if case.at("update") and _stepped_same(case) and states and all(states) and not rates:
        found = case.here.updates
        ratio = f", {found.ratio:.5g} of the baseline's in all" if found is not None else ""
        yield Finding(
            "optimizer.eps", PLAUSIBLE + 0.05,
            f"step {case.here.number}: the same gradients and moments give another update{ratio}, by no multiple of the weights",
        )  # fmt: skip


def _both(case: Case, key: str) -> dict[str, tuple[Any, Any]]:
    """Parameter -> the candidate's and the baseline's setting, where both have it."""
    mine, theirs = case.here.settings(0), case.here.settings(1)
    return {name: (mine[name][key], group[key]) for name, group in theirs.items() if name in mine and key in mine[name] and key in group}


def _stepped_same(case: Case) -> bool:
    """What the optimizer was given is the baseline's, but for rounding."""
    ones = case.here.stepped.values()
    return bool(ones) and all(one.same or one.distance < 1e-4 for one in ones)


def _different_rate(case: Case) -> str | None:
    """A parameter whose learning rate differs in the step of the divergence, among those the one whose rate moves most."""
    both = {name: pair for name, pair in _both(case, "lr").items() if setting_difference(*pair)}
    return max(both, key=lambda name: len({step.get(name) for step in case.rates[1]}), default=None)


def _rates_inside(case: Case, side: int) -> int:
    """Different learning rates within the step of the divergence, on one rank."""
    steps = [facts.sides[side] for facts in case.steps.values() if 1 <= facts.number <= case.here.number]
    return max((len({micro.learning_rates for micro in micros}) for step in steps for micros in step.micro_batches), default=0)


def _speed(mine: list[float], theirs: list[float]) -> float | None:
    """How much faster one moves than the other: of differences, for a line, or of logarithms, for a power."""
    if len(mine) < 2 or len(theirs) < 2 or theirs[0] == theirs[1]:
        return None
    if min(mine[0], mine[1], theirs[0], theirs[1]) > 0 and theirs[1] < theirs[0]:
        return math.log(mine[1] / mine[0]) / math.log(theirs[1] / theirs[0])
    return (mine[1] - mine[0]) / (theirs[1] - theirs[0])


def _same(a: float, b: float) -> bool:
    return setting_difference(a, b) < _EXACT


def _differ(values: list[float]) -> bool:
    return any(not _same(value, values[0]) for value in values)


def explained_by_settings(case: Case) -> Iterator[Finding]:
    """Any other setting that differs."""
    for key in ("amsgrad", "maximize", "nesterov"):
        for name, (mine, theirs) in _both(case, key).items():
            if setting_difference(mine, theirs):
                yield Finding("unknown", POSSIBLE, f"step {case.here.number}: {key} is {mine} instead of {theirs} ({name})")
                return
