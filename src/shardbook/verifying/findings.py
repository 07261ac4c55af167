"""What a rule finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule of `verdict.RULES`, how sure it is (from 0 to 1), and the evidence in a sentence with its figures."""

    rule: str
    confidence: float
    evidence: str


CERTAIN = 0.97
"""The record itself shows the rule broken: a number, a type or a hash that is another."""

LIKELY = 0.85
"""The figures fit this rule to more digits than chance gives, and no other of the list to as many."""

PLAUSIBLE = 0.6
"""They fit, as they would another."""

POSSIBLE = 0.4
"""Nothing speaks against it."""
