"""Whether the engine does on a CUDA device what the test suite shows on a CPU. One command, under 10 minutes on one large GPU:

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --device cpu     tries the check itself, on gloo and the CPU, with a small model
    python -m benchmarks.gpu_check --only simulation    a part of it, by what stands in the rows' names

First come sixteen trainings of one rank with forecast, simulation, books, allocated and reserved bytes side by side (`gpu_simulation`),
under 4 minutes; their table and the allocator's histories lie beside the data, in a folder of that name.

Then: N = 1 on NCCL, and N = 2 as two processes on one device over gloo with CUDA tensors (NCCL refuses two ranks on one device, so NCCL
with more than one rank is not run here). Every stage against the plain loop, bit for bit; the same with kernels delayed before
everything that a gather or a reduction reads, and on another stream; tiers, delayed as well: optimizer and parameters on the host,
the optimizer on a disk, and recomputation with inputs on the host; NCCL's own transport by itself; the allocator's peaks by stage.
Checks run in processes of their own, so that one that fails hides no other. What there is no time for is named as not run. The
exit code is 0 if all passed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cases, gpu_memory, gpu_simulation, gpu_simulation_runs, models, ranks
from benchmarks.gpu_cases import Training

BUDGET_SECONDS = 510.0
"""For all that runs on the device; forecasts and simulations come after it, in about a minute."""
CHECK_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table: a case and the group that runs it."""

    name: str
    num_ranks: int
    backend: str
    case: Callable[..., gpu_cases.Found]
    arguments: tuple[Any, ...]


@dataclass(kw_only=True)
class Row:
    """What came of a check."""

    name: str
    status: str  # passed, failed, not run
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def checks(device: str) -> Iterator[Check]:
    """All of them, the most telling first."""
    groups = [(1, "nccl" if device == "cuda" else "gloo"), (2, "gloo")]
    small = device == "cpu"
    for num_ranks, backend in groups:
        for stage in range(4):
            for dtype in ("fp32", "bf16"):
                training = Training(stage=stage, dtype=dtype)
                yield _equality(
                    f"N = {num_ranks} {backend}, stage {stage}, {dtype}: equals the plain loop", num_ranks, backend, device, training
                )
    yield Check(
        name=f"N = 1 {groups[0][1]}: its transport by itself",
        num_ranks=1,
        backend=groups[0][1],
        case=gpu_cases.collectives,
        arguments=(device,),
    )
    for num_ranks, backend in groups:
        for stage in (1, 3):
            training = Training(stage=stage, dtype="bf16", delayed=True)
            yield _equality(
                f"N = {num_ranks} {backend}, stage {stage}, bf16: the same with delayed kernels", num_ranks, backend, device, training
            )
        training = Training(stage=3, dtype="fp32", delayed=True, side_stream=True)
        yield _equality(f"N = {num_ranks} {backend}, stage 3, fp32: delayed, on another stream", num_ranks, backend, device, training)
    yield from tiers(groups, device)
    for num_ranks, backend in groups:
        for stage in range(4):
            arguments = (device, stage, "bf16", models.SMALL if small else gpu_memory.CONFIG)
            yield Check(
                name=f"N = {num_ranks} {backend}, stage {stage}, bf16: memory",
                num_ranks=num_ranks,
                backend=backend,
                case=gpu_memory.memory,
                arguments=arguments,
            )
        for stage in (0, 3):
            name = f"N = {num_ranks} {backend}, stage {stage}, fp32: books against the allocator"
            yield Check(name=name, num_ranks=num_ranks, backend=backend, case=gpu_cases.books, arguments=(device, stage))


def tiers(groups: Sequence[tuple[int, str]], device: str) -> Iterator[Check]:
    """What rests elsewhere comes and goes on streams of its own: under delays a copy that did not wait would bring old bytes."""
    for num_ranks, backend in groups:
        for what, training in TIERS.items():
            name = f"N = {num_ranks} {backend}, tiers, stage {training.stage}, {training.dtype}: {what}"
            yield _equality(name, num_ranks, backend, device, training)
        for stage, optimizer_on, recompute in ((2, "host", "selective"), (3, "host", "full")):
            what = f"books with the optimizer on the {optimizer_on}, {recompute} recompute"
            name = f"N = {num_ranks} {backend}, tiers, stage {stage}, fp32: {what}"
            arguments = (device, stage, optimizer_on, recompute)
            yield Check(name=name, num_ranks=num_ranks, backend=backend, case=gpu_cases.books, arguments=arguments)


TIERS: Mapping[str, Training] = {
    "optimizer on the host": Training(stage=1, dtype="fp32", optimizer_on="host"),
    "the same, delayed": Training(stage=2, dtype="bf16", optimizer_on="host", delayed=True),
    "optimizer and parameters on the host, delayed": Training(stage=3, dtype="bf16", optimizer_on="host", params_on="host", delayed=True),
    "parameters on the host, delayed, on another stream": Training(stage=3, dtype="fp32", params_on="host", delayed=True, side_stream=True),
    "optimizer on a disk, delayed": Training(stage=3, dtype="bf16", optimizer_on="disk", delayed=True),
    "full recompute, inputs on the host, delayed": Training(stage=3, dtype="bf16", recompute="full", rests=True, delayed=True),
    "selective recompute": Training(stage=2, dtype="bf16", recompute="selective"),
}


def _equality(name: str, num_ranks: int, backend: str, device: str, training: Training) -> Check:
    return Check(name=name, num_ranks=num_ranks, backend=backend, case=gpu_cases.equality, arguments=(device, training))


def run(check: Check, until: float) -> Row:
    """Start the ranks, wait, and keep whatever happens within the row."""
    began = time.monotonic()
    left = until - began
    if left < CHECK_SECONDS / 6:
        return Row(name=check.name, status="not run", wrong=[f"more than {BUDGET_SECONDS:.0f} s had passed"])
    try:
        found: list[gpu_cases.Found] = ranks.run(
            check.num_ranks, check.case, *check.arguments, backend=check.backend, seconds=min(left, CHECK_SECONDS)
        )
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
        return Row(name=check.name, status="failed", seconds=time.monotonic() - began, wrong=[_last_lines(error)])
    wrong = [line for one in found for line in one.wrong]
    figures = {key: max(one.figures[key] for one in found) for key in found[0].figures}
    return Row(name=check.name, status="failed" if wrong else "passed", seconds=time.monotonic() - began, wrong=wrong, figures=figures)


def simulation_cases(device: str, only: str) -> list[gpu_simulation_runs.Case]:
    """The trainings whose row is asked for."""
    every = gpu_simulation_runs.cases() if device == "cuda" else gpu_simulation_runs.small_cases()
    return [case for case in every if only in gpu_simulation.Row(case=case).name]


def simulation_rows(folder: Path) -> list[Row]:
    """What came of the trainings, in this table's terms; the whole of it is written into the folder."""
    return [
        Row(name=row.name, status=row.status, seconds=row.measured.seconds if row.measured else 0.0, wrong=row.wrong, figures=row.figures)
        for row in gpu_simulation.write(folder)
    ]


def peaks_fall(rows: Sequence[Row]) -> Row:
    """At N = 2 a higher stage must not have a higher peak."""
    name = "N = 2: the allocator's peak falls from stage to stage"
    peaks = [row.figures["peak MiB"] for row in rows if row.name.startswith("N = 2") and "peak MiB" in row.figures]
    if len(peaks) < 4:
        return Row(name=name, status="not run", wrong=["not all stages were measured"])
    figures = {f"stage {stage}": peak for stage, peak in enumerate(peaks)}
    falls = all(higher <= lower for lower, higher in itertools.pairwise(peaks))
    return Row(
        name=name, status="passed" if falls else "failed", figures=figures, wrong=[] if falls else ["a higher stage has a higher peak"]
    )


def _last_lines(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])}"


def facts(device: str) -> dict[str, str]:
    """What the figures depend on."""
    found = {"torch": torch.__version__, "device": "CPU, a try of the check itself"}
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(0), "CUDA": str(torch.version.cuda)}
        with suppress(AttributeError, ImportError, RuntimeError):  # the checks matter more than their heading
            from torch.cuda import nccl

            found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def table(rows: Sequence[Row], about: dict[str, str]) -> str:
    """One line a check, what is wrong below it."""
    width = max(len(row.name) for row in rows)
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), ""]
    for row in rows:
        figures = ", ".join(f"{key} {value:.1f}" for key, value in row.figures.items())
        lines.append(f"{row.name:{width}}  {row.status:7}  {row.seconds:5.1f} s  {figures}".rstrip())
        lines += [f"    {line}" for line in row.wrong[:6]]
    counts = {status: sum(row.status == status for row in rows) for status in ("passed", "failed", "not run")}
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items()) + "; NCCL with more than one rank: not run"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the same goes as data (default: %(default)s)")
    parser.add_argument("--only", default="", help="run only checks whose name contains this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the check itself", file=sys.stderr)
        return 2
    about, rows = facts(options.device), []
    until = time.monotonic() + BUDGET_SECONDS
    trainings, folder = simulation_cases(options.device, options.only), options.json.parent / "gpu_simulation"
    if trainings:
        gpu_simulation.train(trainings, options.device, folder)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts, in the ranks: deterministic products
    for check in checks(options.device):
        if options.only in check.name:
            rows.append(run(check, until))
            print(f"{rows[-1].status:7} {rows[-1].name}", flush=True)
    if not options.only:
        rows.append(peaks_fall(rows))
    if trainings:
        rows += simulation_rows(folder)
    if not rows:
        print(f"--only {options.only!r}: no check has that in its name", file=sys.stderr)
        return 2
    options.json.write_text(json.dumps({"facts": about, "checks": [dataclasses.asdict(row) for row in rows]}, indent=2) + "\n")
    print(f"\n{table(rows, about)}")
    return 0 if all(row.status == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
