"""The figures of the books that take too long for the test suite, measured now, written to ``docs/evidence/books.md`` and printed.

    python -m benchmarks.evidence_books                     everything, in under 15 minutes on two quiet cores
    python -m benchmarks.evidence_books --parts facts cost  only some of it, printed and not written
    python -m benchmarks.evidence_books --quick             the smallest settings, to see that it works; printed and not written

Every bound that is promised stands beside its figure. The exit code is 0 if all hold. What is not installed on this machine is printed
as *not run*, with the reason and the remedy, and fails nothing.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import books_cost, books_delays, interposed, ranks, sweeps
from benchmarks.books_case import GPT, LLAMA, SEQUENCE, Case, NotRun, documents, unaccounted, worst
from benchmarks.books_facts import BUCKETS, DTYPES, fact_cases, facts, hidden, hiding_cases, not_run_lines
from benchmarks.engines import Dtype
from benchmarks.evidence_engine import Section, prose, table, write
from benchmarks.measure import MIB
from shardbook.document import Reconciliation, RunDocument

TARGET = Path(__file__).parent.parent / "docs" / "evidence" / "books.md"
ACCOUNTS = ("PARAM", "MASTER", "MOMENT", "GRAD", "GATHERED", "GRAD_FULL", "COMM", "ACTIVATION", "WORKSPACE")
OWN_BOUNDS: dict[Dtype, float] = {"fp32": 0.001, "bf16": 0.01}
PEER_BOUND = 0.01
FULL_BOUND, LIGHT_BOUND, OFF_BOUND = 1.3, 1.03, 1.01
STAGES = (0, 1, 2, 3)


# ---- 1. unaccounted ---------------------------------------------------------------------------------------------------------


def own_cases(*, quick: bool) -> list[Case]:
    """shardbook's stages, in both types, on a GPT with few and with many activations and on a Llama."""
    if quick:
        return [Case(engine="shardbook-3", dtype=dtype, shape=shape) for dtype in DTYPES for shape in ("small", "llama")]
    shapes = (("gpt", 1), ("gpt", 4), ("llama", 1))
    return [
        Case(engine=f"shardbook-{stage}", dtype=dtype, micro_batch=micro_batch, shape=shape)
        for stage in STAGES
        for dtype in DTYPES
        for shape, micro_batch in shapes
    ]


def peer_cases(*, quick: bool) -> list[Case]:
    """Everybody else; DeepSpeed with its default buckets, and with small ones where all accounts can be told from padding."""
    if quick:
        return [Case(engine=name, shape="small") for name in ("plain", "ddp", "ddp-copies", "fsdp2", "fsdp2-keep", "deepspeed-3-small")]
    names = ("plain", "ddp", "ddp-copies", "fsdp2", "fsdp2-keep")
    settings: tuple[tuple[Dtype, int], ...] = (("fp32", 1), ("fp32", 4), ("bf16", 1))
    usual = [Case(engine=name, dtype=dtype, micro_batch=size) for name in names for dtype, size in settings]
    small = [Case(engine=f"deepspeed-{stage}-small", dtype=dtype) for stage in (1, 2, 3) for dtype in DTYPES]
    return [*usual, *small, *BUCKETS]


def unaccounted_bytes(*, quick: bool) -> Section:
    """What the allocator held at the peak and no account explains."""
    section = Section(title="Unaccounted at the peak")
    section.text += prose(
        f"Three steps of fused AdamW on two ranks (a plain loop on one). *gpt*: {GPT.num_parameters:,} parameters, sequences of",
        f"{GPT.sequence}. *llama*: shardbook's decoder, {LLAMA.num_parameters:,} parameters, {LLAMA.heads} query heads to",
        f"{LLAMA.kv_heads} of keys and values, vocabulary {LLAMA.vocab}, sequences of {SEQUENCE}. The peak is the allocator's own, of the",
        "rank that held most; accounts are MiB, by the books alone; UNACCOUNTED is what the allocator held beyond them, *overstated* what",
        "they say beyond the allocator, in bytes. The percentage is the worst of all ranks. bf16 is each engine's own way (DDP and the",
        "plain loop: autocast).",
    )
    own, peers = documents(own_cases(quick=quick)), documents(peer_cases(quick=quick))
    section.text += _account_table(own) + _account_table(peers)
    for dtype, bound in OWN_BOUNDS.items():
        shares = [unaccounted(found) for case, found in own.items() if case.dtype == dtype and isinstance(found, RunDocument)]
        said = f"shardbook in {dtype}, {len(shares)} runs: at most {max(shares):.4%} unaccounted at the peak, bound {bound:.1%}"
        section.promise(said, holds=max(shares) <= bound)
    ran = {case: unaccounted(found) for case, found in peers.items() if isinstance(found, RunDocument)}
    for name in dict.fromkeys(case.engine for case in ran):
        share = max(share for case, share in ran.items() if case.engine == name)
        section.promise(f"{name}: at most {share:.4%} unaccounted at the peak, bound {PEER_BOUND:.0%}", holds=share <= PEER_BOUND)
    for case, one in peers.items():
        if isinstance(one, NotRun) and one.failed:
            section.promise(f"{case.engine} in {case.dtype}: {one.reason}", holds=False)
    section.text += not_run_lines(peers)
    return section


def _account_table(found: dict[Case, RunDocument | NotRun]) -> list[str]:
    head = ["engine", "type", "model", "peak", "where", *ACCOUNTS, "UNACCOUNTED", "%", "overstated"]
    rows = [_account_row(case, one) if isinstance(one, RunDocument) else _not_run_row(case, len(head)) for case, one in found.items()]
    return table(head, rows)


def _account_row(case: Case, document: RunDocument) -> list[str]:
    peak = worst(document)
    accounts = [f"{peak.books.get(name, 0) / MIB:.1f}" if peak.books.get(name, 0) else "" for name in ACCOUNTS]
    share = f"{unaccounted(document):.4%}"
    shown = [f"{peak.allocated / MIB:.1f}", _place(peak), *accounts, f"{peak.books['UNACCOUNTED']:,} B", share, f"{peak.overstated:,}"]
    return [case.engine, case.dtype, f"{case.shape} × {case.micro_batch}", *shown]


def _place(peak: Reconciliation) -> str:
    operator = f" `{peak.operator.split('.')[0]}`" if peak.operator else ""
    return f"{peak.phase} {peak.unit}".strip() + operator


def _not_run_row(case: Case, width: int) -> list[str]:
    start = [case.engine, case.dtype, f"{case.shape} × {case.micro_batch}", "*not run*"]
    return start + [""] * (width - len(start))


# ---- 4. an interposed counter -----------------------------------------------------------------------------------------------


def counter(*, quick: bool) -> Section:
    """The measured peak beside a counter that is no part of Python."""
    section = Section(title="Peak allocated beside an interposed counter")
    section.text += prose(
        "`benchmarks/interposed.c`, loaded by LD_PRELOAD between torch's CPU allocator and `posix_memalign` and `free`, counts live bytes",
        "in all threads. The measured peak is that of `sb.measure`: what was live at its beginning, and the profiler's records since.",
    )
    if (why := interposed.not_run()) is not None:
        section.text += prose(f"*{why[:7].capitalize()}*{why[7:]}.")
        return section
    rows: list[list[str]] = []
    for engine, num_ranks in interposed.SETTINGS[:2] if quick else interposed.SETTINGS:
        for one in interposed.compare(engine, num_ranks, shape="small" if quick else "gpt"):
            rows.append(
                [one.engine, str(one.num_ranks), str(one.rank), f"{one.measured:,}", f"{one.interposed:,}", f"{one.difference:.4%}"]
            )
            said = (
                f"{engine} on {num_ranks}, rank {one.rank}: {one.difference:.4%} off the interposed counter, at most {interposed.BOUND:.1%}"
            )
            section.promise(said, holds=one.difference <= interposed.BOUND and not one.lost)
    section.text += table(["engine", "ranks", "rank", "measured, bytes", "interposed, bytes", "difference"], rows)
    return section


# ---- 5 and 7. what it costs -------------------------------------------------------------------------------------------------


def cost(*, quick: bool) -> Section:
    """Step times with and without, and what a document takes."""
    section = Section(title="What measuring costs")
    section.text += prose(
        "A plain loop in one process with one thread; ways of measuring take turns, ratios are taken within a round, and median and",
        "quartiles are over the rounds. *Wall* is what a person waits, *processor* the process's own time, which other work on the machine",
        f"disturbs less. Light mode looks at its first {books_cost.WARM['light']} steps, which are told apart. *Off*: a model that was",
        "measured before, against one that never was.",
    )
    found = books_cost.measure(1 if quick else None)
    rows: list[list[str]] = []
    for one in found:
        extra = f"{one.microseconds_per_operator:.0f}"
        for kind, ratios in (("wall", one.wall), ("processor", one.processor)):
            start = [one.name, str(one.num_operators), f"{one.seconds * 1e3:.1f}", kind]
            rows.append([*start, *(str(ratios[way]) for way in ("full", "light", "looks", "before")), extra if kind == "wall" else ""])
        if one.name.startswith("GPT"):
            _cost_promises(section, one)
    head = ["model", "operators", "plain step, ms", "time", "full", "light", "light, first steps", "off", "µs an operator, full"]
    section.text += table(head, rows)
    section.text += prose(
        "Full mode pays per operator, so a model of many small layers, whose operators take microseconds each, is its worst case: no bound",
        "is promised there.",
    )
    return section


def _cost_promises(section: Section, one: books_cost.Cost) -> None:
    for kind, ratios in (("wall", one.wall), ("processor", one.processor)):
        for way, median, bound in (("full", ratios["full"].median, FULL_BOUND), ("light", ratios["light"].median, LIGHT_BOUND)):
            section.promise(f"{one.name}, {way} mode, {kind}: {median:.3f} of a plain step, at most {bound}", holds=median <= bound)
    off = one.processor["before"]
    said = f"{one.name}, books off, processor: {off}, at most {OFF_BOUND} or 1 within the quartiles"
    section.promise(said, holds=off.median <= OFF_BOUND or off.lower <= 1 <= off.upper)


def reconciling(*, quick: bool) -> Section:
    """Seconds to make a document."""
    section = Section(title="What a document costs")
    section.text += prose(
        "Seconds to enter a measurement (every live tensor is looked for), to leave it (books are held against the allocator at the peak,",
        "and the step with the peak becomes a curve) and to gather the ranks' parts in a document, after three steps of the GPT.",
    )
    settings = (("plain", 1),) if quick else (("plain", 1), ("ddp", 2), ("fsdp2", 2), ("shardbook-3", 2))
    rows: list[list[str]] = []
    for name, num_ranks in settings:
        opened, closed, made, characters = max(ranks.run(num_ranks, books_cost.edges, name), key=lambda found: found[1])
        rows.append([name, str(num_ranks), f"{opened:.3f}", f"{closed:.3f}", f"{made:.3f}", f"{characters / 1000:.0f}"])
    section.text += table(["engine", "ranks", "enter, s", "leave, s", "document, s", "document, kB of JSON"], rows)
    return section


# ---- 6. exposed time --------------------------------------------------------------------------------------------------------


def exposed(*, quick: bool) -> Section:
    """Sweeps, and delays put in by hand."""
    section = Section(title="Exposed time")
    section.text += [*sweeps.rows(quick=quick, num_steps=2 if quick else 6), ""]
    section.text += prose(
        f"Delays put in by hand: {books_delays.SECONDS * 1e3:.0f} ms in a unit of a chain whose blocks take 1 or 30 ms, stage",
        f"{books_delays.STAGE}; a delayed gather is delayed twice in a step. *Reported* is what rank 0's longest waiting is said to be,",
        f"median over steps. A setting that is more than {books_delays.ERROR:.0%} off is tried again, {books_delays.ATTEMPTS - 1} times",
        "at most, as other work on the machine makes ranks wait too.",
    )
    rows: list[list[str]] = []
    for num_ranks in books_delays.NUM_RANKS[:1] if quick else books_delays.NUM_RANKS:
        found = books_delays.measure(num_ranks, books_delays.WORKS[:1] if quick else books_delays.WORKS)
        for one in found:
            whose = "" if one.culprit is None else f" {one.culprit}"
            injected, seconds = f"{one.delay.seconds * 1e3:.0f}", f"{one.seconds * 1e3:.1f}"
            setting = [str(num_ranks), f"{one.work * 1e3:.0f}", f"{one.delay.what}, blocks.{books_delays.UNIT}", injected]
            rows.append([*setting, seconds, one.unit, f"{one.cause}{whose}", f"{one.error:.1%}", str(one.attempts)])
        furthest = max(found, key=lambda one: one.error)
        section.promise(
            f"{num_ranks} ranks: {len(found)} delays in the right unit, with the right cause, at most {furthest.error:.1%} off; bound 5%",
            holds=all(one.holds for one in found),
        )
    head = ["ranks", "work, ms", "delayed", "put in, ms", "reported, ms", "unit", "cause", "off", "tries"]
    section.text += table(head, rows)
    return section


PARTS: dict[str, Callable[..., Section]] = {
    "unaccounted": unaccounted_bytes,
    "hidden": hidden,
    "facts": facts,
    "counter": counter,
    "cost": cost,
    "exposed": exposed,
    "documents": reconciling,
}

CASES: dict[str, tuple[Callable[..., Sequence[Case]], ...]] = {
    "unaccounted": (own_cases, peer_cases),
    "hidden": (hiding_cases,),
    "facts": (fact_cases,),
}
"""What parts need to be measured, of what they share."""


def page(sections: list[Section], seconds: float) -> str:
    """The whole page."""
    promises = [promise for section in sections for promise in section.promises]
    setting = f"on {os.cpu_count()} cores with torch {torch.__version__}, one thread a rank, gloo on loopback."
    lines = [
        "# The books: what was promised, and what was measured",
        "",
        *prose(f"Written by `make evidence-books` in {seconds / 60:.1f} minutes,", setting),
        *(f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in promises),
        "",
    ]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, printed and not written")
    parser.add_argument("--quick", action="store_true", help="the smallest settings, printed and not written")
    options = parser.parse_args()
    began = time.monotonic()
    sections: list[Section] = []
    wanted = options.parts or list(PARTS)
    documents(case for name in wanted for cases in CASES.get(name, ()) for case in cases(quick=options.quick))  # engines start once
    for name in wanted:
        sections.append(PARTS[name](quick=options.quick))
        print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    text = page(sections, time.monotonic() - began)
    if not options.parts and not options.quick:
        write(text, TARGET)
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
