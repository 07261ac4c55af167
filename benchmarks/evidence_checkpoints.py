"""What checkpoints are worth: pairs, kills, corruption, memory, throughput beside plain reading and writing, exchange with transformers.

    make evidence-checkpoints                                  all, written to docs/evidence/checkpoints.md
    python -m benchmarks.evidence_checkpoints --parts pairs    one part, printed

Each part ends in promises; the exit code is 1 where one doesn't hold.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks import checkpoint_async, checkpoint_speed
from benchmarks.evidence_engine import Section, prose, table
from benchmarks.evidence_page import ROOT, run, tested
from tests import ranks, test_checkpoint_fuzz, test_checkpoint_kill, test_checkpoint_memory, test_checkpoint_pairs

NUM_KILLS, NUM_CORRUPTIONS = 50, 1000
SHARE = 0.8
MIB = 2**20
SHAPES = ((0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"))
CODE_EVENTS = ("exec", "compile", "import", "pickle.find_class", "marshal.loads", "os.system", "os.exec", "subprocess.Popen")
"""Audit events of an interpreter that executes what it did not execute before."""


def pairs() -> Section:
    section = Section(title="From any shape to any other")
    every = test_checkpoint_pairs.PAIRS
    section.text += prose(
        f"{len(every)} pairs of (stage, ranks, precision, units): all pairs of values of two sides, and all",
        "stages to all stages. After two",
        "steps one side saves; the other loads into an engine that began from other values, half of them after",
        "a step of its own. Weights,",
        "masters, moments, module buffers, groups, steps and schedule are compared to the bit, put together by name without the package.",
    )
    with tempfile.TemporaryDirectory() as folder:
        found = test_checkpoint_pairs.every_pair(Path(folder))
    wrong: list[str] = []
    for source, target in every:
        try:
            test_checkpoint_pairs.check((source, target), found)
        except AssertionError as error:
            wrong.append(f"{source} to {target}: {error}")
    section.text += [f"* {one}" for one in wrong] + [""] * bool(wrong)
    section.promise(f"pairs exact: {len(every) - len(wrong)} of {len(every)}, all of at least 40", holds=not wrong and len(every) >= 40)
    return section


def kills() -> Section:
    section = Section(title="Kills")
    section.text += prose(
        f"Two ranks at stage 3 save after every step; {NUM_KILLS} times one of them, or both, are ended by",
        "SIGKILL at a random moment, every second time at one inside a save, and",
        "started again. After each kill every byte of the last checkpoint is verified.",
    )
    with tempfile.TemporaryDirectory() as folder:
        found = test_checkpoint_kill.killed_often(Path(folder), NUM_KILLS, seed=1)
    where = f"{found.num_kills} kills, {found.num_inside} of them inside a save"
    section.promise(f"{where}: {len(found.damaged)} damaged checkpoints", holds=not found.damaged and found.num_inside > 0)
    section.promise(f"{len(found.lost)} saves that had ended were lost: no restart goes back more than one interval", holds=not found.lost)
    same = "the uninterrupted one, bit for bit" if found.is_same else "ANOTHER than the uninterrupted one"
    section.promise(f"the finished run is {same}", holds=found.is_same)
    section.promise(f"left behind: {', '.join(found.rubbish) or 'nothing'}", holds=not found.rubbish)
    return section


def corruption() -> Section:
    section = Section(title="Corruption")
    section.text += prose(
        f"{NUM_CORRUPTIONS} copies of a checkpoint, each changed at random: bits flipped, heads rewritten,",
        "files cut, overwritten, swapped or",
        "removed, values of the manifest edited; each loaded into an engine that trains. While they load, the interpreter's audit events",
        f"are counted that tell of code ({', '.join(f'`{name}`' for name in CODE_EVENTS)}).",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = test_checkpoint_fuzz.made(folder)
        test_checkpoint_fuzz.run(good, folder, 30, seed=2)  # what is imported late is imported now
        counted = _Counted()
        found = test_checkpoint_fuzz.run(good, folder, NUM_CORRUPTIONS, seed=1)
        counted.is_on = False
    refused, whole = len(found.refused), len(found.as_saved)
    section.promise(
        f"{NUM_CORRUPTIONS} corruptions: {len(found.wrong)} loaded as something else ({whole} were what was saved)", holds=not found.wrong
    )
    section.promise(
        f"{refused} refused by a CheckpointError, {len(found.changed)} of them after a change", holds=not found.changed and refused > 0
    )
    section.promise(f"{len(found.raised)} other exceptions, and the interpreter lives", holds=not found.raised)
    said = ", ".join(f"{number} {event}" for event, number in counted.events.items()) or "none"
    section.promise(f"code executed, by audit events: {said}", holds=not counted.events)
    section.text += [f"* {one}" for one in found.raised] + [""] * bool(found.raised)
    return section


class _Counted:
    """Audit events of code, while ``is_on``; a hook can't be taken away again."""

    def __init__(self) -> None:
        self.is_on, self.events = True, Counter[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: object) -> None:
        if self.is_on and event in CODE_EVENTS:
            self.events[event] += 1


def memory() -> Section:
    section = Section(title="Memory")
    unit = test_checkpoint_memory.UNIT
    bound = unit + 64 * MIB
    section.text += prose(
        f"Two ranks, {test_checkpoint_memory.NUM_UNITS} units of {unit / MIB:.1f} MiB in fp32; MiB above the",
        "training state, on the rank that",
        "needs most: by the books, by the allocator's own record, and by the process's resident memory, looked",
        "at every millisecond,beside what it has before and after.",
    )
    rows: list[list[str]] = []
    most: dict[str, float] = {}
    for stage, param in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            found = ranks.call(2, test_checkpoint_memory.job, stage, param, Path(folder))
        for number, name in enumerate(("save", "load")):
            above = [
                max(one[number]["books"] - one[number]["state"] for one in found),
                max(one[number]["allocator"] - one[number]["state"] for one in found),
                max(one[number]["process"] for one in found),
            ]
            rows.append([str(stage), param, name, *(f"{value / MIB:.1f}" for value in above)])
            most[name] = max(most.get(name, 0), *above)
    section.text += table(["stage", "param", "", "books", "allocator", "resident"], rows)
    for name, value in most.items():
        section.promise(
            f"a {name} needs {value / MIB:.1f} MiB above the training state, at most a unit and 64 MiB ({bound / MIB:.1f})",
            holds=value <= bound,
        )
    return section


def throughput() -> Section:
    section = Section(title="Throughput")
    section.text += prose(
        f"Training states of {checkpoint_speed.NBYTES / 2**30:.1f} GiB in all, on one rank and on two, in turn:",
        "a save beside *plain* writing of as",
        "many bytes, 4 MiB at a time with one fsync; a load beside *plain* reading into one buffer, and beside reading into as much",
        "*memory*, which is new where that of the load is. Each goes first in turn, and ranks begin",
        "together. *Cold*: the files were dropped from the page cache before. *Fresh*: the optimizer has no",
        "state yet, as where a run is resumed. GiB/s are medians of the",
        "slowest rank; the ratio is taken in each round; *best* is the ratio of the shortest times; *cores*: seconds of processors, which",
        "depend less on what else the machine does. Only rounds count in",
        f"which *others* took at most {checkpoint_speed.FOREIGN:.0%} of the cores; if fewer than five did, the five",
        "quietest, and the row says little.",
    )
    rows: list[list[str]] = []
    for num_ranks in (1, 2):
        for name, found in checkpoint_speed.measured(num_ranks).items():
            rows += [[str(num_ranks), name, *row] for row in found.rows()]
            if name != "load, warm":
                _promise_share(section, f"{name}, {num_ranks} rank{'s' * (num_ranks > 1)}", found)
    section.text += table(
        ["ranks", "", "beside", "GiB/s", "theirs", "ratio", "quartiles", "best", "cores", "theirs", "rounds", "others"], rows
    )
    section.text += prose(
        "State that is there already is read twice, so that nothing is changed before everything is checked; state that is not there yet,",
        "once. From a warm page cache nothing hides the second pass, nor the memory that is filled: no promise is made there.",
    )
    return section


def _promise_share(section: Section, what: str, found: checkpoint_speed.Pairs) -> None:
    """Of the throughput of each rival, the one that keeps no byte included."""
    noise = "" if found.is_quiet else " (THE MACHINE WAS BUSY with other things: says little)"
    for rival in found.rivals:
        of = "plain throughput" if rival == "plain" else "plain reading into memory"
        share = found.median(rival)
        section.promise(f"{what}: {share:.2f} of {of}, at least {SHARE}{noise}", holds=share >= SHARE)


def background() -> Section:
    section = Section(title="In the background")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".evidence-") as folder:
        section.text += [f"* {line}" for line in checkpoint_async.words(checkpoint_async.stalls(Path(folder))).splitlines()] + [""]
    section.text += prose(
        "The thread that writes and the steps beside it share the cores here, so that most of what the call saves is lost in steps.",
        "No promise is made of time. That the files are those of a save that was waited for, and that the copy is in the books, is held by",
        "`tests/test_checkpoint_async.py`.",
    )
    return section


def exchange() -> Section:
    section = Section(title="Exchange")
    section.text += prose("Tests of exported and imported weights, those of the full suite too.")
    section.text += export_lines(section)
    return section


def export_lines(section: Section) -> list[str]:
    """Run what tests there are of export and import; a promise for each file, a line for each that fails."""
    lines: list[str] = []
    for kind in ("import", "transformers"):
        for path in sorted((ROOT / "tests").glob(f"test_checkpoint_{kind}.py")):
            passed, failed = tested(path)
            lines += [f"* {name}" for name in failed]
            section.promise(f"{path.name}: {passed} tests passed, {len(failed)} failed", holds=not failed and passed > 0)
    return lines + [""] * bool(lines)


PARTS: dict[str, Callable[[], Section]] = {
    "throughput": throughput,
    "pairs": pairs,
    "kills": kills,
    "corruption": corruption,
    "memory": memory,
    "background": background,
    "exchange": exchange,
}


if __name__ == "__main__":
    sys.exit(run("checkpoints", __doc__, PARTS))
