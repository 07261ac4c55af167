"""``shardbook measure``: runs somebody's training script, and says where its memory went."""

import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated

import tyro
from rich.console import Console
from rich.text import Text

from shardbook.checks import SIZE_EXAMPLE, SIZE_UNITS, parse_nbytes
from shardbook.document import RunDocument, write_atomically
from shardbook.errors import ConfigError
from shardbook.report.console import heading, shortage_table
from shardbook.tables.reconciliation import reconciliation_table
from shardbook.train.world import ALONE, World, find_world

NO_TORCH = "measuring needs torch, which is not here: pip install 'shardbook[train]'"
NO_PICTURES = "--html needs {missing}, which is not here: pip install 'shardbook[report]'"

_QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of blocks older than the profiler, which the measurement finds by itself
    "KINETO_LOG_LEVEL": "99",  # the profiler announces its start and stop on stderr
}
_WITH_VALUE = ("--out", "--budget", "--html")

_Script = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT.PY", help="the script that trains")]
_Arguments = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ARGUMENTS", help="all that follows the script's name is the script's own")
]
_Out = Annotated[Path, tyro.conf.arg(metavar="RUN.JSON", help="where the run's document is written")]
_Light = Annotated[bool, tyro.conf.arg(help="look at optimizer steps alone: no cost per operator, no peak"), tyro.conf.FlagCreatePairsOff]
_Budget = Annotated[str | None, tyro.conf.arg(metavar="SIZE", help="end the script and say what was held when a rank crosses this: 8GiB")]
_Html = Annotated[Path | None, tyro.conf.arg(metavar="PAGE.HTML", help="write one self-contained page as well")]
_Json = Annotated[bool, tyro.conf.arg(help="print the document on stdout, and the script's stdout on stderr"), tyro.conf.FlagCreatePairsOff]


def measure(
    script: _Script,
    arguments: _Arguments = (),
    /,
    *,
    out: _Out = Path("run.json"),
    light: _Light = False,
    budget: _Budget = None,
    html: _Html = None,
    json: _Json = False,
) -> int:
    """Run a training script and say where its memory went: alone, or started by torchrun on each rank.

    The exit code is the script's own; 2 is wrong usage.
    """
    limit, world = parse_budget(budget), find_world(os.environ) or ALONE
    if limit is not None and light:
        raise ConfigError(f"--budget {budget} with --light: light mode sees no allocation that could cross it; leave one of them out")
    _check(script, out)
    if find_spec("torch") is None:
        return _fail(NO_TORCH)
    if html is not None and (missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]):
        return _fail(NO_PICTURES.format(missing=" and ".join(missing)))
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from shardbook.ledger.parts import Meeting
    from shardbook.ledger.script import Script, run_script

    meeting = Meeting(out=out.absolute(), rank=world.rank, num_ranks=world.num_ranks, key=_key(world))
    html = None if html is None else html.absolute()  # the script may change the folder
    with _stdout_kept(free=json) as stdout:

        def tell(document: RunDocument) -> None:
            _tell(document, meeting.out, out, html)
            if json:
                print(document.to_json(), end="", file=stdout, flush=True)

        try:
            meeting.begin()
            return run_script(Script(path=script, arguments=arguments, mode="light" if light else "full", budget=limit), meeting, tell)
        except OSError as error:  # the script's own are its traceback
            return _fail(f"--out {out}: what was seen can't be written ({error}); give a file in a folder that can be written")


def with_own_boundary(arguments: Sequence[str]) -> list[str]:
    """``--`` before the script's name, so that nothing behind it is taken for an option of ours.

    >>> with_own_boundary(["measure", "--out", "x.json", "train.py", "--light"])
    ['measure', '--out', 'x.json', '--', 'train.py', '--light']
    >>> with_own_boundary(["train", "recipe.toml"])
    ['train', 'recipe.toml']
    """
    if not arguments or arguments[0] != "measure":
        return list(arguments)
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        if arguments[at] == "--":
            return list(arguments)
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return [*arguments[:at], "--", *arguments[at:]] if at < len(arguments) else list(arguments)


def parse_budget(text: str | None) -> int | None:
    """Bytes of a size as people write it.

    >>> parse_budget("8GiB"), parse_budget("1.5 MB"), parse_budget(None)
    (8589934592, 1500000, None)

    Raises:
        ConfigError: no number, no unit, or one that does not say which power it means.
    """
    if text is None:
        return None
    nbytes = parse_nbytes(text)
    if nbytes is None:
        raise ConfigError(
            f"--budget {text!r}: allowed is a number above 0 with one of {', '.join(SIZE_UNITS)} behind it, as in {SIZE_EXAMPLE}"
        )
    return nbytes


def _check(script: Path, out: Path) -> None:
    """What can be known to fail before anything runs: no script, or a document that can't be written or would destroy another file."""
    if not script.is_file():
        raise ConfigError(f"{script}: {'no such file' if not script.exists() else 'not a file'}; give the Python script that trains")
    if script.suffix != ".py":
        raise ConfigError(f"{script}: not a Python file; give the script itself (.py), not the program that starts it")
    if out.is_dir() or (out.exists() and not _is_document(out)):
        raise ConfigError(f"--out {out}: it exists and is no run document; give another file, or move this one away")
    folder = next(folder for folder in out.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {out}: {folder} can't be written to; give a file in a folder that can")


def _is_document(path: Path) -> bool:
    """Whether it may be written over: an earlier run's document, of whatever version, whole or cut off; or nothing at all."""
    with path.open("rb") as file:
        start = file.read(40)
    return not start or b'"format": "shardbook run"' in start


def _key(world: World) -> str:
    """The same on all ranks of a run, and another one in the next run."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    known = "-".join(filter(None, map(os.environ.get, names))) if world.num_ranks > 1 else f"alone-{os.getpid()}"
    return re.sub(r"[^\w.-]", "_", known) + ".parts"


def _tell(document: RunDocument, path: Path, name: Path, html: Path | None) -> None:
    write_atomically(path, document.to_json())
    console = Console(stderr=True, highlight=False)
    console.print()
    console.print(heading(document, f"written to {name}"))
    if document.shortage is not None:
        console.print(shortage_table(document.shortage))
    console.print(reconciliation_table(document))
    for note in document.notes:
        console.print(Text(f"note: {note}"))
    if html is not None:
        from shardbook.report.html import page

        write_atomically(html, page(document, name.name))
        console.print(Text(f"written to {html}"))


@contextmanager
def _stdout_kept(*, free: bool) -> Generator[IO[str]]:
    """The real stdout; ``free``: what anybody else writes there goes to stderr, its child processes' words included."""
    if not free:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as file:
            yield file
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _fail(message: str) -> int:
    print(f"shardbook: {message}", file=sys.stderr, flush=True)
    return 1
