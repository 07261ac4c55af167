"""Books beside allocator, account by account, at the instant when a rank's allocator held most.

What the books say, what the allocator says and what the formula says are three witnesses: none is corrected by another, and
whatever is left between books and allocator stands in a line of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardbook.accounts import Account
from shardbook.document import Reconciliation, RunDocument, StepMemory
from shardbook.tables.sizes import change, device_size, exact_size, percent, place, size

BASE = "bytes that are older than the measurement, found by walking the live tensors when it started; part of allocated"
"""What ``base`` is, in words that end no sentence."""

NO_BOOKS = "no books were kept, so there is nothing to hold against the allocator; measure in full mode for them"


@dataclass(frozen=True, kw_only=True)
class AccountRow:
    """One account, bytes: by the books and by formula, ``None`` where that witness says nothing of it."""

    account: str
    books: int | None
    closed_form: int | None


def in_order(accounts: Iterable[str]) -> list[str]:
    """The accounts in the order of the enumeration, which is that of every table, stack and legend; unknown ones last.

    >>> in_order({"COMM", "PARAM", "OTHER"})
    ['PARAM', 'COMM', 'OTHER']
    """
    known = [str(account) for account in Account]
    return sorted(accounts, key=lambda name: (known.index(name) if name in known else len(known), name))


def account_rows(found: Reconciliation) -> list[AccountRow]:
    """Every account that books or formula name, without ``UNACCOUNTED``, which is no book's."""
    names = in_order({*found.books, *found.closed_form} - {Account.UNACCOUNTED})
    return [AccountRow(account=name, books=found.books.get(name), closed_form=found.closed_form.get(name)) for name in names]


def booked(books: Mapping[str, int]) -> int:
    """Bytes that an account explains."""
    return sum(nbytes for account, nbytes in books.items() if account != Account.UNACCOUNTED)


def largest(document: RunDocument) -> Reconciliation | None:
    """Of the rank with the largest peak, the lowest such rank; ``None``: no books were kept."""
    return max(document.reconciliations, key=lambda found: (found.allocated, -found.rank), default=None)


def smallest(document: RunDocument) -> Reconciliation | None:
    """Of the rank with the smallest peak, the lowest such rank; ``None``: no books were kept."""
    return min(document.reconciliations, key=lambda found: (found.allocated, found.rank), default=None)


def first_and_later(document: RunDocument, rank: int) -> tuple[StepMemory, StepMemory | None] | None:
    """The first step of a rank that was looked at, and of the later ones that with the largest peak."""
    steps: Sequence[StepMemory] = sorted((step for step in document.steps if step.rank == rank), key=lambda step: step.step)
    if not steps:
        return None
    return steps[0], max(steps[1:], key=lambda step: step.peak_allocated, default=None)


def reconciliation_table(document: RunDocument) -> RenderableType:
    """The table of the rank with the largest peak, and beneath it: which ranks, and the first step against later ones."""
    found = largest(document)
    if found is None:
        return _without_books(document)
    lines = [f"base: {BASE}", *_rank_lines(document), *_step_lines(document, found.rank)]
    when = f"step {found.step}" if found.step else "outside of any step"
    title = f"books and allocator at the peak: rank {found.rank}, {when}, {place(found.phase, found.unit, found.operator)}"
    return Group(Text(title, style="italic"), _table(found), *(Text(line) for line in lines))


def _table(found: Reconciliation) -> Table:
    table = Table()
    table.add_column("account", no_wrap=True)
    for name in ("books", "closed form", "books - form", "share"):
        table.add_column(name, justify="right")
    for row in account_rows(found):
        table.add_row(escape(row.account), *_cells(row, found.allocated))
    table.add_section()
    for name, nbytes in totals(found):
        table.add_row(name, size(nbytes), "", "", percent(nbytes, found.allocated))
    table.add_section()
    table.add_row(*_unaccounted(found))
    return table


def totals(found: Reconciliation) -> list[tuple[str, int]]:
    """The sums beneath the accounts, by their witness; what would not add up is a line too, and never silently spread.

    The accounts hold what the allocator held and a book explains. What a book says of memory that the allocator did not hold is
    in no account: it stands in a line of its own.
    """
    unaccounted = found.books.get(Account.UNACCOUNTED, 0)
    rows = [("total by books", booked(found.books)), ("allocator", found.allocated), ("  of it base", found.base)]
    if found.overstated:
        rows.append(("overstated", found.overstated))
    if gap := found.allocated - booked(found.books) - unaccounted:
        rows.append(("does not add up", gap))
    return rows


def _cells(row: AccountRow, allocated: int) -> tuple[str, str, str, str]:
    both = row.books is not None and row.closed_form is not None
    return (
        "-" if row.books is None else size(row.books),
        "" if row.closed_form is None else size(row.closed_form),
        change((row.books or 0) - (row.closed_form or 0)) if both else "",
        "" if row.books is None else percent(row.books, allocated),
    )


def _unaccounted(found: Reconciliation) -> tuple[str, str, str, str, str]:
    nbytes = found.books.get(Account.UNACCOUNTED, 0)
    return Account.UNACCOUNTED, f"{nbytes:,} bytes", "", "", percent(nbytes, found.allocated)


def _rank_lines(document: RunDocument) -> list[str]:
    high, low = largest(document), smallest(document)
    if high is None or low is None:
        return []
    lines = [_peak_line("largest", high)]
    if low.allocated < high.allocated:
        lines.append(_peak_line("smallest", low))
    elif (num_ranks := len(document.reconciliations)) > 1:
        lines.append(f"all {num_ranks} ranks peak at as many bytes")
    return lines


def _peak_line(name: str, found: Reconciliation) -> str:
    return f"{name} peak: rank {found.rank}, {device_size(found.allocated)}, {place(found.phase, found.unit, found.operator)}"


def _step_lines(document: RunDocument, rank: int) -> list[str]:
    found = first_and_later(document, rank)
    if found is None:
        return []
    first, later = found
    lines = [f"first step of rank {rank} (step {first.step}): {size(first.peak_allocated)} in {place(first.phase, first.unit)}"]
    if later is not None:
        lines.append(
            f"later steps, at most (step {later.step}): {size(later.peak_allocated)} in {place(later.phase, later.unit)},"
            f" {change(later.peak_allocated - first.peak_allocated)} against the first"
        )
    return lines


def _without_books(document: RunDocument) -> RenderableType:
    """What there is to say of the peak without a reconciliation: the accounts if the document has any, and the allocator's word."""
    lines = [NO_BOOKS if not document.peak else "the allocator was not held against the books of this run"]
    if document.peak_allocated is not None:
        lines.append(f"allocator's peak, the largest of all ranks: {exact_size(document.peak_allocated)} ({document.allocator})")
    if document.steps:
        lines += _step_lines(document, max(document.steps, key=lambda step: step.peak_allocated).rank)
    if not document.peak:
        return Group(*(Text(line) for line in lines))
    table = Table(title=escape(f"books at the peak, in {place(document.peak_phase, '')}"), title_justify="left")
    table.add_column("account")
    table.add_column("books", justify="right")
    for name in in_order(document.peak):
        table.add_row(escape(name), size(document.peak[name]))
    return Group(table, *(Text(line) for line in lines))
