"""What happens between the gradient and the optimizer's step."""

import math
from collections.abc import Iterator

from shardbook.recording.read import Step
from shardbook.verifying.case import Case, Facts, norm_of, own_factor
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding
from shardbook.verifying.forwards import varies
from shardbook.verifying.pairing import total_weight

_SAME = 1e-4


def factors(facts: Facts) -> tuple[float, float] | None:
    """What each run multiplies the objective's gradient by before it steps; 1 where it doesn't clip."""
    mine, theirs = (own_factor(step) for step in facts.sides)
    return None if mine is None or theirs is None else (mine * facts.divisors[0], theirs * facts.divisors[1])


def per_rank(case: Case) -> Iterator[Finding]:
    """Each rank clips what it has by that part's norm."""
    here = case.here
    mine, theirs = (_by_rank(step) for step in here.sides)
    drifted = any(one.phase == "gradient" for one in here.pair.candidate.disagreements)
    if not drifted and len(mine) > 1 and _unequal(mine) > 1e-3 and (len(theirs) < 2 or _unequal(theirs) < _SAME):
        each = ", ".join(f"rank {rank} {factor:.4g}" for rank, factor in sorted(mine.items()))
        yield Finding("clip.per_rank", CERTAIN, f"step {here.number}: ranks scale their parts of one gradient by different factors: {each}")
    yield from _by_loss(case)
    both, found = factors(here), here.gradients
    if both is None or found is None or not case.at("backward", "reduce", "clip"):
        return
    clipped, gradient = norm_of(here.pair.baseline.phases["stepped"]), norm_of(here.pair.candidate.phases["gradient"]) / here.divisors[0]
    active = both[1] < 1 - _SAME
    ranks = max(case.num_ranks)
    many = max(max(case.num_ranks), max(case.num_micro_batches)) > 1
    if (
        active
        and many
        and found.ratio < 0.99
        and gradient <= clipped * ranks * 1.01
        and both[0] > 1 - _SAME
        and case.same_outputs is not False
    ):
        # parts that were scaled by different factors are no multiple of the whole, and not far from one
        sure = LIKELY if 10 * here.roundoff < found.rest < 0.15 else PLAUSIBLE + 0.05
        yield Finding(
            "clip.per_rank", sure,
            f"step {here.number}: the gradient's norm is {gradient:.4g} before clipping, nothing is scaled to the limit of "
            f"{clipped:.4g}: parts were clipped before they were added",
        )  # fmt: skip
    elif active and many and found.is_near(1.0) and both[0] > 1 - _SAME and case.at("clip"):
        yield Finding(
            "clip.per_rank", POSSIBLE,
            f"step {here.number}: not clipped, where the baseline's gradient is scaled by {both[1]:.4g}: its parts may be within the limit",
        )  # fmt: skip


def _by_loss(case: Case) -> Iterator[Finding]:
    """Losses of a rank are multiplied by a factor of its own, and it has as many tokens as others."""
    found: dict[int, list[float]] = {}
    for one in case.forwards:
        if one.gradient is not None and one.counted is not None and (one.gradient.rest or 0.0) < 0.02:
            found.setdefault(one.rank, []).append(one.gradient.ratio / one.counted.valid)
    of_ranks = [ratios[0] for ratios in found.values()]
    if len(of_ranks) > 1 and all(varies(ratios) < 1e-3 for ratios in found.values()) and varies(of_ranks) > 5e-3:
        counts = {one.counted.valid for one in case.forwards if one.counted is not None}
        if len(counts) == 1:
            each = ", ".join(f"{ratio / of_ranks[0]:.4g}" for ratio in of_ranks)
            yield Finding(
                "clip.per_rank", PLAUSIBLE + 0.05, f"step {case.here.number}: each rank's losses have a factor of their own ({each})"
            )


def before_unscale(case: Case) -> Iterator[Finding]:
    """A gradient that still carries a scale is held against the limit, and is divided by the scale afterwards."""
    both, here = factors(case.here), case.here
    if both is None or not case.at("clip", "backward") or not both[0] < 1 - _SAME:
        return
    stepped = here.stepped_together
    mine, theirs = (norm_of(step.phases["stepped"]) for step in here.sides)
    if stepped is None or stepped.rest > 0.05 or not theirs or stepped.ratio >= 1:
        return
    over = theirs / mine
    weight = total_weight(here.pair.baseline)
    numbers = [("the total weight", weight or 0.0), ("micro-batches", max(case.num_micro_batches)), ("ranks", max(case.num_ranks)),
               ("micro-batches of a rank", case.per_rank), ("the engine's divisor", here.divisors[0])]  # fmt: skip
    named = [what for what, number in numbers if number > 1 and abs(over / number - 1.0) < 2e-3]
    power = over > 3 and abs(math.log2(over) - round(math.log2(over))) < 2e-3
    if both[1] < 1 - _SAME and (named or power):
        what = named[0] if named else "a power of two, as loss scales are"
        yield Finding(
            "clip.before_unscale", CERTAIN if over >= 64 or (named and over > 4) else LIKELY if named else PLAUSIBLE - 0.05,
            f"step {here.number}: what is stepped on has a norm of {mine:.4g}, the limit of {theirs:.4g} divided by {over:.5g} ({what})",
        )  # fmt: skip
    elif both[0] < both[1] - _SAME and over > 1.5:
        sure = PLAUSIBLE + 0.05 if both[1] < 1 - _SAME else POSSIBLE
        yield Finding(
            "clip.before_unscale", sure if not _limits(case)[0] else sure - 0.1,
            f"step {here.number}: what is stepped on is {over:.4g} times smaller than the baseline's, in every parameter alike",
        )  # fmt: skip


def unexpected(case: Case) -> Iterator[Finding]:
    """Clipping where the baseline does none, or to another limit."""
    both, here = factors(case.here), case.here
    if both is None or not case.at("clip"):
        return
    mine = norm_of(here.pair.candidate.phases["stepped"])
    if both[0] < 1 - _SAME and abs(both[1] - 1.0) < _SAME:
        limit, scaled = _limits(case)
        sure = CERTAIN if limit and not scaled else PLAUSIBLE if scaled and not limit else LIKELY
        yield Finding(
            "clip.unexpected", sure,
            f"step {here.number}: the gradient is scaled by {both[0]:.4g} to a norm of {mine:.4g}; the baseline doesn't clip",
        )  # fmt: skip
        if scaled and not limit:
            weight = _scale_of(here)
            yield Finding(
                "clip.before_unscale", CERTAIN - 0.02,
                f"step {here.number}: what is stepped on has a norm of {mine:.4g}, a limit of {mine * weight:.4g} divided by {weight:.6g}: "
                f"the gradient was clipped before it was divided",
            )  # fmt: skip
    elif both[0] < 1 - _SAME:
        theirs = norm_of(here.pair.baseline.phases["stepped"])
        yield Finding("clip.unexpected", PLAUSIBLE, f"step {here.number}: clipped to a norm of {mine:.4g}, in the baseline to {theirs:.4g}")
    elif both[1] < 1 - _SAME:
        yield Finding(
            "clip.unexpected", PLAUSIBLE, f"step {here.number}: not clipped, where the baseline's gradient is scaled by {both[1]:.4g}"
        )


def scaled(case: Case) -> Iterator[Finding]:
    """The gradient carries a loss scale where it was recorded, and what is stepped on is the limit divided by that."""
    here, found = case.here, case.here.gradients
    if found is None or not found.is_multiple or not case.at("backward", "clip", "reduce") or found.ratio < 8:
        return
    power = abs(math.log2(found.ratio) - round(math.log2(found.ratio))) < 1e-3
    mine = norm_of(here.pair.candidate.phases.get("stepped", {}))
    norms = [norm_of(facts.pair.candidate.phases.get("stepped", {})) for facts in case.steps.values() if facts.number >= here.number]
    if power and len(norms) > 1 and mine and max(norms) - min(norms) < _SAME * mine:
        yield Finding(
            "clip.before_unscale", CERTAIN,
            f"step {here.number}: the gradient is {found.ratio:.6g} times the baseline's, as under a loss scale, and what is stepped on "
            f"has a norm of {mine:.4g} in every step, a limit of {mine * found.ratio:.4g} divided by that",
        )  # fmt: skip


def _limits(case: Case) -> tuple[bool, bool]:
    """Whether the norm of what is stepped on is a limit: the same in several steps, or a round number; and whether it is one times
    what gradients are divided by.
    """
    steps = [facts for facts in case.steps.values() if facts.number >= case.here.number and "stepped" in facts.pair.candidate.phases]
    norms = [norm_of(facts.pair.candidate.phases["stepped"]) for facts in steps]
    scales = [_scale_of(facts) for facts in steps]
    both = [norms, [norm * scale for norm, scale in zip(norms, scales, strict=True)]]
    limit, scaled = (_is_steady(values) for values in both)
    if limit and scaled:
        limit, scaled = (_is_round(values[0]) for values in both)
    return limit, scaled


def _scale_of(facts: Facts) -> float:
    """What the candidate divides its gradient by: the engine's divisor, or the weights it was told."""
    return facts.divisors[0] if facts.divisors[0] != 1.0 else total_weight(facts.pair.candidate) or 1.0


def _is_steady(values: list[float]) -> bool:
    clipped = [value for value in values if value > 0]
    return len(clipped) > 1 and max(clipped) - min(clipped) < _SAME * max(clipped)


def _is_round(value: float) -> bool:
    """Two digits say it."""
    return value > 0 and abs(float(f"{value:.1e}") / value - 1.0) < 2e-4


def _by_rank(step: Step) -> dict[int, float]:
    """Each rank's factor from its parts of the gradient to what it steps on."""
    before, after = _squares(step, "gradient"), _squares(step, "stepped")
    return {rank: math.sqrt(after[rank] / before[rank]) for rank in before if before[rank] > 0 and after.get(rank)}


def _squares(step: Step, phase: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for parts in step.parts.get(phase, {}).values():
        for part in parts:
            found[part.rank] = found.get(part.rank, 0.0) + part.fingerprint.squares
    return found


def _unequal(by_rank: dict[int, float]) -> float:
    largest = max(by_rank.values())
    return (largest - min(by_rank.values())) / largest if largest else 0.0
