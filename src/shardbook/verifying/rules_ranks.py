"""What ranks should have in common: reduced gradients, and replicas."""

from collections.abc import Iterator

from shardbook.verifying.case import Case
from shardbook.verifying.comparing import stale_copies
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding


def reduce_missing(case: Case) -> Iterator[Finding]:
    """Gradients that only their own rank added to."""
    here = case.here
    for one in here.pair.candidate.disagreements:
        if one.phase == "gradient":
            yield Finding(
                "reduce.missing", CERTAIN,
                f"step {here.number}: ranks {one.other} and {one.rank} hold different reduced gradients of {one.parameter}",
            )  # fmt: skip
            break
    if not case.at("backward", "reduce") or not here.entered_alike():
        return
    off = {name: one for name, one in here.gradient.items() if not one.same and one.distance > here.near}
    if not off or case.same_outputs is False or _loss_is_weighed_otherwise(case) or not any(one.norm for one in here.gradient.values()):
        return
    many = max(case.num_ranks) > 1
    share = sum(one.norm for one in off.values()) / (sum(one.other for one in off.values()) or 1.0)
    text = (
        f"step {here.number}: the model's outputs and what reached them are the baseline's, and the gradients of {len(off)} of "
        f"{len(here.gradient)} parameters are not (their norms are {share:.2f} of the baseline's): parts of other ranks are not in them"
    )
    if here.gradients is not None and here.gradients.rest < 0.1 and len(off) == len(here.gradient):
        if here.gradients.rest > here.near:  # a multiple of the whole has all parts in it
            yield Finding("reduce.missing", POSSIBLE, text)
    elif many or len(off) < len(here.gradient):
        partial = len(off) < len(here.gradient)
        yield Finding("reduce.missing", LIKELY if many and partial else PLAUSIBLE + 0.1 if many or partial else POSSIBLE, text)
    elif max(case.num_micro_batches) > 1:
        yield Finding("reduce.missing", POSSIBLE, text)


def replica_stale(case: Case) -> Iterator[Finding]:
    """Parameters that a rank, or the model, still has as they were before the last step."""
    here = case.here
    for one in here.pair.candidate.disagreements:
        if one.phase in ("before", "weight", "model"):
            gradient = any(other.phase == "gradient" for other in here.pair.candidate.disagreements)
            yield Finding(
                "replica.stale", PLAUSIBLE if gradient else CERTAIN,
                f"step {here.number}: rank {one.rank} holds another {one.parameter} than rank {one.other}",
            )  # fmt: skip
            break
    yield from _stale_copies(case)
    yield from _other_start(case)
    if here.number > 1 and here.entered_alike() and case.at("forward", "backward", "reduce"):
        known = [one for one in case.forwards if one.output is not None and one.same_inputs]
        wrong = [one for one in known if one.output is not None and not (one.output.same or one.output.distance < here.near)]
        if wrong and case.at("forward"):
            ranks = sorted({one.rank for one in wrong})
            some = len(wrong) < len(known)
            yield Finding(
                "replica.stale", LIKELY if some and len(ranks) < max(2, case.num_ranks[0]) else PLAUSIBLE,
                f"step {here.number}: the optimizer's weights are the baseline's, and on rank{'s' if len(ranks) > 1 else ''} "
                f"{', '.join(map(str, ranks))} the same inputs give another output: the model there has not got them",
            )  # fmt: skip


def _other_start(case: Case) -> Iterator[Finding]:
    """Before the first step: what some ranks own has the baseline's bits, what others own is another draw of the initial values."""
    start = case.steps.get(0)
    if case.first != 0 or start is None or case.num_ranks[0] < 2:
        return
    same = [name for name, one in start.weight.items() if one.same and one.other]
    other = [name for name, one in start.weight.items() if not one.same and one.distance > 0.1]
    if same and other:
        yield Finding(
            "replica.stale", PLAUSIBLE + 0.1,
            f"before the first step {len(same)} parameters have the baseline's values, {len(other)} quite others ({other[0]}): "
            f"ranks began with values of their own",
        )  # fmt: skip


def _stale_copies(case: Case) -> Iterator[Finding]:
    stale = stale_copies(case.here)
    if stale:
        yield Finding(
            "replica.stale", CERTAIN + 0.01,
            f"step {case.here.number}: the model computes with the {stale[0]} of the step before, and with {len(stale) - 1} others",
        )  # fmt: skip


def _loss_is_weighed_otherwise(case: Case) -> bool:
    ratios = [one.gradient for one in case.forwards if one.gradient is not None and one.gradient.other]
    return any((one.rest or 0.0) > 0.01 or abs(one.ratio / ratios[0].ratio - 1.0) > 0.01 for one in ratios)
