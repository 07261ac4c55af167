"""What a verdict says, in the words and figures that the terminal and the page share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from shardbook.verifying.explanations import EXPLANATIONS
from shardbook.verifying.verdict import Phase, PhaseResult, Verdict

PHASES: tuple[Phase, ...] = get_args(Phase)
NUM_HYPOTHESES = 3
NUM_STEPS = 8
"""Steps that a table shows of a long run."""

MEANINGS: Mapping[Phase, str] = {
    "data": "what the ranks were given",
    "forward": "the loss, and what the model gave",
    "backward": "gradients, as they are when the step is recorded",
    "reduce": "gradients that several ranks hold of the same elements",
    "clip": "gradients as the optimizer finds them",
    "update": "what the optimizer did to the weights, and its settings",
    "state": "optimizer state and buffers, and weights that change between steps",
}

KEY = "= same bits; a number is the deviation, within its bound; ! beyond its bound"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A rule that may explain the difference. ``confidence`` in percent, as text."""

    rule: str
    title: str
    confidence: str
    evidence: str
    explanation: str
    mend: str


def headline(verdict: Verdict) -> str:
    """The verdict in one line.

    >>> headline(Verdict(kind="identical", num_steps=3))
    'identical: 3 steps, every bit'
    """
    if verdict.kind == "identical":
        return f"identical: {_steps(verdict.num_steps)}, every bit"
    if verdict.kind == "within_rounding":
        return f"within rounding: {_steps(verdict.num_steps)}, no deviation beyond its bound"
    if verdict.rule is None or verdict.rule == "unknown":
        return "different: no rule explains it"
    return f"different: {EXPLANATIONS[verdict.rule].title} ({verdict.rule})"


def where(verdict: Verdict) -> str:
    """Where the two first differ, or are farthest apart; empty where they are nowhere apart."""
    if verdict.step is None or verdict.kind == "identical":
        return ""
    place = [step_name(verdict.step, lower=True), verdict.phase or "", verdict.parameter or ""]
    place += [] if verdict.rank is None else [f"rank {verdict.rank}"]
    first = "first at" if verdict.kind == "different" else "farthest at"
    size = f"deviation {number(verdict.deviation)}, bound {number(verdict.bound)}"
    return f"{first} {', '.join(filter(None, place))}: {size}{_times(verdict.deviation, verdict.bound)}"


def hypotheses(verdict: Verdict, limit: int = NUM_HYPOTHESES) -> list[Hypothesis]:
    """The likeliest rules, best first."""
    return [
        Hypothesis(
            rule=rule,
            title=EXPLANATIONS[rule].title,
            confidence=f"{confidence:.0%}",
            evidence=evidence,
            explanation=EXPLANATIONS[rule].explanation,
            mend=EXPLANATIONS[rule].mend,
        )
        for rule, confidence, evidence in verdict.ranking[:limit]
    ]


def loss_rows(verdict: Verdict) -> list[tuple[str, str, str, str]]:
    """(step, the candidate's loss, the baseline's, their difference) of a few steps: the first, the last, and where they part."""
    kept = set(chosen((step for step, _, _ in verdict.losses), verdict.step))
    return [
        (str(step), loss(candidate), loss(baseline), _difference(candidate, baseline))
        for step, candidate, baseline in verdict.losses
        if step in kept
    ]


def chosen(steps: Iterable[int], centre: int | None, limit: int = NUM_STEPS) -> list[int]:
    """At most ``limit`` of the steps: those around ``centre``, the first ones and the last.

    >>> chosen(range(1, 100), 40, 6)
    [1, 2, 39, 40, 41, 99]
    >>> chosen(range(1, 4), None)
    [1, 2, 3]
    """
    found = sorted(set(steps))
    at = found.index(centre) if centre in found else 0
    wanted = [at, len(found) - 1, at + 1, at - 1, *range(len(found))]
    places = list(dict.fromkeys(place for place in wanted if 0 <= place < len(found)))[:limit]
    return [found[place] for place in sorted(places)]


def by_place(verdict: Verdict) -> dict[tuple[int, Phase], PhaseResult]:
    """The worst of each phase of each step."""
    found: dict[tuple[int, Phase], PhaseResult] = {}
    for one in verdict.phases:
        known = found.get((one.step, one.phase))
        if known is None or _badness(one) > _badness(known):
            found[one.step, one.phase] = one
    return found


def grid_rows(verdict: Verdict) -> tuple[list[Phase], list[tuple[str, list[PhaseResult | None]]]]:
    """Phases that were compared, and for each of a few steps its name and what was found in each of them."""
    found = by_place(verdict)
    phases: list[Phase] = [phase for phase in PHASES if any(phase == other for _, other in found)]
    steps = chosen((step for step, _ in found), verdict.step)
    return phases, [(step_name(step), [found.get((step, phase)) for phase in phases]) for step in steps]


def cell(one: PhaseResult | None) -> str:
    """One phase of one step, as :data:`KEY` says.

    >>> cell(PhaseResult(step=1, phase="clip", deviation=0.25, bound=1e-6, same_bits=False)), cell(PhaseResult(step=1, phase="clip"))
    ('0.25 !', '=')
    """
    if one is None:
        return ""
    return f"{number(one.deviation)} !" if one.exceeds else "=" if one.same_bits else number(one.deviation)


DETAIL_HEADS = ("phase", "deviation", "bound", "of the bound", "worst in", "compared")


def detail_rows(verdict: Verdict) -> tuple[str, list[tuple[str, ...]]]:
    """The step in question (where they part, else where they are farthest, else the last), and its phases one by one.

    Nothing where all have the same bits.
    """
    if verdict.kind == "identical":
        return "", []
    found = by_place(verdict)
    last = max((step for step, _ in found), default=None)
    step = last if verdict.step is None else verdict.step
    rows = [_detail(one) for phase in PHASES for one in [found.get((step, phase))] if one is not None] if step is not None else []
    return "" if step is None else step_name(step, lower=True), rows


def _detail(one: PhaseResult) -> tuple[str, ...]:
    place = ", ".join(filter(None, [one.parameter or "", "" if one.rank is None else f"rank {one.rank}"]))
    if one.same_bits and not one.exceeds:
        return one.phase, "same bits", "", "", "", str(one.num_compared)
    return one.phase, cell(one), limit(one.bound), _share(one.deviation, one.bound), place, str(one.num_compared)


def number(value: float) -> str:
    """A deviation: three digits are enough.

    >>> number(0.0), number(0.25), number(1.23456e-7), number(float("nan"))
    ('0', '0.25', '1.23e-07', 'not finite')
    """
    return f"{value:.3g}" if abs(value) < float("inf") else "not finite"


def limit(bound: float) -> str:
    """A bound; nothing bounds what follows from an earlier difference in ways that can't be told.

    >>> limit(2e-7), limit(float("inf"))
    ('2e-07', 'none')
    """
    return number(bound) if bound < float("inf") else "none"


def loss(value: float | None) -> str:
    """A loss with all digits of fp32 that can differ."""
    return "not recorded" if value is None else f"{value:.9g}"


def step_name(step: int, *, lower: bool = False) -> str:
    """A step's number; what was there before the first is the start."""
    return ("the start" if lower else "start") if step == 0 else f"step {step}" if lower else str(step)


def facts(verdict: Verdict) -> Sequence[tuple[str, str]]:
    """What was compared, and where bounds come from; those of same bits matter to nobody."""
    bounds = "" if verdict.kind == "identical" else verdict.bound_origin
    named = (("candidate", verdict.candidate), ("baseline", verdict.baseline), ("bounds", bounds))
    return [(name, words) for name, words in named if words]


def _difference(candidate: float | None, baseline: float | None) -> str:
    if candidate is None or baseline is None:
        return ""
    return "=" if candidate == baseline else f"{candidate - baseline:+.3g}"


def _badness(one: PhaseResult) -> tuple[bool, bool, float]:
    """Beyond the bound first, then whatever lacks the same bits, then by how much of its bound."""
    share = one.deviation / one.bound if one.bound > 0 else one.deviation
    return one.exceeds, not one.same_bits, share if share == share else float("inf")


def _times(deviation: float, bound: float) -> str:
    share = _share(deviation, bound)
    return f" ({share} {'of ' if share.endswith('%') else ''}the bound)" if share and deviation > 0 else ""


def _share(deviation: float, bound: float) -> str:
    """How much of its bound a deviation is.

    >>> _share(0.5, 1.0), _share(2e-3, 1e-6), _share(1.0, 0.0), _share(1.0, 1e-9), _share(1e-4, 1.0)
    ('50%', '2,000 times', '', '1e+09 times', '<1%')
    """
    share = deviation / bound if bound > 0 else float("nan")
    if not share < float("inf"):
        return ""
    if share < 0.01:
        return "<1%" if share else "0%"
    return f"{share:.2g} times" if share >= 1e6 else f"{share:,.0f} times" if share >= 10 else f"{share:.0%}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
