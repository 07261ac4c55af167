"""What should stand still, or come back as it was: ties, frozen parameters, random numbers, and what an evaluation touches."""

from collections.abc import Iterator

from shardbook.verifying.case import Case, Facts
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding


def cleared(case: Case) -> Iterator[Finding]:
    """The record was taken after the gradients were set to zero."""
    here = case.here
    if here.gradient and any(one.other for one in here.gradient.values()) and not any(one.norm for one in here.gradient.values()):
        yield Finding(
            "unknown", CERTAIN,
            f"step {here.number}: every recorded gradient is zero: gradients were cleared before recorder.step; call it before they are",
        )  # fmt: skip


def untied(case: Case) -> Iterator[Finding]:
    """A parameter under two names in the baseline is two in the candidate."""
    if case.names.untied:
        name = case.names.untied[0]
        yield Finding("tied.untied", CERTAIN + 0.02, f"{name} is a parameter of its own, in the baseline another name of a tied one")
    if case.names.tied:
        yield Finding(
            "tied.untied", PLAUSIBLE, f"{case.names.tied[0]} is tied in the candidate, and a parameter of its own in the baseline"
        )


def frozen(case: Case) -> Iterator[Finding]:
    """It moves, and in the baseline it doesn't."""
    here = case.here
    mine, theirs = (facts.phases for facts in here.sides)
    for name in here.before:
        if _is_frozen(case, name) and here.changed(0, name) and not here.changed(1, name):
            yield Finding(
                "frozen.updated",
                CERTAIN + 0.01,
                f"step {here.number}: {name} has changed since the last step, and is frozen in the baseline",
            )
            return
    for name in case.names.common:
        prints = [phases.get(phase, {}).get(name) for phases in (mine, theirs) for phase in ("before", "weight")]
        if any(one is None for one in prints):
            continue
        moved, stood = not prints[0].same_bits(prints[1]), prints[2].same_bits(prints[3])  # pyright: ignore[reportOptionalMemberAccess,reportArgumentType]
        if moved and stood and not (here.weight[name].same):
            known = _is_frozen(case, name) or _without_gradient(here, name)
            sure = CERTAIN + 0.01 if known else PLAUSIBLE
            yield Finding("frozen.updated", sure, f"step {here.number}: {name} was updated, and stands still in the baseline")
            return


def _is_frozen(case: Case, name: str) -> bool:
    return not case.records[1].parameters[name].trainable or name not in case.here.settings(1)


def _without_gradient(here: Facts, name: str) -> bool:
    return name not in here.pair.baseline.phases.get("stepped", {})


def recompute_rng(case: Case) -> Iterator[Finding]:
    """Backward draws random numbers: a recomputed forward has other masks than the one whose loss was taken."""
    here = case.here
    drew = [_drew_in_backward(facts, 0) for facts in case.steps.values() if 1 <= facts.number <= here.number]
    if any(drew) and not _drew_in_backward(here, 1) and case.at("backward", "reduce", "forward", "clip"):
        rank = next(rank for each in drew for rank in each)
        yield Finding(
            "recompute.rng", CERTAIN,
            f"step {here.number}: backward drew random numbers on rank {rank}: what was recomputed had other masks than the forward had",
        )  # fmt: skip
    dropout = max(float(record.manifest.get("dropout") or 0.0) for record in case.records)
    if dropout and case.at("backward", "reduce") and here.entered_alike() and case.same_outputs is not False:
        off = [name for name, one in here.gradient.items() if not one.same and one.distance > here.near]
        if off and len(off) < len(here.gradient):
            yield Finding(
                "recompute.rng", PLAUSIBLE + 0.05,
                f"step {here.number}: the losses are the same under dropout ({dropout:g}), the gradients of {len(off)} parameters are not",
            )  # fmt: skip
        elif off:
            yield Finding(
                "recompute.rng", POSSIBLE, f"step {here.number}: the losses are the same under dropout ({dropout:g}), no gradient is"
            )


def _drew_in_backward(facts: Facts, side: int) -> list[int]:
    """Ranks whose generators are not as the last forward left them."""
    step = facts.sides[side]
    both = zip(step.rng_forward, step.rng, strict=False)
    return [rank for rank, (after, now) in enumerate(both) if after is not None and now is not None and after != now]


def evaluation(case: Case) -> Iterator[Finding]:
    """Modes, buffers, weights or random numbers that are others than training left behind."""
    here = case.here
    modes = [max((micro.evaluating for micros in step.micro_batches for micro in micros), default=0) for step in here.sides]
    if modes[0] > modes[1]:
        yield Finding(
            "evaluation.changed_state",
            CERTAIN,
            f"step {here.number}: {modes[0]} modules train in evaluation mode, in the baseline {modes[1]}",
        )
    changed = [name for name in here.before if here.changed(0, name) and not here.changed(1, name)]
    if changed:
        yield Finding(
            "evaluation.changed_state", LIKELY + 0.03,
            f"step {here.number}: {changed[0]} is not as the step before left it ({len(changed)} parameters changed between steps)",
        )  # fmt: skip
    yield from _buffers(case)
    yield from _random_numbers(case)


def _buffers(case: Case) -> Iterator[Finding]:
    here = case.here
    mine, theirs = (step.parts.get("buffer", {}) for step in here.sides)
    off = [
        name for name in theirs
        if name in mine and any(not a.fingerprint.same_bits(b.fingerprint) for a, b in zip(mine[name], theirs[name], strict=False))
    ]  # fmt: skip
    alike = case.num_ranks[0] == case.num_ranks[1]
    if off and alike and here.entered_alike() and not case.at("data", "backward", "clip"):
        yield Finding(
            "evaluation.changed_state", LIKELY, f"step {here.number}: the buffer {off[0]} is another, from the same weights and data"
        )


def _random_numbers(case: Case) -> Iterator[Finding]:
    """Drawn between two steps."""
    here = case.here
    if not here.entered_alike() or here.number < 2 or not case.at("forward", "backward", "reduce"):
        return
    now = _begins_alike(here)
    before = [_begins_alike(facts) for facts in case.steps.values() if 1 <= facts.number < here.number]
    left = [_left(case, side) for side in (0, 1)]
    if now is False and before and all(before):
        yield Finding(
            "evaluation.changed_state", LIKELY + 0.05,
            f"step {here.number}: random numbers were drawn since the last step that the baseline doesn't draw; steps before began alike",
        )  # fmt: skip
    elif left[0] is False and left[1] is True:
        yield Finding("evaluation.changed_state", LIKELY, f"step {here.number}: random numbers were drawn since the last step")


def _begins_alike(facts: Facts) -> bool | None:
    mine, theirs = (step.rng_before for step in facts.sides)
    if len(mine) != len(theirs) or None in mine or None in theirs or not mine:
        return None
    return mine == theirs


def _left(case: Case, side: int) -> bool | None:
    """Whether this step's generators begin as the last step's ended."""
    if case.last is None or case.last.number < 1:
        return None
    before, now = case.last.sides[side].rng, case.here.sides[side].rng_before
    return None if None in before or None in now or not now else before == now
