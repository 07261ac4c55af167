"""Settings of parameter groups side by side."""

import math
import struct
from typing import Any, cast

from shardbook.verifying.case import Facts
from shardbook.verifying.verdict import PhaseResult

_SETTINGS = (
    "lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "amsgrad", "maximize", "decoupled_weight_decay",
    "alpha", "centered", "rho", "lr_decay", "initial_accumulator_value", "momentum_decay",
)  # fmt: skip
_SAME_NUMBER = 2.0**-40
"""Relative: settings are double precision, and a scheduler reaches one value along several ways."""

_SAME_SINGLE = 2.0**-22


def compare_settings(facts: Facts) -> list[PhaseResult]:
    """The one that differs most; none where all agree."""
    mine, theirs = facts.settings(0), facts.settings(1)
    worst = PhaseResult(step=facts.number, phase="update", num_compared=0)
    for name in theirs:
        for key in _SETTINGS if name in mine else ():
            deviation = setting_difference(mine[name].get(key), theirs[name].get(key))
            if deviation > worst.deviation:
                worst = PhaseResult(
                    step=facts.number, phase="update", parameter=name, deviation=deviation, same_bits=False, num_compared=len(theirs)
                )
    return [worst] if worst.num_compared else []


def setting_difference(mine: Any, theirs: Any) -> float:
    """Relative, 0 where both are the same number or one of them isn't known."""
    if mine is None or theirs is None:
        return 0.0
    if isinstance(mine, list) and isinstance(theirs, list):  # betas
        both = zip(cast("list[Any]", mine), cast("list[Any]", theirs), strict=False)
        return max((setting_difference(a, b) for a, b in both), default=0.0)
    a, b = float(cast("float", mine)), float(cast("float", theirs))
    deviation = abs(a - b) / abs(b) if b else abs(a)
    single = a in (_single(b), b) or b == _single(a)
    return 0.0 if deviation <= _SAME_NUMBER or (single and deviation <= _SAME_SINGLE) else deviation


def _single(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf
