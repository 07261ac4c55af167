"""The files of a record, byte by byte.

A folder: ``manifest.json``, written by rank 0, and a file for each rank, ``rank-00000.rec``. A rank's file is a magic number and then
frames, one for each flush::

    kind (4 bytes)  checksum (crc32 of kind and payload, 4)  length (8)  payload, compressed by zlib

A frame is written in one go and counts once it is there in full with a right checksum, so that a run that is killed leaves every
flush before. ``HEAD`` is JSON about the rank, ``STEP`` holds several steps, ``LAST`` says that the run ended by itself.

The payload of a ``STEP`` frame is the length of its JSON (4 bytes), the JSON, then rows of fingerprints, phase after phase, as the
JSON lists them. All numbers are little-endian. Nothing is pickled.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardbook.errors import ConfigError

VERSION = 1
MAGIC = b"shardbook record\n"
MANIFEST = "manifest.json"

BRIEF = np.dtype([("hash", "<u8"), ("squares", "<f4")])
"""Squares rounded to float32, with a relative error of 6e-8; beyond its range they are infinite."""

NORM = np.dtype([("squares", "<f4")])

COMPLETE = np.dtype(
    [
        ("hash", "<u8"), ("squares", "<f8"), ("total", "<f8"), ("absolute", "<f8"), ("largest", "<f8"), ("nonfinite", "<u4"),
        ("projections", "<f8", 8), ("narrow", "u1"),
    ]
)  # fmt: skip
ROWS = {"norm": NORM, "brief": BRIEF, "complete": COMPLETE}

_FRAME = struct.Struct("<4sIQ")
_JSON = struct.Struct("<I")


class RecordError(ConfigError):
    """A record can't be read, or can't be written where it is asked for."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    payload: bytes


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's steps are."""
    return folder / f"rank-{rank:05d}.rec"


def packed(kind: str, payload: bytes) -> bytes:
    """One frame."""
    body = zlib.compress(payload, 1)
    return _FRAME.pack(kind.encode(), _checksum(kind.encode(), body), len(body)) + body


def _checksum(kind: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(kind))


def packed_json(kind: str, value: Any) -> bytes:
    return packed(kind, json.dumps(value, separators=(",", ":"), allow_nan=True).encode())


def packed_steps(about: Any, rows: bytes) -> bytes:
    text = json.dumps(about, separators=(",", ":"), allow_nan=True).encode()
    return packed("STEP", _JSON.pack(len(text)) + text + rows)


def steps_of(frame: Frame) -> tuple[Any, bytes]:
    """What a ``STEP`` frame says of its steps, and the rows."""
    (length,) = _JSON.unpack_from(frame.payload)
    return json.loads(frame.payload[_JSON.size : _JSON.size + length]), frame.payload[_JSON.size + length :]


def frames(path: Path) -> Iterator[Frame]:
    """The frames of a rank's file, one read at a time.

    Raises:
        RecordError: no such file, no record, or one that ends in the middle of a frame or has a wrong checksum.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordError(f"{path}: can't be read ({error.strerror}); a record has one file for each rank") from error
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordError(f"{path}: not a rank's file of a record (its first bytes are others); records are written by sb.record")
        end = path.stat().st_size
        while head := file.read(_FRAME.size):
            place = file.tell()
            if len(head) < _FRAME.size or place + _FRAME.unpack(head)[2] > end:
                raise TruncatedError(f"{path}: truncated: it ends at byte {end}, inside of what was flushed last")
            kind, checksum, length = _FRAME.unpack(head)
            body = file.read(length)
            if _checksum(kind, body) != checksum:
                raise RecordError(f"{path}: damaged at byte {place}: what was flushed there has another checksum; copy the record again")
            yield Frame(kind.decode("ascii", "replace"), zlib.decompress(body))


class TruncatedError(RecordError):
    """The file ends in the middle of a frame."""
