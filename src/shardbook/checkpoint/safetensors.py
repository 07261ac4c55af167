"""The safetensors format: a header whose every byte is known before the first tensor is, and its reading with every bound checked.

    length of the header (8 bytes, little-endian)   header (JSON, padded with spaces)   the tensors, one after the other

No torch here, and nothing that the file says is believed: offsets, types and shapes are held against each other and against the file.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardbook.checkpoint.errors import CheckpointError

ITEMSIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element, by the type's name in the format."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written, or found in a file: bytes ``begin`` to ``end`` are counted from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


def packed_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[Entry]]:
    """The first bytes of a file that holds these tensors in this order, and the tensors with their places.

    >>> header, (weight,) = packed_header([Entry("weight", "F32", (2, 3))], {})
    >>> len(header) % 8, weight.end - weight.begin, weight.begin == len(header)
    (0, 24, True)
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        if entry.key in table:
            raise ValueError(f"safetensors: two tensors are named {entry.key!r}")
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = _LENGTH.size + len(text)
    placed: list[Entry] = []
    for entry in entries:
        placed.append(Entry(entry.key, entry.dtype, entry.shape, first, first + entry.nbytes))
        first += entry.nbytes
    return _LENGTH.pack(len(text)) + text, placed


def read_header(path: Path) -> list[Entry]:
    """Every tensor of a file, in the order of its bytes.

    Raises:
        CheckpointError: it is no such file, or header and file contradict each other; the message names file and tensor.
    """
    try:
        with path.open("rb") as file:
            end = path.stat().st_size
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else end
            if length > min(_MAX_HEADER, end - _LENGTH.size):
                raise CheckpointError(f"{path}: its header would end behind the file (byte {end}): truncated, or no safetensors file")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    entries = sorted((_checked(path, key, value) for key, value in _table(path, text).items()), key=lambda entry: (entry.begin, entry.end))
    place = 0
    for entry in entries:
        if entry.begin != place:
            raise CheckpointError(
                f"{path}: tensor {entry.key!r} begins at byte {entry.begin} of the data, where {place} is expected: damaged"
            )
        place = entry.end
    first = _LENGTH.size + length
    if first + place != end:
        raise CheckpointError(f"{path}: it ends at byte {end} and its tensors at byte {first + place}: truncated, or something was added")
    return [Entry(entry.key, entry.dtype, entry.shape, first + entry.begin, first + entry.end) for entry in entries]


def _table(path: Path, text: bytes) -> dict[str, Any]:
    try:
        table: Any = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is no JSON ({error}): damaged") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: its header is no JSON object: damaged")
    found = cast(dict[str, Any], table)
    found.pop("__metadata__", None)
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Names that come twice would hide each other."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name comes twice")
    return table


def _checked(path: Path, key: str, value: Any) -> Entry:
    """One line of the header; places are still counted from the start of the data."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {key!r} is described by {str(value)[:120]}, which is no type, shape and place: damaged")
    entry = Entry(key, dtype, tuple(shape), *offsets)
    if entry.end - entry.begin != entry.nbytes:
        raise CheckpointError(
            f"{path}: tensor {key!r} has {entry.end - entry.begin} bytes where its type and shape need {entry.nbytes}: damaged"
        )
    return entry


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in cast(list[Any], values))
