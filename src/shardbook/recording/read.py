"""Reads a record: the steps of all ranks, one after the other, with the parts of each parameter put together.

    record = Record.open("runs/a.rec")
    for step in record.steps():
        step.losses, step.phases["gradient"]["head.weight"].norm

A file is read frame by frame, so that a long record needs no more memory than a few steps of it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shardbook.recording import tensors
from shardbook.recording.format import MANIFEST, ROWS, VERSION, RecordError, TruncatedError, file_of, frames, steps_of
from shardbook.recording.keys import SCHEME
from shardbook.recording.micro_batches import PHASES, MicroBatch, TensorFacts, given, micro_batches
from shardbook.recording.prints import Fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the recorded model. ``stride`` is empty where the engine had taken it to pieces."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks hold the same elements of a parameter with different bits: replicas that have drifted."""

    phase: str
    parameter: str
    rank: int
    other: int


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` and on of a parameter, as one rank had them."""

    rank: int
    start: int
    fingerprint: Fingerprint


@dataclass(slots=True)
class Step:
    """One step of all ranks.

    Args:
        number: from 1; 0 is the state before the first.
        complete: whether fingerprints have sums and projections.
        applied: whether the optimizer stepped.
        losses, weights: by rank, as they were given (a list is added up); the objective's loss is in the hands of who gave them.
        batches: by rank, the hash of each micro-batch.
        given: by rank, the tensors of each micro-batch, in the order of their containers: what was passed as ``batch=``.
        micro_batches: by rank, the forwards that were made for this step.
        rng, rng_before: by rank, hash of the random generators' state at ``Recorder.step``, and at the first forward.
        rng_forward: the same when the last forward had ended: backward draws no random numbers that it doesn't give back.
        divisors: by rank, its part of what the engine will divide its sum of gradients by; None where the engine doesn't say.
        divided_by: by rank, what the engine has in fact divided it by when its optimizer stepped, all ranks together.
        groups: the parameter groups' settings in force, and their parameters, by rank.
        phases: phase -> parameter -> its fingerprint, the parts of all ranks put together, each element once. ``before`` is always
            there: it is the last ``weight`` where that did not change.
        parts: the same by part, before they were put together; buffers stay by rank.
        disagreements: replicas that differ.
        missing: (phase, parameter) of which no rank recorded some elements.
    """

    number: int
    complete: bool
    applied: bool | None
    losses: tuple[float | None, ...]
    weights: tuple[float | None, ...]
    batches: tuple[tuple[int, ...], ...]
    num_rows: tuple[int | None, ...]
    groups: tuple[Sequence[Mapping[str, Any]], ...]
    given: tuple[tuple[tuple[TensorFacts, ...], ...], ...] = ()
    micro_batches: tuple[tuple[MicroBatch, ...], ...] = ()
    rng: tuple[int | None, ...] = ()
    rng_before: tuple[int | None, ...] = ()
    rng_forward: tuple[int | None, ...] = ()
    divisors: tuple[float | None, ...] = ()
    divided_by: tuple[float | None, ...] = ()
    phases: dict[str, dict[str, Fingerprint]] = field(default_factory=dict[str, dict[str, Fingerprint]])
    parts: dict[str, dict[str, list[Part]]] = field(default_factory=dict[str, dict[str, list[Part]]])
    disagreements: list[Disagreement] = field(default_factory=list[Disagreement])
    missing: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def data(self) -> int:
        """Hash of all that the ranks were given in this step, whatever rank and micro-batch it came in."""
        return sum(sum(batches) for batches in self.batches) % 2**64

    def norm(self, phase: str = "gradient") -> float:
        """Of all parameters in a phase together."""
        return sum(one.squares for one in self.phases.get(phase, {}).values()) ** 0.5


_Row = tuple[str, str, int, Fingerprint]
"""Phase, parameter, first element, and what is there."""


@dataclass(slots=True)
class _RankStep:
    about: Mapping[str, Any]
    rows: list[_Row]
    forwards: Mapping[tuple[str, str], Fingerprint] = field(default_factory=dict[tuple[str, str], Fingerprint])


class Record:
    """A folder that :func:`shardbook.record` wrote.

    ``ended`` is False where the run did not come to its end by itself: then steps stop where it was last flushed.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], *, ended: bool, num_steps: int) -> None:
        self.folder, self.manifest, self.ended, self.num_steps = folder, manifest, ended, num_steps
        self.num_ranks: int = manifest["ranks"]
        self.engine: str = manifest["engine"]
        self.sums_gradients: bool = manifest["gradients"] == "sum"
        self.parameters = {one["name"]: _parameter(one) for one in manifest["parameters"]}

    @classmethod
    def open(cls, path: Path | str, *, unfinished: bool = False) -> "Record":
        """Check a record from end to end and open it.

        Args:
            path: its folder.
            unfinished: also accept the record of a run that was killed or left by an exception, up to what all ranks flushed.

        Raises:
            RecordError: no record, one of another version, ranks that are missing or of another run, a damaged or truncated file.
        """
        folder = Path(path)
        manifest = _manifest(folder)
        lasts, ends = zip(*(_look(folder, rank, manifest, unfinished=unfinished) for rank in range(manifest["ranks"])), strict=True)
        if not unfinished and len(set(lasts)) > 1:
            each = ", ".join(f"rank {rank}: {last}" for rank, last in enumerate(lasts))
            raise RecordError(
                f"{folder}: the ranks recorded different numbers of steps ({each}); each must call recorder.step in every step"
            )
        return cls(folder, manifest, ended=all(ends), num_steps=min(lasts))

    def steps(self) -> Iterator[Step]:
        """Steps in order, the state before the first as number 0."""
        groups: list[Sequence[Mapping[str, Any]]] = [() for _ in range(self.num_ranks)]
        files = [_rank_steps(file_of(self.folder, rank)) for rank in range(self.num_ranks)]
        for _, ranks in zip(range(self.num_steps + 1), zip(*files, strict=False), strict=False):
            groups = [one.about.get("groups") or before for one, before in zip(ranks, groups, strict=True)]
            yield self._step(ranks, groups)

    def tensor(self, step: int, phase: str, rank: int = 0) -> dict[tuple[str, int], Tensor]:
        """Full values that one rank had in a complete step, by (parameter, first element); empty without ``full=True``."""
        return tensors.read(self.folder, rank, step, phase)

    def _step(self, ranks: Sequence[_RankStep], groups: Sequence[Sequence[Mapping[str, Any]]]) -> Step:
        first = ranks[0].about
        numbers = {one.about["step"] for one in ranks}
        if len(numbers) > 1:
            raise RecordError(f"{self.folder}: ranks are at different steps ({sorted(numbers)}): its files are of different runs")
        step = Step(
            number=first["step"],
            complete=all(one.about["complete"] for one in ranks),
            applied=first.get("applied"),
            losses=tuple(_number(one.about.get("loss")) for one in ranks),
            weights=tuple(_number(one.about.get("weight")) for one in ranks),
            batches=tuple(tuple(value % 2**64 for value in one.about.get("batch", ())) for one in ranks),
            num_rows=tuple(one.about.get("batch_rows") for one in ranks),
            groups=tuple(groups),
            given=tuple(given(one.about) for one in ranks),
            micro_batches=tuple(micro_batches(one.about, one.forwards) for one in ranks),
            rng=tuple(one.about.get("rng") for one in ranks),
            rng_before=tuple(one.about.get("rng_before") for one in ranks),
            rng_forward=tuple(one.about.get("rng_forward") for one in ranks),
            divisors=tuple(_number(one.about.get("divisor")) for one in ranks),
            divided_by=tuple(_number(one.about.get("divided_by")) for one in ranks),
        )
        for rank, one in enumerate(ranks):
            for phase, name, start, fingerprint in one.rows:
                step.parts.setdefault(phase, {}).setdefault(name, []).append(Part(rank, start, fingerprint))
        for phase, by_name in step.parts.items():
            for name, parts in by_name.items():
                self._put_together(step, phase, name, parts)
        return step

    def _put_together(self, step: Step, phase: str, name: str, parts: Sequence[Part]) -> None:
        """Add up parts, each element once: what several ranks hold of the same elements must have the same bits."""
        if phase == "buffer":  # each rank's own
            step.phases.setdefault(phase, {})[name] = parts[0].fingerprint
            return
        whole: Fingerprint | None = None
        seen: dict[tuple[int, int], Part] = {}
        end = 0
        for part in sorted(parts, key=lambda part: (part.start, part.rank)):
            extent = part.start, part.fingerprint.numel
            if extent in seen:
                if (seen[extent].fingerprint.hash, seen[extent].fingerprint.squares) != (part.fingerprint.hash, part.fingerprint.squares):
                    step.disagreements.append(Disagreement(phase, name, part.rank, seen[extent].rank))
                continue
            if part.start < end:
                raise RecordError(f"{self.folder}: step {step.number}: parts of {name!r} overlap at element {part.start} ({phase})")
            seen[extent] = part
            end = part.start + part.fingerprint.numel
            whole = part.fingerprint if whole is None else whole + part.fingerprint
        assert whole is not None
        step.phases.setdefault(phase, {})[name] = whole
        if name in self.parameters and whole.numel < self.parameters[name].numel:
            step.missing.append((phase, name))


def _manifest(folder: Path) -> Mapping[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RecordError(f"{folder}: no record: it has no {MANIFEST}; give the folder that was passed to sb.record") from error
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: can't be read as a record's manifest ({error})") from error
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise RecordError(f"{path}: not the manifest of a record (it names no version)")
    if (manifest["version"], manifest.get("scheme")) != (VERSION, SCHEME):
        raise RecordError(
            f"{path}: a record of version {manifest['version']}, fingerprints of scheme {manifest.get('scheme')}; this shardbook reads "
            f"version {VERSION} and scheme {SCHEME}: record again with it, or read with shardbook {manifest.get('shardbook')}"
        )
    return manifest  # pyright: ignore[reportUnknownVariableType]


def _look(folder: Path, rank: int, manifest: Mapping[str, Any], *, unfinished: bool) -> tuple[int, bool]:
    """(number of the last step, whether the run ended by itself) of one rank, its file checked from end to end."""
    path, last, ended = file_of(folder, rank), -1, False
    if not path.exists():
        raise RecordError(
            f"{folder}: rank {rank} of {manifest['ranks']} is missing ({path.name}); every rank records, into the same folder"
        )
    try:
        for place, frame in enumerate(frames(path)):
            if (place == 0) != (frame.kind == "HEAD") or ended:
                raise RecordError(f"{path}: its parts are not in the order in which sb.record writes them; copy the record again")
            if frame.kind == "HEAD":
                _check_head(path, rank, json.loads(frame.payload), manifest)
            elif frame.kind == "STEP":
                last = _last_step(path, [step["step"] for step in steps_of(frame)[0]["steps"]], last)
            ended = frame.kind == "LAST"
    except TruncatedError as error:
        if not unfinished:
            raise RecordError(f"{error}; steps to {max(last, 0)} are whole: open it with unfinished=True to read those") from error
        ended = False
    if not ended and not unfinished:
        raise RecordError(
            f"{path}: the run did not come to its end (it was killed, or left by an exception) after step {max(last, 0)} was flushed; "
            f"open it with unfinished=True to read up to there"
        )
    if last < 0:
        raise RecordError(f"{path}: no step was flushed; there is nothing to read")
    return last, ended


def _last_step(path: Path, numbers: Sequence[int], last: int) -> int:
    """The last of the steps of one flush, which go on from ``last``."""
    if list(numbers) != list(range(last + 1, last + 1 + len(numbers))):
        raise RecordError(f"{path}: after step {last} come steps {list(numbers)}: a part of it is missing; copy the record again")
    return numbers[-1]


def _check_head(path: Path, rank: int, head: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    if (head["rank"], head["ranks"], head["engine"]) != (rank, manifest["ranks"], manifest["engine"]):
        raise RecordError(
            f"{path}: written by rank {head['rank']} of {head['ranks']} under {head['engine']}, but the manifest is of {manifest['ranks']} "
            f"ranks under {manifest['engine']}: the folder holds files of different runs"
        )


def _rank_steps(path: Path) -> Iterator[_RankStep]:
    """Steps of one rank. What was hashed again, or not at all, because nothing had changed is given in the detail of what it equals."""
    weights: list[_Row] = []
    for step in _written_steps(path):
        rows = _by_phase(step.rows)
        if step.about["step"]:
            known = {(name, start): fingerprint for _, name, start, fingerprint in weights}
            before = [(phase, name, start, _fuller(one, known.get((name, start)))) for phase, name, start, one in rows.get("before", ())]
            step.rows = [row for row in step.rows if row[0] != "before"] + (before or [("before", *row[1:]) for row in weights])
            weights = rows.get("weight") or before or weights
        else:
            weights = rows.get("weight", [])
        yield step


def _fuller(one: Fingerprint, known: Fingerprint | None) -> Fingerprint:
    """The one with more in it where both are of the same bits."""
    return known if known is not None and known.hash is not None and known.same_bits(one) and not one.is_complete else one


def _by_phase(rows: Sequence[_Row]) -> dict[str, list[_Row]]:
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def _written_steps(path: Path) -> Iterator[_RankStep]:
    tables: list[list[tuple[str, int, int, str]]] = []
    try:
        for frame in frames(path):
            if frame.kind == "STEP":
                about, data = steps_of(frame)
                tables += about["tables"]
                yield from _unpacked(about["steps"], tables, data)
    except TruncatedError:
        return  # `open` has said so


def _unpacked(
    steps: Sequence[Mapping[str, Any]], tables: Sequence[Sequence[tuple[str, int, int, str]]], data: bytes
) -> Iterator[_RankStep]:
    place = 0
    for step in steps:
        rows: list[_Row] = []
        for phase, table, kind in step["rows"]:
            values = np.frombuffer(data, ROWS[kind], count=len(tables[table]), offset=place)
            place += values.nbytes
            for (name, start, numel, dtype), row in zip(tables[table], values.tolist(), strict=True):
                rows.append((phase, name, start, _fingerprint(dtype, numel, row)))
        forwards = {(phase, name): fingerprint for phase, name, _, fingerprint in rows if phase in PHASES}
        yield _RankStep(step, [row for row in rows if row[0] not in PHASES], forwards)


def _fingerprint(dtype: str, numel: int, row: Sequence[Any]) -> Fingerprint:
    if len(row) == 1:
        return Fingerprint(dtype=dtype, numel=numel, hash=None, squares=row[0])
    if len(row) == 2:
        return Fingerprint(dtype=dtype, numel=numel, hash=row[0], squares=row[1])
    total, absolute, largest, nonfinite, projections, narrow = row[2:]
    return Fingerprint(
        dtype=dtype, numel=numel, hash=row[0], squares=row[1], total=total, absolute=absolute, largest=largest, nonfinite=nonfinite,
        projections=tuple(projections.tolist()) if hasattr(projections, "tolist") else tuple(projections),
        narrow="bf16" if narrow & 1 else "fp16" if narrow else None, also_fp16=narrow == 3,
    )  # fmt: skip


def _parameter(one: Mapping[str, Any]) -> Parameter:
    return Parameter(
        name=one["name"], shape=tuple(one["shape"]), stride=tuple(one["stride"]), dtype=one["dtype"], trainable=one["trainable"],
        aliases=tuple(one["aliases"]),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    """Numbers that JSON can't hold were written as text. A list is added up."""
    if isinstance(value, list):
        return math.fsum(float(item) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return None if value is None else float(value)
