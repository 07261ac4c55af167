"""Forecasts beside what people measured and published: errors by counter, runs that did not fit, runs that did.

    python -m benchmarks.published [measured.csv] [feasible.csv]

How a row becomes a question says ``published_rows.py``. Allocated and active bytes are compared with ``peak_allocated``, reserved bytes
with the middle of ``peak_reserved``; the three are never mixed. Rows that a forecast is scored by carry a ``score`` and 4 GiB or more.
"""

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import shardbook as sb
from benchmarks import published_rows
from benchmarks.evidence_engine import Section, prose
from benchmarks.published_mpt import mpt
from benchmarks.published_rows import Asked, NotModelledError, Row
from shardbook.errors import ConfigError
from shardbook.facts.hardware import device
from shardbook.forecasting.result import Forecast, Verdict

GIB = 2**30
DATA = Path("../shared/data")
LEAST_GIB = 4.0
"""Below it interpreter, libraries and allocator rounding are no small part of a measurement."""

WITHIN = 0.15
SOME_DEVICE = "a100-80gb"
"""Where a row states no device: CUDA's kernels, and the smaller workspaces."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row: what was measured, what was forecast; ``reason`` where it is not modelled."""

    row: Row
    measured_gib: float
    counter: str = ""
    forecast_gib: float = 0.0
    phase: str = ""
    reason: str = ""

    @property
    def error(self) -> float:
        """Signed, as a share of what was measured."""
        return self.forecast_gib / self.measured_gib - 1

    @property
    def is_scored(self) -> bool:
        """Whether it is one of the rows that a forecast is judged by."""
        return bool(self.row["score"]) and self.measured_gib >= LEAST_GIB


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run that is known to have fitted, or not: what the forecast says."""

    row: Row
    verdict: Verdict | None
    needed_gib: tuple[float, float] = (0.0, 0.0)
    reason: str = ""


def read(path: Path) -> list[Row]:
    """Rows of a table, "(cumulative)" ones with what they inherit."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return published_rows.unrolled(rows) if rows and "notes" in rows[0] else rows


def compare(rows: Iterable[Row]) -> list[Compared]:
    """Every measured row, in their order."""
    return [_compared(row) for row in rows if row["kind"] == "measured" and row["value_gib"]]


def _compared(row: Row) -> Compared:
    measured = float(row["value_gib"])
    try:
        counter = published_rows.counter(row)
        call = published_rows.asked(row).call()
        told = sb.forecast(**{**call, "device": call["device"] or SOME_DEVICE})
        forecast = _of_counter(told, counter)
    except NotModelledError as reason:
        return Compared(row=row, measured_gib=measured, reason=str(reason))
    except ConfigError as error:
        return Compared(row=row, measured_gib=measured, reason=f"refused: {error}")
    return Compared(row=row, measured_gib=measured, counter=counter, forecast_gib=forecast / GIB, phase=told.peak_phase)


def _of_counter(told: Forecast, counter: str) -> float:
    if not told.is_peak:
        raise NotModelledError("; ".join(told.not_modelled))
    if counter != "reserved":
        return told.peak_allocated
    if told.peak_reserved is None:
        raise NotModelledError("reserved memory of an unknown device")
    return sum(told.peak_reserved) / 2


def verdicts(rows: Iterable[Row], *, feasible: bool) -> list[Ran]:
    """What forecasts say of runs: those of a table of runs that fitted, or the ``oom`` rows of one of measurements."""
    if feasible:
        return [_ran(row, mpt) for row in rows]
    return [_ran(row, published_rows.asked) for row in rows if row["kind"] == "oom"]


def _ran(row: Row, question: published_rows.Question) -> Ran:
    try:
        asked = question(row)
        if asked.device is None:
            raise NotModelledError("the device is unknown")
        told = sb.forecast(**asked.call())
    except NotModelledError as reason:
        return Ran(row=row, verdict=None, reason=str(reason))
    except ConfigError as error:
        return Ran(row=row, verdict=None, reason=f"refused: {error}")
    low, high = told.needed
    return Ran(row=row, verdict=told.fits(device(asked.device).memory), needed_gib=(low / GIB, high / GIB), reason=_batch(asked))


def _batch(asked: Asked) -> str:
    return f"{asked.ranks} ranks, micro-batch {asked.micro_batch}, sequence {asked.sequence}, {asked.config.recompute.policy} recomputation"


# What is printed -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of all rows of one counter, or of all that are scored."""

    rows: int
    modelled: int
    median_error: float
    within: float

    @classmethod
    def of(cls, compared: Sequence[Compared]) -> "Score":
        """The median of absolute errors and the share within 15%, of the rows that are modelled."""
        errors = [abs(each.error) for each in compared if not each.reason]
        within = sum(error <= WITHIN for error in errors) / len(errors) if errors else 0.0
        return cls(rows=len(compared), modelled=len(errors), median_error=median(errors) if errors else 0.0, within=within)

    def __str__(self) -> str:
        return (
            f"{self.modelled} of {self.rows} modelled, median error {self.median_error:.1%}, {self.within:.0%} within {WITHIN:.0%}"
            if self.modelled
            else f"0 of {self.rows} modelled"
        )


def table(compared: Sequence[Compared]) -> Iterator[str]:
    """Markdown, a line for each row."""
    yield "| id | source | model | counter | measured GiB | forecast GiB | error | phase |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in compared:
        row = each.row
        found = f"{each.forecast_gib:.2f} | {each.error:+.1%} | {each.phase}" if not each.reason else f"| | not modelled: {each.reason}"
        yield f"| {row['id']} | {row['source']} | {row['model']} | {each.counter} | {each.measured_gib:.2f} | {found} |"


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Everything about a table of measurements."""
    compared = compare(rows)
    scored = [each for each in compared if each.is_scored]
    yield f"## Rows with a score and {LEAST_GIB:g} GiB or more\n"
    yield from table(scored)
    yield f"\nTogether: {Score.of(scored)}."
    for counter in ("allocated", "active", "reserved"):
        yield f"{counter}: {Score.of([each for each in scored if each.row['score'] == counter])}."
    others = [each for each in compared if not each.is_scored and not each.reason]
    yield f"\n## Other rows that are modelled: {Score.of(others)}\n"
    yield from table(others)
    yield "\n## Rows that are not modelled\n"
    reasons = Counter(each.reason for each in compared if each.reason)
    yield from (f"* {count}: {reason}" for reason, count in reasons.most_common())
    yield "\n## Runs that did not fit\n"
    yield from _told(verdicts(rows, feasible=False), wrong="fits")


def _told(runs: Sequence[Ran], *, wrong: Verdict) -> Iterator[str]:
    said = Counter(each.verdict or "not modelled" for each in runs)
    yield f"{len(runs)} runs: " + ", ".join(f"{count} {verdict}" for verdict, count in said.most_common()) + "."
    for each in runs:
        if each.verdict in (wrong, "too close to call"):
            low, high = each.needed_gib
            mark = "WRONG" if each.verdict == wrong else "too close"
            name = each.row.get("id") or each.row["model"]
            yield f"* {mark}: {name} on {each.row['gpu']}: {low:.1f} to {high:.1f} GiB needed; {each.reason}"


# A section of the evidence ---------------------------------------------------------------------------------------------

MODELLED, MEDIAN, NINE_IN_TEN, MOST_CLOSE = 0.8, 0.06, 0.9, 0.1
"""What is promised: share of scored rows modelled, median absolute error, share within 15%, share of feasible runs too close to call."""


def section(*, quick: bool = False, data: Path = DATA) -> Section:
    """Measured, too large, and feasible runs beside their forecasts. ``quick`` leaves out the feasible ones."""
    found = Section(title="Beside published measurements")
    if not (data / "measured.csv").exists():
        found.text += prose(
            f"*Not run*: {data} holds no measured.csv; `python -m benchmarks.published measured.csv feasible.csv` takes tables."
        )
        return found
    rows = read(data / "measured.csv")
    compared = compare(rows)
    scored = [each for each in compared if each.is_scored]
    found.text += prose(*_INTRODUCTION)
    found.text += [*table(scored), ""]
    _promise_scores(found, scored)
    others = [each for each in compared if not each.is_scored and not each.reason]
    found.text += prose(f"Smaller rows, and rows that are not fit for scoring, as far as they are modelled: {Score.of(others)}.")
    found.text += [*table(others), ""]
    found.text += prose("Measured rows that are not modelled, by reason:")
    reasons = Counter(each.reason for each in compared if each.reason)
    found.text += [*(f"* {count}: {reason}" for reason, count in reasons.most_common()), ""]
    _promise_verdicts(found, verdicts(rows, feasible=False), "did not fit", wrong="fits")
    if not quick and (data / "feasible.csv").exists():
        _promise_verdicts(found, verdicts(read(data / "feasible.csv"), feasible=True), "ran to the end", wrong="does not fit")
    return found


_INTRODUCTION = (
    "`python -m benchmarks.published`. Each row becomes a question by rules on its columns (`benchmarks/published_rows.py`); no constant",
    "is fitted to a row or a source. Allocated and active bytes are compared with `peak_allocated`, reserved bytes with the middle of",
    "`peak_reserved`.",
)


def _promise_scores(found: Section, scored: Sequence[Compared]) -> None:
    missing = [each for each in scored if each.reason]
    found.text += [*(f"* not modelled: {each.row['id']}, {each.reason}" for each in missing), ""] if missing else []
    whole = Score.of(scored)
    share = whole.modelled / whole.rows if whole.rows else 0.0
    found.promise(
        f"{whole.modelled} of {whole.rows} scored rows of {LEAST_GIB:g} GiB and more are modelled, at least {MODELLED:.0%}",
        holds=share >= MODELLED,
    )
    for counter in ("allocated", "active", "reserved"):
        score = Score.of([each for each in scored if each.row["score"] == counter])
        if score.modelled:
            said = f"{counter}: {score}; at most {MEDIAN:.0%} and at least {NINE_IN_TEN:.0%}"
            found.promise(said, holds=score.median_error <= MEDIAN and score.within >= NINE_IN_TEN)


def _promise_verdicts(found: Section, runs: Sequence[Ran], what: str, *, wrong: Verdict) -> None:
    found.text += [f"Runs that {what}:", "", *_told(runs, wrong=wrong), ""]
    said = Counter(each.verdict for each in runs)
    modelled = sum(each.verdict is not None for each in runs)
    found.promise(f'{modelled} modelled runs that {what}: {said[wrong]} forecast as "{wrong}"', holds=said[wrong] == 0)
    if wrong == "does not fit":
        close = said["too close to call"]
        found.promise(
            f"{close} of {len(runs)} runs that {what} are too close to call, at most {MOST_CLOSE:.0%}",
            holds=close <= MOST_CLOSE * len(runs),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=DATA / "measured.csv", help="table of measurements")
    parser.add_argument("feasible", nargs="?", type=Path, default=DATA / "feasible.csv", help="table of runs that fitted")
    options = parser.parse_args()
    missing = [str(path) for path in (options.measured, options.feasible) if not path.exists()]
    if missing:
        print(f"not run: no {' and no '.join(missing)}; give the paths of tables with these columns")
        return
    for line in report(read(options.measured)):
        print(line)
    print("\n## Runs that fitted\n")
    for line in _told(verdicts(read(options.feasible), feasible=True), wrong="does not fit"):
        print(line)


if __name__ == "__main__":
    main()
