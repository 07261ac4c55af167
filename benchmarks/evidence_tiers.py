"""What memory tiers are worth: bits, books, the bottleneck that moves, a disk's speed, a budget, DeepSpeed's offload, kills, advice.

    make evidence-tiers                                  all, written to docs/evidence/tiers.md
    python -m benchmarks.evidence_tiers --parts bits     one part, printed; with --write put into the page

Each part ends in promises; the exit code is 1 where one doesn't hold.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import tiers_advice, tiers_bits, tiers_bottleneck, tiers_budget, tiers_disk, tiers_grid, tiers_step
from benchmarks.evidence_engine import Section, prose, table
from benchmarks.evidence_page import ROOT, run, tested
from tests import test_checkpoint_kill, test_offload_kill

NUM_KILLS, SHARE, OVER = 20, 0.85, 1.15
GIB = 2**30


def bits() -> Section:
    section = Section(title="The same training")
    chosen = list(tiers_bits.cases())
    section.text += prose(
        f"{len(chosen)} runs of two ranks: every stage with every recomputation (none, full, every second block, selective, full with",
        "inputs on the host) and every offload that the stage has (optimizer on the host or a disk, parameters on the host, both), fp32",
        "and bf16, clipping on and off, one micro-batch and three. Reports of each step, weights, masters, moments and buffers beside the",
        "plain loop's, to the bit.",
    )
    found = tiers_bits.run(chosen)
    wrong = {case: texts for case, texts in found.items() if texts}
    section.text += [f"* {case}: {texts[0]}" for case, texts in wrong.items()] + [""] * bool(wrong)
    section.promise(f"equal to the plain loop to the bit: {len(found) - len(wrong)} of {len(found)}", holds=not wrong)
    return section


def budget() -> Section:
    section = Section(title="Six GiB of state in two")
    with tempfile.TemporaryDirectory() as folder:
        found = tiers_budget.compare(Path(folder))
    state, limit = found.shape.state_nbytes / GIB, found.shape.budget / GIB
    section.text += prose(
        f"{found.shape.layers} layers of {found.shape.width}², one rank at stage 3, 2+2+4+8: {state:.2f} GiB of training state; five steps",
        f"with the optimizer on a disk within {limit:.2f} GiB, held by the books (which raise at the first byte beyond) and by the system",
        "(`RLIMIT_DATA`), and five without offload and limit.",
    )
    rows = [
        [name, f"{run.peak_nbytes / GIB:.2f}", f"{run.seconds:.1f}", run.digest[:12]]
        for name, run in (("within the budget, on a disk", found.limited), ("without limit, in memory", found.free))
    ]
    section.text += [*table(["run", "peak, GiB", "s a step", "weights"], rows), ""]
    section.promise(f"peak {found.limited.peak_nbytes / GIB:.2f} of {limit:.2f} GiB", holds=found.limited.peak_nbytes <= found.shape.budget)
    section.promise("losses and weights are those of the run without limit, to the bit", holds=found.is_same)
    section.promise(f"without offload the forecast says: {found.without}", holds=found.without == "does not fit")
    return section


def books() -> Section:
    section = Section(title="Four witnesses of every tier")
    section.text += prose(
        "Real runs of two ranks (`benchmarks/tiers_grid.py`): stages 1 to 3, the optimizer on the device, the host or a disk, parameters",
        "on the device or the host, four precisions and every recomputation, in turns; of a small decoder, which peaks in its loss, and of",
        "a deeper one, which does in a block. Compared to the byte: the device's peak and its accounts, what each tier holds between steps",
        f"and at its highest, and the bytes that move over each link in a step. The closed form may leave {tiers_grid.SLACK_NBYTES} bytes",
        "out of WORKSPACE, numbers that a kernel keeps.",
    )
    for shape, share in (("small decoder", 1), ("decoder 12 layers", 3)):
        with tempfile.TemporaryDirectory() as folder:
            chosen = tiers_grid.points(folder=folder, shape=shape)[::share]
            equal, found = tiers_grid.check(chosen)
        wrong = {point: lines for point, lines in found.items() if lines}
        section.text += [f"* {point}: {lines[0]}" for point, lines in wrong.items()] + [""] * bool(wrong)
        agree = len(chosen) - len(wrong)
        section.promise(f"{shape}: closed form, simulation, books and allocator agree: {agree} of {len(chosen)}", holds=not wrong)
        if share == 1:
            section.promise(
                f"{shape}: simulation equal in both steps and every phase: {equal} of {len(chosen)}", holds=equal == len(chosen)
            )
        else:
            section.text += prose(
                f"Of the {shape} the simulation is equal in every phase of both steps as well for {equal} of {len(chosen)}."
            )
    return section


def bottleneck() -> Section:
    section = Section(title="The bottleneck that moves")
    rows = tiers_bottleneck.compare()
    section.text += prose(
        "A decoder on a long text in bf16, two ranks, measured (`benchmarks/tiers_bottleneck.py`). At stage 0 the optimizer's state is the",
        "largest account; divided, it leaves what blocks save for backward; recomputed, those leave the loss.",
    )
    section.text += [*tiers_bottleneck.table(rows).splitlines(), ""]
    peaks = ", ".join(f"{row.measured.allocated / 2**20:.1f}" for row in rows)
    section.promise(f"peaks of {peaks} MiB: state, then blocks, then the loss", holds=tiers_bottleneck.moves(rows))
    return section


def advice() -> Section:
    section = Section(title="Capacity or throughput")
    section.text += prose(
        "`benchmarks/tiers_advice.py`: a calibration made now (`shardbook doctor --calibrate`), then every way of a few plans, which take",
        "turns of a few steps on the same two ranks. A cost is the share of the step that a way adds to that of the plan with neither",
        f"recomputation nor offload; it is right within {tiers_advice.SHARE:.0%} of the measured cost,",
        f"or within {tiers_advice.CLOSE:.0%} of the step. Advice is right where the way that it",
        "names fits as measured, and none that fits is faster by more than that.",
    )
    found: list[tiers_advice.Cost] = []
    told: list[tiers_advice.Advised] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        machine = tiers_advice.calibrate(ranks=None, output=folder / "machine.json", path=folder)
        seconds = time.monotonic() - began
        for plan in tiers_advice.compare(list(tiers_advice.PLANS), machine, folder):
            found += plan.costs
            told += plan.advised
    section.text += table(
        ["plan", "way", "cost, measured", "foretold", "right"],
        [[one.plan, one.way, f"{one.measured:+.1%}", f"{one.predicted:+.1%}", "yes" if one.is_right else "**no**"] for one in found],
    )
    section.text += table(
        ["plan", "room, MB", "asked about", "advised", "fastest that fits", "right"],
        [
            [one.plan, f"{one.budget / 1e6:.1f}", one.asked, str(one.recommended), str(one.fastest), "yes" if one.is_right else "**no**"]
            for one in told
        ],
    )
    right, advised = sum(one.is_right for one in found), sum(one.is_right for one in told)
    section.promise(f"calibration took {seconds:.0f} s, at most 120", holds=seconds <= 120)
    section.promise(f"costs foretold: {right} of {len(found)} right", holds=right == len(found) >= 6)
    section.promise(f"advice: {advised} of {len(told)} right", holds=advised == len(told) >= 6)
    return section


def disk() -> Section:
    section = Section(title="A disk as fast as it is")
    section.text += prose(
        "`benchmarks/tiers_disk.py`: reads ahead and writes behind beside the same direct I/O with nothing in between, in turn.",
        "`benchmarks/tiers_step.py`: `engine.step()` with master and moments on the disk, beside its lanes alone: the same direct I/O,",
        "and the same optimizer's step in memory; with a fused AdamW (the disk is the slowest lane) and with an Rprop that torch steps",
        "in a loop (the host is). Medians of paired rounds in one process.",
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = tiers_disk.compare(Path(folder), GIB)
    speed = 2 / plain.alone
    statement = f"the pipeline: {plain.ratio:.2f} of the same direct I/O alone ({speed:.1f} GiB/s read and written), at least {SHARE}"
    section.promise(statement, holds=plain.ratio >= SHARE)
    rows: list[list[str]] = []
    for kind in tiers_step.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = tiers_step.measure(kind, Path(folder))
        seconds = [f"{value:.3f}" for value in (found.disk, found.host, found.step)]
        rows.append([kind, f"{found.gib:.2f}", *seconds, f"{found.share:.2f}", f"{found.over:.2f}"])
        if found.disk > found.host:
            section.promise(f"{kind}: {found.share:.2f} of what it does alone, at least {SHARE}", holds=found.share >= SHARE)
        section.promise(f"{kind}: a step is {found.over:.2f} of its slowest lane, at most {OVER}", holds=found.over <= OVER)
    head = ["case", "GiB a step", "disk alone, s", "host alone, s", "step, s", "share of the disk", "of the slowest lane"]
    section.text += table(head, rows)
    return section


def peers() -> Section:
    section = Section(title="Beside DeepSpeed's offload")
    section.text += prose(
        "`benchmarks/tiers_peers.py`: the optimizer on the host or a disk, a GPT of 29.5 million parameters, micro-batch 1, two ranks for",
        "each engine, which take turns a step at a time; DeepSpeed with its own CPU optimizer, compiled in a new folder as on a machine",
        "where it never ran (the first row of a place has that in its first step), with small buckets and with its defaults; on a disk",
        "with both of its pipelines, at stage 3, the only one that it has it for. Ratios of our step to theirs: median and quartiles of",
        "rounds in which nothing else used the cores.",
    )
    python = ROOT / ".venv-peers" / "bin" / "python"
    if not python.exists():
        section.promise("not run: there is no .venv-peers (make peers)", holds=False)
        return section
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "peers.json")
        subprocess.run([str(python), "-m", "benchmarks.tiers_peers", str(file)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(file.read_text())
    lines: list[list[str]] = []
    for row in rows:
        for name, (median, low, high) in row["ratios"].items():
            first, ours = row["first_seconds"][name], row["first_seconds"]["shardbook"]
            milliseconds = [f"{row['milliseconds'][one]:.0f}" for one in ("shardbook", name)]
            programs = ", ".join(row["compilers"][name]) or "nothing"
            ratio = f"{median:.2f} ({low:.2f} to {high:.2f})"
            lines.append(
                [row["place"], f"{row['stage']} {row['dtype']}", name, *milliseconds, ratio, f"{ours:.1f}", f"{first:.1f}", programs]
            )
    head = ["optimizer on", "stage", "beside", "ours, ms", "theirs, ms", "ratio", "our first step, s", "theirs, s", "compiled by"]
    section.text += table(head, lines)
    for row in rows:
        worst = max(median for median, _, _ in row["ratios"].values())
        where = f"optimizer on the {row['place']}, stage {row['stage']} in {row['dtype']}"
        section.promise(f"{where}: {worst:.2f} of DeepSpeed's step, at most 1", holds=worst <= 1)
    if not any(row["place"] == "disk" for row in rows):
        section.promise("offload to a disk was not compared: make peers could not fetch libaio", holds=False)
    compiled = sorted({program for row in rows for program in row["compilers"]["shardbook"]})
    section.promise(f"compiled at our first run: {', '.join(compiled) or 'nothing'}", holds=not compiled)
    return section


def kills() -> Section:
    section = Section(title="Kills and errors of the disk")
    section.text += prose(
        f"Two ranks at stage 3 with master and moments on a disk save after every step; {NUM_KILLS} times one of them, or both, are",
        "ended by",
        "SIGKILL at a random moment, every second time at one inside a save, and started again. Errors of the disk (EIO, short reads and",
        "writes, none at all, no space, no direct I/O, a step that ends half-way) are put in by the tests named below.",
    )
    with tempfile.TemporaryDirectory() as folder:
        found = test_checkpoint_kill.killed_often(Path(folder), NUM_KILLS, 3, test_offload_kill.DISK)
    where = f"{found.num_kills} kills, {found.num_inside} of them inside a save"
    section.promise(
        f"{where}: {len(found.damaged)} damaged checkpoints, {len(found.lost)} lost", holds=not found.damaged and not found.lost
    )
    same = "the uninterrupted one, bit for bit" if found.is_same else "ANOTHER than the uninterrupted one"
    section.promise(f"the finished run is {same}", holds=found.is_same)
    rubbish = [*found.rubbish, *test_offload_kill.left_behind()]
    section.promise(f"left behind: {', '.join(rubbish) or 'nothing'}", holds=not rubbish)
    for name in ("tiers_direct", "tiers_pipeline", "offload_disk", "checkpoint_disk"):
        path = ROOT / "tests" / f"test_{name}.py"
        passed, failed = tested(path)
        section.promise(f"{path.name}: {passed} tests passed, {len(failed)} failed", holds=not failed and passed > 0)
    return section


PARTS: dict[str, Callable[[], Section]] = {
    "disk": disk,
    "peers": peers,
    "advice": advice,
    "bits": bits,
    "books": books,
    "bottleneck": bottleneck,
    "budget": budget,
    "kills": kills,
}


if __name__ == "__main__":
    sys.exit(run("tiers", __doc__, PARTS))
