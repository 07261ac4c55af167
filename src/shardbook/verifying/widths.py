"""Types, and values, that are narrower than the baseline's."""

import math

from shardbook.recording.prints import Fingerprint
from shardbook.verifying.case import Facts
from shardbook.verifying.closeness import Closeness
from shardbook.verifying.statistics import unit_roundoff

_ROUNDED = (2.0**-14, 2.0**-4)
"""Relative distance of values from themselves in fp16 at least, and of sums of some in bf16 at most; errors are half a unit roundoff."""


def is_rounded(facts: Facts, phase: str, name: str) -> bool:
    """Whether the values themselves are as far apart as a rounding takes them: some come to 16-bit values by themselves."""
    mine, theirs = (step.phases[phase][name] for step in facts.sides)
    if mine.dtype != theirs.dtype:
        return True
    one = facts.gradient[name] if phase == "gradient" else Closeness.of(mine, theirs)
    return _ROUNDED[0] < one.distance < _ROUNDED[1]


def is_chance(facts: Facts, phase: str, names: list[str], chance: float) -> bool:
    """Whether so few elements are of 16 bits only by chance: a sum of two 16-bit values of like size is, one time in two.

    Gradients with rows of zeros say nothing: each row may be of one micro-batch alone.
    """
    mine, theirs = (step.phases[phase] for step in facts.sides)
    same_type = [name for name in names if mine[name].dtype == theirs[name].dtype]
    dense = sum(mine[name].numel for name in names if _is_dense(mine[name]))
    return len(same_type) == len(names) and dense < -math.log2(chance)


def _is_dense(one: Fingerprint) -> bool:
    """Most elements are of like size: the mean size squared over the mean square is 0.64 for a normal distribution, less by zeros."""
    return one.absolute is not None and one.absolute**2 > 0.3 * one.squares * one.numel


def narrower_in(facts: Facts, phase: str) -> list[str]:
    """Parameters that the candidate has in a narrower type, or with values of one, than the baseline."""
    mine, theirs = facts.pair.candidate.phases.get(phase, {}), facts.pair.baseline.phases.get(phase, {})
    common = [name for name in facts.names.common if name in mine and name in theirs]
    if phase in ("weight", "before") and facts.number and facts.start is not None:
        begun = facts.start.baseline.phases["weight"]  # ones and zeros are 16-bit values until they move
        common = [name for name in common if begun[name].narrow is None or mine[name].dtype != theirs[name].dtype]
    # A few bf16 values have a sum that fp16 holds exactly: it has three more bits.
    telling = ("bf16",) if facts.roundoff >= unit_roundoff("bf16") else ("bf16", "fp16")
    return [name for name in common if _width(mine[name], telling) < _width(theirs[name], telling)]


def _width(one: Fingerprint, telling: tuple[str, ...]) -> int:
    """Bits of the type, or of the values."""
    if one.largest == 0.0 or one.nonfinite:
        return 64
    narrow = 16 if one.narrow in telling else 64
    return min(narrow, 16 if one.dtype in ("bfloat16", "float16") else 8 if "float8" in one.dtype else 64)
