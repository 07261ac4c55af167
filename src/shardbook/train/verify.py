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
from shardbook.train.recipe import Recipe, build_recipe, read_recipe
from shardbook.train.recipe_verdict import Asked, Job, against_its_plain_loop, against_plain_units, other_variants, plain_of, run_of
from shardbook.train.recorded import RUN
from shardbook.verifying.callables import baseline_reruns, record_of
from shardbook.verifying.judge import judge
from shardbook.verifying.verdict import Verdict

Source = Recipe | Record | Path | Callable[..., Any]


def verify(
    candidate: Any, baseline: Any = None, *, steps: int = 5, precision: Literal["fp64"] | None = None, units: Sequence[str] = (),
    reruns: Sequence[Any] = (), folder: Path | str | None = None, unfinished: bool = False,
) -> Verdict:  # fmt: skip
    """Whether ``candidate`` trains as ``baseline`` does, and which rule it breaks if not.

    Args:
        candidate: a recipe (a ``.toml`` file, or one that is built), a callable that trains under :func:`shardbook.record`, or the
            path of a record.
        baseline: likewise. None: the plain loop of the candidate's recipe.
        steps: how many are compared, from the first. Where both have the same smaller number, that.
        precision: ``"fp64"``: the recipe's plain loop computes and adds in double precision.
        units: of a recipe: modules, by name, whose parameters alone are compared, each by a plain loop of its own, where the whole model
            fits into no process.
        reruns: records of the baseline, summed in another order or in another type, where the baseline is a record: how far they are
            from it bounds what rounding explains.
        folder: where the records of recipes and callables are kept, a new one; None: nowhere.
        unfinished: also read records of runs that were killed, or left by an exception, as far as they go.

    Raises:
        ConfigError: no baseline, different numbers of steps, a record that can't be read, or a wrong recipe.
        LaunchError: a rank failed.
    """
    asked = Asked(steps=steps, precision=precision, units=tuple(units), unfinished=unfinished)
    mine, other = _source(candidate), _source(baseline)
    _check(asked, mine, other, reruns)
    with _place(folder, trains=not (_is_written(mine) and _is_written(other))) as place:
        if isinstance(mine, Recipe) and other in (None, mine):
            return against_plain_units(mine, asked, place) if asked.units else against_its_plain_loop(mine, asked, place)
        found = _candidate(mine, asked, place)
        beside = _baseline(mine if other is None else other, asked, place)
        again = [*beside.reruns, *(_opened(_source(one), asked) for one in reruns)]
        verdict = judge(found.record, beside.record, steps=_num_steps(found, beside, steps), reruns=again, notes=beside.notes)
        return replace(verdict, candidate=found.name or verdict.candidate, baseline=beside.name or verdict.baseline)


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
    if asked.units and not (isinstance(candidate, Recipe) and baseline in (None, candidate)):
        raise ConfigError(
            "verify: units: of a recipe against its own plain loop alone; leave it out, or give the recipe without a baseline"
        )
    if asked.units and asked.precision:
        raise ConfigError("verify: units and precision: what goes into a unit has the run's types; leave one of them out")
    if reruns and (baseline is None or isinstance(baseline, Recipe) or (callable(baseline) and not isinstance(baseline, Record))):
        raise ConfigError(
            "verify: reruns: of a baseline that is a record; a recipe and a callable are run again by themselves; leave it out"
        )


def _candidate(source: Source | None, asked: Asked, place: Path) -> Found:
    if isinstance(source, Recipe):
        Job(recipe=source, place=place, steps=min(asked.steps, source.run.steps)).start(run=True)
        return Found(record=Record.open(place / RUN), name=run_of(source))
    if callable(source) and not isinstance(source, (Record, Path)):
        return Found(record=Record.open(_together(record_of(source, place / "candidate", asked.steps))))
    return Found(record=_opened(source, asked))


def _baseline(source: Source | None, asked: Asked, place: Path) -> Found:
    if isinstance(source, Recipe):
        variants = (asked.variant, *other_variants(asked))
        Job(recipe=source, place=place, steps=min(asked.steps, source.run.steps)).start(variants=variants)
        first, *others = (Record.open(place / variant) for variant in variants)
        return Found(record=first, name=plain_of(source, asked), reruns=tuple(others))
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


# ---- where records are ------------------------------------------------------------------------------------------------------


@contextmanager
def _place(folder: Path | str | None, *, trains: bool) -> Generator[Path]:
    """A folder for records: the one that is asked for, or one that goes away.

    In a process group all ranks have rank 0's. Records that are there already any rank may compare by itself.
    """
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"verify: folder = {str(folder)!r}: can't be made ({error.strerror}); give another") from error
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="shardbook-verify-") as made:
        shared = [made]
        if trains and _in_group():
            dist.broadcast_object_list(shared)
        yield Path(shared[0])
        if trains:
            _together(Path())


def _is_written(source: Source | None) -> bool:
    return isinstance(source, (Record, Path))


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _together(path: Path) -> Path:
    """Once all ranks are here."""
    if _in_group():
        dist.barrier()
    return path
