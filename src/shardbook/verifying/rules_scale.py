"""Gradients that are a multiple of the baseline's: by the number of micro-batches, or of ranks."""

from collections.abc import Iterator

from shardbook.verifying.case import Case
from shardbook.verifying.closeness import Together
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding

_RULES = {
    ("micro", True): ("scale.micro_batches_missing", "the loss is not divided by the {} micro-batches of a rank"),
    ("micro", False): ("scale.micro_batches_twice", "it is divided twice by the {} micro-batches of a rank"),
    ("ranks", True): ("scale.ranks_missing", "gradients of {} ranks are added and not averaged"),
    ("ranks", False): ("scale.ranks_twice", "gradients of {} ranks are averaged twice"),
}


def scale(case: Case) -> Iterator[Finding]:
    """One factor, and it is one of these numbers."""
    found = case.here.gradients
    if found is None or not case.at("backward", "forward", "reduce", "clip") or found.rest > 0.1 or not found.ratio > 0:
        return
    if abs(found.ratio - 1.0) < 0.05:
        return
    ranks, per_rank, total = max(case.num_ranks), case.per_rank, max(case.num_micro_batches)
    numbers = [("micro", per_rank), ("ranks", ranks)]
    if ranks == 1:  # one process that goes over all ranks' micro-batches: their number is not known
        numbers += [("ranks", part) for part in range(2, total) if total % part == 0]
    elif total > max(ranks, per_rank):
        numbers += [("micro", total)]
    for what, number in numbers:
        for over in (True, False):
            if number > 1 and found.is_near(number if over else 1 / number):
                yield _finding(case, found, what, number, over=over)


def _finding(case: Case, found: Together, what: str, number: int, *, over: bool) -> Finding:
    rule, why = _RULES[what, over]
    pure = found.rest < min(0.1, 2000 * case.here.roundoff)
    sure = CERTAIN if pure else PLAUSIBLE
    other = max(case.num_ranks) if what == "micro" else case.per_rank
    if other == number or (what == "ranks" and max(case.num_ranks) == 1):
        sure = _by_output(case, found, what)
    text = f"{found.ratio:.2f}" if over else f"1/{1 / found.ratio:.2f}"
    return Finding(
        rule,
        sure,
        f"step {case.here.number}: every gradient is {text} times the baseline's (all but {found.rest:.2g} of it): {why.format(number)}",
    )


def _by_output(case: Case, found: Together, what: str) -> float:
    """As many ranks as micro-batches: the loss shows which of the two, if its own factor was recorded."""
    ratios = [one.gradient.ratio for one in case.forwards if one.gradient is not None]
    if not ratios:
        return PLAUSIBLE if what == "micro" else POSSIBLE
    over = case.num_ranks[0] / case.num_ranks[1]  # ranks that are averaged afterwards have each that much more in their losses
    in_loss = all(abs(one / (found.ratio * over) - 1.0) < 0.02 for one in ratios)
    if in_loss or all(abs(one / over - 1.0) < 0.02 for one in ratios):
        return LIKELY if in_loss == (what == "micro") else POSSIBLE
    return PLAUSIBLE if what == "ranks" else PLAUSIBLE - 0.1
