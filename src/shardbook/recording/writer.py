"""Writes one rank's file: gathers steps, brings what lies on a device over in one go, and flushes."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from shardbook.recording.fingerprint import Prints
from shardbook.recording.format import MAGIC, MANIFEST, ROWS, RecordError, file_of, packed_json, packed_steps

Table = tuple[tuple[str, int, int, str], ...]
"""What rows of fingerprints are of: (parameter, first element, number of elements, type)."""


@dataclass(slots=True)
class Rows:
    """Fingerprints of one phase of a step."""

    phase: str
    table: Table
    prints: list[Prints]  # of consecutive parts of the table

    def same_hashes(self, other: "Rows") -> bool:
        """Whether both are of the same parts with the same bits. Waits for the device."""
        if self.table != other.table or len(self.prints) != len(other.prints):
            return False
        both = [(a.hash, b.hash) for a, b in zip(self.prints, other.prints, strict=True)]
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in both)


@dataclass(slots=True)
class StepEntry:
    """One step as it comes together; ``scalars`` may hold 0-d tensors until it is written."""

    number: int
    complete: bool
    scalars: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: list[Rows] = field(default_factory=list[Rows])


class Writer:
    """Appends to ``rank-k.rec``.

    Raises:
        RecordError: the rank's file exists, or the folder can't be written to.
    """

    def __init__(self, folder: Path, rank: int, manifest: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._path = file_of(folder, rank)
        self._tables: dict[Table, int] = {}
        self._waiting: list[StepEntry] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._path.open("xb")
        except FileExistsError as error:
            raise RecordError(f"record: {self._path} exists; a record is never written over: give another folder, or delete it") from error
        except OSError as error:
            raise RecordError(f"record: {folder} can't be written to ({error.strerror})") from error
        if rank == 0:
            partial = folder / (MANIFEST + ".part")
            partial.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            partial.replace(folder / MANIFEST)
        self._file.write(MAGIC + packed_json("HEAD", about))
        self._file.flush()

    def add(self, entry: StepEntry) -> None:
        self._waiting.append(entry)

    def flush(self) -> None:
        """Write the steps that wait, as one frame."""
        if not self._waiting:
            return
        tables: list[Table] = []
        steps: list[dict[str, Any]] = []
        body = bytearray()
        scalars = _plain([entry.scalars for entry in self._waiting], _read([entry.scalars for entry in self._waiting]))
        for entry, numbers in zip(self._waiting, scalars, strict=True):
            listed: list[tuple[str, int, str]] = []
            for rows in entry.rows:
                if rows.table not in self._tables:
                    self._tables[rows.table] = len(self._tables)
                    tables.append(rows.table)
                kind, data = _encoded(rows.prints)
                listed.append((rows.phase, self._tables[rows.table], kind))
                body += data
            steps.append({"step": entry.number, "complete": entry.complete, **numbers, "rows": listed})
        self._file.write(packed_steps({"tables": tables, "steps": steps}, bytes(body)))
        self._file.flush()
        self._waiting.clear()

    def close(self, *, ended: bool) -> None:
        """``ended``: the run came to its end, so that nothing is missing."""
        self.flush()
        if ended:
            self._file.write(packed_json("LAST", {}))
        self._file.close()


def _encoded(prints: Sequence[Prints]) -> tuple[str, bytes]:
    """Which of `format.ROWS` they are, and the rows of all parts, one after the other."""
    first = prints[0]
    kind = "norm" if first.hash is None else "brief" if first.total is None else "complete"
    return kind, b"".join(_rows(part, ROWS[kind]).tobytes() for part in prints)


def _rows(prints: Prints, dtype: Any) -> Any:
    rows: Any = np.zeros(len(prints.squares), dtype)
    fields: list[str] = list(dtype.names)
    with np.errstate(over="ignore"):  # beyond float32 squares become infinite
        for name in fields:
            values: Any = getattr(prints, name).cpu().numpy()
            rows[name] = values.view(np.uint64) if name == "hash" else values
    return rows


def _read(values: Any) -> dict[int, Any]:
    """The numbers in tensors of one element, by ``id``: brought over together, since each read of its own would wait for its device."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in _tensors(values):
        if tensor.numel() == 1 and type(tensor) is Tensor:
            found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    numbers: dict[int, Any] = {}
    for own in found.values():
        together = torch.stack([tensor.reshape(()) for tensor in own]).tolist()
        numbers |= {id(tensor): number for tensor, number in zip(own, together, strict=True)}
    return numbers


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)


def _plain(value: Any, numbers: Mapping[int, Any]) -> Any:
    """Tensors as the numbers that were read of them, what JSON has no word for as text."""
    if isinstance(value, Tensor):
        return numbers[id(value)] if id(value) in numbers else value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item, numbers) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_plain(item, numbers) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, torch.dtype):
        return str(value)
    return (
        value
        if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and not math.isnan(value))
        else str(value)
    )
