"""The page's sections about memory."""

from collections.abc import Mapping, Sequence

from shardbook.accounts import Account
from shardbook.document import Curve, Reconciliation, RunDocument
from shardbook.report import charts, markup, tiers, words
from shardbook.report.colours import NEUTRAL, account_colour
from shardbook.report.console import change_cells, shape_words
from shardbook.report.figures import Change, highest_rank, largest_items
from shardbook.tables.reconciliation import (
    BASE,
    NO_BOOKS,
    account_rows,
    booked,
    first_and_later,
    in_order,
    largest,
    smallest,
    totals,
)
from shardbook.tables.sizes import change, device_size, exact_size, percent, place, size

NUM_ITEMS = 15


def reconciliation(document: RunDocument) -> str:
    """Books, allocator and closed form of the ranks with the largest and the smallest peak; the table is the former's."""
    found, least = largest(document), smallest(document)
    if found is None or least is None:
        return _without_books(document)
    shown = [found, least] if least.allocated < found.allocated else [found]
    nbytes = found.books.get(Account.UNACCOUNTED, 0)
    summary = (
        f"Rank {found.rank} peaks highest: {device_size(found.allocated)} in {place(found.phase, found.unit, found.operator)}"
        f" (step {found.step}). {exact_size(nbytes)} of it are in no account: {percent(nbytes, found.allocated)}."
    )
    others = f"Rank {least.rank} peaks lowest: {device_size(least.allocated)} in {place(least.phase, least.unit, least.operator)}."
    if len(shown) == 1:
        others = f"All {len(document.reconciliations)} ranks peak at as many bytes." if len(document.reconciliations) > 1 else ""
    parts = [markup.text("p", summary), markup.text("p", others) if others else "", _witnesses(shown), _table(found)]
    return markup.section("Reconciliation at the peak", parts)


def other_tiers(document: RunDocument) -> str:
    """What lay outside of the device, and what moved."""
    found = [markup.table(heads, rows, title, numbers=(len(heads) - 2, len(heads) - 1)) for title, heads, rows in tiers.parts(document)]
    return markup.section("Other tiers", found) if found else ""


def over_a_step(document: RunDocument) -> str:
    """A stack over time for each curve that the document has."""
    return markup.section("Memory over one step", [_curve(curve) for curve in document.curves if curve.seconds])


def by_step(document: RunDocument) -> str:
    """The first step against later ones."""
    if not document.steps:
        return ""
    found = largest(document)
    rank = found.rank if found is not None else highest_rank(document)
    scale, unit = charts.byte_scale(max(step.peak_allocated for step in document.steps))
    words_of_it = _first_words(document, rank)
    caption = "Bar: the rank with the largest peak in that step; line across it: the rank with the smallest."
    drawing = markup.picture(charts.by_step(document.steps, scale, unit), f"Peak memory of each step. {words_of_it}", caption)
    return markup.section("First step and later ones", [markup.text("p", words_of_it), drawing])


def items(document: RunDocument) -> str:
    """The largest storages at the peak."""
    found = largest_items(document, NUM_ITEMS)
    if not found:
        return ""
    scale, unit = charts.byte_scale(found[0].nbytes)
    segments = [
        segment
        for at, item in enumerate(found, start=1)
        for segment in charts.stack(f"{at}  {item.name or 'no name'}", [(item.account, item.nbytes / scale, account_colour(item.account))])
    ]
    rows = [
        (f"{at}  {item.name or '-'}", size(item.nbytes), item.account, f"{shape_words(item.shape)} {item.dtype}",
         place(item.phase, item.unit), item.site or "-")
        for at, item in enumerate(found, start=1)
    ]  # fmt: skip
    description = f"The {len(found)} largest items at the peak; the largest is {found[0].name or 'one without a name'}, {rows[0][1]}."
    legend = markup.legend({name: account_colour(name) for name in in_order({item.account for item in found})})
    drawing = markup.picture(charts.bars(segments, unit), description, "Each bar is one storage, in its account's colour.", legend)
    heads = ("what", "bytes", "account", "shape and type", "made in", "at")
    return markup.section("Largest items at the peak", [drawing, markup.table(heads, rows, "largest items", numbers=(1,))])


def counters(document: RunDocument) -> str:
    """Counters with their definitions, which stand in the first column that a narrow page shows."""
    if not document.counters:
        return ""
    rows = [
        (name, *(_counted(name, getattr(one, name)) for one in document.counters), definition)
        for name, definition in words.COUNTERS.items()
    ]
    heads = ("counter", *(f"rank {rank}" for rank in range(len(document.counters))), "is")
    remark = "Each by its own definition: they are read side by side, never added to or taken from one another."
    table = markup.table(heads, rows, "counters of allocator and system", numbers=range(1, len(document.counters) + 1))
    return markup.section("Counters", [markup.text("p", remark), table, markup.text("p", f"base: {BASE}.", "soft")])


def _counted(name: str, nbytes: int | None) -> str:
    return words.MISSING.get(name, words.NO_COUNTER) if nbytes is None else size(nbytes)


def account_changes(changes: Sequence[Change], names: tuple[str, str]) -> str:
    """The books of two runs, account by account."""
    if not changes:
        return ""
    rows = [(one.name, *change_cells(one, seconds=False)) for one in changes]
    table = markup.table(("account", *names, "difference"), rows, "books at the peak, by account", numbers=(1, 2, 3), colours=True)
    amounts = [dict[str, int](), dict[str, int]()]
    for one in changes:
        for side, value in zip(amounts, (one.run, one.other), strict=True):
            side[one.name] = int(value or 0)
    scale, unit = charts.byte_scale(max(sum(side.values()) for side in amounts))
    segments = [
        segment for name, side in zip(_apart(names), amounts, strict=True) for segment in charts.stack(name, charts.in_colour(side, scale))
    ]
    moved = max(changes, key=lambda one: abs(one.difference or 0))
    description = f"Books at the peak of both runs. {moved.name} differs most: {change_cells(moved, seconds=False)[2]}."
    drawing = markup.picture(charts.bars(segments, unit), description, description, _legend({one.name for one in changes}))
    return drawing + table


def _apart(names: tuple[str, str]) -> tuple[str, str]:
    """Two names that are not one, as a bar each needs its own."""
    return names if names[0] != names[1] else (f"{names[0]} (first)", f"{names[1]} (second)")


def _witnesses(shown: Sequence[Reconciliation]) -> str:
    scale, unit = charts.byte_scale(shown[0].allocated)
    segments: list[charts.Segment] = []
    for found in shown:
        rows: list[tuple[str, Mapping[str, int]]] = [("books", found.books), ("closed form", found.closed_form)]
        for witness, amounts in rows:
            ordered = {account: amounts[account] for account in in_order(amounts)}
            segments += charts.stack(f"rank {found.rank} {witness}", charts.in_colour(ordered, scale))
        segments += charts.stack(f"rank {found.rank} allocator", [("allocator", found.allocated / scale, NEUTRAL)])
    first = shown[0]
    most = max(first.books, key=lambda account: first.books[account], default="none")
    description = (
        f"Stacked bars of rank {first.rank}: allocator {size(first.allocated)}, books {size(booked(first.books))}, most in {most}."
    )
    caption = "Books: one segment an account. Closed form: only the accounts that have one. Allocator: its own count."
    accounts = {account for found in shown for account in (*found.books, *found.closed_form)}
    return markup.picture(charts.bars(segments, unit), description, caption, _legend(accounts, {"allocator": NEUTRAL}))


def _legend(accounts: set[str], more: Mapping[str, str] | None = None) -> str:
    return markup.legend({name: account_colour(name) for name in in_order(accounts)} | dict(more or {}))


def _table(found: Reconciliation) -> str:
    rows: list[tuple[str, ...]] = []
    for row in account_rows(found):
        both = row.books is not None and row.closed_form is not None
        books, form = ("" if value is None else size(value) for value in (row.books, row.closed_form))
        difference = change((row.books or 0) - (row.closed_form or 0)) if both else ""
        share = percent(row.books or 0, found.allocated)
        rows.append((row.account, books, form, difference, share, words.ACCOUNTS.get(row.account, "")))
    nbytes = found.books.get(Account.UNACCOUNTED, 0)
    unaccounted = percent(nbytes, found.allocated)
    rows.append((Account.UNACCOUNTED, f"{nbytes:,} B", "", "", unaccounted, words.ACCOUNTS[Account.UNACCOUNTED]))
    sums = totals(found)
    rows += [(name.strip(), size(amount), "", "", percent(amount, found.allocated), _SUMS.get(name.strip(), "")) for name, amount in sums]
    caption = f"rank {found.rank}, step {found.step}, {place(found.phase, found.unit, found.operator)}"
    heads = ("account", "books", "closed form", "books - form", "share", "is")
    return markup.table(heads, rows, caption, numbers=(1, 2, 3, 4), sums=len(sums), colours=True)


_SUMS: Mapping[str, str] = {
    "total by books": "all accounts, without UNACCOUNTED",
    "allocator": "bytes in live tensors, by the allocator alone",
    "of it base": BASE,
    "overstated": "what the books say and the allocator did not hold; in no account above",
    "does not add up": "allocator minus books and UNACCOUNTED: a fault of the books",
}


def _curve(curve: Curve) -> str:
    scale, unit = charts.byte_scale(max(curve.allocated))
    peak = max(range(len(curve.allocated)), key=lambda at: curve.allocated[at])
    description = (
        f"Memory of rank {curve.rank} over step {curve.step}, by account; the allocator peaks at {size(curve.allocated[peak])}"
        f" after {1e3 * curve.seconds[peak]:,.1f} milliseconds."
    )
    caption = (
        "The line is the allocator. What is UNACCOUNTED, or lies between line and stack, is in no account. Strips: phases, units below."
    )
    drawing = charts.over_a_step(curve, scale, unit)
    return markup.text("h3", f"rank {curve.rank}, step {curve.step}") + markup.picture(
        drawing, description, caption, _legend(set(curve.accounts))
    )


def _first_words(document: RunDocument, rank: int) -> str:
    found = first_and_later(document, rank)
    if found is None:
        return ""
    first, later = found
    said = f"First step of rank {rank} (step {first.step}): {size(first.peak_allocated)} in {place(first.phase, first.unit)}."
    if later is None:
        return said + " No later step was looked at."
    where = place(later.phase, later.unit)
    difference = change(later.peak_allocated - first.peak_allocated)
    return f"{said} Later ones, at most (step {later.step}): {size(later.peak_allocated)} in {where}, {difference}."


def _without_books(document: RunDocument) -> str:
    parts = [markup.text("p", f"{NO_BOOKS[0].upper()}{NO_BOOKS[1:]}.")] if not document.peak else []
    if document.peak_allocated is not None:
        said = f"Allocator's peak, the largest of all ranks: {exact_size(document.peak_allocated)} ({document.allocator})."
        parts.append(markup.text("p", said))
    rows = [(account, size(document.peak[account])) for account in in_order(document.peak)]
    if rows:
        parts.append(markup.table(("account", "books"), rows, "books at the peak", numbers=(1,), colours=True))
    return markup.section("Reconciliation at the peak", parts)
