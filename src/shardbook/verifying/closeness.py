"""How far two fingerprints are from one another, of one parameter and of all together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from shardbook.recording.prints import NUM_PROJECTIONS, Fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Closeness:
    """``candidate = ratio · baseline + rest``, of one parameter.

    Args:
        same: same bits; None where one of them has no hash, or they aren't in the same unit.
        ratio: by projections; of the norms where there are none. NaN where the baseline is zero.
        rest: estimated norm of what the ratio leaves, relative to the candidate's; None without projections.
        distance: estimated norm of the difference, relative to the baseline's; without projections how much the norms differ,
            which is less than that.
        apart: the same, not relative.
        norm, other: the candidate's and the baseline's norm.
        numel: elements.
    """

    same: bool | None
    ratio: float
    rest: float | None
    distance: float
    apart: float
    norm: float
    other: float
    numel: int
    across: float = 0.0
    along: float = 0.0
    left: float = 0.0

    @classmethod
    def of(cls, candidate: Fingerprint, baseline: Fingerprint, scale: float = 1.0) -> Self:
        """``scale`` multiplies the candidate."""
        hashed = candidate.hash is not None and baseline.hash is not None
        same = candidate.same_bits(baseline) if hashed and scale == 1.0 else None
        norm, other = abs(scale) * candidate.norm, baseline.norm
        if candidate.projections is not None and baseline.projections is not None:
            mine = [scale * one for one in candidate.projections]
            return cls._of(mine, baseline.projections, same, (norm, other), baseline.numel)
        apart = 0.0 if same else abs(norm - other)
        return cls(
            same=same, ratio=norm / other if other else math.nan, rest=None, distance=_relative(apart, other), apart=apart,
            norm=norm, other=other, numel=baseline.numel,
        )  # fmt: skip

    @classmethod
    def of_projections(cls, candidate: Sequence[float], baseline: Sequence[float], numel: int) -> Self:
        """Of differences, which have projections and no more."""
        norms = (_norm(candidate), _norm(baseline))
        return cls._of(candidate, baseline, None, norms, numel)

    @classmethod
    def _of(cls, mine: Sequence[float], theirs: Sequence[float], same: bool | None, norms: tuple[float, float], numel: int) -> Self:
        norm, other = norms
        along = _sum(y * y for y in theirs)
        across = _sum(x * y for x, y in zip(mine, theirs, strict=True))
        ratio = across / along if along else math.nan
        left = _sum((x - ratio * y) ** 2 for x, y in zip(mine, theirs, strict=True)) if along else _sum(x * x for x in mine)
        apart = 0.0 if same else _norm([x - y for x, y in zip(mine, theirs, strict=True)])
        return cls(
            same=same, ratio=ratio, rest=math.sqrt(left / len(mine)) / norm if norm else 0.0,
            distance=_relative(apart, other), apart=apart, norm=norm, other=other, numel=numel, across=across, along=along, left=left,
        )  # fmt: skip

    @property
    def is_zero(self) -> bool:
        """Nothing in the baseline: a ratio says nothing."""
        return self.other == 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """All parameters of a phase at once.

    Args:
        ratio: the one factor that explains most.
        rest: what it leaves, relative to the candidate's norm.
        spread: largest relative deviation of a parameter's own ratio from it, where that ratio is known better than that.
        error: standard error of the ratio: what it leaves, over the root of the number of projections.
        num: parameters.
    """

    ratio: float
    rest: float
    spread: float
    error: float
    num: int

    @property
    def is_multiple(self) -> bool:
        """One factor explains all but a hundredth."""
        return math.isfinite(self.ratio) and self.rest < 0.01

    def is_near(self, value: float, tolerance: float = 2e-3) -> bool:
        return abs(self.ratio / value - 1.0) <= max(tolerance, 4 * self.error / abs(value))


def together(ones: Iterable[Closeness]) -> Together | None:
    """None where there are no projections, or nothing but zeros."""
    known = [one for one in ones if one.rest is not None and math.isfinite(one.along) and math.isfinite(one.across) and one.along]
    along = _sum(one.along for one in known)
    if not along:
        return None
    ratio = _sum(one.across for one in known) / along
    left = _sum(max(0.0, one.left + one.along * (one.ratio - ratio) ** 2) for one in known)
    norm = math.sqrt(_sum(one.norm**2 for one in known))
    rest = math.sqrt(left / NUM_PROJECTIONS) / norm if norm else 0.0
    spread = max((abs(one.ratio / ratio - 1.0) for one in known if ratio and (one.rest or 0.0) < 0.05), default=0.0)
    error = math.sqrt(left / along / (NUM_PROJECTIONS * len(known)))
    return Together(ratio=ratio, rest=rest, spread=spread, error=error, num=len(known))


def closeness(
    candidate: Mapping[str, Fingerprint], baseline: Mapping[str, Fingerprint], scale: float = 1.0, names: Iterable[str] | None = None
) -> dict[str, Closeness]:
    """Of every parameter that both have in a phase."""
    chosen = baseline if names is None else [name for name in names if name in baseline]
    return {name: Closeness.of(candidate[name], baseline[name], scale) for name in chosen if name in candidate}


def _relative(apart: float, other: float) -> float:
    return apart / other if other else math.inf if apart else 0.0


def _sum(values: Iterable[float]) -> float:
    """NaN where infinities of both signs meet, as adding them one by one gives."""
    listed = list(values)
    return math.fsum(listed) if all(map(math.isfinite, listed)) else sum(listed)


def _norm(projections: Sequence[float]) -> float:
    return math.sqrt(_sum(one * one for one in projections) / len(projections))
