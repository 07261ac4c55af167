"""Loading, on every rank: first everything is read that could be wrong, then the ranks agree, and only then anything is changed.

Each rank reads the byte ranges it needs. What is there already it reads twice: once for the checksums, once into place (from the page
cache, as a rule); the alternative, a second copy in memory until all is checked, costs what ZeRO saves. What is not there yet, the state
of an optimizer that has not stepped, is read once, into new memory (:mod:`.fresh`).
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardbook.checkpoint import chance, manifest
from shardbook.checkpoint.agree import Ranks
from shardbook.checkpoint.compare import SCHEDULERS
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.folder import find
from shardbook.checkpoint.fresh import Fresh, fresh_states, new_room, room_that_fits, state_types
from shardbook.checkpoint.load_disk import fill_disk
from shardbook.checkpoint.manifest import Manifest
from shardbook.checkpoint.plan import Asked, Plain, Plan, make_plan
from shardbook.checkpoint.read import Range, Reader, open_checkpoint
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Piece
from shardbook.engine.state import Place
from shardbook.errors import UsageError

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)
"""What a manifest that nobody wrote can lead to."""


def load(engine: Engine, path: Path, asked: Asked) -> Mapping[str, Any]:
    """Take over a checkpoint; all ranks call it, between two steps. Returns its ``extra``.

    Raises:
        CheckpointError: it is damaged, incomplete, or of something else; nothing was changed.
        UsageError: in the middle of a step, or inside ``engine.gathered``.
    """
    check_idle(engine, "load")
    ranks = Ranks(engine.transport, engine._context.storage.device)
    folder = _find(ranks, path)
    with fresh_states(engine) as fresh:  # around the reader: its threads have ended before memory is given back
        reader = None
        try:
            with ranks.together(f"reading {folder}"):
                reader, plan = _prepare(engine, ranks.rank, folder, asked, fresh)
            _take_schedulers(plan.plain.schedulers, ranks, folder)
            with ranks.together(f"loading {folder}"), torch.no_grad():
                assert reader is not None
                _apply(engine, ranks, reader, plan, fresh)
        finally:
            if reader is not None:
                reader.close()
    return plan.plain.extra


def check_idle(engine: Engine, method: str) -> None:
    """Raise UsageError where values can't be changed: ``engine.{method}`` was called inside a step, or where they are in use."""
    if engine._passes.tally.num_micro_batches:
        raise UsageError(f"engine.{method}: in the middle of a step; call it before the first engine.backward of one")
    for unit in engine._units:
        if unit.pins or unit.in_use:
            raise UsageError(f"engine.{method}: unit {unit.name!r} is in use (engine.gathered, or a forward); leave it first")


@contextmanager
def changing(engine: Engine) -> Generator[None]:
    """Around what writes to :func:`weight_places`: nothing is under way to them, and afterwards older graphs must not use them."""
    for unit in engine._units:
        if unit.flats and unit.flats[0].stays_full:
            unit.wait()
    yield
    for unit in engine._units:
        unit.changed()
        unit.release()


def _find(ranks: Ranks, path: Path) -> Path:
    """Rank 0 says which checkpoint it is: another may be finished while the others look."""
    name = ""
    with ranks.together(f"looking for {path}"):
        if ranks.rank == 0:
            found = find(path)
            name = "." if found == path else found.name
    return path / ranks.told(name)[0]


def _prepare(engine: Engine, rank: int, folder: Path, asked: Asked, fresh: Fresh) -> tuple[Reader, Plan]:
    """Read the manifest, compare, and verify every byte that this rank will need; what is fresh is complete then."""
    reader = open_checkpoint(folder)
    try:
        for file in reader.manifest.files:
            reader.check_file(file)
        plan = make_plan(engine, rank, reader, asked)
        fresh.make(plan.states, reader)
        reader.verify(*plan.ranges(reader, fresh))
        reader.check_unchanged()
    except BaseException as error:
        reader.close()
        if isinstance(error, CheckpointError) or not isinstance(error, _MALFORMED):
            raise
        raise CheckpointError(
            f"{folder / manifest.NAME}: a field is missing or of another kind ({error!r}): written by no shardbook"
        ) from error
    return reader, plan


def _take_schedulers(pairs: Sequence[tuple[Any, Any]], ranks: Ranks, folder: Path) -> None:
    """First of all changes, as only a scheduler itself knows whether it takes a state: where one does not, all go back.

    Raises:
        CheckpointError: on some rank one did not take its state.
    """
    before = [(scheduler, deepcopy(scheduler.state_dict())) for scheduler, _ in pairs]
    try:
        with ranks.together(f"loading {folder}"):
            for scheduler, state in pairs:
                _take_scheduler(scheduler, state, folder)
    except BaseException:
        for scheduler, state in before:
            scheduler.load_state_dict(state)
        raise


def _take_scheduler(scheduler: Any, state: Any, folder: Path) -> None:
    try:
        scheduler.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: {type(scheduler).__name__} does not take its state ({type(error).__name__}: {error}); "
            f"allow_unexpected=({SCHEDULERS!r},) begins it anew. Nothing was changed"
        ) from error


@dataclass(frozen=True, slots=True)
class Job:
    """A range of a file, and where it goes."""

    wanted: Range
    place: Place

    def do(self, reader: Reader) -> None:
        first = self.wanted.stored.start + self.wanted.start - self.place.start
        targets = tuple(target[first : first + self.wanted.numel] for target in self.place.targets)
        reader.fill(self.wanted, targets, self.place.through)


def _apply(engine: Engine, ranks: Ranks, reader: Reader, plan: Plan, fresh: Fresh) -> None:
    """Everything is known to be right: change it."""
    with changing(engine):
        _fill(engine, reader, plan, fresh)
    _apply_plain(engine, ranks, reader.manifest, plan.plain)


def _fill(engine: Engine, reader: Reader, plan: Plan, fresh: Fresh) -> None:
    _do(reader, [*(place for place in plan.weights if not place.is_on_disk), *_states(engine, reader, plan, fresh)])
    disk = engine._context.disk
    if disk is not None:
        fill_disk(engine, disk, reader, plan, _do)
    for tensor, wanted in plan.buffers:
        values = torch.empty(tensor.numel(), dtype=tensor.dtype)
        reader.fill(wanted, (values,), None)
        reader.drain()
        tensor.copy_(values.view(tensor.shape))


def _do(reader: Reader, places: Sequence[Place]) -> None:
    """Fill places, in the order of the files' bytes."""
    jobs = [Job(wanted, place) for place in places for wanted in reader.ranges(place.what, place.name, place.start, place.stop)]
    for job in sorted(jobs, key=lambda job: job.wanted.place):
        job.do(reader)
    reader.drain()


def _states(engine: Engine, reader: Reader, plan: Plan, fresh: Fresh) -> list[Place]:
    """Give the optimizer the state of every piece: what is fresh, or the memory that it has already where that fits, and then its values
    are still to come.
    """
    if engine.optimizer is None or engine._pieces is None or not plan.states:
        return []
    old: dict[Any, dict[str, Any]] = dict(engine.optimizer.state)
    kept = {id(piece.parameter) for piece, _ in plan.states}
    found = {parameter: state for parameter, state in old.items() if id(parameter) not in kept}
    groups = {id(parameter): group for group in engine.optimizer.param_groups for parameter in group["params"]}
    engine.optimizer.state.clear()
    places: list[Place] = []
    for piece, states in plan.states:
        name, before = piece.member.name, old.pop(piece.parameter, {})
        if name not in plan.plain.scalars and not states:
            continue
        scalars = plan.plain.scalars.get(name, {})
        found[piece.parameter] = {key: _scalar(key, value, piece, groups[id(piece.parameter)]) for key, value in scalars.items()}
        for what in states if piece.chunk is None else ():
            room = fresh.taken(piece, what)
            if room is None:
                dtype = state_types(reader, piece, what)[1]
                room = room_that_fits(before.pop(what, None), piece, dtype)
                room = new_room(piece, dtype) if room is None else room
                places.append(Place(what, name, piece.span.start, (room,)))
            found[piece.parameter][what] = room
    engine._pieces.take_state(found)
    return places


def _scalar(key: str, value: Any, piece: Piece, group: Mapping[str, Any]) -> Any:
    """One value for a whole parameter; where torch's optimizers keep it on the device, there."""
    if not isinstance(value, Tensor):
        return value
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return value.clone().to(piece.parameter.device) if on_device else value.clone()


def _apply_plain(engine: Engine, ranks: Ranks, found: Manifest, plain: Plain) -> None:
    content = found.content
    engine.num_steps = found.step
    for group, options in plain.groups:
        for key, value in options.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    saved, stepper = content["loss_scale"], engine._stepper
    if saved is not None and stepper is not None and stepper.loss_scale.dynamic and saved["dynamic"]:
        stepper.loss_scale.value, stepper.loss_scale.num_good = float(saved["value"]), int(saved["num_good"])
        engine._passes.loss_scale = stepper.loss_scale.value
    chance.restore_rank(plain.rng, content["rng"], ranks.rank, engine._context.storage.device)
