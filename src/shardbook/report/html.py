"""A run document as one page: no script, no request, everything inside. Other pages use the same frame."""

from collections.abc import Iterable, Iterator
from html import escape

from shardbook import __version__
from shardbook.accounts import Account
from shardbook.document import RunDocument
from shardbook.report import markup, memory, timing
from shardbook.report.console import heading, setting, shortage_cells
from shardbook.report.figures import compare, longest_waiting_rank, peak_nbytes, slowest
from shardbook.report.style import STYLE
from shardbook.tables.reconciliation import in_order, largest, smallest
from shardbook.tables.sizes import device_size, duration, exact_size, percent, place, size

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the browser may load: nothing. Should a value from the document ever become markup, it still could fetch and run nothing."""


def page(document: RunDocument, name: str, other: RunDocument | None = None, other_name: str = "") -> str:
    """The whole page; ``name`` and ``other_name`` are the files'."""
    title = f"{name}: where every byte went" if other is None else f"{name} and {other_name}"
    sections = [*_run(document)]
    if other is not None:
        sections.insert(1, _compared(document, other, (name, other_name)))
    header = [markup.text("p", heading(document, "").plain.strip(), "soft"), markup.cards(_first_figures(document))]
    return frame(title, header, sections)


def frame(title: str, header: Iterable[str], sections: Iterable[str]) -> str:
    """A whole page around its parts: title, what stands under it, and the sections that are not empty."""
    top, body = "\n".join(header), "\n".join(part for part in sections if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="shardbook {escape(__version__)}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
{top}
</header>
{body}
</main>
</body>
</html>
"""


def _run(document: RunDocument) -> Iterator[str]:
    yield _shortage(document)
    yield memory.reconciliation(document)
    yield memory.other_tiers(document)
    yield memory.over_a_step(document)
    yield memory.by_step(document)
    yield memory.items(document)
    yield timing.exposed(document)
    yield timing.step_time(document)
    yield memory.counters(document)
    yield _settings(document)
    yield markup.section("Notes", (markup.text("p", note) for note in document.notes))


def _first_figures(document: RunDocument) -> Iterator[tuple[str, str, str]]:
    peak, found, time = peak_nbytes(document), largest(document), slowest(document)
    if peak is not None:
        yield "allocator's peak", size(peak), device_size(peak)
    if found is not None:
        nbytes = found.books.get(Account.UNACCOUNTED, 0)
        yield "unaccounted at the peak", percent(nbytes, found.allocated), f"{nbytes:,} bytes"
        yield "peak in", place(found.phase, found.unit), f"rank {found.rank}, step {found.step}"
        if (least := smallest(document)) is not None and least.allocated < found.allocated:
            yield "smallest peak of a rank", size(least.allocated), f"rank {least.rank}, {place(least.phase, least.unit)}"
    if time is not None:
        yield "step", duration(time.seconds), f"slowest rank, {time.rank}"
        if longest_waiting_rank(document) is not None or time.exposed:
            yield "exposed", percent(time.exposed, time.seconds), f"{duration(time.exposed)} of a step on rank {time.rank}"


def _shortage(document: RunDocument) -> str:
    found = document.shortage
    if found is None:
        return ""
    limit = "the device's own limit" if found.budget is None else f"a budget of {device_size(found.budget)}"
    when = place(found.phase, found.unit) + (f", step {found.step}" if found.step else "")
    accounts = in_order({*found.live, *found.forecast})
    live = [(account, *shortage_cells(found, account)) for account in accounts]
    levers = [(lever.name, size(lever.nbytes), lever.cost) for lever in found.levers]
    parts = [
        markup.text("p", f"Rank {found.rank}, {when}.", "bad"),
        markup.text("p", f"Asked for {exact_size(found.asked)} more for {found.account} against {limit}."),
        markup.table(("lever", "frees", "costs"), levers, "levers, cheapest first", numbers=(1,)) if levers else "",
        markup.table(
            ("account", "live", "forecast", "live - forecast"), live, "live at that moment", numbers=(1, 2, 3), colours=True
        ),
    ]  # fmt: skip
    return markup.section("Out of memory", parts)


def _compared(document: RunDocument, other: RunDocument, names: tuple[str, str]) -> str:
    found = compare(document, other)
    settings = [(name, setting(here), setting(there)) for name, here, there in found.settings]
    parts = [
        markup.text("p", f"A difference is {names[1]} minus {names[0]}. The rest of the page is about {names[0]}.", "soft"),
        timing.changes("the whole", found.totals[:2], names, seconds=False),
        timing.changes("time a step", found.totals[2:], names, seconds=True) if document.times or other.times else "",
        memory.account_changes(found.accounts, names),
        timing.unit_changes(found.exposed, names),
        markup.table(("setting", *names), settings, "set differently") if settings else "",
    ]
    return markup.section("Two runs compared", parts)


def _settings(document: RunDocument) -> str:
    rows = [(name, setting(entry), str(entry.get("origin", ""))) for name, entry in document.settings.items()]
    versions = [(name, version) for name, version in document.versions.items()]
    facts = [("convention", document.convention), ("data", document.data), ("allocator's peak is", document.allocator)]
    parts = [
        markup.table(("", ""), [fact for fact in facts if fact[1]], "the run") if any(fact[1] for fact in facts) else "",
        markup.table(("setting", "value", "from"), rows, "settings") if rows else "",
        markup.table(("name", "version"), versions, "versions") if versions else "",
    ]
    return markup.section("Settings and versions", parts)
