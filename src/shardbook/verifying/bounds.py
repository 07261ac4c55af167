"""How far rounding alone may take a phase of a step, given how far apart its inputs already are.

The question is asked phase by phase: a fault shows where a phase's outputs are farther apart than its inputs and rounding explain.

* **Gradients.** Where the baseline was run again in other orders and precisions: the root mean square of how far those runs are from
  it, times the root of the F quantile for two estimates of a variance from eight projections each. Without such runs: λ (u √P + v √n),
  the probabilistic bound of Higham and Mary (2019), for P roundings in the type that products are made in, u, and sums of n terms in
  single precision, v; times what eight projections may add to a distance. Where every micro-batch's output, and what came back to it,
  has the baseline's bits, u is that of the sums alone. A parameter whose gradient nearly cancels is held to what its
  share of elements would have of the whole.
* **Weights that differ before.** A gradient changes by as much as the baseline's changed from one step to the next per change of its
  weights (a secant of the run itself), times the distance of the weights.
* **Updates.** From the same gradients and states: the rounding of the weights, and of the update's own arithmetic. Where gradients
  are apart and the optimizer divides them by their size, an element whose gradient is smaller than the distance may turn over, whatever
  its size: two units each, so that one parameter's update says nothing. Most of the parameters together do (of gradients that are spread
  evenly around zero a share r turns over, by a Poisson count), and so do one factor for all and a part that is a multiple of weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardbook.recording.prints import NUM_PROJECTIONS, Fingerprint
from shardbook.verifying.case import Facts, norm_of, updates
from shardbook.verifying.closeness import Closeness, together
from shardbook.verifying.pairing import Pair
from shardbook.verifying.statistics import CHANCE, estimate_factor, f_quantile, normal_deviations, poisson_quantile, unit_roundoff

_SINGLE = unit_roundoff("float32")
_UPDATE_ROUNDINGS = 16  # operations of Adam's update on one element, each rounded once
_UNKNOWN_TERMS = 2**16  # terms of a sum, where nothing tells how many tokens there are


@dataclass
class Bounds:
    """Bounds of one verdict; `enter` is told each step in turn.

    Args:
        num_comparisons: of all phases, parameters and steps; the chance of a false alarm is divided among them.
    """

    num_comparisons: int
    num_parameters: int
    reruns: Mapping[tuple[int, str], Mapping[str, Sequence[float]]] = field(
        default_factory=dict[tuple[int, str], Mapping[str, Sequence[float]]]
    )
    roundoff: float = _SINGLE
    _linear: bool | None = None
    _factor_apart: float = 0.0
    _last_apart: float = 0.0
    _unseen: int = 0
    _steepest: float = 0.0
    _moved: float = 0.0
    _facts: Facts | None = None
    _noise: float = 0.0
    _added: float = 0.0
    _carried: float = 0.0
    _share: float = 0.0
    _stepped: dict[str, float] = field(default_factory=dict[str, float])
    _largest: dict[str, float] = field(default_factory=dict[str, float])
    _before: tuple[float, Pair] | None = None

    @property
    def chance(self) -> float:
        return CHANCE / max(1, self.num_comparisons)

    @property
    def lengthened(self) -> float:
        """What a distance may come out as, from eight projections, for one that is 1."""
        return estimate_factor(NUM_PROJECTIONS, self.chance)

    def enter(self, facts: Facts) -> None:
        """From here on bounds are this step's."""
        self._facts = facts
        terms, self.roundoff = _num_terms(facts), facts.roundoff
        self._noise = self._rounding_of(self.roundoff, terms)
        sums_alone = facts.adds_up and facts.same_parts
        self._added = self._rounding_of(self._of_sums(facts), terms) if sums_alone else self._noise
        apart = self._weights_apart(facts)
        norm = norm_of(facts.pair.baseline.phases.get("gradient", {})) / facts.divisors[1]
        self._carried = self.lengthened * self._secant(facts) * apart / norm if norm else 0.0
        total = sum(one.numel for one in facts.gradient.values()) or 1
        self._share = norm / math.sqrt(total)

    def has_stepped(self, facts: Facts) -> None:
        """What the optimizer was given in this step is known: updates and states follow from it."""
        if self._linear is None and facts.stepped:
            self._see_whether_linear(facts)
        found = facts.stepped_together
        if found is not None and math.isfinite(found.ratio):
            self._factor_apart = max(self._factor_apart, abs(found.ratio - 1.0))
        for name, one in facts.stepped.items():
            if math.isfinite(one.distance) and not one.same:
                self._stepped[name] = max(self._stepped.get(name, 0.0), one.distance)
                self._largest[name] = max(self._largest.get(name, 0.0), one.other)

    def leave(self, facts: Facts) -> None:
        """The step is compared: what later ones have to know of it."""
        gradient = norm_of(facts.pair.baseline.phases.get("gradient", {})) / facts.divisors[1]
        self._before = gradient, facts.pair

    def loss(self, facts: Facts, value: float) -> float:
        """Relative, of the objective or of a micro-batch's output."""
        apart = self._carried * (norm_of(facts.pair.baseline.phases.get("gradient", {})) / facts.divisors[1]) / abs(value) if value else 0.0
        return max(self._noise, self._of_one_number("loss")) + apart

    def _rounding_of(self, roundoff: float, terms: int) -> float:
        narrow, wide = roundoff * math.sqrt(self.num_parameters), min(_SINGLE, roundoff) * math.sqrt(terms)
        return self.lengthened * normal_deviations(self.chance) * (narrow + wide)

    def _of_sums(self, facts: Facts) -> float:
        """Unit roundoff of the types that the baseline and the candidate hold their gradients in."""
        held = [one.dtype for step in facts.sides for one in step.phases.get("gradient", {}).values()]
        return max(map(unit_roundoff, held), default=self.roundoff)

    def _weights_apart(self, facts: Facts) -> float:
        """Norm of the difference of all weights before the step.

        A brief step doesn't show it: since the last that did, each update may have taken the two apart by twice its norm.
        """
        seen = math.sqrt(sum(one.apart**2 for one in facts.before.values() if math.isfinite(one.apart)))
        if all(one.same or one.rest is not None for one in facts.before.values()):
            self._last_apart, self._unseen = seen, 0
            moved = [one.other for one in facts.update.values()]
            self._moved = math.sqrt(sum(one * one for one in moved)) or self._moved
            return seen
        self._unseen += 1
        return max(seen, self._last_apart + 2.0 * self._unseen * self._moved)

    def whole(self, one: Closeness) -> float:
        """What a parameter's deviation is taken relative to: its norm, or its share of the whole gradient's where that is larger.

        A gradient that nearly cancels, as that of a key's bias does, is nothing but rounding.
        """
        return max(one.other, self._share * math.sqrt(one.numel))

    def factor(self, rest: float) -> float:
        """Of the ratio of two factors on losses: each is rounded a few times, and known but for what it leaves."""
        return 4.0 * self.roundoff + 8 * _SINGLE + 2.0 * self.lengthened * rest / math.sqrt(NUM_PROJECTIONS) + self._carried

    def gradient(self, name: str) -> float:
        """Relative to :meth:`whole`."""
        return self._rounding("gradient", name) + self._carried

    def systematic(self, error: float) -> float:
        """Of one factor for all parameters, whose standard error is known: a scale is rounded twice at most."""
        return 2.0 * self.roundoff + 8 * _SINGLE + normal_deviations(self.chance) * error + self._of_one_number("factor") + self._carried

    def systematic_update(self, error: float) -> float:
        """Of updates: they are made in the weights' type, of gradients whose own factor is known."""
        return 2.0 * self.weights_roundoff + 8 * _SINGLE + normal_deviations(self.chance) * error + self._factor_apart

    def stepped(self, gradient: Closeness | None, overall: float) -> float:
        """Given how far the gradient is, of this parameter and of all (which the norm is taken of)."""
        mine = gradient.distance if gradient is not None and math.isfinite(gradient.distance) else 0.0
        return mine + 2.0 * overall + 16 * _SINGLE

    def update(self, facts: Facts, name: str, one: Closeness) -> float:
        """Relative to the update."""
        apart = self._stepped.get(name, 0.0)
        after = facts.pair.baseline.phases["weight"][name]
        if not one.other:  # it stood still: frozen, or without a gradient
            return math.inf if apart else 0.0
        carried = self._turning(facts, name, one) if apart and not self._linear else 4.0 * apart * max(1.0, self._room(facts, name, one))
        return self._arithmetic(after, one) + carried

    @staticmethod
    def _arithmetic(after: Fingerprint, one: Closeness) -> float:
        """Rounding of the weights, and of the update on its way."""
        each = 2.0**-48 if after.dtype == "float64" else _UPDATE_ROUNDINGS * max(unit_roundoff(after.dtype), _SINGLE)
        return 2.0 * unit_roundoff(after.dtype) * after.norm / one.other + each

    def _turning(self, facts: Facts, name: str, one: Closeness) -> float:
        """Every element may turn over: by a whole step each, where the baseline's own stood nearly still."""
        rate = float(facts.settings(1).get(name, {}).get("lr", 0.0))
        return self.lengthened * max(2.0, 1.0 + rate * math.sqrt(one.numel) / one.other)

    def state(self, name: str, one: Closeness, stepped: float) -> float:
        """Relative; moments are sums of gradients and of their squares."""
        apart = self._stepped.get(name, 0.0)
        room = max(1.0, stepped / one.other) if one.other else 1.0
        return 4.0 * apart * room + _UPDATE_ROUNDINGS * _SINGLE

    def most(self, facts: Facts, ones: Mapping[str, Closeness]) -> float:
        """Of the updates of many parameters together, relative to all of them.

        Elements turn over as often as gradients that are spread evenly around zero let them: a Poisson count.
        """
        after = facts.pair.baseline.phases["weight"]
        whole = math.sqrt(sum(one.other**2 for one in ones.values()))
        numel = sum(one.numel for one in ones.values())
        rounding = math.sqrt(sum((self._arithmetic(after[name], one) * one.other) ** 2 for name, one in ones.items() if one.other)) / whole
        apart = max((self._stepped.get(name, 0.0) for name in ones), default=0.0)
        if self._linear or not apart:
            return rounding + 4.0 * apart * max(1.0, *(self._room(facts, name, one) for name, one in ones.items() if one.other))
        turned = poisson_quantile(sum(one.numel * self._stepped.get(name, 0.0) for name, one in ones.items()), self.chance) + 1
        return rounding + min(2.0, 2.0 * math.sqrt(turned / numel) + 2.0 * apart)

    @property
    def weights_roundoff(self) -> float:
        """Of the type in which weights are held."""
        facts = self._facts
        types = [one.dtype for one in facts.pair.baseline.phases.get("weight", {}).values()] if facts is not None else []
        return max(map(unit_roundoff, types), default=_SINGLE)

    def _see_whether_linear(self, facts: Facts) -> None:
        """The baseline's first update tells whether it is a multiple of its gradient, as SGD's is, or of each element's sign, as Adam's."""
        steps, stepped = updates(facts.pair.baseline), facts.pair.baseline.phases.get("stepped", {})
        both = [
            Closeness.of_projections(steps[name], one.projections, one.numel)
            for name, one in stepped.items()
            if name in steps and one.projections is not None
        ]
        found = together(both)
        self._linear = found is not None and found.rest < 0.2

    def _room(self, facts: Facts, name: str, one: Closeness) -> float:
        """How much larger the gradients were that the update is made of, than it is itself: what nearly cancels is mostly rounding."""
        rate = float(facts.settings(1).get(name, {}).get("lr", 1.0))
        return self._largest.get(name, 0.0) * rate / one.other

    def _secant(self, facts: Facts) -> float:
        """Change of the baseline's gradient per change of its weights, from one step to the next: the largest that was seen so far."""
        if self._before is None:
            return 0.0
        gradient, pair = self._before
        now = norm_of(facts.pair.baseline.phases.get("gradient", {})) / facts.divisors[1]
        moved = math.sqrt(sum(sum(one * one for one in update) / len(update) for update in updates(pair.baseline).values()))
        if moved and math.isfinite(gradient + now):
            self._steepest = max(self._steepest, (gradient + now) / moved)
        return self._steepest

    def _rounding(self, phase: str, name: str) -> float:
        return max(self._rerun(phase, name), self._pooled(phase)) or self._added

    def _rerun(self, phase: str, name: str) -> float:
        """From the runs of the baseline in other orders and precisions; 0 without any."""
        number = self._facts.number if self._facts is not None else 0
        return self._quantile(self.reruns.get((number, phase), {}).get(name, ()))

    def _of_one_number(self, phase: str) -> float:
        """Of a number and not of projections: one degree of freedom."""
        number = self._facts.number if self._facts is not None else 0
        values = self.reruns.get((number, phase), {}).get("", ())
        if not any(values):
            return 0.0
        mean = math.sqrt(sum(one * one for one in values) / len(values))
        return mean * math.sqrt(f_quantile(1, len(values), self.chance))

    def _pooled(self, phase: str) -> float:
        number = self._facts.number if self._facts is not None else 0
        each = sorted(self._quantile(distances) for distances in self.reruns.get((number, phase), {}).values())
        return each[len(each) // 2] if each else 0.0

    def _quantile(self, distances: Sequence[float]) -> float:
        if not distances:
            return 0.0
        mean = math.sqrt(sum(one * one for one in distances) / len(distances))
        return mean * math.sqrt(f_quantile(NUM_PROJECTIONS, NUM_PROJECTIONS * len(distances), self.chance))


def _num_terms(facts: Facts) -> int:
    """Tokens or rows that a gradient is summed over."""
    step = facts.pair.baseline
    seen = [max((one.numel for one in micro.inputs), default=0) for micros in step.micro_batches for micro in micros]
    return sum(seen) or _UNKNOWN_TERMS
