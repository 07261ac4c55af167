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

SHOWN = 6
"""Findings that an error names; of the rest it tells how many they are."""
OPTIMIZER, SCHEDULERS = "optimizer", "schedulers"
"""What may be allowed as a whole, beside parameters and buffers."""
ANEW = f"(allow_unexpected=({OPTIMIZER!r},) leaves its optimizer out and begins this one anew)"

_KEEPS = "(named in allow_missing= and in allow_unexpected=, it keeps its value)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Patterns of names (``fnmatch``) that need not be in the checkpoint, and of names in it that nobody needs.

    Raises:
        CheckpointError: one string instead of a list of them, of which each letter would be a pattern.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, patterns in (("missing", self.missing), ("unexpected", self.unexpected)):
            if isinstance(patterns, str):
                raise CheckpointError(f"allow_{name}: {patterns!r}; a list of patterns is allowed: [{patterns!r}]")

    def misses(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.missing)

    def ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.unexpected)

    def replaces(self, name: str) -> bool:
        """Whether what is here stays, though the checkpoint has something else of that name."""
        return self.misses(name) and self.ignores(name)

    def leaves_out(self, part: str) -> bool:
        """Whether :data:`OPTIMIZER` or :data:`SCHEDULERS` is left where it is; said in full, as ``*`` means names of parameters."""
        return part in self.unexpected


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
            more = f"; and {len(self.texts) - SHOWN} more" if len(self.texts) > SHOWN else ""
            raise CheckpointError(f"{folder}: does not fit this engine: {'; '.join(self.texts[:SHOWN])}{more}. Nothing was changed")


def compare_parameters(manifest: Manifest, members: Sequence[tuple[Flat, Member]], allowed: Allowed, found: Findings) -> set[str]:
    """The names of the parameters that both have."""
    stored, here = manifest.parameters, {member.name: (flat, member) for flat, member in members}
    has_optimizer = manifest.content["optimizer"] is not None and not allowed.leaves_out(OPTIMIZER)
    both_train = has_optimizer and any(flat.trainable for flat, _ in members)
    replaced: set[str] = set()
    for name, (flat, member) in here.items():
        if name in stored:
            fault = _other_form(stored[name], member)
            if fault and allowed.replaces(name):
                replaced.add(name)
            elif fault:
                found.add(f"parameter {name!r} has {fault} {_KEEPS}")
            elif both_train:
                _compare_training(stored[name], flat, member, allowed, found)
        elif not allowed.misses(name):
            found.add(f"parameter {name!r} {member.shape} is missing in it (allow_missing= lets it keep its value)")
    for name in stored:
        if name not in here and not allowed.ignores(name):
            found.add(f"parameter {name!r} {tuple(stored[name]['shape'])} is in it and not in the model (allow_unexpected= leaves it out)")
    return (set(stored) & set(here)) - replaced


def _other_form(stored: Mapping[str, Any], member: Member) -> str | None:
    shape, stride = tuple(stored["shape"]), tuple(stored["stride"])
    if shape != member.shape:
        return f"shape {shape} in it and {member.shape} here"
    if stride != member.stride and prod(shape) > 1:
        return f"strides {stride} in it and {member.stride} here: build it in that memory format"
    return None


def _compare_training(stored: Mapping[str, Any], flat: Flat, member: Member, allowed: Allowed, found: Findings) -> None:
    if stored["trainable"] and not flat.trainable and not allowed.ignores(member.name):
        found.add(f"parameter {member.name!r} is trained in it and frozen here (allow_unexpected= leaves its optimizer state out)")
    elif flat.trainable and not stored["trainable"] and not allowed.misses(member.name):
        found.add(f"parameter {member.name!r} is frozen in it and trained here (allow_missing= begins its optimizer state anew)")


def compare_buffers(manifest: Manifest, buffers: Mapping[str, Tensor], allowed: Allowed, found: Findings) -> set[str]:
    """The names of the module buffers that both have."""
    stored: Mapping[str, Any] = manifest.content["buffers"]
    replaced: set[str] = set()
    for name, tensor in buffers.items():
        form = f"{CODES.get(tensor.dtype, tensor.dtype)} {tuple(tensor.shape)}"
        theirs = f"{stored[name]['dtype']} {tuple(stored[name]['shape'])}" if name in stored else None
        if theirs is None and not allowed.misses(name):
            found.add(f"buffer {name!r} is missing in it (allow_missing= lets it keep its value)")
        elif theirs is not None and theirs != form and allowed.replaces(name):
            replaced.add(name)
        elif theirs is not None and theirs != form:
            found.add(f"buffer {name!r} is {theirs} in it and {form} here {_KEEPS}")
    found.texts += [
        f"buffer {name!r} is in it and not in the model (allow_unexpected= leaves it out)"
        for name in stored
        if name not in buffers and not allowed.ignores(name)
    ]
    return (set(stored) & set(buffers)) - replaced


def match_groups(manifest: Manifest, names: Sequence[Sequence[str]], kind: str, found: Findings) -> list[int | None]:
    """For each parameter group here, the number of the one in the checkpoint with the same parameters (of those that both have)."""
    optimizer: Mapping[str, Any] = manifest.content["optimizer"]
    if optimizer["class"] != kind:
        found.add(f"its optimizer is {optimizer['class']} and this engine's is {kind} {ANEW}")
        return [None] * len(names)
    of: dict[str, int] = {name: number for number, group in enumerate(optimizer["groups"]) for name in group["parameters"]}
    matches: list[int | None] = []
    for number, group in enumerate(names):
        theirs = {of[name]: name for name in group if name in of}
        if len(theirs) > 1:
            first, second = list(theirs.values())[:2]
            found.add(f"parameters {first!r} and {second!r} are in one parameter group here (group {number}) and in two in it {ANEW}")
        matches.append(next(iter(theirs), None))
    taken: dict[int, int] = {}
    for number, match in enumerate(matches):
        if match is not None and taken.setdefault(match, number) != number:
            found.add(f"parameter group {match} of it is two groups here ({taken[match]} and {number}) {ANEW}")
    return matches
