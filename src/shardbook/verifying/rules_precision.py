"""Types that are narrower than the baseline's: of what is held, or of what was added up."""

from collections.abc import Iterator

from shardbook.recording.prints import Fingerprint
from shardbook.verifying.case import Case, Facts
from shardbook.verifying.closeness import Closeness
from shardbook.verifying.comparing import adds_narrow
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding
from shardbook.verifying.widths import is_rounded, narrower_in

_ROUNDED = (2.0**-13, 2.0**-6)
"""Relative distance of values from themselves rounded to bf16 or fp16: between an eighth and eight times half a unit."""


def master(case: Case) -> Iterator[Finding]:
    """No copy in full precision, or one that was made of rounded weights."""
    first, later = case.steps.get(0), [facts for facts in case.steps.values() if facts.number >= 1]
    held = [name for facts in later for name in narrower_in(facts, "weight") if name in facts.settings(1)]
    if held:
        where = case.here if case.here.number else later[0]
        one = where.pair.candidate.phases["weight"].get(held[0])
        what = f"in {one.dtype}" if one is not None and "16" in one.dtype else "with values of a 16-bit type"
        yield Finding(
            "precision.master", CERTAIN + 0.01,
            f"step {where.number}: what the optimizer updates is held {what} ({held[0]}), in the baseline in full precision",
        )  # fmt: skip
    between = _rounded_between(case.here)
    if between:
        yield Finding(
            "precision.master", CERTAIN + 0.01,
            f"step {case.here.number}: {between[0]} was rounded to values of a 16-bit type after the last step",
        )  # fmt: skip
    if first is None or case.first > 1:
        return
    trained = [name for name in first.weight if case.records[1].parameters[name].trainable]
    rounded = [name for name in narrower_in(first, "weight") if name in trained]
    apart = {name: first.weight[name].distance for name in trained if not first.weight[name].same}
    small = [name for name, distance in apart.items() if _ROUNDED[0] < distance < _ROUNDED[1]]
    if rounded and apart:
        yield Finding(
            "precision.master_rounded", CERTAIN,
            f"before the first step every value of {rounded[0]} is one of a 16-bit type: the master was made of rounded weights",
        )  # fmt: skip
    elif apart and len(small) > 0.5 * len(apart):
        yield Finding(
            "precision.master_rounded", LIKELY,
            f"before the first step weights are {min(apart.values()):.2g} to {max(apart.values()):.2g} from the baseline's, as rounding to "
            f"16 bits leaves them",
        )  # fmt: skip


def _rounded_between(facts: Facts) -> list[str]:
    """Parameters that became values of a 16-bit type after the last step. An old replica is no rounded one."""
    if facts.previous is None or any(one.phase == "before" for one in facts.pair.candidate.disagreements):
        return []
    ended, before = facts.previous.candidate.phases.get("weight", {}), facts.pair.candidate.phases.get("before", {})
    changed = [name for name in facts.before if facts.changed(0, name) and before[name].narrow and not ended[name].narrow]
    return [name for name in changed if _is_rounding(before[name], ended[name])]


def moment(case: Case) -> Iterator[Finding]:
    """Moments in 16 bits."""
    here = case.here
    for key in here.states:
        narrower = narrower_in(here, f"state.{key}")
        if narrower:
            yield Finding("precision.moment", CERTAIN, f"step {here.number}: {key} of {narrower[0]} has values of a 16-bit type only")
            return
    if not case.at("state", "update") or not _given_alike(here):
        return
    off = {name: one for ones in here.states.values() for name, one in ones.items() if not one.same and one.other and _apart(one) > 1e-6}
    if off and all(_apart(one) < 0.02 for one in off.values()):
        yield Finding(
            "precision.moment", PLAUSIBLE + 0.1,
            f"step {here.number}: from the same gradients the moments of {len(off)} parameters differ by "
            f"{max(abs(one.ratio - 1) for one in off.values()):.2g} of their norms, as rounding to 16 bits leaves them",
        )  # fmt: skip


def accumulation(case: Case) -> Iterator[Finding]:
    """Micro-batches, or ranks, added in 16 bits."""
    here = case.here
    if not case.at("backward", "reduce", "clip"):
        return
    if adds_narrow(here, 0) and not adds_narrow(here, 1):
        yield Finding(
            "precision.accumulation", CERTAIN - 0.01,
            f"step {here.number}: {here.num_accumulated} micro-batches of a rank are added up in a 16-bit type",
        )  # fmt: skip
        return
    narrower = [name for name in narrower_in(here, "gradient") if is_rounded(here, "gradient", name)]
    if narrower:
        yield Finding(
            "precision.accumulation", CERTAIN,
            f"step {here.number}: the gradient of {narrower[0]}, a sum of {here.num_accumulated} micro-batches, has 16-bit values only",
        )  # fmt: skip
        return
    found = here.gradients
    many = max(max(case.num_micro_batches), max(case.num_ranks)) > 1
    off = [one.rest or 0.0 for one in here.gradient.values() if not one.same and one.other]
    if found is None or not many or not off or case.same_outputs is False or abs(found.ratio - 1.0) > 0.02:
        return
    rounded = sum(2.0**-14 < one < 2.0**-4 for one in off)
    if _ROUNDED[0] / 4 < found.rest < _ROUNDED[1] * 4 and rounded > 0.7 * len(off):
        yield Finding(
            "precision.accumulation", LIKELY if rounded > 0.9 * len(off) else POSSIBLE,
            f"step {here.number}: gradients are {min(off):.2g} to {max(off):.2g} from the baseline's, as sums in 16 bits are",
        )  # fmt: skip


def _is_rounding(after: Fingerprint, before: Fingerprint) -> bool:
    """Whether one is as far from the other as rounding takes it."""
    return before.is_complete and after.is_complete and _ROUNDED[0] < Closeness.of(after, before).distance < _ROUNDED[1]


def _given_alike(facts: Facts) -> bool:
    return bool(facts.stepped) and all(one.same or one.distance < facts.near for one in facts.stepped.values())


def _apart(one: Closeness) -> float:
    return abs(one.ratio - 1.0)
