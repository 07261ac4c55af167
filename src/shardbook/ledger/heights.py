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

    ``operator`` ran then (``inside``), or had run last; ``nbytes`` were given out last. ``allocated`` and ``books`` are the device's.
    """

    phase: str
    unit: str
    operator: str
    inside: bool
    nbytes: int
    allocated: int
    books: Mapping[str, int]


def heights(log: StepLog, apart: Collection[Item] = (), *, finely: bool = False) -> list[Height]:
    """The highest instant of each phase of a step, of those at which something was given out, in the order in which phases begin.

    ``finely``: of each unit in each phase, and there of each operator and number of bytes by which it is reached. Whatever is highest in
    a model of more units that are alike is among these.
    """
    highest: dict[tuple[str, str, str, int], _Rise] = {}
    reader = Reader(log, apart)
    for rise in _rises(log, sum(item.nbytes for item in apart), {(block.address, block.allocated) for block in reader.beside}):
        phase, unit, operator = rise.place
        key = (phase, unit, operator, rise.nbytes) if finely else (phase, "", "", 0)
        if key not in highest or rise.total > highest[key].total:
            highest[key] = rise
    books = _books_at(reader, sorted(rise.instant for rise in highest.values()))
    return [rise.as_height(books[rise.instant]) for rise in highest.values()]


@dataclass(frozen=True, slots=True)
class _Rise:
    """An allocation: when, what was held after it, how much it was, and the operator that had begun last."""

    instant: int
    total: int
    nbytes: int
    operator: Operator | None

    @property
    def place(self) -> tuple[str, str, str]:
        """(phase, unit, operator)."""
        return ("between", "", "") if self.operator is None else (self.operator.phase, self.operator.unit, self.operator.name)

    def as_height(self, books: Mapping[str, int]) -> Height:
        phase, unit, operator = self.place
        inside = self.operator is not None and self.instant <= self.operator.end
        return Height(
            phase=phase, unit=unit, operator=operator, inside=inside, nbytes=self.nbytes, allocated=self.total, books=books
        )  # fmt: skip


def _rises(log: StepLog, apart: int, beside: Collection[tuple[int, int]]) -> Iterator[_Rise]:
    """Each allocation of a step; ``apart``: bytes that don't count; ``beside``: blocks that are not the device's, by address and when."""
    live = {address: block.nbytes for address, block in log.before.items() if (address, block.allocated) not in beside}
    running = sum(live.values()) + log.unknown - apart
    following = 0
    for change in log.changes:
        running -= live.pop(change.address, 0)
        if change.nbytes <= 0 or (change.address, change.nanoseconds) in beside:
            continue
        live[change.address] = change.nbytes
        running += change.nbytes
        while following < len(log.operators) and log.operators[following].begin <= change.nanoseconds:
            following += 1
        yield _Rise(change.nanoseconds, running, change.nbytes, log.operators[following - 1] if following else None)


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
