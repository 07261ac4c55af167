"""Two records -> a verdict: steps are compared in order, the first divergence is found, and rules are asked why."""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardbook.recording.format import RecordError
from shardbook.recording.read import Record, Step
from shardbook.verifying.bounds import Bounds
from shardbook.verifying.case import Case, Facts, choose_units
from shardbook.verifying.comparing import compare_start, compare_step
from shardbook.verifying.diagnose import diagnose
from shardbook.verifying.pairing import Pair, match, num_steps, objective, pairs
from shardbook.verifying.spread import distances
from shardbook.verifying.verdict import PhaseResult, Verdict

_KEPT = 5  # first steps whose facts rules may ask for
_AFTER = 2  # steps after the first divergence that they may
_OF_RANKS = ("reduce.missing", "scale.ranks_missing", "scale.ranks_twice", "clip.per_rank")


def judge(
    candidate: Record, baseline: Record, *, steps: int | None = None, reruns: Sequence[Record] = (), notes: Sequence[str] = ()
) -> Verdict:
    """Compare two records.

    Args:
        candidate: whose training is in question.
        baseline: the training it should be.
        steps: how many; None: all that both have.
        reruns: records of the baseline in other orders and precisions, which bounds are derived from.
        notes: what the verdict has to say besides.

    Raises:
        RecordError: records of different models, of different data from the first step on, or of different numbers of steps.
    """
    case = Case((candidate, baseline), match(candidate, baseline))
    number = num_steps(candidate, baseline, steps)
    spread = distances(baseline, reruns, number)
    bounds = Bounds(num_comparisons=number * 6 * len(case.names.common), num_parameters=len(case.names.common), reruns=spread)
    phases, losses = _walk(case, bounds, number)
    first = next((one for one in phases if one.exceeds), None)
    told = Verdict(
        kind="different" if first else "identical" if _identical(phases) else "within_rounding",
        num_steps=number, candidate=_described(candidate), baseline=_described(baseline), bound_origin=_origin(bounds, reruns),
        notes=(*notes, *_notes(case, phases)), losses=tuple(losses), phases=tuple(phases),
    )  # fmt: skip
    return _placed(told, case, first)


def _walk(case: Case, bounds: Bounds, number: int) -> tuple[list[PhaseResult], list[tuple[int, float | None, float | None]]]:
    """Compare every step; what rules may ask for stays in ``case``."""
    phases: list[PhaseResult] = []
    losses: list[tuple[int, float | None, float | None]] = []
    previous: Pair | None = None
    start: Pair | None = None
    diverged: int | None = None
    for pair in pairs(*case.records, number):
        if pair.number == 1:
            case.units = choose_units(case.records, pair, case.names)
            _check_data(case, pair)
        start = start or pair
        facts = Facts(pair, case.names, case.units, case.records, previous, start)
        found = compare_start(facts, bounds) if pair.number == 0 else compare_step(facts, bounds)
        phases += found
        case.steps[pair.number] = facts
        case.note_rates(facts)
        if pair.number:
            losses.append((pair.number, objective(pair.candidate), objective(pair.baseline)))
        if diverged is None and any(one.exceeds for one in found):
            diverged = case.first = pair.number
            case.divergence = next(one for one in found if one.exceeds)
        _forget(case, pair.number, diverged)
        previous = pair
    return phases, losses


def _forget(case: Case, number: int, diverged: int | None) -> None:
    """A long run needs no more memory than its first steps and those around the divergence."""
    old = number - 2
    around = diverged is not None and diverged - 2 <= old <= diverged + _AFTER
    if old > _KEPT and not around:
        case.steps.pop(old, None)


def _check_data(case: Case, pair: Pair) -> None:
    """Two runs that have no tensor of data in common are no two runs of one training.

    Raises:
        RecordError: at the first step.
    """
    mine, theirs = (_tensors(step) for step in (pair.candidate, pair.baseline))
    if mine and theirs and not mine & theirs:
        folders = [str(record.folder) for record in case.records]
        raise RecordError(
            f"verify: {folders[0]} and {folders[1]} are records of different batches: in step 1 they have no tensor in common; "
            f"give both the same data in the same steps (any ranks and micro-batches)"
        )


def _tensors(step: Step) -> set[int]:
    """Hashes of whatever went in, by tensor: each alone and, as micro-batches may be cut in other ways, all of a place together."""
    given = step.given if any(step.given) else tuple(tuple(micro.inputs for micro in micros) for micros in step.micro_batches)
    single = {one.hash for micros in given for micro in micros for one in micro}
    places = max((len(micro) for micros in given for micro in micros), default=0)
    whole = {sum(micro[at].hash for micros in given for micro in micros if at < len(micro)) % 2**64 for at in range(places)}
    return single | whole


def _identical(phases: Sequence[PhaseResult]) -> bool:
    """Losses are the caller's arithmetic, and gradients may be in another unit: weights, what is stepped on and states are not."""
    return all(one.same_bits for one in phases if one.phase in ("data", "clip", "update", "state"))


def _placed(told: Verdict, case: Case, first: PhaseResult | None) -> Verdict:
    """Where it is, and why."""
    if first is None:
        far = max(
            (one for one in told.phases if one.deviation), key=lambda one: one.deviation / one.bound if one.bound else 0.0, default=None
        )
        if told.kind == "identical" or far is None:
            return told
        return replace(
            told, step=far.step, phase=far.phase, parameter=far.parameter, rank=far.rank, deviation=far.deviation, bound=far.bound
        )
    ranking = tuple((one.rule, one.confidence, one.evidence) for one in diagnose(case))
    rule = ranking[0][0]
    phase = "reduce" if rule in _OF_RANKS and first.phase == "backward" else first.phase
    phases = tuple(replace(one, phase=phase) if one is first else one for one in told.phases)
    return replace(
        told, rule=rule, ranking=ranking, phases=phases, step=first.step, phase=phase, parameter=first.parameter, rank=first.rank,
        deviation=first.deviation, bound=first.bound,
    )  # fmt: skip


def _described(record: Record) -> str:
    ranks = f"{record.num_ranks} rank{'' if record.num_ranks == 1 else 's'}"
    return f"{record.folder}: {record.engine}, {ranks}, {record.num_steps} steps, {record.manifest.get('optimizer', 'optimizer')}"


def _origin(bounds: Bounds, reruns: Sequence[Record]) -> str:
    if reruns:
        return f"{len(reruns)} runs of the baseline in other orders and precisions, and the roundings of each step's arithmetic"
    return (
        f"roundings counted along the computation (unit roundoff {bounds.roundoff:.2g}, {bounds.num_parameters} parameters), "
        f"as the baseline was not run again"
    )


def _notes(case: Case, phases: Sequence[PhaseResult]) -> list[str]:
    seen = {one.phase for one in phases}
    found: list[str] = []
    if "data" not in seen:
        found.append("data: not recorded on both sides; pass batch= to recorder.step")
    buffers = [any("buffer" in step.parts for step in facts.sides) for facts in case.steps.values()]
    if any(buffers) and case.num_ranks[0] != case.num_ranks[1]:
        found.append("buffers: each rank has its own, and the runs have different numbers of ranks: not compared")
    told = [one for one in phases if one.phase == "forward" and one.bound == math.inf and one.deviation]
    if told:
        found.append(f"loss: told as {told[0].deviation:.2g} away from the baseline's in step {told[0].step}, while nothing else is")
    found += [
        f"{record.folder}: the run did not end by itself; compared up to step {record.num_steps}"
        for record in case.records
        if not record.ended
    ]
    for side, facts in ((side, facts) for facts in case.steps.values() for side in (0, 1) if facts.sides[side].missing):
        phase, name = facts.sides[side].missing[0]
        found.append(f"{case.records[side].folder}: step {facts.number}: some elements of {name} were recorded by no rank ({phase})")
        break
    return found
