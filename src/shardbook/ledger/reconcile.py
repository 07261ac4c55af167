"""Books beside allocator: which block is which item, at the instant when the allocator held most.

A block is what the allocator says it gave out, an item what somebody saw. They are one if they lie at the same address at the same
time. A block without an item is UNACCOUNTED; an item without a block is overstated. A block that came and went inside one operator
without being its result is that operator's temporary: the allocator saw it, and the operator is known, so it is WORKSPACE.

On a CPU one allocator gives out what is the device's and what is the host's, told apart by the items. The peak is the device's; what
the host's tier had of the same memory at that instant stands beside it, so that both together are what the allocator held.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardbook import document
from shardbook.accounts import Account
from shardbook.ledger.allocator import Change
from shardbook.ledger.items import Item
from shardbook.ledger.watcher import Operator

_FOREVER = 2**63
_NUM_ITEMS = 40


@dataclass(slots=True, eq=False)
class Block:
    """Memory that the allocator gave out; ``freed`` is None while it lives. ``items``: what was seen there meanwhile, in order.

    ``is_away``: of another tier than the device, in the same allocator.
    """

    address: int
    nbytes: int
    allocated: int
    freed: int | None = None
    items: Sequence[Item] = ()
    is_away: bool = False

    def lies_in(self, items: Sequence[Item]) -> None:
        """Take those of the items at its address that lived while it did."""
        end = self.freed or _FOREVER
        self.items = [item for item in items if item.born < end and (item.died is None or item.died > self.allocated)]
        self.is_away = any(item.is_away for item in self.items)

    def item_at(self, instant: int) -> Item | None:
        """What it is at an instant: the item that lives then, else one that is about to be seen (an operator still runs)."""
        coming = None
        for item in self.items:
            if item.born > instant:
                coming = coming or item
            elif item.died is None or item.died > instant:
                return item
        return coming if coming is not None and coming is self.items[0] else None


@dataclass(slots=True)
class StepLog:
    """All that was recorded in one step, unread: instants are of ``time.perf_counter_ns``."""

    number: int
    begin: int
    end: int
    before: Mapping[int, Block]
    changes: Sequence[Change]
    items: Sequence[Item]
    operators: Sequence[Operator]
    unknown: int  # live before the measurement, by the allocator's own count, and reachable by nobody
    peak: "Peak"


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest total of the device's tier, and when; ``beside`` it the allocator held so many bytes of other tiers."""

    nbytes: int
    instant: int
    beside: int = 0


class Blocks:
    """The allocator's blocks that live now, carried from step to step."""

    def __init__(self, base: Mapping[int, Item], unknown: int) -> None:
        self.live = {address: Block(address, item.nbytes, 0) for address, item in base.items()}
        self.unknown = unknown

    def follow(self, changes: Sequence[Change], end: int, items: Sequence[Item]) -> tuple[list[Change], Peak]:
        """Takes the changes of a step; returns them with the frees that nobody recorded, and the peak. ``items``: of the step."""
        deaths = [_Death(item) for item in items if item.memory_gone and item.died is not None and item.died <= end]
        merged = sorted([*changes, *deaths], key=lambda entry: entry.nanoseconds)
        self._back(items, changes)
        before = list(self.live.values())
        told: list[tuple[Change, Block | None, Block | None]] = []
        for entry in merged:
            change = self._unrecorded(entry) if isinstance(entry, _Death) else entry
            if change is not None:
                told.append((change, *self._apply(change)))
        if away := [item for item in items if item.is_away]:
            _tell_apart([*before, *(new for _, _, new in told if new is not None)], away)
        return [change for change, _, _ in told], self._peak(before, told, merged[0].nanoseconds if merged else end)

    def _peak(self, before: Sequence[Block], told: Sequence[tuple[Change, Block | None, Block | None]], begin: int) -> Peak:
        """The device's highest total over the changes, each with the block that goes and the one that comes."""
        beside = sum(block.nbytes for block in before if block.is_away)
        running = sum(block.nbytes for block in before) - beside + self.unknown
        peak = Peak(running, begin, beside)
        for change, old, new in told:
            for block, sign in ((old, -1), (new, 1)):
                if block is not None and block.is_away:
                    beside += sign * block.nbytes
                elif block is not None:
                    running += sign * block.nbytes
            if running > peak.nbytes:
                peak = Peak(running, change.nanoseconds, beside)
        return peak

    def _back(self, items: Sequence[Item], changes: Sequence[Change]) -> None:
        """Note which items the allocator has had a block for: those of numpy, of another process or another thread never have one."""
        spans = {address: [[block.allocated, _FOREVER]] for address, block in self.live.items()}
        for change in changes:
            if change.nbytes > 0:
                spans.setdefault(change.address, []).append([change.nanoseconds, _FOREVER])
            elif change.address in spans:
                spans[change.address][-1][1] = change.nanoseconds
        for item in items:
            if not item.is_backed:
                end = item.died or _FOREVER
                item.is_backed = any(begin < end and item.born < freed for begin, freed in spans.get(item.address, ()))

    def _unrecorded(self, death: "_Death") -> Change | None:
        """The allocator is silent about blocks older than its records, and on a CPU about frees in other threads."""
        item = death.item
        block = self.live.get(item.address)
        if block is None or block.allocated > item.born:
            return None  # recorded already
        return Change(death.nanoseconds, item.address, -block.nbytes)

    def _apply(self, change: Change) -> tuple[Block | None, Block | None]:
        """The block that goes, and the one that comes."""
        old = self.live.pop(change.address, None)
        if old is not None:
            old.freed = change.nanoseconds
        if change.nbytes < 0:
            return old, None
        new = self.live[change.address] = Block(change.address, change.nbytes, change.nanoseconds)
        return old, new


class _Death:
    """A storage died: with it, its block."""

    def __init__(self, item: Item) -> None:
        self.item, self.nanoseconds = item, item.died or 0


def blocks_of(log: StepLog) -> list[Block]:
    """Every block that lived in the step, with its items."""
    live = {address: Block(block.address, block.nbytes, block.allocated) for address, block in log.before.items()}
    found = list(live.values())
    for change in log.changes:
        old = live.pop(change.address, None)
        if old is not None:
            old.freed = change.nanoseconds
        if change.nbytes > 0:
            block = live[change.address] = Block(change.address, change.nbytes, change.nanoseconds)
            found.append(block)
    _tell_apart(found, log.items)
    return found


def _tell_apart(blocks: Sequence[Block], items: Sequence[Item]) -> None:
    """Give each block its items."""
    by_address: defaultdict[int, list[Item]] = defaultdict(list)
    for item in items:
        by_address[item.address].append(item)
    for block in blocks:
        block.lies_in(by_address[block.address])


@dataclass(slots=True)
class Held:
    """What one block is at one instant."""

    account: Account
    nbytes: int
    name: str
    item: Item | None = None


@dataclass(slots=True)
class Reader:
    """Reads one step's log: which operator ran when, and what each block was; ``apart``: items that are left out."""

    log: StepLog
    apart: Collection[Item] = ()
    blocks: list[Block] = field(default_factory=list[Block])
    beside: list[Block] = field(default_factory=list[Block])
    _begins: list[int] = field(default_factory=list[int])
    _staging: list[Operator] = field(default_factory=list[Operator])

    def __post_init__(self) -> None:
        self.apart = set(self.apart)
        found = [block for block in blocks_of(self.log) if not self.apart.intersection(block.items)]
        self.blocks = [block for block in found if not block.is_away]
        self.beside = [block for block in found if block.is_away]
        self._begins = [operator.begin for operator in self.log.operators]
        self._staging = [operator for operator in self.log.operators if operator.staged]

    def operator_at(self, instant: int) -> Operator | None:
        """The operator that ran then."""
        last = self.last_operator(instant)
        return last if last is not None and instant <= last.end else None

    def last_operator(self, instant: int) -> Operator | None:
        """The one that had begun last."""
        index = bisect_right(self._begins, instant) - 1
        return self.log.operators[index] if index >= 0 else None

    def held(self, block: Block, instant: int) -> Held:
        """What a block is at an instant in its life; several accounts never share one."""
        item = block.item_at(instant)
        if item is not None:
            return Held(item.account, min(item.nbytes, block.nbytes), item.name, item)
        if not block.items:
            if (staging := self._staging_of(block)) is not None:
                return Held(Account.COMM, block.nbytes, f"staging of {staging.name}")
            operator = self.operator_at(block.allocated)
            if operator is not None and block.freed is not None and block.freed <= operator.end:
                return Held(Account.COMM if operator.staged else Account.WORKSPACE, block.nbytes, f"inside {operator.name}")
        return Held(Account.UNACCOUNTED, block.nbytes, block.items[-1].name if block.items else "")

    def _staging_of(self, block: Block) -> Operator | None:
        """A collective that was under way and whose transport, as is known, holds a copy of that length meanwhile."""
        last = bisect_right(self._staging, block.allocated, key=lambda operator: operator.begin)
        return next((operator for operator in self._staging[max(0, last - 4) : last] if operator.staged == block.nbytes), None)

    def at(self, instant: int) -> list[tuple[Block, Held]]:
        """Every block that lives at an instant, and what it is."""
        return [
            (block, self.held(block, instant))
            for block in self.blocks
            if block.allocated <= instant and (block.freed is None or block.freed > instant)
        ]

    def overstated(self, instant: int) -> int:
        """Bytes of items that live at an instant in no block, and had one earlier."""
        blocks = [*self.blocks, *self.beside]
        matched = {item for block in blocks if block.allocated <= instant < (block.freed or _FOREVER) for item in block.items}
        live = {item for item in self.log.items if item.is_backed and item.born <= instant < (item.died or _FOREVER)}
        return sum(item.nbytes for item in live - matched - set(self.apart))

    def host(self, instant: int) -> dict[str, int]:
        """Account to bytes of items on the host at an instant."""
        found: defaultdict[str, int] = defaultdict(int)
        for item in self.log.items:
            if item.is_away and item.born <= instant < (item.died or _FOREVER):
                found[item.account] += item.nbytes
        return {str(account): found[account] for account in Account if found[account]}


def reconcile(log: StepLog, rank: int, base: int, apart: Collection[Item] = ()) -> document.Reconciliation:
    """The books beside the allocator at the peak of a step. ``apart``: items of somebody else, that live throughout."""
    reader, instant = Reader(log, apart), log.peak.instant
    books: defaultdict[str, int] = defaultdict(int)
    items: list[document.Item] = []
    for block, held in reader.at(instant):
        books[held.account] += held.nbytes
        books[Account.UNACCOUNTED] += block.nbytes - held.nbytes
        items.append(_item(block, held, reader))
    books[Account.UNACCOUNTED] += log.unknown
    place = reader.last_operator(instant)
    running = reader.operator_at(instant)
    return document.Reconciliation(
        rank=rank,
        step=log.number,
        phase="between" if place is None else place.phase,
        unit="" if place is None else place.unit,
        operator="" if running is None else running.name,
        allocated=log.peak.nbytes - sum(item.nbytes for item in apart),
        base=base,
        books={str(account): books[account] for account in Account if books[account] or account is Account.UNACCOUNTED},
        overstated=reader.overstated(instant),
        host=reader.host(instant),
        beside=log.peak.beside,
        items=tuple(sorted(items, key=lambda item: item.nbytes, reverse=True)[:_NUM_ITEMS]),
    )


def place_of_peak(log: StepLog) -> tuple[str, str]:
    """(phase, unit) in which the peak of a step was."""
    index = bisect_right(log.operators, log.peak.instant, key=lambda operator: operator.begin) - 1
    return ("between", "") if index < 0 else (log.operators[index].phase, log.operators[index].unit)


def _item(block: Block, held: Held, reader: Reader) -> document.Item:
    item = held.item
    maker = reader.last_operator(block.allocated)
    made = ("", "") if maker is None else (maker.phase, maker.unit)
    return document.Item(
        account=str(held.account),
        name=held.name,
        unit=made[1] if item is None else item.unit,
        shape=() if item is None else item.shape,
        dtype="" if item is None else item.dtype,
        nbytes=block.nbytes,
        phase=made[0] if item is None else item.phase,
        site="" if item is None else item.site,
    )


def curve(log: StepLog, rank: int, apart: Collection[Item] = (), num_points: int = 400) -> document.Curve:
    """Memory over the step, account by account; of each stretch of time, the instant with most."""
    reader = Reader(log, apart)
    totals: defaultdict[str, int] = defaultdict(int)
    points: dict[int, tuple[float, int, dict[str, int]]] = {}
    span = max(1, log.end - log.begin)
    for instant, account, nbytes in edges_of(reader):
        totals[account] += nbytes
        allocated = sum(totals.values()) + log.unknown
        slot = min(num_points - 1, max(0, (instant - log.begin) * num_points // span))
        if instant >= log.begin and (slot not in points or allocated > points[slot][1]):
            points[slot] = (max(0, instant - log.begin) / 1e9, allocated, dict(totals))
    chosen = [points[slot] for slot in sorted(points)]
    return document.Curve(
        rank=rank,
        step=log.number,
        seconds=tuple(seconds for seconds, _, _ in chosen),
        allocated=tuple(allocated for _, allocated, _ in chosen),
        accounts={account: series for account in Account if any(series := tuple(held.get(account, 0) for _, _, held in chosen))},
        spans=tuple(_spans(log)),
    )


def edges_of(reader: Reader) -> list[tuple[int, str, int]]:
    """(instant, account, bytes more) of every change of a step, in order; what its blocks hold at the beginning comes first."""
    return sorted((edge for block in reader.blocks for edge in _edges(reader, block)), key=lambda edge: edge[0])


def _edges(reader: Reader, block: Block) -> Iterator[tuple[int, str, int]]:
    """When a block begins and ends to be what it is. What is longer than its item is in no account for the rest."""
    begin = max(block.allocated, reader.log.begin)
    end = block.freed if block.freed is not None else _FOREVER
    turns = sorted({begin, *(item.born for item in block.items[1:] if begin < item.born < end)})
    for start, stop in zip(turns, [*turns[1:], end], strict=True):
        held = reader.held(block, start)
        for account, nbytes in ((held.account, held.nbytes), (Account.UNACCOUNTED, block.nbytes - held.nbytes)):
            if nbytes:
                yield start, str(account), nbytes
                if stop is not _FOREVER:
                    yield stop, str(account), -nbytes


def _spans(log: StepLog) -> Iterator[tuple[str, str, float, float]]:
    """Stretches of time in one phase of one unit, by the operators that ran."""
    current: list[float | str] = []
    for operator in log.operators:
        begin = max(0.0, (operator.begin - log.begin) / 1e9)
        end = max(begin, (min(operator.end, log.end) - log.begin) / 1e9)
        if current and current[:2] == [operator.phase, operator.unit]:
            current[3] = end
            continue
        if current:
            yield str(current[0]), str(current[1]), float(current[2]), float(current[3])
        current = [operator.phase, operator.unit, begin, end]
    if current:
        yield str(current[0]), str(current[1]), float(current[2]), float(current[3])
