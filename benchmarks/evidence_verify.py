"""What `verify` is worth: false alarms, faults found and named, other engines, and what a record costs.

    make evidence-verify                                            all, written to docs/evidence/verify.md
    python -m benchmarks.evidence_verify --parts right              one part, printed
    python -m benchmarks.evidence_verify --parts right --cases 20   the first 20 configurations

Each part ends in promises; the exit code is 1 where one doesn't hold.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import shardbook as sb
from benchmarks import recording_cost, verify_mutations, verify_peers
from benchmarks.evidence_engine import Section, prose, table, write
from benchmarks.verify_cases import draw
from benchmarks.verify_loops import Outcome, run
from shardbook.recording.prints import NUM_PROJECTIONS
from shardbook.verifying.callables import RERUNS, Reruns, baseline_reruns
from shardbook.verifying.judge import judge
from shardbook.verifying.statistics import f_quantile
from shardbook.verifying.verdict import Verdict
from tests import mutations, ranks

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "evidence" / "verify.md"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
CASES = 200
SHARES = (0.5, 0.9, 0.99, 0.999)
NAMED = 0.9
COST = 1.15
MEGABYTE = 10**6


# ---- right configurations ---------------------------------------------------------------------------------------------------


def right(num_cases: int) -> Section:
    """No false alarm; under shardbook the same bits."""
    section = Section(title="Right configurations")
    section.text += prose(
        f"{num_cases} configurations drawn from the numbers 0 to {num_cases - 1} (`benchmarks/verify_cases.py`): three kinds of model,",
        "1 to 4 ranks, stages 0 to 3, fp32 and bf16, 1 to 4 micro-batches, clipping on and off, ragged ends, means and token weights,",
        "AdamW and SGD, groups, tied and frozen parameters, dropout and recomputation. Each trains 3 steps under its engine and in a",
        f"plain loop, which is run again under {', '.join(name for name, _ in RERUNS)}. *Nearest* is",
        "the largest deviation as a share of its bound.",
    )
    outcomes: list[Outcome] = []
    for number in range(num_cases):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run(draw(number), Path(folder)))
    kinds = sorted({(one.case.engine, one.case.dtype) for one in outcomes})
    rows = [_row(engine, dtype, outcomes) for engine, dtype in kinds]
    section.text += table(["engine", "type", "configurations", "identical", "within rounding", "different", "nearest"], rows)
    section.text += _calibration(outcomes)
    alarms = [one for one in outcomes if one.verdict.kind == "different"]
    section.text += [f"* {one.case}: {_told(one.verdict)}" for one in alarms] + [""] * bool(alarms)
    section.promise(f"false alarms: {len(alarms)} in {num_cases} right configurations; none is allowed", holds=not alarms)
    ours = [one for one in outcomes if one.case.engine == "shardbook"]
    same = sum(one.verdict.kind == "identical" for one in ours)
    section.promise(f"identical under shardbook: {same} of {len(ours)}, all of them", holds=same == len(ours))
    return section


def _row(engine: str, dtype: str, outcomes: Sequence[Outcome]) -> list[str]:
    of_kind = [one.verdict for one in outcomes if (one.case.engine, one.case.dtype) == (engine, dtype)]
    counts = Counter(one.kind for one in of_kind)
    shares = [phase.deviation / phase.bound for one in of_kind for phase in one.phases if phase.bound and phase.deviation]
    numbers = [str(counts[kind]) for kind in ("identical", "within_rounding", "different")]
    return [engine, dtype, str(len(of_kind)), *numbers, f"{max(shares, default=0.0):.2f}"]


def _calibration(outcomes: Sequence[Outcome]) -> list[str]:
    """How far candidates are, beside how far reruns are."""
    text = prose(
        "How far gradients of the first step are from the plain loop's, as a mean square over eight projections, divided by the same of",
        "the five reruns: bounds take it for an F variable. Quantiles of all gradients under DDP and FSDP2 that haven't the plain loop's",
        "bits:",
    )
    rows: list[list[str]] = []
    for dtype in ("fp32", "bf16"):
        found = sorted(ratio for one in outcomes if one.case.dtype == dtype and one.case.engine != "shardbook" for ratio in one.ratios)
        if found:
            quantiles = [found[min(len(found) - 1, int(share * len(found)))] for share in SHARES]
            rows.append([dtype, str(len(found)), *(f"{one:.2f}" for one in quantiles)])
    degrees = NUM_PROJECTIONS, NUM_PROJECTIONS * len(RERUNS)
    rows.append([f"F({degrees[0]}, {degrees[1]})", "", *(f"{f_quantile(*degrees, 1 - share):.2f}" for share in SHARES)])
    return text + table(["type", "gradients", *(f"{share:.1%}" for share in SHARES)], rows)


def _told(verdict: Verdict) -> str:
    where = " ".join(str(one) for one in (verdict.phase, verdict.parameter) if one)
    size = f"{verdict.deviation:.2g} beside a bound of {verdict.bound:.2g}"
    return f"{verdict.kind}, {verdict.rule}: step {verdict.step} {where}, {size}" if verdict.kind == "different" else verdict.kind


# ---- faults -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A fault, and what was said of it."""

    mutation: mutations.Mutation
    verdict: Verdict

    @property
    def is_seen(self) -> bool:
        return self.verdict.kind == "different"

    @property
    def is_named(self) -> bool:
        return self.verdict.rule == self.mutation.rule


def faults(_: int) -> Section:
    """Every rule, broken for real."""
    section = Section(title="Faults")
    every = mutations.every()
    section.text += prose(
        f"{len(every)} faults put into right loops for real (`tests/mutations.py`): in a plain loop, on ranks that reduce by hand, under",
        "DDP and inside of shardbook. *Named* counts those whose rule is the first in the verdict's ranking; 3 steps each.",
    )
    found = [Found(mutation=one, verdict=verify_mutations.verdict_of(one)) for one in every]
    rows: list[list[str]] = []
    for rule in sb.RULES[:-1]:
        of_rule = [one for one in found if one.mutation.rule == rule]
        others = Counter(one.verdict.rule or "-" for one in of_rule if not one.is_named)
        said = ", ".join(f"{other} ({number})" for other, number in others.items())
        counts = [len(of_rule), sum(one.is_seen for one in of_rule), sum(one.is_named for one in of_rule)]
        rows.append([rule, *map(str, counts), said])
    section.text += table(["rule", "faults", "seen", "named", "called otherwise"], rows)
    seen, named = sum(one.is_seen for one in found), sum(one.is_named for one in found)
    section.promise(f"faults seen: {seen} of {len(found)}, all of them", holds=seen == len(found))
    section.promise(
        f"named right: {named} of {len(found)} ({named / len(found):.1%}), at least {NAMED:.0%}", holds=named >= NAMED * len(found)
    )
    least = min(Counter(one.mutation.rule for one in found).get(rule, 0) for rule in sb.RULES[:-1])
    section.promise(f"every rule is broken at least twice; the rarest {least} times", holds=least >= 2)
    return section


def without_faults(_: int) -> Section:
    """The same loops as they should be."""
    section = Section(title="The same loops without their faults")
    controls = mutations.controls(mutations.every())
    verdicts = [verify_mutations.verdict_of(one) for one in controls]
    wrong = [(one, verdict) for one, verdict in zip(controls, verdicts, strict=True) if verdict.kind == "different"]
    section.text += [f"* {one.name}: {_told(verdict)}" for one, verdict in wrong] + [""] * bool(wrong)
    kinds = Counter(verdict.kind for verdict in verdicts)
    said = (
        f"{len(controls)} right loops: {kinds['identical']} identical, {kinds['within_rounding']} within rounding, {len(wrong)} different"
    )
    section.promise(said, holds=not wrong)
    return section


# ---- DeepSpeed --------------------------------------------------------------------------------------------------------------

EXPECTED = {"fp32": None, "default": "clip.unexpected", "bf16": "precision.master_rounded"}


def deepspeed(_: int) -> Section:
    """DeepSpeed beside a plain loop."""
    section = Section(title="DeepSpeed")
    section.text += prose(
        f"A GPT on {verify_peers.NUM_RANKS} ranks, AdamW, 3 steps, beside one plain loop. *fp32* has clipping turned",
        "off; *default* says nothing of clipping, which DeepSpeed then does at a norm of 1; *bf16* has it turned off and the `bf16`",
        "section on, whose masters are clones of weights that were rounded.",
    )
    if not PEERS.exists():
        section.text += prose("Not run: there is no environment with DeepSpeed here (`make peers` makes it).")
        return section
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([PEERS, "-m", "benchmarks.verify_peers", folder], check=True, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        rows = [_engine_row(section, folder, variant, stage) for stage, variant in verify_peers.RUNS]
    section.text += table(["stage", "run", "verdict", "first in rank", "evidence"], rows)
    return section


def _engine_row(section: Section, folder: Path, variant: str, stage: int) -> list[str]:
    """One run's verdict, and its promise."""
    found = _plain_of(folder, "bf16" if variant == "bf16" else "fp32")
    verdict = judge(
        sb.Record.open(folder / verify_peers.name_of(stage, variant)),
        found.record,
        steps=verify_peers.STEPS,
        reruns=found.reruns,
        notes=found.notes,
    )
    expected = EXPECTED[variant]
    said = f"DeepSpeed, stage {stage}, {variant}: {verdict.rule or verdict.kind}"
    section.promise(f"{said}; expected {expected or 'the same training'}", holds=verdict.rule == expected)
    evidence = verdict.ranking[0][2] if verdict.ranking else ""
    return [str(stage), variant, verdict.kind, verdict.rule or "", evidence]


_PLAIN: dict[str, Reruns] = {}


def _plain_of(folder: Path, dtype: str) -> Reruns:
    if dtype not in _PLAIN:
        (folder / dtype).mkdir()
        _PLAIN[dtype] = baseline_reruns(lambda path: verify_peers.plain(path, dtype), folder / dtype)
    return _PLAIN[dtype]


# ---- what recording costs ---------------------------------------------------------------------------------------------------


def cost(_: int) -> Section:
    """Time of a recorded step, bytes of a record."""
    section = Section(title="What recording costs")
    section.text += prose("`python -m benchmarks.recording_cost`: two copies of a GPT are trained in turn, one of them recorded.", "")
    ratio = recording_cost.main()
    section.promise(f"a recorded step takes {ratio:.3f} times a plain one over a long run, at most {COST}", holds=ratio <= COST)
    parameters, nbytes = _long_record()
    said = f"1,000 steps of a model of {parameters} parameters: {nbytes / MEGABYTE:.1f} MB, under 20"
    section.promise(said, holds=parameters >= 100 and nbytes < 20 * MEGABYTE)
    return section


def _long_record() -> tuple[int, int]:
    """(parameters, bytes) of a record of 1,000 steps."""
    layers = [torch.nn.Linear(4, 4) for _ in range(50)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        with sb.record(model, optimizer, Path(folder) / "a") as recorder:
            for step in range(1000):
                batch = torch.full((2, 4), float(step % 7))
                loss = model(batch).square().mean()
                loss.backward()
                recorder.step(loss=loss, batch=batch)
                optimizer.step()
                optimizer.zero_grad()
        nbytes = sum(path.stat().st_size for path in (Path(folder) / "a").iterdir())
    return len(list(model.parameters())), nbytes


# ---- the page ---------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[int], Section]] = {
    "right": right,
    "faults": faults,
    "without-faults": without_faults,
    "deepspeed": deepspeed,
    "cost": cost,
}


def page(sections: Sequence[Section], seconds: float) -> str:
    promises = [promise for section in sections for promise in section.promises]
    lines = ["# Evidence: verify", ""]
    lines += prose(
        f"Written by `make evidence-verify` in {seconds / 60:.1f} minutes on {os.cpu_count()} cores with torch {torch.__version__}; a rank",
        "has one intra-op thread, and ranks are processes on gloo.",
    )
    lines += [*(f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in promises), ""]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, printed and not written")
    parser.add_argument("--cases", type=int, default=CASES, help="right configurations; fewer than all are printed and not written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    sections: list[Section] = []
    try:
        for name in options.parts or PARTS:
            sections.append(PARTS[name](options.cases))
            print(f"{name}: {time.monotonic() - began:.0f} s so far", file=sys.stderr, flush=True)
    finally:
        ranks.stop_all()
    text = page(sections, time.monotonic() - began)
    if not options.parts and options.cases == CASES:
        write(text, TARGET)
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1


if __name__ == "__main__":
    sys.exit(main())
