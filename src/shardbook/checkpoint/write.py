"""Writes one rank's file of tensors: the header first, as all sizes are known, then piece after piece, each read where it lies."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardbook.checkpoint.dtypes import CODES
from shardbook.checkpoint.manifest import Stored, StoredFile
from shardbook.checkpoint.safetensors import Entry, packed_header
from shardbook.engine.state import OnDisk, loaded
from shardbook.tiers.pages import bytes_of

BLOCK_NBYTES = 4 << 20
"""Bytes that one checksum stands for: at most so many are read too much at each end of a range."""

_WORTH_BEGINNING = 1 << 18  # bytes
_ONLY_BEGIN = 2  # SYNC_FILE_RANGE_WRITE


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written. ``start``: see :class:`.manifest.Stored`."""

    what: str
    name: str
    start: int
    tensor: Tensor | OnDisk

    @property
    def numel(self) -> int:
        return self.tensor.numel() if isinstance(self.tensor, Tensor) else self.tensor.numel

    @property
    def key(self) -> str:
        return f"{self.what}:{self.name}:{self.start}"


def write_file(path: Path, items: Sequence[Item]) -> StoredFile:
    """Write the tensors to a new file and wait until the disk has them.

    Raises:
        OSError: as the file system says it.
    """
    header, entries = packed_header(
        [Entry(item.key, CODES[item.tensor.dtype], (item.numel,)) for item in items], {"format": "pt", "writer": "shardbook"}
    )
    with path.open("xb", buffering=0) as file:
        write_bytes(file.fileno(), memoryview(header))
        sums = [tuple(_write_and_sum(file.fileno(), block) for block in blocks_of(loaded(item.tensor))) for item in items]
        os.fsync(file.fileno())
        nbytes = file.tell()
    stored = tuple(
        Stored(key=item.key, what=item.what, name=item.name, start=item.start, dtype=entry.dtype, begin=entry.begin, end=entry.end, xxh3=of)
        for item, entry, of in zip(items, entries, sums, strict=True)
    )
    return StoredFile(path.name, nbytes, len(header), checksum(header), stored)


def _write_and_sum(descriptor: int, block: memoryview) -> str:
    """One after the other: adding up takes a tenth of the time of writing, and leaves the block in the processor's cache."""
    value = checksum(block)
    write_bytes(descriptor, block)
    if len(block) >= _WORTH_BEGINNING:
        _let_the_disk_begin(descriptor)
    return value


def _let_the_disk_begin(descriptor: int) -> None:
    """With what is written so far: the system would let it wait for the ``fsync`` at the end, and the disk idle meanwhile."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, 0, 0, _ONLY_BEGIN)  # errors are told by fsync


def _found_sync_file_range() -> Any:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _found_sync_file_range()


def checksum(data: bytes | bytearray | memoryview) -> str:
    """What the manifest keeps of some bytes: their 64-bit XXH3, 16 hexadecimal digits. It finds accidents, not intent."""
    return xxhash.xxh3_64_hexdigest(data)


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a flat tensor, block by block; a device's come through host memory one block at a time."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), BLOCK_NBYTES):
        block = flat[begin : begin + BLOCK_NBYTES].cpu()
        yield bytes_of(block)


def write_bytes(descriptor: int, data: Tensor | memoryview) -> None:
    """All of the data, however many calls it takes."""
    left = data if isinstance(data, memoryview) else bytes_of(data)
    while left:
        left = left[os.write(descriptor, left) :]
