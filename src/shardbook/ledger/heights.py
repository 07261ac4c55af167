"""The highest instants of a step: of each phase, or of each unit and operator in it, and what the books say of them.

`reconcile` looks at one instant, the peak, block by block. This looks at as many as there are places, in one pass.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardbook.accounts import Account
from shardbook.ledger.items import Item
from shardbook.ledger.reconcile import Reader, StepLog, edges_of
from shardbook.ledger.watcher import Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Height:
    """A highest instant: where it was, what the allocator held, and what the books say it was.

    ``operator`` ran then, or had run last; ``nbytes`` were given out last.
    """

    phase: str
    unit: str
    operator: str
    nbytes: int
    allocated: int
    books: Mapping[str, int]


def heights(log: StepLog, apart: Collection[Item] = (), *, finely: bool = False) -> list[Height]:
    """The highest instant of each phase of a step, of those at which something was given out, in the order in which phases begin.

    ``finely``: of each unit in each phase, and there of each operator and number of bytes by which it is reached. Whatever is highest in
    a model of more units that are alike is among these.
    """
    highest: dict[tuple[str, str, str, int], tuple[int, int, tuple[str, str, str, int]]] = {}
    for instant, running, nbytes, operator in _rises(log, sum(item.nbytes for item in apart)):
        place = ("between", "", "", nbytes) if operator is None else (operator.phase, operator.unit, operator.name, nbytes)
        key = place if finely else (place[0], "", "", 0)
        if key not in highest or running > highest[key][0]:
            highest[key] = running, instant, place
    books = _books_at(Reader(log, apart), sorted(instant for _, instant, _ in highest.values()))
    return [
        Height(phase=phase, unit=unit, operator=operator, nbytes=nbytes, allocated=allocated, books=books[instant])
        for allocated, instant, (phase, unit, operator, nbytes) in highest.values()
    ]


def _rises(log: StepLog, apart: int) -> Iterator[tuple[int, int, int, Operator | None]]:
    """(instant, total, bytes given out, operator that began last) of each allocation of a step."""
    running = sum(block.nbytes for block in log.before.values()) + log.unknown - apart
    live = {address: block.nbytes for address, block in log.before.items()}
    following = 0
    for change in log.changes:
        running -= live.pop(change.address, 0)
        if change.nbytes <= 0:
            continue
        live[change.address] = change.nbytes
        running += change.nbytes
        while following < len(log.operators) and log.operators[following].begin <= change.nanoseconds:
            following += 1
        yield change.nanoseconds, running, change.nbytes, log.operators[following - 1] if following else None


def _books_at(reader: Reader, instants: Sequence[int]) -> dict[int, dict[str, int]]:
    """Account to bytes at each instant, all in one pass through the step."""
    edges, following = edges_of(reader), 0
    totals: defaultdict[str, int] = defaultdict(int, {Account.UNACCOUNTED: reader.log.unknown})
    found: dict[int, dict[str, int]] = {}
    for instant in instants:
        while following < len(edges) and edges[following][0] <= instant:
            totals[edges[following][1]] += edges[following][2]
            following += 1
        found[instant] = {str(account): totals[account] for account in Account if totals[account]}
    return found
