"""Small real runs on this machine: each is the command line that a person would type, and what it printed.

They are as small as they can be and still show what they are for: teaching examples are not production benchmarks.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NOT_A_BENCHMARK = "teaching examples are not production benchmarks"
NO_TORCH = "torch is not here, so nothing can be run: pip install 'shardbook[train]'"
MOST_SECONDS = 300
"""A run that takes longer is ended: the smallest machine that was tried takes a tenth of it."""

RUN_FILE = "run.json"
_SMALL = ("--layers", "4", "--width", "96", "--ffn", "256", "--sequence", "64", "--micro-batch", "2", "--steps", "3")
_HERE = Path(__file__).parent
_EXAMPLE = _HERE.parents[2] / "examples" / "does_the_peak_divide.py"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Commands that are run one after the other, in a folder of their own; ``script`` is a file that one of them needs."""

    commands: tuple[tuple[str, ...], ...]
    script: Path | None = None

    def typed(self) -> str:
        """The command lines as a person types them."""
        name = self.script and str(self.script)
        return "\n".join(shlex.join(Path(word).name if word == name else word for word in command) for command in self.commands)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was printed, whether it ended well, and the document it wrote; ``document`` is None where there is none."""

    text: str
    ok: bool
    document: Path | None = None


def training(stage: int, ranks: int = 2) -> Job:
    """A decoder of half a million parameters under a stage."""
    return Job(commands=(("shardbook", "train", "--ranks", str(ranks), "--stage", str(stage), *_SMALL, "--out", "."),))


def traffic() -> Job:
    """The same training under stages 1 and 3, and what differs."""
    train = ("shardbook", "train", "--ranks", "2", *_SMALL)
    return Job(
        commands=(
            (*train, "--stage", "1", "--out", "one"),
            (*train, "--stage", "3", "--out", "three"),
            ("shardbook", "report", f"one/{RUN_FILE}", f"three/{RUN_FILE}"),
        )
    )


def checkpointing(*, recompute: bool) -> Job:
    """A plain loop, measured from outside, with and without recomputation of its blocks."""
    script = _HERE / "checkpointed_blocks.py"
    return Job(commands=(("shardbook", "measure", "--out", RUN_FILE, str(script), *(["--recompute"] if recompute else [])),), script=script)


def divide() -> Job:
    """The example of the question, in a small size."""
    sizes = ("--layers", "3", "--width", "124", "--vocab", "500", "--sequence", "64", "--real", "1", "2", "--fake", "8")
    return Job(commands=(("python", str(_EXAMPLE), *sizes),), script=_EXAMPLE)


def run(job: Job, *, seconds: float = MOST_SECONDS) -> Outcome:
    """Runs the commands to their end, or to the first that fails; what went wrong is in the text, and nothing is raised."""
    if find_spec("torch") is None:
        return Outcome(text=NO_TORCH, ok=False)
    if job.script is not None and not job.script.is_file():
        return Outcome(text=f"{job.script.name} is not in this installation: it is part of the repository", ok=False)
    folder = Path(tempfile.mkdtemp(prefix="shardbook-explore-"))
    said: list[str] = []
    for command in job.commands:
        text, ok = _one(command, folder, seconds)
        said.append(text)
        if not ok:
            return Outcome(text="\n".join(said), ok=False)
    document = folder / RUN_FILE
    return Outcome(text="\n".join(said), ok=True, document=document if document.is_file() else None)


def _one(command: Sequence[str], folder: Path, seconds: float) -> tuple[str, bool]:
    try:
        done = subprocess.run(
            _program(command), cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return f"{_plain(late.stdout or b'')}\nended after {seconds:g} seconds, which is the most that a run here may take", False
    except OSError as error:
        return f"could not be started: {error}", False
    text = _plain(done.stdout)
    return (text, True) if done.returncode == 0 else (f"{text}\nended with exit code {done.returncode}", False)


def _program(command: Sequence[str]) -> list[str]:
    """This interpreter runs it: what is found on the path may be another one."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    return [sys.executable, "-c", "from shardbook.cli.main import main; main()", *command[1:]]


def _environment() -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def _plain(output: bytes) -> str:
    """Without colours, and of lines that were written over each other the last."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode("utf-8", "replace"))
    return "\n".join(line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").splitlines()).strip()
