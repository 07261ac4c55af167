"""One step of both runs, phase by phase, in the order in which things happen in it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from shardbook.recording.micro_batches import TensorFacts
from shardbook.recording.read import Step
from shardbook.verifying.bounds import Bounds
from shardbook.verifying.case import Facts, own_factor
from shardbook.verifying.closeness import Closeness, together
from shardbook.verifying.forwards import varies
from shardbook.verifying.pairing import objective
from shardbook.verifying.residuals import residuals
from shardbook.verifying.results import result, worst, worst_of
from shardbook.verifying.settings import compare_settings
from shardbook.verifying.statistics import unit_roundoff
from shardbook.verifying.verdict import Phase, PhaseResult
from shardbook.verifying.widths import is_chance, is_rounded, narrower_in


def compare_start(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    """The state before the first step."""
    limits = {name: _frozen_roundoff(facts, name, bounds) for name in facts.weight}
    found = [worst(0, "state", facts.weight, limits), *_buffers(facts)]
    found += [
        PhaseResult(step=0, phase="state", parameter=name, deviation=1.0, same_bits=False, num_compared=1)
        for name in (*facts.names.untied, *facts.names.tied)
    ]
    return [one for one in found if one.num_compared]


def _frozen_roundoff(facts: Facts, name: str, bounds: Bounds) -> float:
    """A parameter that isn't trained has no master: one run may keep it as forward uses it, the other in full precision."""
    types = [step.phases["weight"][name].dtype for step in facts.sides]
    trained = any(record.parameters[name].trainable for record in facts.records)
    return 0.0 if trained or types[0] == types[1] else bounds.lengthened * max(map(unit_roundoff, types))


def compare_step(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    """Everything of one step."""
    applied = [step.applied for step in facts.sides]
    if applied == [False, False]:  # an overflow under a loss scale: there is no gradient to compare, and nothing was done
        return [one for one in (*_data(facts), *_entered(facts)) if one.num_compared]
    bounds.enter(facts)
    found = [*_data(facts), *_entered(facts), *_replicas(facts, "before", "model"), *_copies(facts)]
    found += [*_forward(facts, bounds), *_outputs(facts, bounds)]
    found += [
        *_replicas(facts, "gradient"),
        *_narrower(facts, "gradient", "backward", bounds),
        *_gradient(facts, bounds),
        *_clip(facts, bounds),
    ]
    bounds.has_stepped(facts)
    found += [*compare_settings(facts), *_narrower(facts, "weight", "update", bounds), *_update(facts, bounds), *_replicas(facts, "weight")]
    found += [*_states(facts, bounds), *_buffers(facts)]
    if False in applied:
        found.append(PhaseResult(step=facts.number, phase="update", deviation=1.0, same_bits=False, num_compared=1))
    bounds.leave(facts)
    return _without_told([one for one in found if one.num_compared])


def _without_told(found: list[PhaseResult]) -> list[PhaseResult]:
    """A loss is what the loop tells. Where nothing else is apart, or the model's outputs and what came back to them are not, it is told
    in another way: averaged, say.
    """
    told = [one for one in found if one.exceeds and one.phase == "forward" and one.rank is None and one.parameter is None]
    beyond = [one for one in found if one.exceeds and one not in told]
    outputs = [one for one in found if one.phase == "forward" and one.rank is not None]
    sent_back = [one for one in found if one.phase == "backward" and one.num_compared == 1]
    alike = outputs and sent_back and not any(one.exceeds for one in (*outputs, *sent_back))
    if told and (not beyond or alike):
        return [replace(one, bound=math.inf) if one in told else one for one in found]
    return found


# ---- before the gradient --------------------------------------------------------------------------------------------------


def _data(facts: Facts) -> list[PhaseResult]:
    mine, theirs = data_of(facts, 0), data_of(facts, 1)
    if not mine or not theirs:
        return []
    same = mine == theirs
    rank = None
    if not same and len(facts.pair.candidate.batches) == len(facts.pair.baseline.batches):
        rank = next(
            (at for at, (a, b) in enumerate(zip(facts.pair.candidate.batches, facts.pair.baseline.batches, strict=True)) if a != b), None
        )
    return [PhaseResult(step=facts.number, phase="data", rank=rank, deviation=float(not same), same_bits=same, num_compared=1)]


def data_of(facts: Facts, side: int) -> tuple[int, ...]:
    """What a run was given and what its model saw, whatever rank and micro-batch it came in; empty where one of both is not known."""
    found: tuple[int, ...] = ()
    if all(any(one.batches) for one in facts.sides) and _of_one_kind([_given(step) for step in facts.sides]):
        found += (facts.sides[side].data,)
    inputs = [[micro.inputs for micros in step.micro_batches for micro in micros] for step in facts.sides]
    seen = [sum(micro.num_rows or 0 for micros in step.micro_batches for micro in micros) for step in facts.sides]
    if _of_one_kind(inputs) and (not found or seen[0] == seen[1]):  # else another module, a copy of this one, saw the rest
        places = min(len(one) for each in inputs for one in each)
        found += tuple(sum(one[place].hash for one in inputs[side]) % 2**64 for place in range(places))
    return found


def _given(step: Step) -> list[tuple[TensorFacts, ...]]:
    return [micro for micros in step.given for micro in micros]


def _of_one_kind(both: list[list[tuple[TensorFacts, ...]]]) -> bool:
    """As many tensors in each micro-batch, of the same types: one loop may pass less than another, or cast before the model does."""
    kinds = [{tuple(one.dtype for one in micro) for micro in each} for each in both]
    return bool(kinds[0]) and kinds[0] == kinds[1]


def _entered(facts: Facts) -> list[PhaseResult]:
    """Weights that changed since the last step ended; modules left in evaluation mode."""
    found: list[PhaseResult] = []
    changed = {name: one for name, one in facts.before.items() if facts.changed(0, name) != facts.changed(1, name)}
    if changed:
        found.append(worst(facts.number, "state", changed, dict.fromkeys(changed, 0.0)))
    modes = [sorted({micro.evaluating for micros in step.micro_batches for micro in micros}) for step in facts.sides]
    if all(modes) and modes[0] != modes[1]:
        found.append(PhaseResult(step=facts.number, phase="forward", deviation=1.0, same_bits=False, num_compared=1))
    return found


def _replicas(facts: Facts, *phases: str) -> list[PhaseResult]:
    """Ranks of the candidate that hold different values of what all should have alike, where the baseline's don't."""
    if any(one.phase in phases for one in facts.pair.baseline.disagreements):
        return []
    phase: Phase = "reduce" if phases == ("gradient",) else "state"
    found = [one for one in facts.pair.candidate.disagreements if one.phase in phases]
    return [
        PhaseResult(step=facts.number, phase=phase, parameter=one.parameter, rank=one.rank, deviation=1.0, same_bits=False, num_compared=1)
        for one in found[:1]
    ]


def _forward(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    mine, theirs = objective(facts.pair.candidate), objective(facts.pair.baseline)
    if mine is None or theirs is None:
        return []
    deviation = abs(mine - theirs) / abs(theirs) if theirs else abs(mine)
    deviation = 0.0 if mine == theirs or (math.isnan(mine) and math.isnan(theirs)) else deviation
    return [
        PhaseResult(
            step=facts.number,
            phase="forward",
            deviation=deviation,
            bound=bounds.loss(facts, theirs),
            same_bits=mine == theirs,
            num_compared=1,
        )
    ]


def _outputs(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    """Micro-batch by micro-batch: what the model gave, and how the loss weighs it."""
    found: list[PhaseResult] = []
    ones = facts.forwards
    outputs = [(one.rank, one.output) for one in ones if one.output is not None and one.same_inputs]
    for rank, output in outputs:
        bound = bounds.loss(facts, 1.0)
        found.append(result(facts.number, "forward", None, output, bound, rank))
    gradients = [(one.rank, one.gradient) for one in ones if one.gradient is not None and one.gradient.other]
    for rank, gradient in gradients:
        if gradient.rest is not None:
            found.append(
                PhaseResult(step=facts.number, phase="backward", rank=rank, deviation=gradient.rest, bound=bounds.loss(facts, 1.0),
                            same_bits=bool(gradient.same), num_compared=1)
            )  # fmt: skip
    ratios = [gradient.ratio for _, gradient in gradients]
    if len(ratios) > 1:
        bound = bounds.factor(max(gradient.rest or 0.0 for _, gradient in gradients))
        found.append(
            PhaseResult(step=facts.number, phase="backward", deviation=varies(ratios), bound=bound, same_bits=False, num_compared=1)
        )
    return worst_of(found)


# ---- gradient, clip -------------------------------------------------------------------------------------------------------


def _gradient(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    if facts.stepped_alike:  # what was recorded before is a sum beside a mean, say, or the model's own beside its masters'
        return [PhaseResult(step=facts.number, phase="backward", same_bits=True, num_compared=len(facts.gradient))]
    limits = {name: bounds.gradient(name) for name in facts.gradient}
    if _recorded_clipped(facts, limits, bounds):
        return [PhaseResult(step=facts.number, phase="backward", num_compared=len(facts.gradient), same_bits=False)]
    wholes = {name: bounds.whole(one) for name, one in facts.gradient.items()}
    found = [
        *_added_narrow(facts),
        worst(facts.number, "backward", facts.gradient, limits, wholes),
        *_missing(facts, "gradient", "backward"),
    ]
    return found + _systematic(facts.number, "backward", facts.gradient, limits, bounds.systematic)


def _recorded_clipped(facts: Facts, limits: Mapping[str, float], bounds: Bounds) -> bool:
    """Whether the baseline's gradient was recorded as it is stepped on, clipped already, and the candidate steps on the same."""
    factor, found = own_factor(facts.pair.baseline), facts.gradients
    if factor is None or abs(factor - 1.0) > 1e-6 or not facts.stepped or (found is not None and found.rest > facts.near):
        return False
    return all(one.apart <= limits.get(name, 0.0) * max(one.other, bounds.whole(one)) for name, one in facts.stepped.items())


def _added_narrow(facts: Facts) -> list[PhaseResult]:
    """Gradients of the step's micro-batches before are held in 16 bits while the next is added, and the baseline's are not."""
    if not adds_narrow(facts, 0) or adds_narrow(facts, 1) or facts.stepped_alike:
        return []
    return [PhaseResult(step=facts.number, phase="backward", deviation=1.0, same_bits=False, num_compared=1)]


def adds_narrow(facts: Facts, side: int) -> bool:
    """Whether a run adds micro-batches up in a 16-bit type."""
    return any(micro.held in ("bfloat16", "float16") for micros in facts.sides[side].micro_batches for micro in micros[1:])


def _clip(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    norm = math.sqrt(sum(one.other**2 for one in facts.gradient.values()))
    overall = math.sqrt(sum(one.apart**2 for one in facts.gradient.values())) / norm if norm else 0.0
    limits = {name: bounds.stepped(facts.gradient.get(name), overall) for name in facts.stepped}
    return [worst(facts.number, "clip", facts.stepped, limits)]


def _missing(facts: Facts, name: str, phase: Phase) -> list[PhaseResult]:
    """Parameters of which only one of both has this."""
    mine, theirs = (step.phases.get(name, {}) for step in facts.sides)
    lost = [one for one in facts.names.common if (one in mine) != (one in theirs) and (mine.get(one) or theirs[one]).squares > 0.0]
    if not mine or not theirs or not lost:
        return []
    return [PhaseResult(step=facts.number, phase=phase, parameter=lost[0], deviation=1.0, same_bits=False, num_compared=len(lost))]


def _systematic(
    number: int, phase: Phase, ones: Mapping[str, Closeness], limits: Mapping[str, float], bound: Callable[[float], float]
) -> list[PhaseResult]:
    """One factor for all parameters that are known well. ``bound``: of such a factor, given its standard error."""
    sure = [one for name, one in ones.items() if limits[name] < 0.5 and (one.rest or 0.0) < 0.5]
    found = together(sure)
    if found is None or len(sure) < 2:
        return []
    deviation, most = abs(found.ratio - 1.0), bound(found.error)
    return [PhaseResult(step=number, phase=phase, deviation=deviation, bound=most, same_bits=deviation == 0.0, num_compared=len(sure))]


# ---- update, state --------------------------------------------------------------------------------------------------------


def _narrower(facts: Facts, name: str, phase: Phase, bounds: Bounds) -> list[PhaseResult]:
    """What the candidate holds in a narrower type than the baseline. One micro-batch's gradient may come so: nothing was added in it."""
    trained = facts.settings(1)
    narrower = [one for one in narrower_in(facts, name) if is_rounded(facts, name, one) and one in trained]
    if (
        not narrower
        or (name == "gradient" and facts.stepped_alike)
        or is_chance(facts, name, narrower, bounds.chance)
        or (name == "gradient" and not facts.adds_up)
    ):
        return []
    return [PhaseResult(step=facts.number, phase=phase, parameter=narrower[0], deviation=1.0, same_bits=False, num_compared=len(narrower))]


def _update(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    if all(one.same for one in facts.weight.values()):
        return [PhaseResult(step=facts.number, phase="update", num_compared=len(facts.weight))]
    limits = {name: bounds.update(facts, name, one) for name, one in facts.update.items()}
    different = {name: one for name, one in facts.update.items() if not (facts.weight[name].same and facts.before[name].same)}
    found = [
        worst(facts.number, "update", different, limits),
        *_systematic(facts.number, "update", different, limits, bounds.systematic_update),
    ]
    found += [*_most(facts, bounds), *_decay(facts, bounds)]
    if not facts.update:  # a brief step: norms of weights, within what updates may have done
        limits = dict.fromkeys(facts.weight, math.inf)
        found = [worst(facts.number, "update", facts.weight, limits)]
    return found


def _most(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    """All but the worst quarter of the parameters together: rounding may turn all of a few over, and a few elements of all."""
    ones = {name: one for name, one in facts.update.items() if one.other}
    kept = sorted(ones, key=lambda name: ones[name].distance)[: max(1, len(ones) * 3 // 4)]
    chosen = {name: ones[name] for name in kept}
    whole = math.sqrt(sum(one.other**2 for one in chosen.values()))
    apart = [one.apart for name, one in chosen.items() if not (facts.weight[name].same and facts.before[name].same)]
    if not whole or not apart:
        return []
    deviation = math.sqrt(sum(one * one for one in apart)) / whole
    bound = bounds.most(facts, chosen)
    return [PhaseResult(step=facts.number, phase="update", deviation=deviation, bound=bound, same_bits=False, num_compared=len(chosen))]


def _decay(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    """A part of all updates that is a multiple of the weights, seen against the updates: of those that decay, and of all others."""
    decaying = {name for name, group in facts.settings(1).items() if group.get("weight_decay")}
    off = residuals(facts, "update")
    results: list[PhaseResult] = []
    for names in (decaying & off.keys(), off.keys() - decaying):
        found = together(off[name] for name in names)
        weights = math.sqrt(sum(facts.pair.baseline.phases["before"][name].squares for name in names))
        updates = math.sqrt(sum(facts.update[name].other ** 2 for name in names))
        if found is not None and updates:
            per = weights / updates
            bound = bounds.systematic_update(found.error * per) + 2.0 * bounds.weights_roundoff * per
            deviation = abs(found.ratio) * per
            results.append(
                PhaseResult(step=facts.number, phase="update", deviation=deviation, bound=bound, same_bits=False, num_compared=len(names))
            )
    return results


def _copies(facts: Facts) -> list[PhaseResult]:
    """The model's own copies that stood still while what they are made from moved."""
    stale = stale_copies(facts)
    return [
        PhaseResult(step=facts.number, phase="state", parameter=name, deviation=1.0, same_bits=False, num_compared=len(stale))
        for name in stale[:1]
    ]


def stale_copies(facts: Facts) -> list[str]:
    """Parameters whose copy for forward is as it was in the step before, and the baseline's is not."""
    if facts.previous is None:
        return []
    mine, before = facts.pair.candidate.phases.get("model", {}), facts.previous.candidate.phases.get("model", {})
    theirs, theirs_before = facts.pair.baseline.phases.get("model", {}), facts.previous.baseline.phases.get("model", {})
    still = [name for name, one in mine.items() if name in before and one.same_bits(before[name]) and one.squares]
    return [name for name in still if name in theirs and name in theirs_before and not theirs[name].same_bits(theirs_before[name])]


def _states(facts: Facts, bounds: Bounds) -> list[PhaseResult]:
    found: list[PhaseResult] = []
    for key, ones in facts.states.items():
        found += _narrower(facts, f"state.{key}", "state", bounds)
        stepped = {name: facts.pair.baseline.phases.get("stepped", {}).get(name) for name in ones}
        limits = {name: bounds.state(name, one, stepped[name].norm if stepped[name] else 0.0) for name, one in ones.items()}  # pyright: ignore[reportOptionalMemberAccess]
        found.append(worst(facts.number, "state", ones, limits))
    return worst_of(found)


def _buffers(facts: Facts) -> list[PhaseResult]:
    """Each rank's own: compared where both runs have as many ranks."""
    mine, theirs = facts.pair.candidate.parts.get("buffer", {}), facts.pair.baseline.parts.get("buffer", {})
    if len(facts.pair.candidate.losses) != len(facts.pair.baseline.losses) or not mine or not theirs:
        return []
    results: list[PhaseResult] = []
    alike = 1 if "ddp" in [record.engine for record in facts.records] else None  # it sends rank 0's to the others
    for name in theirs:
        for a, b in list(zip(mine.get(name, ()), theirs[name], strict=False))[:alike]:
            one = Closeness.of(a.fingerprint, b.fingerprint)
            exact = "float" not in b.fingerprint.dtype or facts.number == 0 or facts.same_before()  # counts don't follow from weights
            results.append(result(facts.number, "state", name, one, 0.0 if exact else math.inf, a.rank))
    return worst_of(results)
