"""What a run had outside of its device, and what moved between tiers, as rows: the same for terminal and page."""

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from shardbook.document import RunDocument
from shardbook.tables.reconciliation import in_order
from shardbook.tables.sizes import size

TIER_HEADS = ("tier", "account", "most of all ranks", "rank")
MOVED_HEADS = ("link", "moved in a step, most of all ranks", "rank", "in all")
TIER_TITLE = "outside of the device, each tier at its highest"
MOVED_TITLE = "moved between tiers"

Row = tuple[str, ...]


def tier_rows(document: RunDocument) -> Iterator[Row]:
    """Each tier's accounts, and their sum, on the rank that holds most there."""
    for tier in dict.fromkeys(one.tier for one in document.tiers):
        most = max((one for one in document.tiers if one.tier == tier), key=lambda one: one.nbytes)
        for account in in_order(most.accounts):
            yield tier, account, size(most.accounts[account]), str(most.rank)
        yield tier, "total", size(most.nbytes), str(most.rank)


def moved_rows(document: RunDocument) -> Iterator[Row]:
    """Each link's bytes."""
    for link in dict.fromkeys(one.link for one in document.moved):
        most = max((one for one in document.moved if one.link == link), key=lambda one: (one.nbytes_per_step, one.nbytes))
        yield link, size(most.nbytes_per_step), str(most.rank), size(most.nbytes)


def tables(document: RunDocument) -> Iterator[Table]:
    """For the terminal; nothing where everything was on the device."""
    for title, heads, rows in parts(document):
        table = Table(title=title, title_justify="left")
        for number, head in enumerate(heads):
            table.add_column(head, justify="right" if number >= len(heads) - 2 else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        yield table


def parts(document: RunDocument) -> Iterator[tuple[str, Row, list[Row]]]:
    """Title, heads and rows of what there is to say; nothing where everything was on the device."""
    for title, heads, rows in ((TIER_TITLE, TIER_HEADS, list(tier_rows(document))), (MOVED_TITLE, MOVED_HEADS, list(moved_rows(document)))):
        if rows:
            yield title, heads, rows
