"""A verdict as one page: no script, no request, everything inside."""

from collections.abc import Iterator

from shardbook.report import markup, verdict_charts
from shardbook.report import verdict_words as words
from shardbook.report.html import frame
from shardbook.verifying.verdict import Verdict

_NUM_HYPOTHESES = 6
_LOSSES = "The objective of each step, drawn through for the candidate and dashed for the baseline."
_DEVIATIONS = "Below, the deviation of each phase is drawn through and its bound dashed; a step with a deviation of 0 has no point."


def page(verdict: Verdict) -> str:
    """The whole page."""
    kind = "bad" if verdict.kind == "different" else ""
    header = [
        markup.text("p", words.headline(verdict), kind),
        markup.text("p", words.where(verdict)) if words.where(verdict) else "",
        *(markup.text("p", f"{name}: {text}", "soft") for name, text in words.facts(verdict)),
        markup.cards(_cards(verdict)),
    ]
    sections = (_explained(verdict), _losses(verdict), _deviations(verdict), _notes(verdict))
    return frame("Is it still the same training?", header, sections)


def _cards(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    yield "verdict", verdict.kind.replace("_", " "), f"{verdict.num_steps} steps compared"
    if verdict.rule is not None:
        first = words.hypotheses(verdict, 1)
        yield "broken rule", verdict.rule, f"{first[0].title}, {first[0].confidence} sure" if first else ""
    if verdict.step is not None:
        name = "they part at" if verdict.kind == "different" else "farthest at"
        size = f"deviation {words.number(verdict.deviation)}, bound {words.limit(verdict.bound)}"
        place = ", ".join(filter(None, (words.step_name(verdict.step, lower=True), verdict.phase)))
        yield name, place, f"{verdict.parameter}: {size}" if verdict.parameter else size


def _explained(verdict: Verdict) -> str:
    found = words.hypotheses(verdict, _NUM_HYPOTHESES)
    if not found:
        return ""
    rows = [(one.rule, one.confidence, one.evidence, one.mend) for one in found]
    heads = ("rule", "sure", "evidence", "what usually helps")
    parts = [markup.text("p", found[0].explanation), markup.table(heads, rows, "likeliest first")]
    return markup.section("What explains it", parts)


def _losses(verdict: Verdict) -> str:
    rows = words.loss_rows(verdict)
    known = [(step, a, b) for step, a, b in verdict.losses if a is not None or b is not None]
    if not known:
        return ""
    said = "; ".join(f"step {step}: candidate {words.loss(a)}, baseline {words.loss(b)}" for step, a, b in (known[0], known[-1]))
    picture = markup.picture(verdict_charts.losses(verdict), f"Both losses over the steps. {said}", _LOSSES)
    table = markup.table(("step", "candidate", "baseline", "difference"), rows, "losses", numbers=(0, 1, 2, 3))
    return markup.section("Losses", [picture, table])


def _deviations(verdict: Verdict) -> str:
    if not verdict.phases:
        return ""
    phases, grid = words.grid_rows(verdict)
    step, details = words.detail_rows(verdict)
    rows = [(name, *map(words.cell, found)) for name, found in grid]
    parts = [
        markup.table(("step", *phases), rows, f"by step and phase: {words.KEY}", numbers=range(1 + len(phases))),
        markup.table(words.DETAIL_HEADS, details, step, numbers=(1, 2, 3, 5)) if details else "",
        *_pictures(verdict),
    ]
    return markup.section("Deviation against bound", parts)


def _pictures(verdict: Verdict) -> Iterator[str]:
    finite = [one for one in verdict.phases if 0 < one.deviation < float("inf")]
    if finite:
        yield markup.text("p", _DEVIATIONS, "soft")
    for phase in words.PHASES:
        if worst := max((one for one in finite if one.phase == phase), key=lambda one: one.deviation, default=None):
            size = f"largest deviation {words.number(worst.deviation)} in step {worst.step}, bound there {words.limit(worst.bound)}"
            yield markup.text("h3", f"{phase}: {words.MEANINGS[phase]}")
            yield markup.picture(verdict_charts.deviations(verdict, phase), f"Deviation and bound over the steps: {size}", size)


def _notes(verdict: Verdict) -> str:
    return markup.section("Notes", (markup.text("p", note) for note in verdict.notes))
