"""Small runs on this machine: what the lesson's *run* buttons start, and what comes back."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shardbook.document import RunDocument
from shardbook.explore.small import EXAMPLE_LOAD, Small
from shardbook.train.settings import RUN_FILE

NO_TORCH = "a run needs torch, which is not here: pip install 'shardbook[train]'"
NO_EXAMPLE = "the example is part of the source distribution, and is not beside this installation: {path} is missing"
LONGEST_SECONDS = 300
_SHARDBOOK = (sys.executable, "-c", "import sys; from shardbook.cli.main import main; sys.argv[0] = 'shardbook'; main()")
"""The command without its script, which need not be on the path."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a person would type, what is started for it, and the folder of its ``run.json``; None: it writes none.

    ``needs``: a file without which there is nothing to start.
    """

    typed: str
    arguments: Sequence[str]
    out: Path | None = None
    needs: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was typed and printed, whether it ended well, how long it took, and the run's document if it wrote one."""

    typed: str
    text: str
    ended_well: bool
    seconds: float
    document: RunDocument | None = None


def train(small: Small) -> Command:
    """``shardbook train`` with a small decoder."""
    out = _folder()
    arguments = [*_SHARDBOOK, "train", *small.options, "--out", str(out)]
    return Command(typed=f"shardbook train {' '.join(small.options)}", arguments=arguments, out=out)


def recomputing(policy: str) -> Command:
    """One rank at stage 0 under ``shardbook.measure``, each block in ``torch.utils.checkpoint`` (``"full"``) or not (``"none"``)."""
    out, options = _folder(), ["-m", "shardbook.explore.recomputing", "--recompute", policy]
    arguments = [sys.executable, *options, "--out", str(out / RUN_FILE)]
    return Command(typed=f"python {' '.join(options)}", arguments=arguments, out=out)


def does_the_peak_divide() -> Command:
    """The example with small sizes: 1 and 2 ranks for real, 8 in torch's fake process group."""
    path = Path(__file__).parents[3] / "examples" / "does_the_peak_divide.py"
    options = [part for name, value in EXAMPLE_LOAD.items() for part in (f"--{name.replace('_', '-')}", f"{value}")]
    options += ["--real", "1", "2", "--fake", "8"]
    typed = f"python examples/{path.name} {' '.join(options)}"
    return Command(typed=typed, arguments=[sys.executable, str(path), *options], needs=path)


def perform(command: Command) -> Outcome:
    """Runs a command to its end. What goes wrong is in the text; nothing is raised."""
    begin = time.monotonic()
    if find_spec("torch") is None:
        return Outcome(typed=command.typed, text=NO_TORCH, ended_well=False, seconds=0.0)
    if command.needs is not None and not command.needs.is_file():
        return Outcome(typed=command.typed, text=NO_EXAMPLE.format(path=command.needs), ended_well=False, seconds=0.0)
    text, ended_well = _process(command.arguments)
    document = _document(command.out) if ended_well else None
    if command.out is not None:
        shutil.rmtree(command.out, ignore_errors=True)
    return Outcome(typed=command.typed, text=text, ended_well=ended_well, seconds=time.monotonic() - begin, document=document)


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shardbook-explore-"))


def _document(out: Path | None) -> RunDocument | None:
    if out is None or not (out / RUN_FILE).is_file():
        return None
    return RunDocument.from_json((out / RUN_FILE).read_text(encoding="utf-8"))


def _process(arguments: Sequence[str]) -> tuple[str, bool]:
    """What one process printed, and whether it ended well within :data:`LONGEST_SECONDS`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    try:
        ended = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            errors="replace", timeout=LONGEST_SECONDS, check=False, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return f"{said}\nstopped after {LONGEST_SECONDS} seconds".strip(), False
    except OSError as error:
        return f"could not be started: {error}", False
    return ended.stdout.strip(), ended.returncode == 0
