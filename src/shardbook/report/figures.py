"""Figures that terminal, page and JSON share, taken from run documents by pure functions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardbook.accounts import Account
from shardbook.document import Exposed, Item, Reconciliation, RunDocument, StepTime
from shardbook.tables.reconciliation import booked, first_and_later, in_order, largest, smallest


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Exposed time of one unit for one cause: on the rank where it is longest, and the mean over all ranks, seconds a step."""

    unit: str
    kind: str
    cause: str
    culprit: int | None
    rank: int
    seconds: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure in two runs, ``None`` where a run does not have it."""

    name: str
    run: float | None
    other: float | None

    @property
    def difference(self) -> float | None:
        """The other run's minus this run's; ``None`` unless both have it."""
        return None if self.run is None or self.other is None else self.other - self.run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs beside each other.

    Args:
        totals: figures of the whole run: peak in bytes, step and exposed time in seconds, bytes sent.
        accounts: bytes at the peak instant, each run's rank with the largest peak; an account that a run has not holds 0.
        exposed: seconds a step by unit, each run's rank that waits longest; a unit that nobody waits for has 0.
        settings: dotted name, value here, value there; only what differs.
    """

    totals: tuple[Change, ...]
    accounts: tuple[Change, ...]
    exposed: tuple[Change, ...]
    settings: tuple[tuple[str, Any, Any], ...]


def waits(document: RunDocument) -> list[Wait]:
    """Exposed time by unit, kind, cause and culprit, longest first."""
    by_key: dict[tuple[str, str, str, int | None], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for one in document.exposed:
        by_key[one.unit, one.kind, one.cause, one.culprit][one.rank] += one.seconds
    num_ranks = max(len(document.times), len({one.rank for one in document.exposed}), 1)
    found: list[Wait] = []
    for (unit, kind, cause, culprit), ranks in by_key.items():
        rank = max(ranks, key=lambda key: (ranks[key], -key))
        mean = sum(ranks.values()) / num_ranks
        found.append(Wait(unit=unit, kind=kind, cause=cause, culprit=culprit, rank=rank, seconds=ranks[rank], mean=mean))
    return sorted(found, key=lambda wait: (-wait.seconds, wait.unit, wait.kind, wait.cause))


def longest_waiting_rank(document: RunDocument) -> int | None:
    """The rank whose exposed time is largest; ``None``: nobody waited, or nobody looked."""
    totals: dict[int, float] = defaultdict(float)
    for one in document.exposed:
        totals[one.rank] += one.seconds
    return max(totals, key=lambda rank: (totals[rank], -rank), default=None)


def exposed_of(document: RunDocument, rank: int | None) -> list[Exposed]:
    """What one rank waited for."""
    return [one for one in document.exposed if one.rank == rank]


def exposed_by_unit(document: RunDocument) -> dict[str, float]:
    """Seconds a step by unit, of the rank that waits longest, longest first."""
    found: dict[str, float] = defaultdict(float)
    for one in exposed_of(document, longest_waiting_rank(document)):
        found[one.unit] += one.seconds
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def largest_items(document: RunDocument, count: int) -> list[Item]:
    """The largest storages at the peak instant of the rank with the largest peak."""
    found = largest(document)
    return sorted(found.items, key=lambda item: -item.nbytes)[:count] if found is not None else []


def peak_books(document: RunDocument) -> Mapping[str, int]:
    """Account to bytes at the peak, of the rank with the largest peak; empty where no books were kept."""
    found = largest(document)
    return found.books if found is not None else document.peak


def peak_nbytes(document: RunDocument) -> int | None:
    """The allocator's largest peak of all ranks in bytes; ``None``: not measured."""
    found = largest(document)
    return found.allocated if found is not None else document.peak_allocated


def highest_rank(document: RunDocument) -> int:
    """The rank whose steps reach the largest peak; 0 where no step was looked at."""
    return max(document.steps, key=lambda step: (step.peak_allocated, -step.rank)).rank if document.steps else 0


def slowest(document: RunDocument) -> StepTime | None:
    """The times of the rank whose step takes longest."""
    return max(document.times, key=lambda time: time.seconds, default=None)


def compare(run: RunDocument, other: RunDocument) -> Comparison:
    """Two runs beside each other, with whatever either has."""
    books = peak_books(run), peak_books(other)
    exposed = exposed_by_unit(run), exposed_by_unit(other)
    units = sorted({*exposed[0], *exposed[1]}, key=lambda unit: (-max(exposed[0].get(unit, 0), exposed[1].get(unit, 0)), unit))
    return Comparison(
        totals=_totals(run, other),
        accounts=tuple(_change(name, books) for name in in_order({*books[0], *books[1]})),
        exposed=tuple(_change(unit, exposed) for unit in units),
        settings=_settings(run, other),
    )


def _change(name: str, tables: tuple[Mapping[str, float], Mapping[str, float]]) -> Change:
    run, other = (table.get(name, 0) if table else None for table in tables)
    return Change(name=name, run=run, other=other)


def _totals(run: RunDocument, other: RunDocument) -> tuple[Change, ...]:
    times = slowest(run), slowest(other)
    seconds, exposed = ([getattr(time, name) if time else None for time in times] for name in ("seconds", "exposed"))
    return (
        Change(name="peak allocated", run=peak_nbytes(run), other=peak_nbytes(other)),
        Change(name="sent by a rank in a step", run=run.sent_nbytes_per_step, other=other.sent_nbytes_per_step),
        Change(name="step, slowest rank", run=seconds[0], other=seconds[1]),
        Change(name="exposed, same rank", run=exposed[0], other=exposed[1]),
    )


def _settings(run: RunDocument, other: RunDocument) -> tuple[tuple[str, Any, Any], ...]:
    here, there = ({name: entry.get("value") for name, entry in document.settings.items()} for document in (run, other))
    return tuple((name, here.get(name), there.get(name)) for name in sorted({*here, *there}) if here.get(name) != there.get(name))


def figures(document: RunDocument) -> dict[str, Any]:
    """The main figures as plain data for JSON; bytes and seconds, as their names say."""
    ends = largest(document), smallest(document)
    return {
        "engine": document.engine,
        "mode": document.mode,
        "num_parameters": document.num_parameters,
        "peak_allocated": peak_nbytes(document),
        "allocator": document.allocator,
        "largest_peak": _peak(ends[0]),
        "smallest_peak": _peak(ends[1]),
        "steps": _steps(document, ends[0]),
        "counters": [asdict(counters) for counters in document.counters],
        "items": [asdict(item) for item in largest_items(document, 10)],
        "times": [asdict(time) for time in document.times],
        "exposed": [asdict(wait) for wait in waits(document)],
        "shortage": None if document.shortage is None else asdict(document.shortage),
        "notes": list(document.notes),
    }


def comparison_figures(found: Comparison) -> dict[str, Any]:
    """The comparison as plain data for JSON; differences are the other run's minus this run's."""

    def rows(changes: Sequence[Change]) -> dict[str, Any]:
        return {change.name: {"run": change.run, "other": change.other, "difference": change.difference} for change in changes}

    return {
        "totals": rows(found.totals),
        "accounts": rows(found.accounts),
        "exposed": rows(found.exposed),
        "settings": {name: {"run": here, "other": there} for name, here, there in found.settings},
    }


def _peak(found: Reconciliation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    unaccounted = found.books.get(Account.UNACCOUNTED, 0)
    return {
        **{name: getattr(found, name) for name in ("rank", "step", "phase", "unit", "operator", "allocated", "base", "overstated")},
        "books": dict(found.books),
        "closed_form": dict(found.closed_form),
        "booked": booked(found.books),
        "unaccounted": unaccounted,
        "unaccounted_share": unaccounted / found.allocated if found.allocated else 0.0,
    }


def _steps(document: RunDocument, found: Reconciliation | None) -> dict[str, Any] | None:
    """First step and largest later one, of the rank with the largest peak."""
    ends = first_and_later(document, found.rank if found is not None else highest_rank(document))
    return None if ends is None else {"first": asdict(ends[0]), "later": None if ends[1] is None else asdict(ends[1])}
