"""What is known about a run when it ends: plain, versioned data that reports, pages and notebooks read.

A document is written as one JSON object and read back strictly: another version, a truncated file or a foreign one is refused
with the reason, never half understood. Nothing here imports torch.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, cast

from shardbook.errors import ConfigError

VERSION = 1
"""The version this release writes, and the only one it reads."""

_FORMAT = "shardbook run"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory in bytes. Each counter by its own definition; they are never added to or taken from one another.

    Args:
        rank: which one.
        peak_allocated: largest number of bytes in live tensors; ``None``: not measured.
        peak_reserved: largest number of bytes the caching allocator held; ``None`` where there is none (CPU).
        peak_resident: largest resident set of the process: interpreter, libraries and everything else included.
        includes_baseline: whether the plain loop lived in this process too while the resident peak was taken.
    """

    rank: int
    peak_allocated: int | None
    peak_reserved: int | None
    peak_resident: int
    includes_baseline: bool = False


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """How the run compared with the plain loop. ``difference`` is one line, ``None`` where every bit agreed."""

    steps: int
    identical: bool
    difference: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunDocument:
    """One run.

    Args:
        peak: account to bytes at the peak instant, of the rank with the largest peak; empty where no books were kept.
        peak_phase: the phase that owns the peak; empty where it is not known.
        peak_allocated: by the allocator, the largest of all ranks; ``None``: not measured.
        peak_reserved: by the caching allocator, the largest of all ranks; ``None`` where there is none.
        allocator: which counter ``peak_allocated`` is.
        convention: bytes per parameter in each account, and what is partitioned, in words.
        num_parameters: elements of the model's parameters.
        settings: dotted name to ``{"value": ..., "origin": ...}``.
        versions: name to version of what the run stood on.
        data: what was read, in words.
        losses: loss of each step, in nats per token, in order; ``None`` for one that was not finite.
        validation_loss: nats per token after the last step.
        skipped_steps: numbers of the steps that were not applied.
        num_tokens: targets trained on, all ranks.
        seconds: wall time of the steps.
        sent_nbytes: what each rank sent over all steps, without headers, by rank.
        sent_nbytes_per_step: what one rank sent in the last step, the largest of all ranks.
        memory: by rank.
        baseline: the comparison with the plain loop; ``None``: not asked for.
        version: of this format.
    """

    peak: Mapping[str, int]
    peak_phase: str
    peak_allocated: int | None
    peak_reserved: int | None
    allocator: str
    convention: str
    num_parameters: int
    settings: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    data: str
    losses: tuple[float | None, ...]
    validation_loss: float | None
    skipped_steps: tuple[int, ...] = ()
    num_tokens: int
    seconds: float
    sent_nbytes: tuple[int, ...]
    sent_nbytes_per_step: int
    memory: tuple[RankMemory, ...] = field(default_factory=tuple)
    baseline: Baseline | None = None
    version: int = VERSION

    def to_json(self) -> str:
        """The document as one JSON object, which :meth:`from_json` reads back to an equal document."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The document that :meth:`to_json` wrote.

        Raises:
            ConfigError: truncated, not a run of shardbook, of another version, or with keys missing or unknown.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not a run document: not JSON, or cut off ({error}); write it again with shardbook train") from error
        if not isinstance(found, dict) or cast("dict[str, Any]", found).pop("format", None) != _FORMAT:
            raise ConfigError(f'not a run document: it lacks "format": "{_FORMAT}"; give the run.json that shardbook train wrote')
        values = cast("dict[str, Any]", found)
        if values.get("version") != VERSION:
            raise ConfigError(f"run document of version {values.get('version')!r}: this release of shardbook reads version {VERSION}")
        _same_keys(cls, values, "run document")
        values["memory"] = tuple(RankMemory(**_same_keys(RankMemory, entry, "memory")) for entry in values["memory"])
        values["baseline"] = None if values["baseline"] is None else Baseline(**_same_keys(Baseline, values["baseline"], "baseline"))
        for name in ("losses", "skipped_steps", "sent_nbytes"):
            values[name] = tuple(values[name])
        return cls(**values)


def _same_keys(kind: type[Any], values: Any, what: str) -> dict[str, Any]:
    """``values`` if they are a table with exactly the fields of ``kind``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: expected a table, not {values!r}; the file was changed after it was written")
    table = cast("dict[str, Any]", values)
    known = {item.name for item in fields(kind)}
    faults = [f"{name} is missing" for name in sorted(known - set(table))] + [f"{name} is unknown" for name in sorted(set(table) - known)]
    if faults:
        raise ConfigError(f"{what}: {'; '.join(faults)}; the file was changed, or another version of shardbook wrote it")
    return table


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all: to a temporary neighbour that then takes its place. Makes the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
