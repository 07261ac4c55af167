"""The engine's figures that take too long for the test suite, measured now, written to ``docs/evidence/engine.md`` and printed.

    python -m benchmarks.evidence_engine                      everything, in under 10 minutes on two cores
    python -m benchmarks.evidence_engine --parts memory time  only some of it, printed and not written

Every bound that is promised stands beside its figure. The exit code is 0 if all hold.
"""

import argparse
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import fake_ranks, models, peaks, step_time, traffic
from benchmarks.engines import Dtype
from benchmarks.measure import MIB

TARGET = Path(__file__).parent.parent / "docs" / "evidence" / "engine.md"
FOREIGN = 0.10
"""In a round of step times that counts, other processes took at most this share of the cores."""


TIMED: tuple[tuple[int, Dtype, int, float], ...] = ((2, "fp32", 1, 80.0), (2, "fp32", 4, 30.0), (2, "bf16", 4, 30.0), (4, "fp32", 1, 30.0))
"""Ranks, type, micro-batch, and the seconds after which no round begins."""

NUM_ROUNDS = 40


@dataclass(kw_only=True)
class Section:
    """A heading, Markdown below it, and what was promised: (statement with the figure, whether it holds)."""

    title: str
    text: list[str] = field(default_factory=list)
    promises: list[tuple[str, bool]] = field(default_factory=list)

    def promise(self, statement: str, *, holds: bool) -> None:
        self.promises.append((statement, holds))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def prose(*sentences: str) -> list[str]:
    """A paragraph and an empty line."""
    return [*textwrap.wrap(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False), ""]


def memory() -> Section:
    """Peaks and live bytes at stage 3, beside FSDP2."""
    section = Section(title="Memory at stage 3")
    config = models.GPTConfig()
    section.text += prose(
        f"A GPT of {config.num_parameters:,} parameters, 2 ranks, micro-batch 4, fused AdamW; MiB on the rank that holds most. *Peak* is",
        "the allocator's highest sum inside a steady step, *live* what it holds after the step, both above what was live before the model",
        "was built, from the profiler's allocation records. FSDP2 is `fully_shard` on each block and on the root, resharded after forward,",
        "measured in the same way; blocks that a thread of gloo freed unseen are left out of its figures, which makes them lower bounds.",
    )
    rows: list[list[str]] = []
    bounds: tuple[tuple[Dtype, int, int], ...] = (("fp32", 490, 170), ("bf16", 371, 179))
    for dtype, peak_bound, live_bound in bounds:
        for name in ("shardbook-3", "fsdp2"):
            found = peaks.measure(name, dtype)
            peak, live = max(one.peak.nbytes for one in found) / MIB, max(one.live_nbytes for one in found) / MIB
            rows.append([name, dtype, f"{peak:.1f}", f"{live:.1f}", f"`{_innermost(found[0].peak.inside)}`", f"{found[0].loss:.6f}"])
            if name == "shardbook-3":
                padding = max(one.padding for one in found)
                section.promise(f"peak in {dtype}: {peak:.1f} MiB, at most {peak_bound}", holds=peak <= peak_bound)
                section.promise(f"live bytes in {dtype}: {live:.1f} MiB, at most {live_bound}", holds=live <= live_bound)
                section.promise(f"padding in {dtype}: {padding:.3%}, under 0.1%", holds=padding < 0.001)
    section.text += table(["engine", "type", "peak", "live", "the peak is in", "loss after 4 steps"], rows)
    section.text += prose("`python -m benchmarks.peaks --blocks 60` lists the blocks that are live at the peak.")
    return section


def _innermost(inside: tuple[str, ...]) -> str:
    return inside[-1] if inside else "no operator"


def times() -> Section:
    """Step times, paired."""
    section = Section(title="Step time at stage 3")
    section.text += prose(
        "The same model. All engines live in the same processes and take turns, step by step; times are of the slowest rank, the ratio is",
        "taken in each round, and the median and quartiles are over the rounds. Losses of the first steps are compared before any time",
        f"counts. Only rounds count in which other processes took at most {FOREIGN:.0%} of the cores (the five quietest, if fewer did:",
        "then the row says little).",
    )
    rows: list[list[str]] = []
    for num_ranks, dtype, micro_batch, budget_seconds in TIMED:
        names = ["shardbook-3", "fsdp2", "ddp"]
        found = step_time.measure(
            names, dtype, num_ranks=num_ranks, micro_batch=micro_batch, num_rounds=NUM_ROUNDS, budget_seconds=budget_seconds
        )
        kept = found.quiet(FOREIGN)
        setting = [str(num_ranks), dtype, str(micro_batch)]
        milliseconds = [f"{found.median(name, FOREIGN) * 1e3:.0f}" for name in found.names]
        ratios = [found.ratio("shardbook-3", peer, FOREIGN) for peer in ("fsdp2", "ddp")]
        others = f"{max(one.foreign for one in kept):.0%}"
        rows.append(
            [
                *setting,
                *milliseconds,
                *("{:.3f} ({:.3f} to {:.3f})".format(*ratio) for ratio in ratios),
                f"{len(kept)} of {len(found.rounds)}",
                others,
            ]
        )
        if setting == ["2", "fp32", "1"]:
            middle = ratios[0][0]
            section.promise(f"step time at micro-batch 1 on 2 ranks: {middle:.3f} of FSDP2's, at most 0.80", holds=middle <= 0.80)
    head = [
        "ranks",
        "type",
        "micro-batch",
        "shardbook ms",
        "FSDP2 ms",
        "DDP ms",
        "shardbook to FSDP2",
        "shardbook to DDP",
        "rounds",
        "others' share",
    ]
    section.text += table(head, rows)
    section.text += prose("`python -m benchmarks.step_time` measures other settings, stages 0 to 2 included.")
    return section


def bytes_sent() -> Section:
    """Traffic by closed form, events and sockets."""
    section = Section(title="Bytes sent per step and rank")
    config = traffic.CONFIG
    section.text += prose(
        f"Ψ = {config.num_parameters:,} (no padding at these N), k micro-batches in a step; the rows are rank 0's. *Closed form* counts",
        "elements, each times (N-1)/N; bytes follow from the types: gradients travel as autograd made them, in fp32 once several were",
        "added locally; stage 0 sends full gradients back in fp32. *Events* is what the engine reports. *Sockets* is what, by the",
        "kernel's count, this process's TCP connections to other ranks carried beside that payload and the step's one exchange: gloo's",
        "headers, 144 bytes a message, and as many for each message of the barrier that ends the count. TCP's own headers, and the",
        "store's connection, are not in it.",
    )
    rows: list[list[str]] = []
    for num_ranks in (2, 4):
        by_rank = traffic.measure(num_ranks)
        for sent in by_rank[0]:
            total = sum(sent.expected.values())
            headers = "not counted here" if sent.headers is None else f"+{sent.headers:,} in {sent.messages} messages"
            setting = [str(num_ranks), str(sent.stage), sent.dtype, str(sent.micro_batches)]
            rows.append([*setting, traffic.elements(sent), f"{total:,}", f"{sum(sent.events.values()):,}", headers, f"{sent.exchange:,}"])
        agree = all(sent.agrees for of_rank in by_rank for sent in of_rank)
        section.promise(f"N = {num_ranks}: events equal the closed form to the byte, sockets but for headers, on every rank", holds=agree)
    section.text += table(["N", "stage", "type", "k", "closed form", "bytes", "events", "sockets", "exchange"], rows)
    return section


def fakes() -> Section:
    """1,024 ranks in one process; fake balances against real ones."""
    section = Section(title="Fake ranks")
    cost = fake_ranks.in_its_own_process()
    section.text += prose(
        f"A Llama of {cost.num_parameters:,} parameters (width 4096, 32 layers, 32 heads, feed-forward 11008, vocabulary 32000), built on",
        f"the meta device, bf16 at stage 3 on a fake group of 1,024 ranks, fake tensors, one step of 1 × {fake_ranks.SEQUENCE} tokens:",
        f"{cost.seconds:.1f} s, imports not counted, and a resident peak of {cost.resident_mib:.0f} MiB of the whole process. Between",
        f"steps a rank's books hold {cost.persistent_nbytes:,} bytes.",
    )
    section.promise(f"7B on 1,024 fake ranks: {cost.seconds:.1f} s, under 10", holds=cost.seconds < 10)
    section.promise(f"7B on 1,024 fake ranks: {cost.resident_mib:.0f} MiB resident, under 1024", holds=cost.resident_mib < 1024)
    rows: list[list[str]] = []
    for num_ranks in (2, 4):
        compared = fake_ranks.compare(num_ranks)
        for one in compared:
            between, highest = (sum(books.values()) for books in (one.real[0].between, one.real[0].peak))
            rows.append(
                [
                    str(num_ranks),
                    str(one.stage),
                    one.precision,
                    f"{between:,}",
                    f"{highest:,}",
                    "equal" if not one.differences else "; ".join(one.differences),
                ]
            )
        section.promise(
            f"N = {num_ranks}: fake balances equal those of a real run to the byte", holds=not any(one.differences for one in compared)
        )
    section.text += prose(
        "A small decoder, fake against real, on every rank: balances after three steps, all accounts at the highest instant, and",
        "the most that each account held. The rows are rank 0's.",
    )
    section.text += table(["N", "stage", "type", "after a step", "at the peak", "fake and real"], rows)
    return section


PARTS: dict[str, Callable[[], Section]] = {"memory": memory, "time": times, "bytes": bytes_sent, "fakes": fakes}


def document(sections: list[Section], seconds: float) -> str:
    """The whole page."""
    promises = [promise for section in sections for promise in section.promises]
    lines = [
        "# The engine: what was promised, and what was measured",
        "",
        *prose(
            f"Written by `make evidence-engine` in {seconds / 60:.1f} minutes, on {os.cpu_count()} cores with torch {torch.__version__},",
            "one thread a rank, gloo on loopback.",
        ),
        *(f"* {'holds' if holds else '**does not hold**'}: {statement}" for statement, holds in promises),
        "",
    ]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


def write(text: str, target: Path) -> None:
    """All of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".partial", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).replace(target)
    target.chmod(0o644)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, printed and not written")
    options = parser.parse_args()
    began = time.monotonic()
    sections: list[Section] = []
    for name in options.parts or PARTS:
        sections.append(PARTS[name]())
        print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    text = document(sections, time.monotonic() - began)
    if not options.parts:
        write(text, TARGET)
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
