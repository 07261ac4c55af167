"""Two records as pairs of steps: what has to agree before anything can be compared, and where they don't lie in the same units.

A gradient is recorded as the engine has it: shardbook keeps a sum, most loops a mean. `Pairing.divisors` says what each side's gradient
is divided by to be the objective's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardbook.recording.format import RecordError
from shardbook.recording.read import Parameter, Record, Step


@dataclass(frozen=True, slots=True)
class Names:
    """Parameters that both records have, and those that only one has because a tie exists in the other only."""

    common: tuple[str, ...]
    untied: tuple[str, ...]  # the candidate's own, that the baseline has as another name of one parameter
    tied: tuple[str, ...]  # the other way round


@dataclass(frozen=True, slots=True)
class Pair:
    """The same step of both."""

    candidate: Step
    baseline: Step

    @property
    def number(self) -> int:
        return self.baseline.number

    @property
    def complete(self) -> bool:
        return self.candidate.complete and self.baseline.complete


def match(candidate: Record, baseline: Record) -> Names:
    """Which parameters correspond.

    Raises:
        RecordError: the models differ: names or shapes.
    """
    mine, theirs = candidate.parameters, baseline.parameters
    untied = tuple(name for name in mine if name not in theirs and name in _aliases(theirs))
    tied = tuple(name for name in theirs if name not in mine and name in _aliases(mine))
    faults = [f"{name} is in the candidate only" for name in mine if name not in theirs and name not in untied]
    faults += [f"{name} is in the baseline only" for name in theirs if name not in mine and name not in tied]
    common = tuple(name for name in theirs if name in mine)
    faults += [
        f"{name} is {list(mine[name].shape)} in the candidate, {list(theirs[name].shape)} in the baseline"
        for name in common
        if mine[name].shape != theirs[name].shape
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise RecordError(
            f"{candidate.folder} and {baseline.folder} are records of different models: {'; '.join(faults[:3])}{more}; "
            f"record the same model in both"
        )
    return Names(common, untied, tied)


def _aliases(parameters: Mapping[str, Parameter]) -> set[str]:
    return {alias for one in parameters.values() for alias in one.aliases}


def num_steps(candidate: Record, baseline: Record, steps: int | None) -> int:
    """How many steps are compared.

    Raises:
        RecordError: none, or one of them has fewer than were asked for while the other has more.
    """
    mine, theirs = candidate.num_steps, baseline.num_steps
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        raise RecordError(f"verify: steps = {steps!r}: how many steps are compared, at least 1")
    if min(mine, theirs) < 1:
        raise RecordError(f"verify: {candidate.folder} has {mine} steps, {baseline.folder} has {theirs}; there is nothing to compare")
    if mine != theirs and (steps is None or steps > min(mine, theirs)):
        raise RecordError(
            f"verify: {candidate.folder} has {mine} steps, {baseline.folder} has {theirs}; record as many in both, or compare the first "
            f"{min(mine, theirs)}: steps={min(mine, theirs)}"
        )
    return min(mine, theirs, steps or mine)


def pairs(candidate: Record, baseline: Record, steps: int) -> Iterator[Pair]:
    """Step by step, the state before the first as number 0."""
    for _, mine, theirs in zip(range(steps + 1), candidate.steps(), baseline.steps(), strict=False):
        yield Pair(mine, _alone(theirs) if baseline.engine == "plain" else theirs)


def _alone(step: Step) -> Step:
    """A plain loop that every rank of a group ran over all data, as one: ranks that are given the same are no ranks of one run."""
    inputs = [tuple(one.hash for micro in micros for one in micro.inputs) for micros in step.micro_batches] or list(step.batches)
    if len(step.losses) < 2 or not all(inputs) or any(one != inputs[0] for one in inputs) or step.disagreements:
        return step
    return replace(
        step, losses=step.losses[:1], weights=step.weights[:1], batches=step.batches[:1], num_rows=step.num_rows[:1],
        given=step.given[:1], micro_batches=step.micro_batches[:1], rng=step.rng[:1], rng_before=step.rng_before[:1],
        rng_forward=step.rng_forward[:1], divisors=step.divisors[:1], divided_by=step.divided_by[:1],
    )  # fmt: skip


def total_weight(step: Step) -> float | None:
    """Σ weight over ranks, as they were given; None where one is not known."""
    known = [weight for weight in step.weights if weight is not None]
    return sum(known) if known and len(known) == len(step.weights) else None


def counts_tokens(step: Step) -> bool:
    """Whether the weights are more than a number of means: left at 1, one for each rank or micro-batch."""
    weight, ranks = total_weight(step), len(step.losses)
    micros = sum(map(len, step.micro_batches)) or sum(map(len, step.batches))
    return weight is not None and weight not in {1.0, float(ranks), float(micros), float(micros) / ranks}


def objective(step: Step) -> float | None:
    """Σ loss / Σ weight over ranks."""
    weight = total_weight(step)
    losses = [loss for loss in step.losses if loss is not None]
    if not weight or len(losses) != len(step.losses):
        return None
    return sum(losses) / weight


def divisor_of(record: Record, step: Step) -> float:
    """What the engine says it divides its sum by; 1 where gradients are as they are."""
    if not record.sums_gradients:
        return 1.0
    done = [one for one in step.divided_by if one]
    if done:
        return done[0]
    known = [one for one in step.divisors if one is not None]
    if known and len(known) == len(step.weights):
        return sum(known) or 1.0
    return total_weight(step) or 1.0
