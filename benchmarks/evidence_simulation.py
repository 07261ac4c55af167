"""How right the two witnesses before a run are, found now, written to ``docs/accuracy.md`` and printed.

    python -m benchmarks.evidence_simulation                     everything, in under 12 minutes on two quiet cores
    python -m benchmarks.evidence_simulation --parts grid cost   only some of it, printed and not written

Every bound that is promised stands beside its figure. The exit code is 0 if all hold.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import forecast_grid, simulation_grid, simulation_peers
from benchmarks.books_case import ROOT
from benchmarks.evidence_engine import Section, prose, table, write
from benchmarks.forecast_grid import Point
from benchmarks.simulation_grid import Grid, Pair, Witnessed
from shardbook.accounts import Account

TARGET = ROOT / "docs" / "accuracy.md"
COMMAND = Path(sys.executable).parent / "shardbook"
GIB = 2**30
ACCOUNTS = tuple(dict.fromkeys((*map(str, Account), "UNACCOUNTED")))
EQUAL_SHARE, FURTHEST = 0.60, 0.005
MOST_WORST = 12


# ---- 1. the grid ------------------------------------------------------------------------------------------------------------


def grid() -> list[Section]:
    """Measured steps beside both witnesses."""
    found = simulation_grid.compare(forecast_grid.points())
    return [_promised(found), _by_account(found), _worst(found), _points(found)]


def _promised(found: Grid) -> Section:
    section = Section(title="Measured steps, and how they were measured")
    first, later = found.pairs("first"), found.pairs("later")
    section.text += prose(
        f"{len(found.points)} runs of shardbook's engine in {found.measuring:.0f} s: gloo on loopback, one thread a rank, on this CPU.",
        "The first step is measured by itself by `sb.measure`, then two more. The allocator's peak is that of the profiler's allocation",
        "records, the accounts are the books at that instant. The closed form is told what a person tells it; it is held against the",
        "rank that held most. The simulation is `sb.simulate` as the same rank: rank 0, the rank that held most, and all ranks of a",
        f"group of 3, which makes {len(later)} simulated ranks in {found.simulating:.0f} s, two at a time ({found.one_simulation[0]:.1f}",
        f"s in the middle, {found.one_simulation[1]:.1f} at most). Errors are signed: above zero the witness says more than was",
        "measured.",
    )
    rank0 = [pair for pair in later if pair.rank == 0]
    _promise_equal(section, "later steps, rank 0", rank0)
    _promise_equal(section, "later steps, every simulated rank", later)
    _promise_equal(section, "first step, every simulated rank", first)
    pairs = [*first, *later]
    placed = sum(pair.is_same_place for pair in pairs)
    section.promise(f"{placed} of {len(pairs)} peaks are simulated in the measured phase and unit", holds=placed == len(pairs))
    inside = [pair for pair in later if pair.measured.operator]
    same = sum(pair.is_same_operator for pair in inside)
    section.promise(f"{same} of the {len(inside)} later peaks inside an operator are simulated in that operator", holds=same == len(inside))
    heights = sum(not any(pair.phases.values()) for pair in pairs)
    said = f"the highest instant of every phase is equal to the byte in {heights} of {len(pairs)}, at least {EQUAL_SHARE:.0%}"
    section.promise(said, holds=heights >= EQUAL_SHARE * len(pairs))
    sent = sum(one.sent[0] == one.sent[1] for one in found.points)
    said = f"bytes sent in a step are equal in {sent} of {len(found.points)} runs"
    section.promise(said, holds=sent == len(found.points))
    return section


def _promise_equal(section: Section, which: str, pairs: Sequence[Pair]) -> None:
    equal = sum(not pair.difference for pair in pairs)
    share, furthest = equal / len(pairs), max(pairs, key=lambda pair: abs(pair.error))
    said = f"{which}: the peak is equal to the byte in {equal} of {len(pairs)} ({share:.0%}), at least {EQUAL_SHARE:.0%}"
    section.promise(said, holds=share >= EQUAL_SHARE)
    said = f"{which}: at most {abs(furthest.error):.5%} off ({furthest.difference:+,} bytes: {furthest.point}), bound {FURTHEST:.1%}"
    section.promise(said, holds=abs(furthest.error) <= FURTHEST)
    apart = {name: _differing(pairs, name) for name in ACCOUNTS if _differing(pairs, name)}
    told = "; ".join(f"{name} in {len(by)} by {min(by):+,} to {max(by):+,} bytes" for name, by in apart.items()) or "none"
    every = sum(pair.is_equal for pair in pairs)
    said = f"{which}: every account is equal in {every} of {len(pairs)}; apart are {told}"
    section.promise(said, holds=every / len(pairs) >= EQUAL_SHARE)


def _differing(pairs: Sequence[Pair], account: str) -> list[int]:
    return [pair.accounts[account] for pair in pairs if pair.accounts.get(account)]


def _by_account(found: Grid) -> Section:
    section = Section(title="Signed errors of both witnesses, by account")
    section.text += prose(
        "On the rank that held most, after the first step; percentages are of what was measured of that account in that run. *Furthest* is",
        "the largest difference in bytes, with its run.",
    )
    rows: list[list[str]] = []
    for account in ("peak", *ACCOUNTS):
        told = [one for one in (_Said.of(point, account) for point in found.points) if one.is_any]
        if told:
            rows += [[account, *_row("closed form", told)], ["", *_row("simulation", told)]]
    section.text += table(["account", "witness", "runs", "equal", "median error", "furthest, bytes", "of it", "where"], rows)
    return section


@dataclass(frozen=True, kw_only=True)
class _Said:
    """Bytes of an account, or of the peak, in one run."""

    point: Point
    measured: int
    witnesses: Mapping[str, int]

    @classmethod
    def of(cls, one: Witnessed, account: str) -> "_Said":
        pair, forecast = one.highest, one.closed_form.forecast
        if account == "peak":
            said = {"closed form": forecast.peak_allocated, "simulation": pair.simulated.allocated}
            return cls(point=pair.point, measured=pair.measured.allocated, witnesses=said)
        said = {"closed form": forecast.accounts.get(account, 0), "simulation": pair.simulated.books.get(account, 0)}
        return cls(point=pair.point, measured=pair.measured.books.get(account, 0), witnesses=said)

    @property
    def is_any(self) -> bool:
        return bool(self.measured or any(self.witnesses.values()))

    def difference(self, witness: str) -> int:
        return self.witnesses[witness] - self.measured


def _row(witness: str, told: Sequence[_Said]) -> list[str]:
    shares = [one.difference(witness) / one.measured for one in told if one.measured]
    furthest = max(told, key=lambda one: abs(one.difference(witness)))
    difference = furthest.difference(witness)
    share = f"{difference / furthest.measured:+.4%}" if furthest.measured else ""
    equal = sum(not one.difference(witness) for one in told)
    figures = [str(len(told)), str(equal), f"{statistics.median(shares or [0]):+.5%}", f"{difference:+,}"]
    return [witness, *figures, *((share, str(furthest.point)) if difference else ("", ""))]


def _worst(found: Grid) -> Section:
    section = Section(title="Where the simulation is furthest off")
    pairs = [pair for pair in (*found.pairs("first"), *found.pairs("later")) if not pair.is_equal]
    pairs.sort(key=lambda pair: abs(pair.error), reverse=True)
    causes = Counter(_cause(pair) for pair in pairs)
    section.text += [f"* {number} of {len(pairs)}: {cause}" for cause, number in causes.most_common()] + [""] if pairs else []
    rows = [
        [str(pair.point), str(pair.rank), pair.steps, _in(pair), f"{pair.difference:+,}", f"{pair.error:+.5%}", _apart(pair.accounts)]
        for pair in pairs[:MOST_WORST]
    ]
    section.text += table(["run", "rank", "step", "the measured peak is in", "bytes", "error", "accounts"], rows) if rows else []
    return section


_CAUSES = {
    "number": "a number of Python beside a tensor is made a tensor, and cast, inside the operator: 8 bytes and one element",
    "kept": "numbers of Python that a model multiplies by, which autograd keeps until backward as tensors of 8 bytes each; they are made"
    " above everything that can be looked at, so the books of the real run have them as UNACCOUNTED as well",
    "both": "both: a number beside a tensor, and one that autograd keeps",
    "matmul": "a matrix product in 16 bits, whose library takes scratch by rules of its own",
}


def _cause(pair: Pair) -> str:
    differing = {name for name, nbytes in pair.accounts.items() if nbytes}
    is_small = all(-16 <= nbytes <= 0 for name, nbytes in pair.accounts.items() if name == "WORKSPACE")
    if differing == {"WORKSPACE"} and pair.measured.operator.startswith(("mm.", "addmm.", "bmm.")):
        return _CAUSES["matmul"]
    if differing and is_small and differing <= {"WORKSPACE", "UNACCOUNTED"}:
        return _CAUSES["both" if len(differing) == 2 else "kept" if "UNACCOUNTED" in differing else "number"]
    return "not known"


def _in(pair: Pair) -> str:
    phase, unit, operator = pair.place
    return f"{phase} {unit}".strip() + (f" `{operator}`" if operator else "")


def _apart(differences: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:+,}" for name, nbytes in differences.items() if nbytes) or "equal"


def _points(found: Grid) -> Section:
    section = Section(title="Every run")
    section.text += prose(
        "Of the rank that held most, or of rank 0 where all hold alike. *First step* and *later* are measured peaks, and what the",
        "simulation says beyond them in bytes; a batch is accumulation × micro-batch × sequence. What is held first is less where the",
        "optimizer has made no state yet.",
    )
    rows: list[list[str]] = []
    for one in found.points:
        later = one.highest
        first = next(pair for pair in one.pairs if pair.steps == "first" and pair.rank == later.rank)
        peaks = [f"{first.measured.allocated:,}", f"{first.difference:+,}", f"{later.measured.allocated:,}", f"{later.difference:+,}"]
        rows.append([str(one.closed_form.point), str(later.rank), *peaks, _in(later), f"{one.closed_form.peak_error:+.4%}"])
    section.text += table(["run", "rank", "first step", "off", "later", "off", "peak of later steps in", "closed form"], rows)
    return section


# ---- 2. others' engines -----------------------------------------------------------------------------------------------------


def peers() -> list[Section]:
    """FSDP2 and DDP, simulated beside themselves."""
    section = Section(title="FSDP2 and DDP beside themselves")
    shape = simulation_peers.SHAPE
    section.text += prose(
        f"A GPT of {shape.num_parameters:,} parameters, sequences of {shape.sequence}, on {simulation_peers.NUM_RANKS} ranks, fused",
        "AdamW; a plain loop, measured from before the model is built, beside `sb.simulate` with the same engine. The first step is a",
        f"run of its own. *Off* is in bytes: {simulation_peers.MESH_NBYTES} are DeviceMesh's table of ranks, which is a real tensor in a",
        "simulation too.",
    )
    found = simulation_peers.compare()
    rows: list[list[str]] = []
    for one in found:
        case, peak = one.case, one.measured
        first = [f"{one.first[0]:,}", f"{one.first[1] - one.first[0]:+,}"]
        setting = [case.engine, case.dtype, f"{case.accumulate} × {case.micro_batch}"]
        where = f"{peak.phase} {peak.unit} `{peak.operator}`"
        rows.append([*setting, *first, f"{peak.allocated:,}", f"{one.difference:+,}", where, _apart(one.accounts)])
    section.text += table(["engine", "types", "batch", "first step", "off", "all steps", "off", "where", "accounts"], rows)
    for engine in dict.fromkeys(one.case.engine for one in found):
        furthest = max((one for one in found if one.case.engine == engine), key=lambda one: abs(one.error))
        said = f"{engine}: at most {abs(furthest.error):.5%} off ({furthest.difference:+,} bytes), bound {FURTHEST:.1%}"
        section.promise(said, holds=abs(furthest.error) <= FURTHEST)
    first = max(abs(one.first[1] / one.first[0] - 1) for one in found)
    section.promise(f"FSDP2's and DDP's first step: at most {first:.5%} off, bound {FURTHEST:.1%}", holds=first <= FURTHEST)
    return [section]


def cold_start() -> list[Section]:
    """The first step under FSDP2."""
    section = Section(title="From a cold start")
    section.text += prose(
        "A Llama of plain torch modules under FSDP2, bf16 parameters, fp32 reduction, fused AdamW, in its first and its second step.",
        "Torch's own `FSDPMemTracker` runs on fake tensors, where DTensor finds out the shapes of the optimizer's step, once, with",
        "tensors as large as the whole parameters; the tracker takes them for memory. The simulation tells them apart. Real steps are",
        f"of gloo ranks; where a peak is in a reduction, the lowest of {simulation_peers.TRIES}, as a thread of gloo gives a copy back",
        "some time later. GiB.",
    )
    rows: list[list[str]] = []
    for one in simulation_peers.cold_start():
        setting = one.setting
        name = f"{setting.layers} layers, width {setting.hidden}, sequence {setting.sequence}, {setting.ranks} ranks"
        witnesses = (("measured", one.measured), ("simulated", one.simulated), ("FSDP2's tracker", one.tracked))
        for number, (witness, peaks) in enumerate(witnesses):
            if peaks is not None:
                rows.append(["" if number and one.measured else name, witness, *(f"{nbytes / GIB:.4f}" for nbytes in peaks)])
        _promise_start(section, name, one)
    section.text += table(["model", "witness", "first step", "second step"], rows)
    return [section]


def _promise_start(section: Section, name: str, one: simulation_peers.ColdStart) -> None:
    if one.measured is not None:
        for which, told, measured in zip(("first", "second"), one.simulated, one.measured, strict=True):
            said = f"{name}: the simulated {which} step is {told - measured:+,} bytes off a real one ({told / measured - 1:+.4%})"
            section.promise(f"{said}, bound {FURTHEST:.1%}", holds=abs(told / measured - 1) <= FURTHEST)
        section.text += prose(f"{name}: the tracker says {one.tracked[0] / one.measured[0]:.2f} times what the first step took.")
        return
    times, stepping = one.tracked[0] / one.simulated[0], one.tracked[0] / one.stepping
    section.text += prose(
        f"{name}: from a cold start the tracker says {one.tracked[0] / GIB:.1f} GiB, {times:.1f} times the simulated peak of the first",
        f"step, and {stepping:.0f} times the most that is held while the optimizer steps in it ({one.stepping / GIB:.3f} GiB).",
    )
    error = one.simulated[1] / one.tracked[1] - 1
    said = f"{name}: the second step is simulated {error:+.2%} off the tracker's, which knows no copy that gloo makes; within 3%"
    section.promise(said, holds=abs(error) <= 0.03)


# ---- 3. what it costs -------------------------------------------------------------------------------------------------------

SEVEN = ("llama-2-7b", 4096)
LARGEST = ("llama-3.1-405b", 8192)
RANKS = (8, 64, 1024, 16_384)
SECONDS = {(SEVEN[0], 64): 6.0, (LARGEST[0], 16_384): 30.0}
RESIDENT = 2 * GIB
FLAT = 1.3
TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one command, start included: the best of some tries."""

    model: str
    num_ranks: int
    seconds: float
    processor: float
    resident: int
    peak: int


def cost() -> list[Section]:
    """Seconds and memory of the command line."""
    section = Section(title="What a simulation costs")
    section.text += prose(
        f"`shardbook forecast MODEL --simulate` in a fresh process, stage 3, bf16, micro-batch 1: the best of {TRIES} tries, start and",
        "imports included. *Resident* is the largest resident set of the process.",
    )
    found = [_cost(*SEVEN, num_ranks) for num_ranks in RANKS] + [_cost(*LARGEST, RANKS[-1])]
    rows: list[list[str]] = []
    for one in found:
        figures = [f"{one.seconds:.2f}", f"{one.processor:.2f}", f"{one.resident / GIB:.2f}", f"{one.peak / GIB:.2f}"]
        rows.append([one.model, f"{one.num_ranks:,}", *figures])
        bound = SECONDS.get((one.model, one.num_ranks))
        if bound is not None:
            said = f"{one.model} on {one.num_ranks:,} ranks: {one.seconds:.2f} s from the command line, under {bound:.0f}"
            section.promise(said, holds=one.seconds < bound)
    section.text += table(["model", "ranks", "seconds", "of the processor", "resident, GiB", "simulated peak, GiB"], rows)
    most = max(one.resident for one in found)
    section.promise(f"at most {most / GIB:.2f} GiB resident, under {RESIDENT / GIB:.0f}", holds=most < RESIDENT)
    of_seven = [one.processor for one in found if one.model == SEVEN[0]]
    flat = max(of_seven) / min(of_seven)
    said = f"{SEVEN[0]} on {', '.join(f'{n:,}' for n in RANKS)} ranks: the dearest takes {flat:.2f} times the cheapest's processor time"
    section.promise(f"{said}, at most {FLAT}", holds=flat <= FLAT)
    return [section]


def _cost(model: str, sequence: int, num_ranks: int) -> Cost:
    tries = [_run(model, sequence, num_ranks) for _ in range(TRIES)]
    return min(tries, key=lambda one: one.seconds)


def _run(model: str, sequence: int, num_ranks: int) -> Cost:
    arguments = ["forecast", model, "--ranks", str(num_ranks), "--micro-batch", "1", "--sequence", str(sequence), "--simulate", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as out:
        began = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
        process = os.posix_spawn(COMMAND, [str(COMMAND), *arguments], environment, file_actions=actions)
        _, status, used = os.wait4(process, 0)
        seconds = time.monotonic() - began
        out.seek(0)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            raise RuntimeError(f"shardbook {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
        told: dict[str, Any] = json.load(out)
    return Cost(
        model=model,
        num_ranks=num_ranks,
        seconds=seconds,
        processor=used.ru_utime + used.ru_stime,
        resident=used.ru_maxrss * 1024,
        peak=told["peak_allocated"],
    )


PARTS: dict[str, Callable[[], list[Section]]] = {"grid": grid, "peers": peers, "start": cold_start, "cost": cost}


def page(sections: list[Section], seconds: float) -> str:
    """The whole page."""
    promises = [promise for section in sections for promise in section.promises]
    setting = f"on {os.cpu_count()} cores with torch {torch.__version__}."
    lines = [
        "# Accuracy: the closed form and the simulation, held against what was measured",
        "",
        *prose(f"Written by `make evidence-simulation` in {seconds / 60:.1f} minutes,", setting),
        *(f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in promises),
        "",
        *prose(*_BEYOND),
    ]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


_BEYOND = (
    "All of this is on a CPU. What a GPU's kernels take inside, and what its caching allocator reserves, are models on top, which no",
    "GPU has validated. On a CPU one temporary has no model: a matrix product in 16 bits takes scratch inside its library, by the",
    "processor's kind; it is at no peak of these runs.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, printed and not written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    sections: list[Section] = []
    for name in options.parts or PARTS:
        sections += PARTS[name]()
        print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    text = page(sections, time.monotonic() - began)
    if not options.parts:
        write(text, TARGET)
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
