"""Small runs on this machine: what the lesson's *run* buttons start, and what comes back."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shardbook.document import RunDocument
from shardbook.errors import ConfigError
from shardbook.explore.lesson import EXAMPLE_LOAD, SMALL_RUN, Small

NO_TORCH = "a run needs torch, which is not here: pip install 'shardbook[train]'"
LONGEST_SECONDS = 300
_SHARDBOOK = "import sys; from shardbook.cli.main import main; sys.argv[0] = 'shardbook'; main()"
"""The command without its script, which need not be on the path."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is typed, what is started for it, and the folder of its ``run.json``; None: it writes none."""

    typed: str
    arguments: Sequence[str]
    out: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run printed, whether it ended well, how long it took, and its document if it wrote one."""

    typed: str
    text: str
    ended_well: bool
    seconds: float
    document: RunDocument | None = None


def train(small: Small) -> Command:
    """``shardbook train`` with a small decoder."""
    out = Path(tempfile.mkdtemp(prefix="shardbook-explore-"))
    options = ["train", *small.options, "--steps", f"{SMALL_RUN.steps}"]
    return Command(typed=_typed(options), arguments=[sys.executable, "-c", _SHARDBOOK, *options, "--out", str(out)], out=out)


def recomputing(policy: str) -> Command:
    """One rank at stage 0 under ``shardbook.measure``, each block in ``torch.utils.checkpoint`` or not."""
    module, out = "shardbook.explore.recomputing", Path(tempfile.mkdtemp(prefix="shardbook-explore-"))
    arguments = ["-m", module, "--recompute", policy]
    return Command(typed=f"python {' '.join(arguments)}", arguments=[sys.executable, *arguments, "--out", str(out / "run.json")], out=out)


def does_the_peak_divide() -> Command:
    """The example with small sizes.

    Raises:
        ConfigError: this installation has no examples beside it.
    """
    path = Path(__file__).parents[3] / "examples" / "does_the_peak_divide.py"
    if not path.is_file():
        raise ConfigError("examples/does_the_peak_divide.py is part of the source distribution, and not beside this installation")
    options = [part for name, value in EXAMPLE_LOAD.items() for part in (f"--{name.replace('_', '-')}", f"{value}")]
    options += ["--real", "1", "2", "--fake", "8"]
    return Command(typed=f"python examples/{path.name} {' '.join(options)}", arguments=[sys.executable, str(path), *options])


def perform(command: Command) -> Outcome:
    """Runs it to its end, at most :data:`LONGEST_SECONDS`. What goes wrong is in the text; nothing is raised."""
    begin = time.monotonic()
    if find_spec("torch") is None:
        return Outcome(typed=command.typed, text=NO_TORCH, ended_well=False, seconds=0.0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    try:
        ended = subprocess.run(
            command.arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            errors="replace", timeout=LONGEST_SECONDS, check=False, env=environment,
        )  # fmt: skip
        text, code = ended.stdout, ended.returncode
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        text, code = f"{said}\nstopped after {LONGEST_SECONDS} seconds", 1
    except OSError as error:
        text, code = f"could not be started: {error}", 1
    seconds = time.monotonic() - begin
    document = _document(command.out) if code == 0 else None
    return Outcome(typed=command.typed, text=text.strip(), ended_well=code == 0, seconds=seconds, document=document)


def _document(out: Path | None) -> RunDocument | None:
    if out is None or not (out / "run.json").is_file():
        return None
    return RunDocument.from_json((out / "run.json").read_text(encoding="utf-8"))


def _typed(options: Sequence[str]) -> str:
    return " ".join(["shardbook", *options])
