"""What a load will do on this rank: known, and checked, before it does anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from torch import Tensor

from shardbook.checkpoint import chance
from shardbook.checkpoint.compare import OPTIMIZER, SCHEDULERS, Allowed, Findings, compare_buffers, compare_parameters, match_groups
from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.fresh import Fresh
from shardbook.checkpoint.manifest import Manifest
from shardbook.checkpoint.plain import decoded
from shardbook.checkpoint.read import Range, Reader
from shardbook.checkpoint.save import persistent_buffers, schedulers_of
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Piece
from shardbook.engine.state import WEIGHT, Place, members_of, weight_places


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person asks of a load."""

    allowed: Allowed
    schedulers: Sequence[Any]


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
    """All that a load will change on this rank."""

    weights: Sequence[Place]
    states: Sequence[tuple[Piece, Sequence[str]]]  # of each piece, the states that are stored
    buffers: Sequence[tuple[Tensor, Range]]
    plain: Plain

    def ranges(self, reader: Reader, fresh: Fresh) -> list[tuple[Range, Tensor | None]]:
        """Everything that will be read, in the order of the files' bytes, and where it goes if it is read but once."""
        found: list[tuple[Range, Tensor | None]] = [(wanted, None) for _, wanted in self.buffers]
        for place in self.weights:
            found += [(wanted, None) for wanted in reader.ranges(place.what, place.name, place.start, place.stop)]
        for piece, states in self.states:
            for what in states:
                wanted_ones = reader.ranges(what, piece.member.name, piece.span.start, piece.span.stop)
                found += [(wanted, fresh.part(piece, what, wanted)) for wanted in wanted_ones]
        return sorted(found, key=lambda pair: pair[0].place)


def make_plan(engine: Engine, rank: int, reader: Reader, asked: Asked) -> Plan:
    """Hold what is stored against what is here, and find out where everything is.

    Raises:
        CheckpointError: they don't fit, or the files don't hold what the manifest says.
    """
    found = reader.manifest
    findings = Findings()
    members = members_of(engine._units)
    shared = compare_parameters(found, [(flat, member) for _, flat, member in members], asked.allowed, findings)
    here = persistent_buffers(engine.model)
    buffers = compare_buffers(found, here, asked.allowed, findings)
    matches = _matches(engine, found, asked.allowed, findings)
    pairs = _schedulers(engine, found, asked, findings)
    findings.raise_if_any(reader.folder)
    for name in shared:
        numel = prod(found.parameters[name]["shape"])
        for what in {WEIGHT, *reader.kinds(name)} if numel else ():
            reader.check_complete(what, name, numel)
    flats = [flat for unit in engine._units for flat in unit.flats]
    resumes = found.content["optimizer"] and not asked.allowed.leaves_out(OPTIMIZER)
    pieces = [piece for flat in flats for piece in flat.pieces if piece.member.name in shared] if resumes else []
    states = [(piece, [what for what in reader.kinds(piece.member.name) if what != WEIGHT]) for piece in pieces]
    _check_room(engine, reader, states)
    return Plan(
        weights=[place for flat in flats for place in weight_places(flat, rank) if place.name in shared],
        states=states,
        buffers=[(here[name], _buffer(reader, name, here[name], rank)) for name in sorted(buffers) if here[name].numel()],
        plain=_plain(engine, found, matches, pairs),
    )


def _check_room(engine: Engine, reader: Reader, states: Sequence[tuple[Piece, Sequence[str]]]) -> None:
    """On a disk there is room for what the optimizer kept when it was built."""
    disk = engine._context.disk
    for piece, names in states if disk is not None else ():
        assert disk is not None
        kept = disk.kept(piece.member.parameter, piece.parameter.dtype)
        for name in names:
            if name not in kept:
                raise CheckpointError(
                    f"{reader.folder}: it has {name!r} of {piece.member.name!r}, for which the optimizer here has no room on its disk; "
                    f"build it with the options that it was saved with, or leave out its state: allow_unexpected=({OPTIMIZER!r},)"
                )


def _buffer(reader: Reader, name: str, tensor: Tensor, rank: int) -> Range:
    """Where a module buffer is: the rank's own, where that was another than rank 0's."""
    found = reader.whole("buffer", name, rank) or reader.whole("buffer", name, 0)
    if found is None or found.stop != tensor.numel() or TYPES[found.stored.dtype] != tensor.dtype:
        raise CheckpointError(f"{reader.folder}: buffer {name!r} is not in the files as the manifest says: incomplete or damaged")
    return found


def _matches(engine: Engine, found: Manifest, allowed: Allowed, findings: Findings) -> list[int | None]:
    if engine.optimizer is None or engine._pieces is None:
        return []
    if allowed.leaves_out(OPTIMIZER):
        return [None] * len(engine.optimizer.param_groups)
    if found.content["optimizer"] is None:
        if not allowed.misses(OPTIMIZER):
            findings.add('it has no optimizer state (allow_missing=("optimizer",) begins it anew)')
        return [None] * len(engine.optimizer.param_groups)
    names = engine._pieces.group_names({id(member.parameter): member.name for _, _, member in members_of(engine._units)})
    return match_groups(found, names, type(engine.optimizer).__name__, findings)


def _schedulers(engine: Engine, found: Manifest, asked: Asked, findings: Findings) -> list[tuple[Any, Any]]:
    here, stored = schedulers_of(engine, asked.schedulers), found.content["schedulers"]
    if asked.allowed.leaves_out(SCHEDULERS) or (not stored and asked.allowed.misses(SCHEDULERS)):
        return []
    kinds, theirs = [type(one).__name__ for one in here], [one["class"] for one in stored]
    if kinds != theirs:
        findings.add(
            f"its schedulers are {theirs or 'none'} and here they are {kinds or 'none'} (the engine's, then those of schedulers=; "
            f"{'allow_unexpected' if stored else 'allow_missing'}=({SCHEDULERS!r},) begins those here anew)"
        )
        return []
    pairs = [(one, decoded(state["state"])) for one, state in zip(here, stored, strict=True)]
    for number, (one, state) in enumerate(pairs):
        groups, those = _group_counts(one.state_dict()), _group_counts(state)
        if groups != those:
            findings.add(
                f"scheduler {number} ({kinds[number]}) is of {those} parameter groups in it and of {groups} here "
                f"(allow_unexpected=({SCHEDULERS!r},) begins it anew)"
            )
    return pairs


def _group_counts(state: Any) -> list[int]:
    """Of how many parameter groups a scheduler, and those it is made of, set the learning rates."""
    table = cast(Mapping[str, Any], state) if isinstance(state, Mapping) else {}
    rates, inner = table.get("base_lrs"), table.get("_schedulers")
    own = [len(cast(list[Any], rates))] if isinstance(rates, list) else []
    return own + [count for one in (cast(list[Any], inner) if isinstance(inner, list) else []) for count in _group_counts(one)]


def _plain(engine: Engine, found: Manifest, matches: Sequence[int | None], pairs: Sequence[tuple[Any, Any]]) -> Plain:
    optimizer, scale = found.content["optimizer"], found.content["loss_scale"]
    here = [] if engine.optimizer is None else engine.optimizer.param_groups
    options = [None if match is None else _mapping(optimizer["groups"][match]["options"]) for match in matches]
    scalars = {} if optimizer is None else _mapping(optimizer["scalars"])
    rng = [_mapping(state) for state in found.content["rng"]]
    if not rng:
        raise TypeError("rng is of no rank")
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
