"""``shardbook verify``: is it still the same training? Two records beside each other, or a recipe beside the plain loop.

The exit code says it: 0 identical or within rounding, 1 different, 2 no verdict (wrong usage, a record that can't be read).
"""

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from shardbook.document import write_atomically
from shardbook.errors import ConfigError, ShardbookError
from shardbook.report.verdict_console import show
from shardbook.verifying.verdict import Verdict

NO_TORCH = "verifying needs torch, which is not here: pip install 'shardbook[train]'"
NO_PICTURES = "--html needs {missing}, which is not here: pip install 'shardbook[report]'"

_RECIPE = ".toml"
_RECIPE_STEPS = 5


def _option(text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Whether two runs are the same training, and if not, which rule is broken."""

    candidate: Annotated[Path, tyro.conf.Positional, _option("a record (the folder given to sb.record), or a recipe", "CANDIDATE")]
    baseline: Annotated[
        Path | None, tyro.conf.Positional, _option("the record it is held against; a recipe is held against the plain loop", "BASELINE")
    ] = None
    steps: Annotated[int | None, _option("compare so many steps (default: all of two records, 5 of a recipe)", "N")] = None
    rerun: Annotated[
        tuple[Path, ...], _option("records of the baseline run in other orders or precisions: they bound what is rounding", "RECORD")
    ] = ()
    fp64: Annotated[bool, _option("the recipe's plain loop in double precision", "")] = False
    units: Annotated[tuple[str, ...], _option("of a recipe whose model fits into no process: compare these modules alone", "MODULE")] = ()
    out: Annotated[Path | None, _option("keep the records of a recipe in this new folder (default: nowhere)", "FOLDER")] = None
    unfinished: Annotated[bool, _option("also read records of runs that did not come to their end", "")] = False
    html: Annotated[Path | None, _option("write one self-contained page as well", "PAGE.HTML")] = None
    json: Annotated[bool, _option("print the verdict as JSON", "")] = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: allowed is 1 or more; leave it out to compare all steps of two records")
        _check_page(self.html)
        for path in filter(None, (self.candidate, self.baseline, *self.rerun)):
            _check(path)
        if not self._recipes:
            self._check_records()
        elif self._recipes == self._runs and (given := [name for name in ("rerun", "unfinished") if getattr(self, name)]):
            raise ConfigError(f"--{given[0]}: allowed is it with records; a recipe is run here, so leave it out")

    @property
    def _runs(self) -> list[Path]:
        return [self.candidate] if self.baseline is None else [self.candidate, self.baseline]

    @property
    def _recipes(self) -> list[Path]:
        return [path for path in self._runs if path.suffix == _RECIPE]

    def _check_records(self) -> None:
        if self.baseline is None:
            raise ConfigError(
                f"{self.candidate}: a record alone has nothing to be compared with; give the baseline's record behind it, as in "
                f"shardbook verify {self.candidate} baseline.rec"
            )
        if given := [name for name in ("fp64", "units", "out") if getattr(self, name)]:
            raise ConfigError(f"--{given[0]}: allowed is it with a recipe, which is run here; records are as they are, so leave it out")

    def verdict(self) -> Verdict:
        """Reads, or runs, and compares."""
        if not self._recipes:
            return self._of_records()
        from shardbook.train.verify import verify as verify_training

        return verify_training(
            self.candidate,
            self.baseline,
            steps=self.steps or _RECIPE_STEPS,
            precision="fp64" if self.fp64 else None,
            units=self.units,
            reruns=self.rerun,
            folder=self.out,
            unfinished=self.unfinished,
        )

    def _of_records(self) -> Verdict:
        from shardbook.recording.read import Record
        from shardbook.verifying.judge import judge

        candidate, baseline, *reruns = (Record.open(path, unfinished=self.unfinished) for path in (*self._runs, *self.rerun))
        if self.steps is not None and self.steps > max(candidate.num_steps, baseline.num_steps):
            raise ConfigError(f"--steps {self.steps}: the records have {baseline.num_steps} steps; leave it out to compare all of them")
        return judge(candidate, baseline, steps=self.steps, reruns=reruns)


def verify(options: Annotated[VerifyOptions, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Say whether two runs are the same training; if not, where they part and which rule is broken.

    0: identical or within rounding. 1: different. 2: wrong usage.
    """
    if find_spec("torch") is None:
        return _fail(NO_TORCH)
    if options.html is not None and (missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]):
        return _fail(NO_PICTURES.format(missing=" and ".join(missing)))
    try:
        verdict = options.verdict()
    except ShardbookError as error:
        return _fail(_as_options(str(error)))
    if options.html is not None:
        _write_page(options.html, verdict)
    if options.json:
        print(verdict.to_json())
    else:
        show(verdict, Console(highlight=False))
    return 0 if verdict.same else 1


def _as_options(message: str) -> str:
    """A remedy of the library as a remedy of the command.

    >>> _as_options("open it with unfinished=True, or compare the first 3: steps=3")
    'open it with --unfinished, or compare the first 3: --steps 3'
    """
    return re.sub(r"\bsteps=(\d+)", r"--steps \1", message).replace("unfinished=True", "--unfinished")


def _check(path: Path) -> None:
    """What can be known before anything is read: neither a record nor a recipe."""
    if path.suffix == _RECIPE:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; give the recipe that shardbook train takes")
    elif not path.exists():
        raise ConfigError(f"{path}: no such folder; give the one that was passed to sb.record, or a recipe ({_RECIPE})")
    elif not path.is_dir():
        inside = f"; it lies in {path.parent}" if path.name == "manifest.json" or path.suffix == ".rec" else ""
        raise ConfigError(
            f"{path}: a file, and a record is a folder{inside}; give the folder that was passed to sb.record, or a recipe ({_RECIPE})"
        )


def _check_page(path: Path | None) -> None:
    """A page that can't be written is known before a recipe is run for it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--html {path}: is a folder; give a file")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir():
        raise ConfigError(f"--html {path}: can't be written, as {folder} is no folder; give a file in a folder that can be")


def _write_page(path: Path, verdict: Verdict) -> None:
    from shardbook.report.verdict_page import page

    try:
        write_atomically(path, page(verdict))
    except OSError as error:
        raise ConfigError(f"--html {path}: can't be written ({error.strerror}); give a file in a folder that can be") from error
    print(f"written to {path}", file=sys.stderr)


def _fail(message: str, code: int = 2) -> int:
    print(f"shardbook: {message}", file=sys.stderr, flush=True)
    return code
