"""Loading, on every rank: first everything is read that could be wrong, then the ranks agree, and only then anything is changed.

Each rank reads the byte ranges it needs, twice: once for their checksums, once into place (from the page cache, as a rule). The
alternative, a second copy in memory until all is checked, costs what ZeRO saves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shardbook.accounts import Account
from shardbook.checkpoint import chance, manifest
from shardbook.checkpoint.agree import Ranks
from shardbook.checkpoint.compare import Allowed, Findings, compare_buffers, compare_parameters, match_groups
from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.folder import find
from shardbook.checkpoint.manifest import Manifest
from shardbook.checkpoint.plain import decoded
from shardbook.checkpoint.read import Reader, open_checkpoint
from shardbook.checkpoint.save import persistent_buffers, schedulers_of
from shardbook.checkpoint.write import BLOCK_NBYTES
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Piece
from shardbook.engine.state import WEIGHT, Place, members_of, weight_places
from shardbook.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What is not in tensors, decoded, with its counterparts here."""

    extra: dict[str, Any]
    schedulers: Sequence[tuple[Any, Any]]  # (scheduler here, its state)
    groups: Sequence[tuple[dict[str, Any], dict[str, Any]]]  # (parameter group here, its options)
    scalars: Mapping[str, dict[str, Any]]
    rng: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a load will change on this rank, known and checked before it does."""

    manifest: Manifest
    weights: Sequence[Place]
    states: Sequence[tuple[Piece, Mapping[str, str]]]  # of each piece, the types in which its states are stored
    buffers: Mapping[str, tuple[Tensor, int]]  # (buffer here, rank whose values it takes)
    plain: Plain


def load(engine: Engine, path: Path, allowed: Allowed, schedulers: Sequence[Any]) -> Mapping[str, Any]:
    """Take over a checkpoint; all ranks call it, between two steps. Returns its ``extra``.

    Raises:
        CheckpointError: it is damaged, incomplete, or of something else; nothing was changed.
        UsageError: in the middle of a step, or inside ``engine.gathered``.
    """
    _check_idle(engine)
    ranks = Ranks(engine.transport, engine._context.storage.device)
    folder = _find(ranks, path)
    reader = None
    try:
        with ranks.together(f"reading {folder}"):
            reader, plan = _prepare(engine, ranks, folder, allowed, schedulers)
        with ranks.together(f"loading {folder}"), torch.no_grad():
            assert reader is not None
            _apply(engine, ranks, reader, plan)
    finally:
        if reader is not None:
            reader.close()
    return plan.plain.extra


def _check_idle(engine: Engine) -> None:
    if engine._passes.tally.num_micro_batches:
        raise UsageError("engine.load: in the middle of a step; call it before the first engine.backward of one")
    for unit in engine._units:
        if unit.pins or unit.in_use:
            raise UsageError(f"engine.load: unit {unit.name!r} is in use (engine.gathered, or a forward); leave it first")


def _find(ranks: Ranks, path: Path) -> Path:
    """Rank 0 says which checkpoint it is: another may be finished while the others look."""
    name = ""
    with ranks.together(f"looking for {path}"):
        if ranks.rank == 0:
            found = find(path)
            name = "." if found == path else found.name
    return path / ranks.told(name)[0]


def _prepare(engine: Engine, ranks: Ranks, folder: Path, allowed: Allowed, schedulers: Sequence[Any]) -> tuple[Reader, Plan]:
    """Read the manifest, compare, and verify every byte that this rank will need."""
    found, reader = open_checkpoint(folder)
    try:
        for file in found.files:
            reader.check_file(file)
        plan = _plan(engine, ranks, reader, found, allowed, schedulers)
        _verify(reader, plan)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reader.close()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder / manifest.NAME}: a field is missing or of another kind ({error!r}): written by no shardbook"
        ) from error
    return reader, plan


def _plan(engine: Engine, ranks: Ranks, reader: Reader, found: Manifest, allowed: Allowed, schedulers: Sequence[Any]) -> Plan:
    findings = Findings()
    members = members_of(engine._units)
    shared = compare_parameters(found, [(flat, member) for _, flat, member in members], allowed, findings)
    here = persistent_buffers(engine.model)
    buffers = compare_buffers(found, here, allowed, findings)
    matches = _matches(engine, found, allowed, findings)
    pairs = _schedulers(engine, found, schedulers, findings)
    findings.raise_if_any(reader.folder)
    for name in shared:
        numel = _numel(found.parameters[name]["shape"])
        for what in {WEIGHT, *reader.kinds(name)} if numel else ():
            reader.check_complete(what, name, numel)
    flats = [flat for unit in engine._units for flat in unit.flats]
    places = [place for flat in flats for place in weight_places(flat, ranks.rank) if place.name in shared]
    has_optimizer = found.content["optimizer"] is not None
    return Plan(
        manifest=found,
        weights=places,
        states=[(piece, _state_types(reader, piece)) for flat in flats for piece in flat.pieces if piece.member.name in shared]
        if has_optimizer
        else [],
        buffers={name: (here[name], _whose(reader, name, ranks)) for name in buffers},
        plain=_plain(engine, found, matches, pairs),
    )


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _state_types(reader: Reader, piece: Piece) -> dict[str, str]:
    name = piece.member.name
    return {what: reader.stored(what, name)[0].dtype for what in reader.kinds(name) if what != WEIGHT}


def _whose(reader: Reader, name: str, ranks: Ranks) -> int:
    """The rank whose module buffer this one takes: its own where that was another than rank 0's."""
    return ranks.rank if any(stored.start == ranks.rank for stored in reader.stored("buffer", name)) else 0


def _matches(engine: Engine, found: Manifest, allowed: Allowed, findings: Findings) -> list[int | None]:
    if engine.optimizer is None or engine._pieces is None:
        return []
    if found.content["optimizer"] is None:
        if not allowed.misses("optimizer"):
            findings.add('it has no optimizer state (allow_missing=("optimizer",) begins it anew)')
        return [None] * len(engine.optimizer.param_groups)
    names = engine._pieces.group_names({id(member.parameter): member.name for _, _, member in members_of(engine._units)})
    return match_groups(found, names, type(engine.optimizer).__name__, findings)


def _schedulers(engine: Engine, found: Manifest, given: Sequence[Any], findings: Findings) -> list[tuple[Any, Any]]:
    here, stored = schedulers_of(engine, given), found.content["schedulers"]
    kinds, theirs = [type(one).__name__ for one in here], [one["class"] for one in stored]
    if kinds != theirs:
        findings.add(f"its schedulers are {theirs or 'none'} and here they are {kinds or 'none'} (the engine's, then those of schedulers=)")
        return []
    return [(one, decoded(state["state"])) for one, state in zip(here, stored, strict=True)]


def _plain(engine: Engine, found: Manifest, matches: Sequence[int | None], pairs: Sequence[tuple[Any, Any]]) -> Plain:
    optimizer, scale = found.content["optimizer"], found.content["loss_scale"]
    here = [] if engine.optimizer is None else engine.optimizer.param_groups
    options = [None if match is None else _mapping(optimizer["groups"][match]["options"]) for match in matches]
    scalars = {} if optimizer is None else _mapping(optimizer["scalars"])
    rng = [_mapping(state) for state in found.content["rng"]]
    for state in rng:
        chance.check(state)
    kinds = None if scale is None else [type(scale[key]) for key in ("value", "dynamic", "num_good")]
    if type(found.step) is not int or kinds not in (None, [float, bool, int]):
        raise TypeError(f"step is {found.step!r}, loss_scale {scale!r}")
    return Plain(
        extra=_mapping(found.content["extra"]),
        schedulers=pairs,
        groups=[(group, values) for group, values in zip(here, options, strict=True) if values is not None],
        scalars={name: _mapping(values) for name, values in scalars.items()},
        rng=rng,
    )


def _mapping(value: Any) -> dict[str, Any]:
    """Plain data that must be a dictionary.

    Raises:
        TypeError: it is something else.
    """
    found = decoded(value)
    if not isinstance(found, dict):
        raise TypeError(f"{str(found)[:60]} in the place of a dictionary")
    return cast(dict[str, Any], found)


def _verify(reader: Reader, plan: Plan) -> None:
    for place in plan.weights:
        for wanted in reader.ranges(WEIGHT, place.name, place.start, place.stop):
            reader.verify(wanted)
    for piece, types in plan.states:
        for what in types:
            for wanted in reader.ranges(what, piece.member.name, piece.span.start, piece.span.stop):
                reader.verify(wanted)
    for name, (buffer, rank) in plan.buffers.items():
        if buffer.numel():
            found = list(reader.ranges("buffer", name, rank, rank + buffer.numel()))
            mine = [wanted for wanted in found if wanted.stored.start == rank]
            if len(mine) != 1 or mine[0].stop != buffer.numel() or TYPES[mine[0].stored.dtype] != buffer.dtype:
                raise CheckpointError(f"{reader.folder}: buffer {name!r} is not in the files as the manifest says: incomplete or damaged")
            reader.verify(mine[0])


def _apply(engine: Engine, ranks: Ranks, reader: Reader, plan: Plan) -> None:
    """Everything is known to be right: change it."""
    for unit in engine._units:
        if unit.flats and unit.flats[0].stays_full:
            unit.wait()
    buffer = engine._context.storage.buffer(Account.WORKSPACE, "root", BLOCK_NBYTES, torch.uint8)
    staging = buffer.tensor if buffer.tensor.device.type == "cpu" else torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
    for place in plan.weights:
        _fill(reader, place, staging)
    if engine.optimizer is not None and engine._pieces is not None and plan.states:
        engine._pieces.take_state(_states(engine, reader, plan, staging))
    for name, (tensor, rank) in plan.buffers.items():
        _fill_buffer(reader, name, tensor, rank)
    buffer.give_back()
    for unit in engine._units:
        unit.changed()
        unit.release()
    _apply_plain(engine, ranks, plan)


def _fill(reader: Reader, place: Place, staging: Tensor) -> None:
    for wanted in reader.ranges(place.what, place.name, place.start, place.stop):
        first = wanted.stored.start + wanted.start - place.start
        targets = tuple(target[first : first + wanted.stop - wanted.start] for target in place.targets)
        reader.fill(wanted, targets, place.through, staging)


def _fill_buffer(reader: Reader, name: str, tensor: Tensor, rank: int) -> None:
    for wanted in reader.ranges("buffer", name, rank, rank + tensor.numel()):
        if wanted.stored.start == rank:
            values = torch.empty(tensor.numel(), dtype=tensor.dtype)
            reader.fill(wanted, (values,), None, values)
            tensor.copy_(values.view(tensor.shape))


def _states(engine: Engine, reader: Reader, plan: Plan, staging: Tensor) -> dict[Any, dict[str, Any]]:
    """The optimizer's state of every piece, in the memory that it has already where that fits."""
    assert engine.optimizer is not None
    old: dict[Any, dict[str, Any]] = dict(engine.optimizer.state)
    kept = {id(piece.parameter) for piece, _ in plan.states}
    engine.optimizer.state.clear()
    found = {parameter: state for parameter, state in old.items() if id(parameter) not in kept}
    groups = {id(parameter): group for group in engine.optimizer.param_groups for parameter in group["params"]}
    for piece, types in plan.states:
        before = old.pop(piece.parameter, {})
        scalars = plan.plain.scalars.get(piece.member.name)
        if scalars is None and not types:
            continue
        state = {key: _scalar(key, value, piece, groups[id(piece.parameter)]) for key, value in (scalars or {}).items()}
        for what, code in types.items():
            state[what] = _room(before.pop(what, None), piece, reader.stored(WEIGHT, piece.member.name)[0].dtype, code)
            _fill(reader, Place(what, piece.member.name, piece.span.start, (state[what],)), staging)
        found[piece.parameter] = state
    return found


def _room(before: Any, piece: Piece, weight: str, code: str) -> Tensor:
    """Memory for a state: in its own type where the weight keeps its type, else in the weight's, as ``load_state_dict`` would have it."""
    dtype = TYPES[code]
    if dtype.is_floating_point and TYPES[weight] != piece.parameter.dtype:
        dtype = piece.parameter.dtype
    if isinstance(before, Tensor) and before.shape == piece.parameter.shape and before.dtype == dtype:
        return before
    return torch.empty_like(piece.parameter, dtype=dtype, requires_grad=False)


def _scalar(key: str, value: Any, piece: Piece, group: Mapping[str, Any]) -> Any:
    """One value for a whole parameter; where torch's optimizers keep it on the device, there."""
    if not isinstance(value, Tensor):
        return value
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return value.clone().to(piece.parameter.device) if on_device else value.clone()


def _apply_plain(engine: Engine, ranks: Ranks, plan: Plan) -> None:
    plain, content = plan.plain, plan.manifest.content
    engine.num_steps = plan.manifest.step
    for group, options in plain.groups:
        for key, value in options.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    for scheduler, state in plain.schedulers:
        scheduler.load_state_dict(state)
    saved, stepper = content["loss_scale"], engine._stepper
    if saved is not None and stepper is not None and stepper.loss_scale.dynamic and saved["dynamic"]:
        stepper.loss_scale.value, stepper.loss_scale.num_good = float(saved["value"]), int(saved["num_good"])
        engine._passes.loss_scale = stepper.loss_scale.value
    chance.restore_rank(plain.rng, content["rng"], ranks.rank, engine._context.storage.device)
