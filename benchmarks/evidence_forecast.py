"""The forecast's figures that take too long for the test suite, found now, written to ``docs/evidence/forecast.md`` and printed.

    python -m benchmarks.evidence_forecast                     everything, in under 12 minutes on two quiet cores
    python -m benchmarks.evidence_forecast --parts state grid  only some of it, printed and not written

Every bound that is promised stands beside its figure. The exit code is 0 if all hold. What is not on this machine (tables of published
measurements, the peers' environment) is printed as *not run*, with the remedy, and fails nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import estimators, forecast_grid, fsdp2_tracker, published
from benchmarks.books_case import ROOT
from benchmarks.evidence_engine import Section, prose, table, write
from benchmarks.forecast_grid import ACCOUNT_BOUND, ACCOUNT_FLOOR, PEAK_BOUND, Compared
from shardbook.accounts import Account

TARGET = ROOT / "docs" / "evidence" / "forecast.md"
GB, GIB, MIB = 10**9, 2**30, 2**20
COMMAND = Path(sys.executable).parent / "shardbook"


# ---- 1. the figures of the ZeRO paper ---------------------------------------------------------------------------------------


def state() -> Section:
    """Known figures of state, by the command line itself."""
    section = Section(title="State")
    rows: list[list[str]] = []

    def show(said: str, arguments: str, found: str, *, holds: bool) -> None:
        rows.append([f"`shardbook forecast {arguments}`", found])
        section.promise(f"{said}: {found}", holds=holds)

    seven = "7e9 --convention 2+2+4+8"
    nbytes = _told(seven)["persistent"]
    show("7·10^9 parameters", seven, f"{nbytes / GB:.1f} GB, {nbytes / GIB:.1f} GiB", holds=nbytes == 112 * GB)
    paper = "7.5e9 --ranks 64 --convention 2+2+4+8 --compare-stages"
    held = [stage["forecast"]["persistent"] for stage in _told(paper)["stages"]]
    wanted = [16 * 7.5, 4 * 7.5 + 12 * 7.5 / 64, 2 * 7.5 + 14 * 7.5 / 64, 16 * 7.5 / 64]
    said = " / ".join(f"{nbytes / GB:.1f}" for nbytes in held) + " GB"
    show("stages 0 to 3 on 64 ranks", paper, said, holds=all(abs(a / GB - b) < 1e-6 for a, b in zip(held, wanted, strict=True)))
    for budget, dominant in (("60GiB", False), ("10GiB", True)):
        arguments = f"7e9 --convention 2+2+4+8 --state {budget} --activations 20GiB"
        largest = _told(arguments)["dominant"]
        show(f"state cut to {budget}, 20 GiB of activations", arguments, f"largest: {largest}", holds=(largest == "ACTIVATION") == dominant)
    section.text += table(["command", "says"], rows)
    return section


def _told(arguments: str) -> dict[str, Any]:
    """What the command says, as data."""
    done = subprocess.run([COMMAND, "forecast", *arguments.split(), "--json"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"shardbook forecast {arguments}: {done.stderr.strip()}")
    return json.loads(done.stdout)


# ---- 2. measured steps ------------------------------------------------------------------------------------------------------


def grid() -> Section:
    """shardbook's own engine on this machine."""
    section = Section(title="Measured steps on the CPU")
    began = time.monotonic()
    compared = forecast_grid.compare(forecast_grid.points())
    seconds = time.monotonic() - began
    section.text += prose(
        f"{len(compared)} runs of shardbook's engine in {seconds:.0f} s, gloo on loopback, one thread a rank: one step unseen, then two",
        "measured by `sb.measure`; the forecast knows the module on the meta device, the configuration, the batch and the optimizer's",
        "kernel. Peaks are of the rank whose allocator held most, accounts what the books say at that instant. A batch is accumulation ×",
        "micro-batch × sequence. Errors are signed: above zero the forecast is higher. Shapes: gpt, of plain torch modules, and decoder,",
        "shardbook's own, with wide vocabularies, tied embeddings, 1 and 12 layers and odd sizes; Llama and GPT-2 of transformers.",
    )
    worst = max(compared, key=lambda one: abs(one.peak_error))
    within = sum(abs(one.peak_error) <= PEAK_BOUND for one in compared)
    furthest = f"at most {abs(worst.peak_error):.3%} off ({worst.point})"
    said = f"{len(compared)} runs, at least 60: peak within {PEAK_BOUND:.0%} in {within}, {furthest}"
    section.promise(said, holds=within == len(compared) >= 60)
    missed = [f"{account} in {one.point}" for one in compared for account in one.misses() if account != "peak"]
    bound = f"every account within {ACCOUNT_BOUND:.0%} or {ACCOUNT_FLOOR // MIB} MiB in every run"
    section.promise(f"{bound}; missed: {'; '.join(missed) or 'none'}", holds=not missed)
    section.text += _worst_by_account(compared)
    section.text += _points(compared)
    return section


def _worst_by_account(compared: list[Compared]) -> list[str]:
    rows: list[list[str]] = []
    for account in (*map(str, Account), "UNACCOUNTED"):
        having = [one for one in compared if account in one.accounts]
        if having and account not in {row[0] for row in rows}:
            worst = max(having, key=lambda one: abs(one.difference(account)))
            equal = sum(one.difference(account) == 0 for one in having)
            rows.append([account, str(len(having)), str(equal), f"{worst.difference(account):+,}", str(worst.point)])
    return table(["account", "runs that have it", "equal to the byte", "furthest, bytes", "where"], rows)


def _points(compared: Iterable[Compared]) -> list[str]:
    rows: list[list[str]] = []
    for one in compared:
        point, peak = one.point, one.measured.allocated
        accounts = max(one.accounts, key=lambda account: abs(one.difference(account)))
        batch = f"{point.accumulate} × {point.micro_batch} × {point.sequence}"
        setting = [point.shape, str(point.stage), point.precision, batch, str(point.ranks)]
        setting.append(f"{point.kernel} {point.optimizer}" + (", clipped" if point.clip else ""))
        where = f"{one.measured.phase} {one.measured.unit}".strip()
        rows.append([*setting, f"{peak:,}", where, f"{one.peak_error:+.4%}", f"{accounts} {one.difference(accounts):+,}"])
    head = ["shape", "stage", "types", "batch", "ranks", "optimizer", "peak, bytes", "where", "error", "furthest account, bytes"]
    return table(head, rows)


# ---- 3. and 4. published measurements ---------------------------------------------------------------------------------------


def measured_elsewhere() -> Section:
    """Rows of published measurements; runs that fitted, and that did not."""
    section = Section(title="Published measurements")
    if not (published.DATA / "measured.csv").exists():
        section.text += prose(f"*Not run*: no tables in `{published.DATA}`; give them to `python -m benchmarks.published`.")
        return section
    rows, feasible = published.read(published.DATA / "measured.csv"), published.read(published.DATA / "feasible.csv")
    scored = [one for one in published.compare(rows) if one.is_scored]
    _promise_scores(section, scored)
    ran_out, fitted = published.verdicts(rows, feasible=False), published.verdicts(feasible, feasible=True)
    wrongly = sum(one.verdict == "fits" for one in ran_out)
    section.promise(f"{len(ran_out)} runs that ran out of memory: {wrongly} are said to fit", holds=not wrongly)
    refused = sum(one.verdict == "does not fit" for one in fitted)
    section.promise(f"{len(fitted)} runs that fitted: {refused} are said not to", holds=not refused)
    close = sum(one.verdict == "too close to call" for one in fitted) / len(fitted)
    section.promise(f"of them {close:.1%} too close to call, at most 10%", holds=close <= 0.10)
    section.text += [line.replace("## ", "### ") for line in published.report(rows)] + [""]
    return section


def _promise_scores(section: Section, scored: list[published.Compared]) -> None:
    score = published.Score.of(scored)
    share = score.modelled / score.rows
    section.promise(f"{score.modelled} of {score.rows} scored rows are modelled, at least 80%", holds=share >= 0.80)
    section.promise(f"median absolute error {score.median_error:.1%}, at most 6%", holds=score.median_error <= 0.06)
    section.promise(f"{score.within:.0%} within {published.WITHIN:.0%}, at least 90%", holds=score.within >= 0.90)


# ---- 5. FSDP2's tracker -----------------------------------------------------------------------------------------------------


def tracker() -> Section:
    """FSDP2 as its own tracker counts it."""
    section = Section(title="FSDP2 beside its own tracker")
    section.text += prose(
        "A Llama of 32 layers, width 4096, feed-forward 11008, vocabulary 32000, untied, on 64 fake ranks: micro-batch 1, sequence 2048,",
        "bf16 parameters, fp32 reduction, fused AdamW, logits in fp32. The tracker runs now, on fake tensors, in a process of its own.",
    )
    rows: list[list[str]] = []
    for name, setting in fsdp2_tracker.SEVEN_BILLION.items():
        tracked, told = fsdp2_tracker.in_its_own_process(setting).nbytes, fsdp2_tracker.forecast_of(setting)
        error = told / tracked - 1
        rows.append([name, f"{tracked / GIB:.3f}", f"{told / GIB:.3f}", f"{error:+.2%}"])
        section.promise(f"FSDP2, {name}: {error:+.2%} of its tracker's peak, within 3%", holds=abs(error) <= 0.03)
    section.text += table(["", "tracker, GiB", "forecast, GiB", "error"], rows)
    return section


# ---- 6. how long an answer takes --------------------------------------------------------------------------------------------

_WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from shardbook.cli.main import main
sys.exit(main())
"""
LARGEST = ("llama-3.1-405b", "--ranks", "16384", "--stage", "3")


def start() -> Section:
    """From the command to its answer, where there is no torch."""
    section = Section(title="Seconds to an answer")
    seconds: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, "forecast", *LARGEST], capture_output=True, timeout=60, check=True)
        seconds.append(time.monotonic() - began)
    said = f"`shardbook forecast {' '.join(LARGEST)}` where torch can't be imported, start included: {min(seconds):.2f} s"
    section.promise(f"{said}, under 1", holds=min(seconds) < 1)
    section.text += prose(f"Best of {len(seconds)} starts; the others took up to {max(seconds):.2f} s.")
    return section


PARTS: dict[str, Callable[[], Section]] = {
    "state": state,
    "start": start,
    "grid": grid,
    "published": measured_elsewhere,
    "estimators": estimators.section,
    "tracker": tracker,
}


def page(sections: list[Section], seconds: float) -> str:
    """The whole page."""
    promises = [promise for section in sections for promise in section.promises]
    setting = f"on {os.cpu_count()} cores with torch {torch.__version__}."
    lines = [
        "# The forecast: what was promised, and what was found",
        "",
        *prose(f"Written by `make evidence-forecast` in {seconds / 60:.1f} minutes,", setting),
        *(f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in promises),
        "",
    ]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, printed and not written")
    options = parser.parse_args()
    began = time.monotonic()
    sections: list[Section] = []
    for name in options.parts or PARTS:
        sections.append(PARTS[name]())
        print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    text = page(sections, time.monotonic() - began)
    if not options.parts:
        write(text, TARGET)
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
