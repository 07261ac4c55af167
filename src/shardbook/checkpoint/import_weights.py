"""Weights that others wrote, into an engine: names and shapes first, on all ranks, and only then values.

Each rank reads the byte ranges of its own pieces, unit by unit. What it holds beside the training state is one block of a file, or,
where a parameter lies in another order of memory than its dimensions', that parameter. The optimizer's state, the schedules and the
number of steps are left as they are, as ``model.load_state_dict`` leaves them in a plain loop.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.checkpoint.agree import Ranks
from shardbook.checkpoint.compare import Findings
from shardbook.checkpoint.dtypes import CODES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.foreign import Found, find_tensors
from shardbook.checkpoint.foreign_names import Asked, Wanted, match, names_here
from shardbook.checkpoint.foreign_read import Files, fill, put, whole
from shardbook.checkpoint.load import changing, check_idle
from shardbook.checkpoint.save import aliases_of, persistent_buffers
from shardbook.checkpoint.write import BLOCK_NBYTES
from shardbook.engine.engine import Engine
from shardbook.engine.flat import Flat, Member
from shardbook.engine.state import members_of, places_in_turn

Matches = Mapping[str, Sequence[Found]]


def import_weights(engine: Engine, path: Path, asked: Asked) -> None:
    """Take over weights; all ranks call it, between two steps.

    Raises:
        CheckpointError: they can't be read, or don't fit; nothing was changed.
        UsageError: in the middle of a step, or inside ``engine.gathered``.
    """
    check_idle(engine, "load_weights")
    ranks = Ranks(engine.transport, engine._context.storage.device)
    with Files() as files:
        matches: Matches = {}
        with ranks.together(f"reading {path}"):
            matches = _prepare(engine, files, path, asked)
        _check_same(ranks, path, matches)
        with ranks.together(f"loading {path}"):
            if ranks.rank == 0:
                _check_tied(engine, files, matches)
        with ranks.together(f"loading {path}"), torch.no_grad(), changing(engine):
            _apply(engine, ranks.rank, files, matches)
            files.check_unchanged()


def fill_module(module: nn.Module, path: Path, asked: Asked, *, under: str = "") -> None:
    """The same values into a plain module on a device; ``under``: what its names begin with in the whole model.

    What the files hold besides is left out, as of a module that is part of a model: an engine's import is the strict one.

    Raises:
        CheckpointError: they can't be read, or lack a parameter of the module.
    """
    aliases = _by_owner(aliases_of(module))
    tensors = {**dict(module.named_parameters()), **persistent_buffers(module)}
    wanted = [
        Wanted(
            kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer", name=under + name, shape=tuple(tensor.shape),
            dtype=CODES[tensor.dtype], aliases=tuple(under + alias for alias in aliases.get(name, ())),
        )
        for name, tensor in tensors.items()
    ]  # fmt: skip
    found, findings = names_here(find_tensors(path), asked.rename, path), Findings()
    names = {name for one in wanted for name in (one.name, *one.aliases)}
    matches = match({name: one for name, one in found.items() if name in names}, wanted, asked.allowed, findings)
    findings.raise_if_any(path)
    with Files() as files, torch.no_grad():
        for name, tensor in tensors.items():
            if under + name in matches:
                one = matches[under + name][0]
                files.open(one.path)
                tensor.copy_(whole(files, one, tensor.dtype))


def _prepare(engine: Engine, files: Files, path: Path, asked: Asked) -> Matches:
    """Open the files and hold all names, shapes and types against the engine's."""
    found = find_tensors(path)
    for file in dict.fromkeys(one.path for one in found.values()):
        files.open(file)
    findings = Findings()
    matches = match(names_here(found, asked.rename, path), _wanted(engine), asked.allowed, findings)
    findings.raise_if_any(path)
    return matches


def _wanted(engine: Engine) -> list[Wanted]:
    aliases = _by_owner(aliases_of(engine.model))
    parameters = [
        Wanted(
            kind="parameter", name=member.name, shape=member.shape, dtype=CODES[_weight_type(flat)],
            aliases=aliases.get(member.name, ()),
        )
        for _, flat, member in members_of(engine._units)
    ]  # fmt: skip
    buffers = persistent_buffers(engine.model).items()
    return parameters + [Wanted(kind="buffer", name=name, shape=tuple(tensor.shape), dtype=CODES[tensor.dtype]) for name, tensor in buffers]


def _by_owner(aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Of each parameter that has other names, those."""
    found: dict[str, tuple[str, ...]] = {}
    for alias, name in aliases.items():
        found[name] = (*found.get(name, ()), alias)
    return found


def _weight_type(flat: Flat) -> torch.dtype:
    return flat.types.master or flat.types.param


def _check_same(ranks: Ranks, path: Path, matches: Matches) -> None:
    """All ranks see the same tensors, wherever their copies of the files are.

    Raises:
        CheckpointError: they don't; the same on all ranks.
    """
    lines = [f"{name} {one.path.name} {one.entry}" for name, found in sorted(matches.items()) for one in found]
    digests = ranks.told(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(f"{path}: rank {different[0]} sees other files there than rank 0; give all ranks the same ones")


def _check_tied(engine: Engine, files: Files, matches: Matches) -> None:
    for _, flat, member in members_of(engine._units):
        found = matches.get(member.name, ())
        for other in found[1:]:
            files.check_equal(found[0], other, _weight_type(flat))


def _apply(engine: Engine, rank: int, files: Files, matches: Matches) -> None:
    """Everything is known to fit: change it."""
    buffer = engine._context.storage.buffer(Account.WORKSPACE, "root", BLOCK_NBYTES, torch.uint8)
    files.staging = buffer.tensor if buffer.tensor.device.type == "cpu" else None
    for unit in engine._units:
        for flat in unit.flats:
            _fill_flat(flat, rank, files, matches)
    for name, tensor in persistent_buffers(engine.model).items():
        if name in matches:
            tensor.copy_(whole(files, matches[name][0], tensor.dtype))
    files.staging = None
    buffer.give_back()


def _fill_flat(flat: Flat, rank: int, files: Files, matches: Matches) -> None:
    members = {member.name: member for member in flat.members}
    last: tuple[str, Tensor] | None = None
    for place in places_in_turn(flat, rank):
        if place.name not in matches:
            continue
        one = matches[place.name][0]
        if _is_in_order(members[place.name]):
            fill(files, one, place.start, place.targets, place.through)
            continue
        if last is None or last[0] != place.name:
            last = (place.name, _in_memory_order(whole(files, one, _weight_type(flat)), members[place.name]))
        put(last[1][place.start : place.stop], place.targets, place.through)


def _is_in_order(member: Member) -> bool:
    """Whether elements lie in memory as they do in a file."""
    return member.stride == torch.empty(member.shape, device="meta").stride() or torch.Size(member.shape).numel() < 2


def _in_memory_order(values: Tensor, member: Member) -> Tensor:
    ordered = torch.empty_strided(member.shape, member.stride, dtype=values.dtype)
    return ordered.copy_(values).as_strided((values.numel(),), (1,))
