"""Every rule is asked whether it explains the first divergence; the answers, the likeliest first."""

from collections.abc import Callable, Iterator

from shardbook.verifying.case import Case
from shardbook.verifying.findings import Finding

_RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = ()


def diagnose(case: Case) -> list[Finding]:
    """At least one finding: ``unknown`` where no rule explains it."""
    best: dict[str, Finding] = {}
    for rule in _RULES:
        for finding in rule(case):
            known = best.get(finding.rule)
            if known is None or finding.confidence > known.confidence:
                best[finding.rule] = finding
    found = sorted(best.values(), key=lambda one: -one.confidence)
    if not found or found[0].confidence < 0.3:
        found.insert(0, Finding("unknown", 0.3, "no rule of the list explains where the two runs part"))
    return found
