"""Mutations: every rule of a right training broken for real, in a plain loop, on ranks and inside of shardbook.

A :class:`Mutation` is a setting, an engine, a fault (a mixin over the engine's loop) and its size, and the rule that it breaks.
``records`` trains baseline and candidate and gives their folders; baselines are trained once and kept.
"""

import dataclasses
import hashlib
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests import ranks
from tests.mutations_loops import KINDS, ONE_PROCESS
from tests.mutations_models import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One broken run. ``size`` says how much, in the fault's own unit; ``baseline`` is the kind of the right loop it is held against."""

    name: str
    rule: str | None
    engine: str
    setting: Setting
    fault: type | None
    size: Any = None
    baseline: str = "plain"

    @property
    def right(self) -> "Mutation":
        """The same without the fault."""
        return dataclasses.replace(self, name=f"{self.name}: right", rule=None, fault=None, size=None)


class Folder:
    """Where records go: below a temporary folder of this process, or where ``keep`` says, to be used again by the next one."""

    keep: Path | None = None

    @classmethod
    @cache
    def temporary(cls) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="mutations-")

    @classmethod
    def path(cls) -> Path:
        return cls.keep or Path(cls.temporary().name)


@cache
def recorded(setting: Setting, engine: str, fault: type | None = None, size: Any = None) -> Path:
    """The record of a run, trained at the first call."""
    what = f"{setting} {engine} {'' if fault is None else fault.__module__ + fault.__qualname__} {size}"
    path = Folder.path() / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.rec"
    if path.exists():
        return path
    num_ranks = 1 if engine in ONE_PROCESS else setting.num_ranks
    try:
        ranks.call(num_ranks, train, setting, engine, fault, size, str(path), seconds=120)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def train(setting: Setting, engine: str, fault: type | None, size: Any, path: str) -> None:
    """A job: the loop of an engine with a fault in front of it, on this rank."""
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    base = KINDS[engine]
    loop = type("Faulty", (fault, base), {}) if fault is not None else base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of the mistakes
        loop(setting, path, size=size, rank=rank, world=world).run()


def records(mutation: Mutation) -> tuple[Path, Path]:
    """Folders of the candidate's record and of its baseline's."""
    return (
        recorded(mutation.setting, mutation.engine, mutation.fault, mutation.size),
        recorded(mutation.setting, mutation.baseline),
    )


def every() -> list[Mutation]:
    """All mutations of the suite."""
    from tests.mutations_others import MUTATIONS as others
    from tests.mutations_plain import MUTATIONS as plain
    from tests.mutations_shardbook import MUTATIONS as shardbook

    return [*plain, *shardbook, *others]


def controls(mutations: Iterable[Mutation]) -> list[Mutation]:
    """The right runs beside them, each once; those that are their own baseline are left out."""
    found = {(one.setting, one.engine, one.baseline): one.right for one in mutations if one.engine != one.baseline}
    return list(found.values())
