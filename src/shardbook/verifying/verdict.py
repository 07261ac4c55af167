"""The verdict: what a comparison of two runs came to, as plain data that the command, the page and a program read.

Nothing here imports torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, get_args

from shardbook.errors import ConfigError

Kind = Literal["identical", "within_rounding", "different"]
Phase = Literal["data", "forward", "backward", "reduce", "clip", "update", "state"]

RULES: tuple[str, ...] = (
    "weight.mean_of_means", "weight.padding_counted", "weight.labels_shifted",
    "scale.micro_batches_missing", "scale.micro_batches_twice", "scale.ranks_missing", "scale.ranks_twice",
    "schedule.per_micro_batch", "schedule.offset", "data.micro_batch_dropped", "data.ranks_share",
    "clip.per_rank", "clip.before_unscale", "clip.unexpected",
    "decay.wrong_group", "decay.missing", "decay.twice", "optimizer.betas", "optimizer.eps",
    "reduce.missing", "replica.stale", "tied.untied", "frozen.updated", "recompute.rng",
    "precision.moment", "precision.master", "precision.master_rounded", "precision.accumulation", "evaluation.changed_state",
    "unknown",
)  # fmt: skip
"""What can be broken. ``unknown`` is a difference that none of the others explains."""

_FORMAT = "shardbook verdict"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """One phase of one step: the parameter in which it is farthest from the baseline, seen against its bound.

    Args:
        step: from 1; 0 is the state before the first.
        phase: which.
        parameter: the worst; None where the phase is of no parameter (data, a loss).
        rank: whose part differs, where that is one rank's.
        deviation: norm of the difference relative to the baseline's, or the relative difference of two numbers.
        bound: what rounding explains of it, in the same unit.
        same_bits: everything compared in this phase has the baseline's bits.
        num_compared: parameters, or values, that were.
    """

    step: int
    phase: Phase
    parameter: str | None = None
    rank: int | None = None
    deviation: float = 0.0
    bound: float = 0.0
    same_bits: bool = True
    num_compared: int = 0

    @property
    def exceeds(self) -> bool:
        """Whether rounding doesn't explain it. NaN, where one of the two is not finite, is never explained."""
        return not self.same_bits and self.deviation != 0.0 and not self.deviation <= self.bound


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the candidate is still the baseline's training, and if not, which rule is broken.

    Args:
        kind: ``"identical"``: weights, gradients as stepped on, optimizer states and buffers have the same bits in every step compared;
            ``"within_rounding"``: they don't, and every deviation is within its bound; ``"different"``.
        rule: the first of ``ranking``; None unless different.
        ranking: (rule of :data:`RULES`, confidence from 0 to 1, evidence), the likeliest first.
        step, phase, parameter, rank: where the two first differ by more than rounding, else where they are farthest from one another;
            None where that says nothing.
        deviation: of that place; relative, 0 where nothing differs.
        bound: what rounding explains there.
        num_steps: steps compared.
        candidate, baseline: what they are, in a line each.
        bound_origin: where bounds come from, in a sentence.
        notes: what could not be compared, and what else a reader has to know.
        losses: (step, the candidate's objective, the baseline's).
        phases: everything that was compared, in the order of the run.
    """

    kind: Kind
    rule: str | None = None
    ranking: tuple[tuple[str, float, str], ...] = ()
    step: int | None = None
    phase: Phase | None = None
    parameter: str | None = None
    rank: int | None = None
    deviation: float = 0.0
    bound: float = 0.0
    num_steps: int = 0
    candidate: str = ""
    baseline: str = ""
    bound_origin: str = ""
    notes: tuple[str, ...] = ()
    losses: tuple[tuple[int, float | None, float | None], ...] = ()
    phases: tuple[PhaseResult, ...] = ()

    def __post_init__(self) -> None:
        unknown = [rule for rule, _, _ in self.ranking if rule not in RULES]
        if self.kind not in get_args(Kind) or unknown:
            raise ConfigError(f"Verdict: kind = {self.kind!r}, rules {unknown}: kinds are {get_args(Kind)}, rules those of shardbook.RULES")

    @property
    def same(self) -> bool:
        """Whether it is the same training."""
        return self.kind != "different"

    def to_json(self) -> str:
        """One JSON object; numbers that JSON has no word for are text."""
        return json.dumps(_plain({"format": _FORMAT, "version": VERSION, **asdict(self)}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` wrote.

        Raises:
            ConfigError: no JSON, another format or version, missing or unknown fields.
        """
        try:
            found: Any = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"verdict: no JSON ({error}); give what Verdict.to_json or shardbook verify --json wrote") from error
        if not isinstance(found, dict) or (found.pop("format", None), found.pop("version", None)) != (_FORMAT, VERSION):  # pyright: ignore[reportUnknownMemberType]
            raise ConfigError(f"verdict: not a verdict of version {VERSION}; give what Verdict.to_json or shardbook verify --json wrote")
        try:
            return cls(**_fields(found))
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"verdict: its fields are not those of version {VERSION} ({error}); write it again") from error

    def __str__(self) -> str:
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
        if self.kind == "identical":
            return f"identical: {steps}, every bit"
        at = "" if self.step is None else f"step {self.step}, {self.phase}" + (f", {self.parameter}" if self.parameter else "")
        at += "" if self.rank is None else f", rank {self.rank}"
        size = f"deviation {self.deviation:.3g}, bound {self.bound:.3g}"
        if self.kind == "within_rounding":
            return f"within rounding: {steps}; farthest at {at}: {size}"
        evidence = f"\n{self.rule}: {self.ranking[0][2]}" if self.ranking else ""
        return f"different: first at {at}: {size}{evidence}"


def _fields(found: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(found)
    fields["ranking"] = tuple((rule, float(sure), evidence) for rule, sure, evidence in fields["ranking"])
    fields["losses"] = tuple((step, _number(mine), _number(theirs)) for step, mine, theirs in fields["losses"])
    fields["notes"] = tuple(fields["notes"])
    fields["phases"] = tuple(PhaseResult(**_numbers(one)) for one in fields["phases"])
    return _numbers(fields)


def _numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if name in ("deviation", "bound") else value for name, value in fields.items()}


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
