"""A callable that trains under ``sb.record``, run for its record, and, as a baseline, run again in other summation orders and precisions.

A callable takes ``path``, the folder to record into, and may take ``steps``, how many are wanted. One that takes neither records where
it likes; it is found out. All ranks of a process group call these functions together.
"""

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardbook.errors import ConfigError
from shardbook.recording.begun import records_begun
from shardbook.recording.format import MANIFEST, RecordError
from shardbook.recording.prints import Fingerprint
from shardbook.recording.read import Record, Step
from shardbook.verifying.rerun import order, precision, rounding

RERUNS: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("precision", precision),
    ("order-1", partial(order, 1)),
    ("order-2", partial(order, 2)),
    ("rounding-1", partial(rounding, 1)),
    ("rounding-2", partial(rounding, 2)),
)
"""How a baseline is run again: the name of each record, and what it runs under."""


@dataclass(frozen=True, kw_only=True)
class Reruns:
    """A baseline's record, those of its reruns under :data:`RERUNS`, and what a reader of the verdict has to know about them."""

    record: Record
    reruns: tuple[Record, ...]
    notes: tuple[str, ...] = ()


def record_of(source: Callable[..., Any], folder: Path, steps: int | None = None) -> Path:
    """Run a callable that trains under ``sb.record``; the folder of its record.

    Args:
        source: ``f(path)``, ``f(path, steps)``, both by name or, ``path``, by position; or ``f()``, which returns the path it recorded to,
            or begins one record in the thread that calls it.
        folder: where it is to record, new; every rank passes any, rank 0's is taken.
        steps: given to a parameter of that name.

    Raises:
        ConfigError: other parameters, no record, or several.
        Exception: whatever the callable raises.
    """
    takes = _takes(source, steps)
    folder = _agreed(folder)
    args: tuple[Any, ...] = (folder,) if takes.by_position else ()
    kwargs: dict[str, Any] = ({"path": folder} if takes.by_name else {}) | ({"steps": steps} if takes.steps else {})
    with records_begun() as begun:
        returned = source(*args, **kwargs)
    _meet()
    paths = [*begun, *([Path(returned)] if isinstance(returned, (str, Path)) else []), folder]
    found = {path.resolve(): path for path in paths if (path / MANIFEST).exists()}
    if len(found) != 1:
        raise ConfigError(_not_one(source, list(found.values())))
    return next(iter(found.values()))


def baseline_reruns(baseline: Callable[..., Any], folder: Path, steps: int | None = None) -> Reruns:
    """Run a plain loop for its record, once more as it is, and under each of :data:`RERUNS`.

    Args:
        baseline: see :func:`record_of`. Each run begins with the random generators (torch's, numpy's, Python's) as they are now.
        folder: an existing folder, to which the records are written.
        steps: how many are wanted.

    Raises:
        ConfigError: it records nothing, or its second run begins with other weights or is given other data: then nothing can be said.
    """
    restore = _generators()
    first = Record.open(record_of(baseline, folder / "plain", steps))
    try:
        second = _run_again(baseline, restore, folder / "again", steps)
    except RecordError as error:
        return Reruns(record=first, reruns=(), notes=(f"the baseline was not run again, so rounding has no bound of its own: {error}",))
    difference = first_difference(first, second)
    _check_start(baseline, difference)
    reruns = [] if difference is None else [second]
    notes = () if difference is None else (_not_repeatable(difference),)
    for name, mode in RERUNS:
        with mode():
            reruns.append(_run_again(baseline, restore, folder / name, steps))
    return Reruns(record=first, reruns=tuple(reruns), notes=notes)


def first_difference(one: Record, other: Record) -> tuple[int, str, str] | None:
    """(step, phase, parameter) where two records first have different bits; None where they agree.

    Step 0 is the state before the first; phases are those of `record`, and ``data`` and ``steps``, which are of no parameter.
    """
    for left, right in zip(one.steps(), other.steps(), strict=False):
        if left.data != right.data:
            return left.number, "data", ""
        for phase, name in _differing(left, right):
            return left.number, phase, name
    return None if one.num_steps == other.num_steps else (min(one.num_steps, other.num_steps), "steps", "")


# ---- callables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Takes:
    """What a callable is called with."""

    by_name: bool
    by_position: bool
    steps: bool


def _takes(source: Callable[..., Any], steps: int | None) -> _Takes:
    parameters = inspect.signature(source).parameters
    given = steps is not None and "steps" in parameters
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters.values() if one.default is one.empty and one.kind not in variable]
    rest = [one for one in needed if one.name != "path" and not (given and one.name == "steps")]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not rest:
        only = parameters.get("path")
        by_position = only is not None and only.kind is inspect.Parameter.POSITIONAL_ONLY
        return _Takes(only is not None and not by_position, by_position, given)
    if len(rest) == 1 and "path" not in parameters and rest[0] is next(iter(parameters.values())) and rest[0].kind in positional:
        return _Takes(by_name=False, by_position=True, steps=given)
    raise ConfigError(
        f"verify: {_called(source)} takes {', '.join(map(str, needed))}; allowed are `path`, the folder to record into, and `steps`; "
        f"give the others beforehand, with functools.partial or a lambda"
    )


def _not_one(source: Callable[..., Any], found: list[Path]) -> str:
    if found:
        return (
            f"verify: {_called(source)} made {len(found)} records ({', '.join(str(path) for path in found[:3])}); it must make one: "
            f"verify each by itself, or let it return the path of the one that is meant"
        )
    return (
        f"verify: {_called(source)} recorded nothing; it must train under `with sb.record(model, optimizer, path) as recorder:` and call "
        f"recorder.step in every step; one that trains in other processes or threads takes `path`, or returns it"
    )


def _called(source: Callable[..., Any]) -> str:
    return f"the callable {getattr(source, '__qualname__', None) or repr(source)}"


def _agreed(folder: Path) -> Path:
    """Rank 0's, on all ranks."""
    if not _has_others():
        return folder
    shared = [str(folder)]
    dist.broadcast_object_list(shared)
    return Path(shared[0])


def _meet() -> None:
    """Until all ranks have closed their files."""
    if _has_others():
        dist.barrier()


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# ---- runs -----------------------------------------------------------------------------------------------------------------


def _run_again(baseline: Callable[..., Any], restore: Callable[[], None], folder: Path, steps: int | None) -> Record:
    restore()
    return Record.open(record_of(baseline, folder, steps))


def _generators() -> Callable[[], None]:
    """Puts back the state that the random generators have now."""
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy:
            numpy.random.set_state(state)

    return restore


def _check_start(baseline: Callable[..., Any], difference: tuple[int, str, str] | None) -> None:
    """Raises where the two runs are not of one training."""
    if difference is None or (difference[0] > 0 and difference[1] not in ("data", "steps")):
        return
    step, phase, name = difference
    what = "other data" if phase == "data" else "another number of steps" if phase == "steps" else f"other values of {name!r}"
    where = "before the first step" if step == 0 else f"in step {step}"
    raise ConfigError(
        f"verify: {_called(baseline)}, run a second time, had {what} {where}: it can't be a baseline; "
        f"let it build its model, its optimizer and its batches itself, from seeds, each time that it is called"
    )


def _not_repeatable(difference: tuple[int, str, str]) -> str:
    step, phase, name = difference
    return (
        f"the baseline run twice doesn't give the same bits: its kernels, or the loop itself, are not deterministic; first in step {step}, "
        f"{phase} of {name}. Its second run counts among the reruns"
    )


def _differing(left: Step, right: Step) -> Iterator[tuple[str, str]]:
    """(phase, parameter) of what has different bits in two steps, in the order in which a step goes."""
    for phase, mine in left.phases.items():
        theirs = right.phases.get(phase, {})
        for name, one in mine.items():
            if name not in theirs or not _same(one, theirs[name]):
                yield phase, name
        for name in theirs.keys() - mine.keys():
            yield phase, name


def _same(one: Fingerprint, other: Fingerprint) -> bool:
    return one.squares == other.squares if one.hash is None or other.hash is None else one.same_bits(other)
