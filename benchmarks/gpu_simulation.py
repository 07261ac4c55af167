"""Forecast, simulation, books, allocated and reserved side by side: sixteen trainings of one rank, in under 4 minutes of one GPU.

    python -m benchmarks.gpu_simulation                  on a GPU; `python -m benchmarks.gpu_check` runs it as well
    python -m benchmarks.gpu_simulation --device cpu     the same way without a GPU: two small trainings, all but CUDA itself
    python -m benchmarks.gpu_simulation --again DIR      the table again from what a run left in DIR, wherever; needs no GPU

First every case is trained (`gpu_simulation_runs`), which is all that needs the device; answers and allocator histories are kept in files.
Then, from the files, it is forecast and simulated, and each history is replayed through the model of the caching allocator. So when one of
the three has changed, a device that was borrowed once still answers. A case that there was no time for is named.
"""

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import shardbook as sb
from benchmarks import gpu_simulation_runs as runs
from benchmarks import ranks
from benchmarks.gpu_memory import Trace
from benchmarks.gpu_simulation_runs import Case, Measured
from shardbook.errors import ConfigError
from shardbook.facts.hardware import device as device_of
from shardbook.replay.comparison import compare
from shardbook.replay.recorded import recorded
from shardbook.replay.replay import replay
from shardbook.replay.settings import Settings
from shardbook.replay.snapshot import Entry, snapshot_of
from shardbook.replay.trace import Event, alloc, free
from shardbook.simulation import cuda_workspaces

BUDGET_SECONDS = 225.0
"""For all trainings; what is predicted comes after them."""
PEAK_BOUND, SIMULATION_BOUND, UNACCOUNTED_BOUND = 0.03, 0.005, 0.01
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was said of a case without running it. Bytes; None where nothing was said."""

    forecast: int | None = None
    forecast_reserved: tuple[int, int] | None = None
    simulated_first: int | None = None
    simulated: int | None = None
    simulated_reserved: int | None = None
    simulated_accounts: dict[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the model of the allocator makes of a run's own history: highest figures, each by itself.

    ``seen``: the most that was reserved by the history's own segments; None from a CPU. ``difference``: where both part, in words.
    """

    allocated: int
    reserved: int
    num_segments: int
    events: int
    seen: int | None = None
    difference: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case with everything that is known of it. ``status``: passed, failed, not run."""

    case: Case
    measured: Measured | None = None
    told: Told = Told()
    replay: Replay | None = None
    errors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"simulation: {self.case}"

    @property
    def status(self) -> str:
        return "not run" if self.measured is None and not self.errors else "failed" if self.wrong else "passed"

    @property
    def wrong(self) -> list[str]:
        """What is further off than it should be, in words."""
        if self.measured is None:
            return list(self.errors) or ["there was no time left"]
        seen, told = self.measured, self.told
        found = [*self.errors, *told.errors, *seen.notes]
        unaccounted = seen.books.get("UNACCOUNTED", 0)
        if unaccounted > UNACCOUNTED_BOUND * seen.seen:
            found.append(f"{unaccounted:,} of {seen.seen:,} bytes are in no account")
        for name, value, truth, bound in (
            ("forecast", told.forecast, seen.later, PEAK_BOUND),
            ("simulation", told.simulated, seen.later, SIMULATION_BOUND),
            ("simulation, first step", told.simulated_first, seen.first, SIMULATION_BOUND),
        ):
            if (error := off(value, truth)) is not None and abs(error) > bound:
                found.append(f"{name}: {error:+.2%} of what was allocated")
        if self.replay is not None and seen.reserved is not None and self.replay.reserved != seen.reserved:
            found.append(f"replay: {self.replay.reserved:,} bytes reserved, {seen.reserved:,} by the allocator's counter")
        if self.replay is not None and self.replay.difference:
            found += self.replay.difference.splitlines()[:3]
        return found

    @property
    def figures(self) -> dict[str, float]:
        """Signed errors in percent, for the check's own table."""
        if self.measured is None:
            return {}
        pairs = {"forecast %": self.told.forecast, "simulation %": self.told.simulated}
        errors = {name: off(value, self.measured.later) for name, value in pairs.items()}
        replayed = None if self.replay is None else off(self.replay.reserved, self.measured.reserved)
        errors |= {"replay %": replayed}
        return {name: 100 * error for name, error in errors.items() if error is not None} | {"peak MiB": self.measured.later / MIB}


def off(value: int | None, truth: int | None) -> float | None:
    """Signed error as a share of the truth; None where either is not known.

    >>> off(103, 100), off(None, 100)
    (0.03, None)
    """
    return None if value is None or not truth else (value - truth) / truth


# ---- on the device ---------------------------------------------------------------------------------------------------------------


def train(chosen: Sequence[Case], device: str, folder: Path, seconds: float = BUDGET_SECONDS) -> None:
    """Every case that there is time for, a process for each setting of the allocator; what comes of it lies in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("measured-*.json"), *folder.glob("trace-*.json.gz"), *folder.glob("failed-*.txt")):
        old.unlink()  # else a case that there is no time for would have an older answer
    until = time.time() + seconds
    (folder / "cases.json").write_text(json.dumps({"about": about(device), "cases": [asdict(case) for case in chosen]}), encoding="utf-8")
    for expandable, numbered in _groups(chosen):
        left = until - time.time()
        if left < 5:
            return
        before = os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        if expandable:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = runs.EXPANDABLE  # read when a rank's allocator is made
        try:
            backend = "nccl" if device == "cuda" else "gloo"
            ranks.run(1, runs.measure_all, numbered, device, str(folder), until, backend=backend, seconds=left)
        except ranks.RankFailedError as error:  # what had been measured until then lies in files
            (folder / f"failed-{int(expandable)}.txt").write_text(str(error), encoding="utf-8")
        finally:
            os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
            if before is not None:
                os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before


def _groups(chosen: Sequence[Case]) -> Iterator[tuple[bool, list[tuple[int, Case]]]]:
    for expandable in (False, True):
        numbered = [(number, case) for number, case in enumerate(chosen) if case.expandable == expandable]
        if numbered:
            yield expandable, numbered


def about(device: str) -> dict[str, str]:
    """What the figures depend on; ``catalog``: the device's name for forecasts, "" where it has none."""
    found = {"torch": torch.__version__, "device": "CPU, a try of the check itself", "catalog": ""}
    if device == "cuda":
        name = torch.cuda.get_device_name(0)
        found |= {"device": name, "CUDA": str(torch.version.cuda), "catalog": catalog_name(name, torch.cuda.mem_get_info(0)[1])}
    return found


def catalog_name(name: str, nbytes: int) -> str:
    """The catalog's name of what the driver calls ``name``; a plain size where it knows none.

    >>> catalog_name("NVIDIA H200", 150 * 2**30), catalog_name("NVIDIA A100-SXM4-80GB", 80 * 2**30), catalog_name("X", 3 * 2**30)
    ('h200', 'a100-80gb', '3GiB')
    """
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("-", " ").split()
    for candidate in ("-".join([*words[:1], *words[-1:]]), "-".join(words), *words[:1]):
        try:
            found = device_of(candidate)
        except ConfigError:
            continue
        if found.memory < 1.1 * nbytes and not candidate.endswith("gib"):
            return found.name
    return f"{nbytes // 2**30}GiB"


# ---- what is told without it -----------------------------------------------------------------------------------------------------


def tell(case: Case, catalog: str) -> Told:
    """The closed form, and the simulation, each with what it says of an error of its own."""
    told: dict[str, Any] = {}
    errors: list[str] = []
    for name, ask in (("forecast", _forecast), ("simulation", _simulation)):
        try:
            told |= ask(case, catalog or None)
        except Exception as error:  # noqa: BLE001 - the other witness is shown all the same
            errors.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Told(**told, errors=tuple(errors))


def _forecast(case: Case, device: str | None) -> dict[str, Any]:
    with torch.device("meta"):
        model = runs.build(case)
    found = sb.forecast(
        model, case.config, ranks=1, micro_batch=case.micro_batch, sequence=case.sequence, engine=_engine(case), device=device,
        choices=sb.Choices(kernel=case.kernel),
    )  # fmt: skip
    return {"forecast": found.peak_allocated, "forecast_reserved": found.peak_reserved}


def _engine(case: Case) -> str:
    return "ddp" if case.engine == "plain" else case.engine


def _simulation(case: Case, device: str | None) -> dict[str, Any]:
    settings = runs.EXPANDABLE if case.expandable and device is not None else None
    found = sb.simulate(
        lambda: runs.build(case), lambda: runs.batch(case), case.config, ranks=1,
        optimizer=lambda parameters: runs.adamw(case, parameters), engine=_engine(case), device=device, allocator=settings,
    )  # fmt: skip
    assert found.simulated is not None
    return {
        "simulated": found.simulated.later_peak,
        "simulated_first": found.simulated.first_peak,
        "simulated_reserved": found.simulated.replayed.reserved if found.simulated.replayed else None,
        "simulated_accounts": dict(found.accounts),
    }


def replayed(trace: Trace, case: Case) -> Replay:
    """The run's own history through the model of the allocator: laid beside the real one's segments, or, from a CPU, by itself."""
    snapshot = snapshot_of(trace)
    if not snapshot.segments:
        settings = Settings.parse(runs.EXPANDABLE if case.expandable else "")
        return _replay(replay([event for entry in snapshot.entries for event in _event(entry)], settings))
    run = recorded(snapshot)
    compared = compare(run)
    return _replay(
        replay(run.events, run.settings, start=run.start),
        seen=compared.real_peak_reserved,
        difference="" if compared.equal else str(compared),
    )


def _replay(found: Any, *, seen: int | None = None, difference: str = "") -> Replay:
    return Replay(
        allocated=found.peak_allocated, reserved=found.peak_reserved, num_segments=found.stats["segment.all.peak"],
        events=len(found.times), seen=seen, difference=difference,
    )  # fmt: skip


def _event(entry: Entry) -> Iterator[Event]:
    if entry.action == "alloc":
        yield alloc(entry.address, entry.nbytes, stream=entry.stream, time=entry.time)
    elif entry.action == "free_completed":
        yield free(entry.address, time=entry.time)


# ---- all together ----------------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> tuple[dict[str, str], list[Row]]:
    """From what :func:`train` left: what it depends on, and a row for each case."""
    written = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    chosen = [Case(**case) for case in written["cases"]]
    return written["about"], [_row(number, case, written["about"]["catalog"], folder) for number, case in enumerate(chosen)]


def _row(number: int, case: Case, catalog: str, folder: Path) -> Row:
    file = folder / f"measured-{number}.json"
    if not file.exists():
        failed = folder / f"failed-{int(case.expandable)}.txt"
        lost = (f"its process ended: {failed.read_text(encoding='utf-8').splitlines()[-1]}",) if failed.exists() else ()
        return Row(case=case, errors=lost)
    found = json.loads(file.read_text(encoding="utf-8"))
    told = tell(case, catalog)
    if "error" in found:
        return Row(case=case, told=told, errors=(found["error"],))
    measured = Measured(**found | {"notes": tuple(found["notes"])})
    errors: tuple[str, ...] = ()
    found_again = None
    try:
        with gzip.open(folder / measured.trace, "rt", encoding="utf-8") as trace:
            found_again = replayed(json.load(trace), case)
    except Exception as error:  # noqa: BLE001 - the rest is shown all the same
        errors = (f"replay: {type(error).__name__}: {' '.join(str(error).split())[:300]}",)
    return Row(case=case, measured=measured, told=told, replay=found_again, errors=errors)


HEADINGS = (
    "training", "allocated", "first step", "by history", "in no account", "forecast", "simulation", "first step", "reserved", "replay",
    "simulation's", "forecast's", "segments", "replay",
)  # fmt: skip

LEGEND = (
    "MiB, bytes where nothing is named by an account. Percentages are signed errors: of forecast and simulation against `allocated`,"
    " of figures of reserved bytes against `reserved`. `by history`: the peak of measured steps, which the books explain."
)


def table(found: Sequence[Row], depends: dict[str, str]) -> str:
    """As Markdown: MiB, and signed errors against what the allocator's counters say."""
    lines = [
        f"{', '.join(f'{key} {value}' for key, value in depends.items() if value)}.",
        "",
        LEGEND,
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|---{'|---:' * (len(HEADINGS) - 1)}|",
        *(f"| {' | '.join(_cells(row))} |" for row in found),
        "",
    ]
    for row in found:
        if row.wrong:
            lines += [f"* {row.case}: {row.status}", *(f"    * {line}" for line in row.wrong[:6])]
    lines += ["", "Kernels that are modelled:", *(f"* {model.name} ({model.source})" for model in cuda_workspaces.MODELS)]
    lines += ["", "Known to differ, and without a figure:", *(f"* {what}" for what in cuda_workspaces.NOT_MODELLED)]
    counts = {status: sum(row.status == status for row in found) for status in ("passed", "failed", "not run")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])


def _cells(row: Row) -> Iterator[str]:
    yield str(row.case)
    seen, told, again = row.measured, row.told, row.replay
    if seen is None:
        yield from ["-"] * (len(HEADINGS) - 1)
        return
    yield from (_mib(seen.later), _mib(seen.first), _with_error(seen.seen, seen.later), f"{seen.books.get('UNACCOUNTED', 0):,}")
    yield from (_with_error(told.forecast, seen.later), _with_error(told.simulated, seen.later))
    yield _with_error(told.simulated_first, seen.first)
    yield from (_mib(seen.reserved), _with_error(again and again.reserved, seen.reserved))
    yield _with_error(told.simulated_reserved, seen.reserved)
    yield "-" if told.forecast_reserved is None else " to ".join(_mib(bound) for bound in told.forecast_reserved)
    yield from ("-" if seen.num_segments is None else str(seen.num_segments), "-" if again is None else str(again.num_segments))


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"


def _with_error(value: int | None, truth: int | None) -> str:
    error = off(value, truth)
    return _mib(value) if error is None else f"{_mib(value)} ({error:+.2%})"


def write(folder: Path) -> list[Row]:
    """The table and the same as data, beside what was measured."""
    depends, found = rows(folder)
    (folder / "table.md").write_text(table(found, depends) + "\n", encoding="utf-8")
    data = {"about": depends, "rows": [asdict(row) | {"status": row.status, "wrong": row.wrong, "figures": row.figures} for row in found]}
    (folder / "table.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("gpu_simulation"), help="where everything is kept (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="of the device (default: %(default)s)")
    parser.add_argument("--again", type=Path, metavar="DIR", help="train nothing: make the table from what a run left there")
    options = parser.parse_args()
    if options.again is None:
        if options.device == "cuda" and not torch.cuda.is_available():
            print("no CUDA device here; --device cpu tries the check itself", file=sys.stderr)
            return 2
        train(runs.cases() if options.device == "cuda" else runs.small_cases(), options.device, options.folder, options.seconds)
    folder = options.again or options.folder
    if not (folder / "cases.json").exists():
        print(f"--again {folder}: no run has left anything there; it holds cases.json", file=sys.stderr)
        return 2
    found = write(folder)
    print((folder / "table.md").read_text(encoding="utf-8"))
    return 0 if all(row.status == "passed" for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
