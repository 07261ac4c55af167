"""What a checkpoint holds against what an engine needs, by name, before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from shardbook.checkpoint.dtypes import CODES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.manifest import Manifest
from shardbook.engine.flat import Flat, Member

_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Patterns of names (``fnmatch``) that need not be in the checkpoint, and of names in it that nobody needs."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def misses(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.missing)

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unexpected)


@dataclass(slots=True)
class Findings:
    """Everything that does not fit."""

    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.texts.append(text)

    def raise_if_any(self, folder: Path) -> None:
        """One error that names them.

        Raises:
            CheckpointError: there are some.
        """
        if self.texts:
            more = f"; and {len(self.texts) - _SHOWN} more" if len(self.texts) > _SHOWN else ""
            raise CheckpointError(f"{folder}: does not fit this engine: {'; '.join(self.texts[:_SHOWN])}{more}. Nothing was changed")


def compare_parameters(manifest: Manifest, members: Sequence[tuple[Flat, Member]], allowed: Allowed, found: Findings) -> set[str]:
    """The names of the parameters that both have."""
    stored, here = manifest.parameters, {member.name: (flat, member) for flat, member in members}
    both_train = manifest.content["optimizer"] is not None and any(flat.trainable for flat, _ in members)
    for name, (flat, member) in here.items():
        if name in stored:
            _compare_form(stored[name], member, found)
            if both_train:
                _compare_training(stored[name], flat, member, allowed, found)
        elif not allowed.misses(name):
            found.add(f"parameter {name!r} {member.shape} is missing in it (allow_missing= lets it keep its value)")
    for name in stored:
        if name not in here and not allowed.ignores(name):
            found.add(f"parameter {name!r} {tuple(stored[name]['shape'])} is in it and not in the model (allow_unexpected= leaves it out)")
    return set(stored) & set(here)


def _compare_form(stored: Mapping[str, Any], member: Member, found: Findings) -> None:
    shape, stride = tuple(stored["shape"]), tuple(stored["stride"])
    if shape != member.shape:
        found.add(f"parameter {member.name!r} has shape {shape} in it and {member.shape} here")
    elif stride != member.stride and prod(shape) > 1:
        found.add(f"parameter {member.name!r} has strides {stride} in it and {member.stride} here: build it in that memory format")


def _compare_training(stored: Mapping[str, Any], flat: Flat, member: Member, allowed: Allowed, found: Findings) -> None:
    if stored["trainable"] and not flat.trainable and not allowed.ignores(member.name):
        found.add(f"parameter {member.name!r} is trained in it and frozen here (allow_unexpected= leaves its optimizer state out)")
    elif flat.trainable and not stored["trainable"] and not allowed.misses(member.name):
        found.add(f"parameter {member.name!r} is frozen in it and trained here (allow_missing= begins its optimizer state anew)")


def compare_buffers(manifest: Manifest, buffers: Mapping[str, Tensor], allowed: Allowed, found: Findings) -> set[str]:
    """The names of the module buffers that both have."""
    stored: Mapping[str, Any] = manifest.content["buffers"]
    for name, tensor in buffers.items():
        form = f"{CODES.get(tensor.dtype, tensor.dtype)} {tuple(tensor.shape)}"
        theirs = f"{stored[name]['dtype']} {tuple(stored[name]['shape'])}" if name in stored else None
        if theirs is None and not allowed.misses(name):
            found.add(f"buffer {name!r} is missing in it (allow_missing= lets it keep its value)")
        elif theirs is not None and theirs != form:
            found.add(f"buffer {name!r} is {theirs} in it and {form} here")
    found.texts += [
        f"buffer {name!r} is in it and not in the model (allow_unexpected= leaves it out)"
        for name in stored
        if name not in buffers and not allowed.ignores(name)
    ]
    return set(stored) & set(buffers)


def match_groups(manifest: Manifest, names: Sequence[Sequence[str]], kind: str, found: Findings) -> list[int | None]:
    """For each parameter group here, the number of the one in the checkpoint with the same parameters (of those that both have)."""
    optimizer: Mapping[str, Any] = manifest.content["optimizer"]
    if optimizer["class"] != kind:
        found.add(f"its optimizer is {optimizer['class']} and this engine's is {kind}")
        return [None] * len(names)
    of: dict[str, int] = {name: number for number, group in enumerate(optimizer["groups"]) for name in group["parameters"]}
    matches: list[int | None] = []
    for number, group in enumerate(names):
        theirs = {of[name]: name for name in group if name in of}
        if len(theirs) > 1:
            first, second = list(theirs.values())[:2]
            found.add(f"parameters {first!r} and {second!r} are in one parameter group here (group {number}) and in two in it")
        matches.append(next(iter(theirs), None))
    taken: dict[int, int] = {}
    for number, match in enumerate(matches):
        if match is not None and taken.setdefault(match, number) != number:
            found.add(f"parameter group {match} of it is two groups here ({taken[match]} and {number})")
    return matches
