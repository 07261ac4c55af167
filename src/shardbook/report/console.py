"""A run document on the terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardbook.document import Item, RunDocument, Shortage, StepTime
from shardbook.report import tiers, words
from shardbook.report.figures import Change, Comparison, Wait, compare, largest_items, waits
from shardbook.tables.reconciliation import in_order, reconciliation_table
from shardbook.tables.sizes import change, device_size, duration, exact_size, percent, place, size

__all__ = ["comparison_table", "reconciliation_table", "show", "show_comparison"]

NUM_ITEMS = 12
NUM_WAITS = 15
NUM_RANKS = 4


def show(document: RunDocument, name: str, console: Console) -> None:
    """Prints one run, part by part; ``name`` is the file's."""
    for part in parts(document, name):
        console.print(part)
        console.print()


def show_comparison(run: RunDocument, other: RunDocument, names: tuple[str, str], console: Console) -> None:
    """Prints how ``other`` differs from ``run``."""
    console.print(comparison_table(compare(run, other), names))


def parts(document: RunDocument, name: str) -> Iterator[RenderableType]:
    """What is printed, top to bottom; what the document has nothing of is left out."""
    yield heading(document, name)
    if document.shortage is not None:
        yield shortage_table(document.shortage)
    yield reconciliation_table(document)
    yield from tiers.tables(document)
    if document.counters:
        yield counters_table(document)
    if items := largest_items(document, NUM_ITEMS):
        yield items_table(items)
    if document.times:
        yield times_table(document.times)
    if found := waits(document):
        yield waits_table(found)
    if document.notes:
        yield Text("\n".join(f"note: {note}" for note in document.notes))


def heading(document: RunDocument, name: str) -> Text:
    """Who trained what, on how many ranks."""
    num_ranks = max(len(document.memory), len(document.counters), len(document.reconciliations), len(document.times))
    facts = [document.engine or "engine not named", f"{document.num_parameters:,} parameters", f"ranks: {num_ranks or 'unknown'}"]
    facts.append(f"measured in {document.mode} mode" if document.mode else "not measured")
    finite = [loss for loss in document.losses if loss is not None]
    if finite:
        facts.append(f"loss {finite[0]:.4f} -> {finite[-1]:.4f} in {len(document.losses)} steps")
    return Text.assemble((name, "bold"), "  ", ", ".join(facts))


def counters_table(document: RunDocument) -> Table:
    """Counters by rank, each beside what it counts."""
    rows = {name: [getattr(counters, name) for counters in document.counters] for name in words.COUNTERS}
    shown = {name: ["" if nbytes is None else size(nbytes) for nbytes in found] for name, found in rows.items()}
    return _by_rank("counters, each by its own definition and never added to another", rows, shown, words.COUNTERS)


def _by_rank(
    title: str, rows: Mapping[str, Sequence[float | None]], shown: Mapping[str, Sequence[str]], meanings: Mapping[str, str]
) -> Table:
    """One row a figure and one column a rank, or only the least and the most where there are too many ranks to show."""
    num_ranks = max(map(len, rows.values()))
    every = num_ranks <= NUM_RANKS
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for head in (f"rank {rank}" for rank in range(num_ranks)) if every else ("least of all ranks", "most"):
        table.add_column(head, justify="right")
    table.add_column("is")
    for name, found in rows.items():
        missing = words.MISSING.get(name, words.NO_COUNTER)
        cells = [text or missing for text in shown[name]]
        ends = [at for at, value in enumerate(found) if value is not None]
        if not every:
            ends = sorted(ends, key=lambda at: found[at] or 0)
            cells = [f"{shown[name][at]}, rank {at}" for at in (ends[0], ends[-1])] if ends else [missing, missing]
        table.add_row(name, *cells, meanings[name])
    return table


def items_table(items: Sequence[Item]) -> Table:
    """The largest storages at the peak."""
    table = Table(title="largest items at the peak", title_justify="left")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("account", no_wrap=True)
    for name in ("what", "made in, at"):
        table.add_column(name, overflow="fold")
    for item in items:
        what = f"{item.name or '-'}\n{shape_words(item.shape)} {item.dtype}"
        made = place(item.phase, item.unit) + (f"\n{item.site}" if item.site else "")
        table.add_row(size(item.nbytes), *map(escape, (item.account, what, made)))
    return table


def shape_words(shape: Sequence[int]) -> str:
    """A shape as people write it.

    >>> shape_words((4, 256)), shape_words(())
    ('4 x 256', 'scalar')
    """
    return " x ".join(map(str, shape)) or "scalar"


def times_table(times: Sequence[StepTime]) -> Table:
    """Where the time of a step went, by rank."""
    rows = {
        "wall": [time.seconds for time in times],
        **{name: [getattr(time, name) for time in times] for name in ("compute", "exposed", "communication", "floor")},
    }
    shown = {name: ["" if seconds is None else duration(seconds) for seconds in found] for name, found in rows.items()}
    shown["exposed"] = [f"{duration(time.exposed)} ({percent(time.exposed, time.seconds)})" for time in times]
    return _by_rank(f"time of a step, by rank, mean of {times[0].num_steps}", rows, shown, words.TIMES)


def waits_table(found: Sequence[Wait]) -> Table:
    """Exposed time by unit and cause, longest first."""
    table = Table(title="exposed time a step, by unit and cause, longest first", title_justify="left")
    for name in ("unit", "what", "cause"):
        table.add_column(name, overflow="fold")
    for name in ("longest", "on rank", "mean of ranks"):
        table.add_column(name, justify="right")
    for wait in found[:NUM_WAITS]:
        named = map(escape, (wait.unit or "-", wait.kind, cause_words(wait)))
        table.add_row(*named, duration(wait.seconds), str(wait.rank), duration(wait.mean))
    if rest := found[NUM_WAITS:]:
        table.caption = f"and {len(rest)} shorter ones, none above {duration(rest[0].seconds)}"
    return table


def cause_words(wait: Wait) -> str:
    """The cause, with the rank that was late where there is one."""
    return wait.cause if wait.culprit is None else f"{wait.cause} {wait.culprit}"


def shortage_table(found: Shortage) -> Group:
    """What was known when memory ran out, and what would help."""
    limit = "the device's own limit" if found.budget is None else f"a budget of {device_size(found.budget)}"
    when = f"step {found.step}, {place(found.phase, found.unit)}" if found.step else place(found.phase, found.unit)
    asked = f"asked for {exact_size(found.asked)} more for {found.account} against {limit}"
    lines = [Text(f"out of memory on rank {found.rank}: {when}", style="bold red"), Text(asked)]
    live = Table(title="live at that moment", title_justify="left")
    live.add_column("account")
    for name in ("live", "forecast", "live - forecast"):
        live.add_column(name, justify="right")
    for account in in_order({*found.live, *found.forecast}):
        live.add_row(escape(account), *shortage_cells(found, account))
    levers = Table(title="levers, cheapest first", title_justify="left")
    levers.add_column("lever", overflow="fold")
    levers.add_column("frees", justify="right")
    levers.add_column("costs", overflow="fold")
    for lever in found.levers:
        levers.add_row(escape(lever.name), size(lever.nbytes), escape(lever.cost))
    return Group(*lines, live, *([levers] if found.levers else []))


def shortage_cells(found: Shortage, account: str) -> tuple[str, str, str]:
    """Live bytes of an account, those that were forecast, and the difference; the latter two empty without a forecast."""
    live, expected = found.live.get(account, 0), found.forecast.get(account, 0)
    return (size(live), size(expected), change(live - expected)) if found.forecast else (size(live), "none made", "")


def comparison_table(found: Comparison, names: tuple[str, str]) -> Group:
    """Two runs beside each other: the whole, the peak by account, exposed time by unit, and what was set differently."""
    first, second = names
    heads = (first, second, "difference")
    tables = [_changes_table("the whole", found.totals[:2], heads, seconds=False)]
    if any(change.run is not None or change.other is not None for change in found.totals[2:]):
        tables.append(_changes_table("time a step", found.totals[2:], heads, seconds=True))
    if found.accounts:
        tables.append(_changes_table("books at the peak, by account", found.accounts, heads, seconds=False))
    if found.exposed:
        tables.append(_changes_table("exposed time a step, by unit", found.exposed, heads, seconds=True))
    if found.settings:
        tables.append(_settings_table(found, names))
    return Group(Text(f"{second} against {first}; a difference is {second} minus {first}", style="bold"), *tables)


def change_cells(one: Change, *, seconds: bool) -> tuple[str, str, str]:
    """Both figures and their difference in words; what a run does not have is said to be missing."""
    if seconds:
        run, other = ("not measured" if value is None else duration(value) for value in (one.run, one.other))
        return run, other, "" if one.difference is None else f"{'+' if one.difference > 0 else ''}{duration(one.difference)}"
    run, other = ("not measured" if value is None else size(int(value)) for value in (one.run, one.other))
    return run, other, "" if one.difference is None else change(int(one.difference))


def _changes_table(title: str, changes: Sequence[Change], heads: Sequence[str], *, seconds: bool) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for head in heads:
        table.add_column(escape(head), justify="right")
    for one in changes:
        table.add_row(escape(one.name), *change_cells(one, seconds=seconds))
    return table


def _settings_table(found: Comparison, names: tuple[str, str]) -> Table:
    table = Table(title="set differently", title_justify="left")
    for head in ("", *names):
        table.add_column(escape(head), overflow="fold")
    for name, here, there in found.settings:
        table.add_row(escape(name), escape(setting(here)), escape(setting(there)))
    return table


def setting(value: object) -> str:
    """A setting's value in words.

    >>> setting(None), setting({"value": 3}), setting([1, 2])
    ('none', '3', '[1, 2]')
    """
    if isinstance(value, Mapping) and "value" in value:
        return setting(value["value"])
    return "none" if value is None else str(value)
