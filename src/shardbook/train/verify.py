"""``verify``: is it still the same training? A candidate and a baseline become records, and the records a verdict.

Each of the two is one of

    a recipe     its run on its ranks, as ``shardbook train`` runs it; as a baseline its plain loop, in one process
    a callable   trains under `shardbook.record`; as a baseline it is run again in other summation orders and precisions
    a record     the folder, or what :meth:`shardbook.Record.open` gives
"""

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from shardbook.errors import ConfigError
from shardbook.recording.read import Record
from shardbook.train.launch import LaunchError, launch
from shardbook.train.recipe import Recipe, build_recipe, read_recipe
from shardbook.train.recorded import DOUBLE, PLAIN, RUN
from shardbook.verifying.callables import RERUNS, baseline_reruns, record_of
from shardbook.verifying.judge import judge
from shardbook.verifying.verdict import Verdict

Source = Recipe | Record | Path | Callable[..., Any]


def verify(
    candidate: Any, baseline: Any = None, *, steps: int = 5, precision: Literal["fp64"] | None = None, reruns: Sequence[Any] = (),
    folder: Path | str | None = None, unfinished: bool = False,
) -> Verdict:  # fmt: skip
    """Whether ``candidate`` trains as ``baseline`` does, and which rule it breaks if not.

    Args:
        candidate: a recipe (a ``.toml`` file, or one that is built), a callable that trains under :func:`shardbook.record`, or the
            path of a record.
        baseline: likewise. None: the plain loop of the candidate's recipe.
        steps: how many are compared, from the first. Where both have the same smaller number, that.
        precision: ``"fp64"``: the recipe's plain loop computes and adds in double precision.
        reruns: records of the baseline, summed in another order or in another type, where the baseline is a record: how far they are
            from it bounds what rounding explains.
        folder: where the records of recipes and callables are kept, a new one; None: nowhere.
        unfinished: also read records of runs that were killed, or left by an exception, as far as they go.

    Raises:
        ConfigError: no baseline, different numbers of steps, a record that can't be read, or a wrong recipe.
        LaunchError: a rank failed.
    """
    asked = Asked(steps=steps, precision=precision, unfinished=unfinished)
    mine, other = _source(candidate), _source(baseline)
    _check(asked, mine, other, reruns)
    with _place(folder) as place:
        if isinstance(mine, Recipe) and other in (None, mine):
            return _against_its_plain_loop(mine, asked, place)
        found = _candidate(mine, asked, place)
        beside = _baseline(mine if other is None else other, asked, place)
        again = [*beside.reruns, *(_opened(_source(one), asked) for one in reruns)]
        verdict = judge(found.record, beside.record, steps=_num_steps(found, beside, steps), reruns=again, notes=beside.notes)
        return replace(verdict, candidate=found.name or verdict.candidate, baseline=beside.name or verdict.baseline)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How two runs are to be compared; see :func:`verify`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    steps: int
    precision: Literal["fp64"] | None = None
    unfinished: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"verify: steps = {self.steps!r}: allowed is a whole number from 1 up; 5 is usual")
        if self.precision not in (None, DOUBLE):
            raise ConfigError(f"verify: precision = {self.precision!r}: allowed is {DOUBLE!r}, or None for the run's own types")

    @property
    def variant(self) -> str:
        """Which plain loop is the baseline."""
        return self.precision or PLAIN


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record, and what goes with it. ``name`` is empty where the record speaks for itself."""

    record: Record
    name: str = ""
    reruns: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()


# ---- candidates and baselines ----------------------------------------------------------------------------------------------


def _source(given: Any) -> Source | None:
    """A recipe's file is read; whatever else is no callable is taken for the path of a record."""
    if given is None or isinstance(given, (Recipe, Record)):
        return given
    if isinstance(given, (str, Path)):
        path = Path(given)
        return build_recipe(read_recipe(path), {}) if path.suffix == ".toml" else path
    if callable(given):
        return given
    raise ConfigError(
        f"verify: {type(given).__name__} is neither a recipe nor a record nor a callable: give the path of a .toml file or of a "
        f"record's folder, or a function that trains under shardbook.record"
    )


def _check(asked: Asked, candidate: Source | None, baseline: Source | None, reruns: Sequence[Any]) -> None:
    if candidate is None:
        raise ConfigError("verify: candidate = None: allowed is a recipe, a record, or a callable that trains under shardbook.record")
    if baseline is None and not isinstance(candidate, Recipe):
        what = "a callable" if callable(candidate) else "a record"
        raise ConfigError(
            f"verify: {what} says nothing of what it should have been; give a baseline beside it: a record of a run that is right, a "
            f"plain loop under shardbook.record, or a recipe"
        )
    if asked.precision and not isinstance(candidate if baseline is None else baseline, Recipe):
        raise ConfigError(
            f"verify: precision = {asked.precision!r}: of a recipe's plain loop alone; a callable builds its model in torch.float64 "
            f"itself, and a record has the types that it has"
        )
    if reruns and (baseline is None or isinstance(baseline, Recipe) or (callable(baseline) and not isinstance(baseline, Record))):
        raise ConfigError(
            "verify: reruns: of a baseline that is a record; a recipe and a callable are run again by themselves; leave it out"
        )


def _candidate(source: Source | None, asked: Asked, place: Path) -> Found:
    if isinstance(source, Recipe):
        steps = min(asked.steps, source.run.steps)
        _start(source, place, steps=steps, run=True, variants=())
        return Found(record=Record.open(place / RUN), name=_run_of(source))
    if callable(source) and not isinstance(source, (Record, Path)):
        return Found(record=Record.open(_together(record_of(source, place / "candidate", asked.steps))))
    return Found(record=_opened(source, asked))


def _baseline(source: Source | None, asked: Asked, place: Path) -> Found:
    if isinstance(source, Recipe):
        variants = (asked.variant, *_other_variants(asked))
        _start(source, place, steps=min(asked.steps, source.run.steps), run=False, variants=variants)
        first, *others = (Record.open(place / variant) for variant in variants)
        return Found(record=first, name=_plain_of(source, asked), reruns=tuple(others))
    if callable(source) and not isinstance(source, (Record, Path)):
        found = baseline_reruns(source, place, asked.steps)
        return Found(record=found.record, reruns=found.reruns, notes=found.notes)
    return Found(record=_opened(source, asked))


def _opened(source: Any, asked: Asked) -> Record:
    return source if isinstance(source, Record) else Record.open(source, unfinished=asked.unfinished)


def _num_steps(candidate: Found, baseline: Found, steps: int) -> int:
    """How many are compared."""
    counts = candidate.record.num_steps, baseline.record.num_steps
    if min(counts) >= steps or counts[0] == counts[1]:
        return min(steps, *counts)
    fewer = "candidate" if counts[0] < counts[1] else "baseline"
    raise ConfigError(
        f"verify: steps = {steps}: the candidate's record has {counts[0]} steps, the baseline's {counts[1]}; "
        f"record {steps} steps of the {fewer}, or compare steps={min(counts)}"
    )


# ---- a recipe ----------------------------------------------------------------------------------------------------------------


def _against_its_plain_loop(recipe: Recipe, asked: Asked, place: Path) -> Verdict:
    """The run and its plain loop; further plain loops, for a bound on rounding, only where bits differ."""
    steps = min(asked.steps, recipe.run.steps)
    scales = _start(recipe, place, steps=steps, run=True, variants=(asked.variant,))
    run, plain = Record.open(place / RUN), Record.open(place / asked.variant)
    verdict = judge(run, plain, steps=steps)
    if verdict.kind != "identical":
        others = _other_variants(asked)
        _start(recipe, place, steps=steps, run=False, variants=others, scales=scales)
        verdict = judge(run, plain, steps=steps, reruns=[Record.open(place / variant) for variant in others])
    return replace(verdict, candidate=_run_of(recipe), baseline=_plain_of(recipe, asked))


def _other_variants(asked: Asked) -> tuple[str, ...]:
    names = tuple(name for name, _ in RERUNS)
    return (PLAIN, *names) if asked.precision else names


def _start(
    recipe: Recipe, place: Path, *, steps: int, run: bool, variants: Sequence[str], scales: Sequence[float] | None = None
) -> list[float] | None:
    """Ranks that record what is asked for; a plain loop alone needs one."""
    job = {"task": "record", "recipe": recipe.request(), "folder": str(place.resolve()), "steps": steps, "run": run,
           "variants": list(variants), "scales": scales}  # fmt: skip
    try:
        return launch(job, ranks=recipe.run.ranks if run else 1, port=recipe.run.port)
    except LaunchError as error:
        if error.exit_code == 2:
            raise ConfigError(str(error)) from error
        raise


def _run_of(recipe: Recipe) -> str:
    return f"{_title(recipe)}: shardbook, stage {recipe.zero.stage}, {_ranks(recipe)}"


def _plain_of(recipe: Recipe, asked: Asked) -> str:
    what = "plain loop in fp64" if asked.precision else "plain loop"
    return f"{_title(recipe)}: {what}, one process, the micro-batches of {_ranks(recipe)}"


def _ranks(recipe: Recipe) -> str:
    return "1 rank" if recipe.run.ranks == 1 else f"{recipe.run.ranks} ranks"


def _title(recipe: Recipe) -> str:
    """The file that it came from."""
    files = sorted({one.origin for one in recipe.given.values() if one.origin.endswith(".toml")})
    return files[0] if files else "recipe"


# ---- where records are ------------------------------------------------------------------------------------------------------


@contextmanager
def _place(folder: Path | str | None) -> Generator[Path]:
    """A folder for records: the one that is asked for, or one that goes away. In a process group all ranks have rank 0's."""
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"verify: folder = {str(folder)!r}: can't be made ({error.strerror}); give another") from error
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="shardbook-verify-") as made:
        shared = [made]
        if _in_group():
            dist.broadcast_object_list(shared)
        yield Path(shared[0])
        _together(Path())


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _together(path: Path) -> Path:
    """Once all ranks are here."""
    if _in_group():
        dist.barrier()
    return path
