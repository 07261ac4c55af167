"""The two runs of a verdict as the rules look at them: what every step shows, in the same units, computed when it is asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from shardbook.recording.prints import Fingerprint, difference
from shardbook.recording.read import Record, Step
from shardbook.verifying.closeness import Closeness, Together, closeness, together
from shardbook.verifying.forwards import Matched, matched
from shardbook.verifying.pairing import Names, Pair, divisor_of, total_weight
from shardbook.verifying.statistics import unit_roundoff
from shardbook.verifying.verdict import PhaseResult

Unit = Literal["engine", "found", "sum"]
"""What a recorded gradient is: the engine's own sum, as the loop wants it, or a sum over the weights that the loop divides later."""


@dataclass(eq=False)
class Facts:
    """One step of both. ``names``: parameters to compare; ``units``: of the candidate's and the baseline's gradient."""

    pair: Pair
    names: Names
    units: tuple[Unit, Unit]
    records: tuple[Record, Record]
    previous: Pair | None = None
    start: Pair | None = None

    @property
    def sides(self) -> tuple[Step, Step]:
        """The candidate's step and the baseline's."""
        return self.pair.candidate, self.pair.baseline

    def changed(self, side: int, name: str) -> bool:
        """Whether a parameter is another than the one with which this run's last step ended."""
        if self.previous is None:
            return False
        ended = (self.previous.candidate, self.previous.baseline)[side].phases.get("weight", {}).get(name)
        before = self.sides[side].phases.get("before", {}).get(name)
        return ended is not None and before is not None and not ended.same_bits(before)

    @property
    def num_accumulated(self) -> int:
        """Micro-batches that a rank of the candidate has in this step."""
        step = self.pair.candidate
        return max((len(micros) for micros in (*step.micro_batches, *step.batches)), default=0)

    @property
    def adds_up(self) -> bool:
        """Whether the candidate's gradient is a sum of several by its own doing: of micro-batches, or of ranks as shardbook was told to."""
        many_ranks = len(self.pair.candidate.losses) > 1 and self.records[0].sums_gradients
        return self.num_accumulated > 1 or many_ranks

    @property
    def number(self) -> int:
        return self.pair.number

    @cached_property
    def divisors(self) -> tuple[float, float]:
        """What each gradient is divided by to be the objective's."""
        both = zip(self.units, self.records, self.sides, strict=True)
        mine, theirs = (_divisor(unit, record, step) for unit, record, step in both)
        return mine, theirs

    @property
    def scale(self) -> float:
        return self.divisors[1] / self.divisors[0]

    def phase(self, name: str) -> dict[str, Closeness]:
        """Any phase as recorded, unscaled."""
        return closeness(self.pair.candidate.phases.get(name, {}), self.pair.baseline.phases.get(name, {}), names=self.names.common)

    @cached_property
    def before(self) -> dict[str, Closeness]:
        return self.phase("before")

    @cached_property
    def weight(self) -> dict[str, Closeness]:
        return self.phase("weight")

    @cached_property
    def stepped(self) -> dict[str, Closeness]:
        return self.phase("stepped")

    @property
    def stepped_alike(self) -> bool:
        """Whether both optimizers were given the same bits. A brief step shows that by the weights they leave."""
        ones = self.stepped if self.pair.complete else self.weight
        return bool(self.stepped) and bool(ones) and all(one.same for one in ones.values())

    @cached_property
    def gradient(self) -> dict[str, Closeness]:
        mine, theirs = self.pair.candidate.phases.get("gradient", {}), self.pair.baseline.phases.get("gradient", {})
        return closeness(mine, theirs, self.scale, names=self.names.common)

    @cached_property
    def update(self) -> dict[str, Closeness]:
        """Weights after less weights before; complete steps only."""
        mine, theirs = updates(self.pair.candidate), updates(self.pair.baseline)
        common = [name for name in self.names.common if name in mine and name in theirs]
        parameters = self.records[1].parameters
        return {name: Closeness.of_projections(mine[name], theirs[name], parameters[name].numel) for name in common}

    @cached_property
    def states(self) -> dict[str, dict[str, Closeness]]:
        keys = [key for key in self.pair.baseline.phases if key.startswith("state.") and key in self.pair.candidate.phases]
        return {key.removeprefix("state."): self.phase(key) for key in keys}

    @cached_property
    def gradients(self) -> Together | None:
        return together(self.gradient.values())

    @cached_property
    def stepped_together(self) -> Together | None:
        return together(self.stepped.values())

    @cached_property
    def updates(self) -> Together | None:
        return together(self.update.values())

    def same_before(self) -> bool:
        """Whether both enter this step with the same weights, to the bit."""
        return bool(self.before) and all(one.same for one in self.before.values())

    @cached_property
    def forwards(self) -> list[Matched]:
        """Micro-batches that both runs have."""
        return matched(self.pair)

    @cached_property
    def same_parts(self) -> bool:
        """Whether micro-batches' gradients are the baseline's to the bit, so that only their sum may differ.

        Every output is, and what came back to it but for a power of two. The products behind them are the same then.
        """
        ones = self.forwards
        whole = ones and all(len(ones) == num_micro_batches(step) for step in self.sides)
        return bool(whole) and all(
            one.output is not None and bool(one.output.same) and one.gradient is not None and one.gradient.rest == 0.0
            and one.gradient.ratio > 0 and math.frexp(one.gradient.ratio)[0] == 0.5
            for one in ones
        )  # fmt: skip

    @cached_property
    def roundoff(self) -> float:
        """Unit roundoff of the narrowest type that either run makes its products in."""
        casts = [micro.autocast for step in self.sides for micros in step.micro_batches for micro in micros if micro.autocast]
        compute = [str(record.manifest.get("compute", "float32")) for record in self.records]
        return unit_roundoff("+".join([*compute, *casts])) or unit_roundoff("float32")

    @property
    def near(self) -> float:
        """Relative distance that still is rounding's: a fault is larger. Generous, for what only supports a diagnosis."""
        return min(0.1, 2000 * self.roundoff)

    def entered_alike(self) -> bool:
        """Whether both enter this step with weights that rounding may have parted."""
        apart, whole = (
            math.sqrt(sum(value)) for value in zip(*((one.apart**2, one.other**2) for one in self.before.values()), strict=True)
        )
        return apart <= self.near * whole

    def settings(self, side: int) -> dict[str, Mapping[str, Any]]:
        """Parameter -> its group's settings in this step. ``side``: 0 the candidate, 1 the baseline."""
        step = self.sides[side]
        return {name: group for groups in step.groups for group in groups for name in group["parameters"] if name}


def updates(step: Step) -> dict[str, tuple[float, ...]]:
    """Projections of what the step did to each parameter, where they were taken."""
    before, after = step.phases.get("before", {}), step.phases.get("weight", {})
    known = [name for name, one in after.items() if one.is_complete and name in before and before[name].is_complete]
    return {name: difference(after[name], before[name]) for name in known}


def _divisor(unit: Unit, record: Record, step: Step) -> float:
    if unit == "engine":
        return divisor_of(record, step)
    return (total_weight(step) or 1.0) if unit == "sum" else 1.0


def choose_units(records: tuple[Record, Record], pair: Pair, names: Names) -> tuple[Unit, Unit]:
    """Units in which the two gradients are nearest, of those that each record allows."""
    options = [_options(record, step) for record, step in zip(records, (pair.candidate, pair.baseline), strict=True)]
    both: list[tuple[Unit, Unit]] = [(mine, theirs) for mine in options[0] for theirs in options[1]]
    best, nearest = both[0], math.inf
    for units in both:
        found = Facts(pair, names, units, records).gradients
        far = abs(math.log(found.ratio)) if found is not None and found.ratio > 0 else math.inf
        if far < nearest - 1e-3:
            best, nearest = units, far
    return best


def _options(record: Record, step: Step) -> list[Unit]:
    """A loop that divides its sum after it was recorded shows that between gradient and what is stepped on."""
    if record.sums_gradients:
        return ["engine"]
    weight, factor = total_weight(step) or 1.0, own_factor(step)
    if factor is None or weight == 1.0:
        return ["found"]
    micros = num_micro_batches(step)
    counts = {len(step.losses), micros, micros // len(step.losses)}  # of these a fault is a multiple, which clipping may hide
    divides = abs(factor * weight - 1.0) < 1e-5 or (factor * weight < 1.0 + 1e-5 and micros and weight not in counts)
    return ["found", "sum"] if divides else ["found"]


def own_factor(step: Step) -> float | None:
    """What a run itself multiplied its gradient by before it stepped, of all parameters that both phases have."""
    gradient, stepped = step.phases.get("gradient", {}), step.phases.get("stepped", {})
    common = [name for name in gradient if name in stepped]
    before = norm_of(gradient, common)
    return norm_of(stepped, common) / before if before and math.isfinite(before) else None


def norm_of(prints: Mapping[str, Fingerprint], names: Sequence[str] | None = None) -> float:
    return math.sqrt(sum(prints[name].squares for name in (prints if names is None else names)))


@dataclass(eq=False)
class Case:
    """Everything that rules may ask for.

    Args:
        records: candidate and baseline.
        steps: facts of the steps that were kept: the first ones, and those around the first divergence.
        first: number of the step in which the two first differ by more than rounding.
        divergence: where in it.
        rates: learning rate of each parameter, by step, of the candidate and of the baseline.
    """

    records: tuple[Record, Record]
    names: Names
    units: tuple[Unit, Unit] = ("found", "found")
    steps: dict[int, Facts] = field(default_factory=dict[int, Facts])
    first: int = 0
    divergence: PhaseResult | None = None
    rates: tuple[list[dict[str, float]], list[dict[str, float]]] = field(
        default_factory=lambda: (list[dict[str, float]](), list[dict[str, float]]())
    )

    def note_rates(self, facts: Facts) -> None:
        """Learning rates by parameter: the only thing that rules ask of every step."""
        if facts.number:
            for side in (0, 1):
                self.rates[side].append({name: float(one["lr"]) for name, one in facts.settings(side).items() if "lr" in one})

    @property
    def here(self) -> Facts:
        """The step of the first divergence; the first step where it was there before any."""
        return self.steps[max(1, self.first)] if max(1, self.first) in self.steps else self.steps[self.first]

    @property
    def last(self) -> Facts | None:
        """The step before it."""
        return self.steps.get(self.here.number - 1)

    @property
    def num_ranks(self) -> tuple[int, int]:
        return self.records[0].num_ranks, self.records[1].num_ranks

    @cached_property
    def num_micro_batches(self) -> tuple[int, int]:
        """Of all ranks in the step of the first divergence, as far as it is known; 0: unknown."""
        return num_micro_batches(self.here.pair.candidate), num_micro_batches(self.here.pair.baseline)

    @cached_property
    def forwards(self) -> list[Matched]:
        """Micro-batches of that step that both runs have."""
        return self.here.forwards

    @property
    def same_outputs(self) -> bool | None:
        """Whether the model gave the same for the same, but for rounding; None where that isn't recorded."""
        known = [one.output for one in self.forwards if one.output is not None and one.same_inputs]
        return all(one.same or one.distance < self.here.near for one in known) if known else None

    @cached_property
    def turned(self) -> float | None:
        """What of the gradients that reached the outputs is in another direction than the baseline's: root mean square."""
        rests = [
            one.gradient.rest for one in self.forwards if one.gradient is not None and one.gradient.rest is not None and not one.is_loss
        ]
        return math.sqrt(sum(rest * rest for rest in rests) / len(rests)) if rests else None

    @cached_property
    def sent_back(self) -> Together | None:
        """What reached the outputs, all micro-batches together."""
        return together(one.gradient for one in self.forwards if one.gradient is not None)

    def at(self, *phases: str) -> bool:
        """Whether the first divergence is in one of these."""
        return self.divergence is not None and self.divergence.phase in phases

    @cached_property
    def per_rank(self) -> int:
        """Micro-batches that a rank has in a step, of the run that has more ranks; 0: unknown."""
        ranks = max(self.num_ranks)
        return max(self.num_micro_batches) // ranks


def num_micro_batches(step: Step) -> int:
    """By the forwards seen, else by what was given as ``batch``."""
    return sum(map(len, step.micro_batches)) or sum(map(len, step.batches))
