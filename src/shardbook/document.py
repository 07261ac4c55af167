"""What is known about a run when it ends: plain, versioned data that reports, pages and notebooks read.

A document is written as one JSON object and read back strictly: another version, a truncated file or a foreign one is refused
with the reason, never half understood. Nothing here imports torch.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, cast, get_args, get_origin, get_type_hints

from shardbook.errors import ConfigError

VERSION = 3
"""The version this release writes."""

_OLDER = (2,)
"""Those that it reads as well: what they don't say is empty."""

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
class Counters:
    """The allocator's and the system's counters of one rank in bytes, each by its own definition; ``None``: this device has none.

    Args:
        allocated: bytes in live tensors, at their highest.
        requested: what those tensors asked for, before rounding; on a CPU nothing is rounded.
        active: allocated, and freed blocks that a stream still uses (``active_bytes``).
        reserved: what the caching allocator took from the driver, at its highest.
        fragmentation: reserved minus allocated, at the end.
        largest_free_block: the largest block that could be handed out without asking the driver, at the end.
        driver: device memory in use by everybody: contexts, communicators, other processes.
        resident: the process's resident set at its highest: interpreter, libraries and everything else included.
    """

    allocated: int | None = None
    requested: int | None = None
    active: int | None = None
    reserved: int | None = None
    fragmentation: int | None = None
    largest_free_block: int | None = None
    driver: int | None = None
    resident: int | None = None


@dataclass(frozen=True, kw_only=True)
class Item:
    """One storage that was live at the peak instant.

    Args:
        account: what it is for; ``UNACCOUNTED`` where no book knows it.
        name: of the parameter, or the operator that made it.
        unit: whose it is, or in whose forward or backward it was made; empty: nobody's.
        shape: of the tensor that was seen first on the storage.
        dtype: of that tensor, as ``float32``.
        nbytes: of the whole storage.
        phase: in which it was made.
        site: ``file.py:12 in function`` of the user's code that made it; empty where it is not known.
    """

    account: str
    name: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    phase: str
    site: str


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """Books beside allocator at the instant when one rank's allocator held most.

    Args:
        rank: whose.
        step: number of the step in which it was, counted from 1; 0: outside of any.
        phase: what went on (``forward``, ``backward``, ``step``, ...), and
        unit: in which unit.
        operator: the operator that ran, empty outside of one.
        allocated: bytes in live tensors, by the allocator alone.
        base: how many of them are older than the measurement, found by walking the live tensors at its start.
        books: account to bytes of the allocator's blocks that an item of the books explains; ``UNACCOUNTED`` are those that none does.
        overstated: bytes of items that the books held and the allocator did not; in no account of ``books``, which add up to ``allocated``.
        closed_form: account to bytes, by formula, for the accounts that have one; empty where the engine has none.
        host: account to bytes that lay in the host's memory at that instant, in no account of ``books``.
        beside: how many bytes of these the same allocator had given out, so that it held ``allocated`` and them; 0 on a device.
        items: the largest storages at that instant, largest first.
    """

    rank: int
    step: int
    phase: str
    unit: str
    operator: str
    allocated: int
    base: int
    books: Mapping[str, int]
    overstated: int = 0
    closed_form: Mapping[str, int] = field(default_factory=dict[str, int])
    host: Mapping[str, int] = field(default_factory=dict[str, int])
    beside: int = 0
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TierMemory:
    """What one rank held outside of its device, when that was most: ``tier`` is ``host``, pinned or not, or ``disk``.

    Args:
        rank: whose.
        tier: where.
        nbytes: at the highest instant of this tier, whatever the device held then.
        accounts: account to bytes at that instant, by the books.
    """

    rank: int
    tier: str
    nbytes: int
    accounts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that one rank moved between two tiers: ``link`` is ``host to device``, ``device to host``, ``disk to host`` or back.

    Args:
        rank: whose.
        link: from where to where.
        nbytes: over all steps.
        nbytes_per_step: in the last step.
    """

    rank: int
    link: str
    nbytes: int
    nbytes_per_step: int


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The peak inside one step of one rank: to hold the first step against later ones."""

    rank: int
    step: int
    peak_allocated: int
    phase: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Memory of one rank over one step. All sequences are as long as ``seconds``, which counts from the step's begin.

    Args:
        rank: whose.
        step: which.
        seconds: when.
        allocated: by the allocator.
        accounts: account to bytes, by the books; only accounts that held something.
        spans: (phase, unit, begin, end) in seconds, of what went on; nested spans follow the one around them.
    """

    rank: int
    step: int
    seconds: tuple[float, ...]
    allocated: tuple[int, ...]
    accounts: Mapping[str, tuple[int, ...]]
    spans: tuple[tuple[str, str, float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Time in which one rank stood still for one collective of one unit, all steps that were looked at together.

    Args:
        rank: who waited.
        unit: for which unit; for ``straggler rank``, the unit in which the culprit lost the time.
        kind: ``gather``, ``reduce``, ``refresh``, ``return``, or ``step`` (the step's exchange, of no unit).
        cause: ``issued late``, ``bandwidth``, ``waiting for the producer``, ``waiting for a buffer`` or ``straggler rank``.
        culprit: the rank that was late, for ``straggler rank``; else ``None``.
        seconds: the union of the intervals, mean per step.
    """

    rank: int
    unit: str
    kind: str
    cause: str
    culprit: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where one rank's wall time of a step went, in seconds, mean of the steps that were looked at.

    Args:
        rank: whose.
        num_steps: how many steps the means are over.
        seconds: of one step.
        compute: not waiting for any collective.
        exposed: waiting: the union of intervals, hence never more than ``seconds`` minus ``compute``.
        communication: in which at least one collective was under way, waited for or not.
        floor: what the bytes sent would take at ``bandwidth``; ``None``: no bandwidth was measured.
        bandwidth: bytes per second and rank, measured in the same run; ``None``: not measured.
        sent_nbytes: per step.
    """

    rank: int
    num_steps: int
    seconds: float
    compute: float
    exposed: float
    communication: float
    floor: float | None
    bandwidth: float | None
    sent_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Lever:
    """Something to turn when memory is short: what it would free at the peak on this rank, in bytes, and what it costs, in words."""

    name: str
    nbytes: int
    cost: str


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What was known when memory ran out, or a set budget was crossed.

    Args:
        rank: whose memory.
        step: in which step; 0: outside of any.
        phase: what went on, in which
        unit: and for which
        account: account more was wanted.
        asked: bytes asked for.
        budget: what was allowed; ``None``: the device's own limit.
        live: account to bytes that were held.
        forecast: account to bytes that were expected at the peak; empty where there was no forecast.
        levers: the three cheapest, cheapest first.
    """

    rank: int
    step: int
    phase: str
    unit: str
    account: str
    asked: int
    budget: int | None
    live: Mapping[str, int]
    forecast: Mapping[str, int] = field(default_factory=dict[str, int])
    levers: tuple[Lever, ...] = ()


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
        engine: who trained: ``shardbook stage 3``, ``ddp``, ``fsdp2``, ``deepspeed 2``, ``plain``.
        mode: of measurement, ``full`` or ``light``; empty: not measured.
        notes: what is missing from this document or odd about it, in sentences.
        counters: by rank.
        reconciliations: books against allocator at the peak, by rank; empty in light mode.
        steps: the peak of each step looked at, by rank and step.
        curves: memory over one step, of the ranks with the smallest and the largest peak.
        times: where the time went, by rank; empty where the engine tells of no collectives.
        exposed: waiting, by rank, unit, kind and cause.
        shortage: what was known when memory ran out; ``None``: it did not.
        tiers: what lay outside of the device at its highest, by rank and tier; empty where everything was on the device.
        moved: bytes between tiers, by rank and link.
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
    engine: str = ""
    mode: str = ""
    notes: tuple[str, ...] = ()
    counters: tuple[Counters, ...] = ()
    reconciliations: tuple[Reconciliation, ...] = ()
    steps: tuple[StepMemory, ...] = ()
    curves: tuple[Curve, ...] = ()
    times: tuple[StepTime, ...] = ()
    exposed: tuple[Exposed, ...] = ()
    shortage: Shortage | None = None
    tiers: tuple[TierMemory, ...] = ()
    moved: tuple[Moved, ...] = ()
    version: int = VERSION

    def to_json(self) -> str:
        """The document as one JSON object, which :meth:`from_json` reads back to an equal document."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The document that :meth:`to_json` wrote, in this version or the one before.

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
        if values.get("version") not in (*_OLDER, VERSION):
            allowed = " and ".join(map(str, (*_OLDER, VERSION)))
            raise ConfigError(f"run document of version {values.get('version')!r}: this release of shardbook reads versions {allowed}")
        if values.get("version") in _OLDER:
            values = _brought_up(values)
        return _read(cls, values, "run document")


def _brought_up(older: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 2, whose runs had nothing outside of the device, as one of this version."""
    found = [one | {"host": {}, "beside": 0} if isinstance(one, dict) else one for one in older.get("reconciliations", ())]
    return {**older, "version": VERSION, "tiers": [], "moved": [], "reconciliations": found}


def _read(kind: Any, found: Any, what: str) -> Any:
    """``found``, which came out of JSON, as a value of ``kind``: a data class, a tuple of something, a mapping, or a plain value."""
    if is_dataclass(kind):
        table, types = _same_keys(cast("type[Any]", kind), found, what), get_type_hints(kind)
        return cast("type[Any]", kind)(**{name: _read(types[name], value, name) for name, value in table.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if found is None else _read(next(option for option in arguments if option is not NoneType), found, what)
    if origin is tuple:
        if not isinstance(found, list):
            raise ConfigError(f"{what}: expected a list, not {found!r}; the file was changed after it was written")
        entries = cast("list[Any]", found)
        types = [arguments[0]] * len(entries) if arguments[-1] is Ellipsis else arguments
        if len(types) != len(entries):
            raise ConfigError(f"{what}: expected {len(types)} entries, not {found!r}; the file was changed after it was written")
        return tuple(_read(option, entry, what) for option, entry in zip(types, entries, strict=True))
    if origin is Mapping:
        if not isinstance(found, dict):
            raise ConfigError(f"{what}: expected a table, not {found!r}; the file was changed after it was written")
        return {name: _read(arguments[1], value, what) for name, value in cast("dict[str, Any]", found).items()}
    return _plain(kind, found, what)


def _plain(kind: Any, found: Any, what: str) -> Any:
    allowed = (int, float) if kind is float else kind
    if kind is not Any and (not isinstance(found, allowed) or (isinstance(found, bool) and kind is not bool)):
        raise ConfigError(f"{what}: expected {kind.__name__}, not {found!r}; the file was changed after it was written")
    return found


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


def write_atomically(path: Path, text: str | bytes) -> None:
    """Writes a file whole or not at all: to a temporary neighbour that then takes its place. Makes the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8") if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
