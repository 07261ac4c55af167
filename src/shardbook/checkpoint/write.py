"""Writes one rank's file of tensors: the header first, as all sizes are known, then piece after piece, each read where it lies."""

import ctypes
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardbook.checkpoint.dtypes import CODES
from shardbook.checkpoint.manifest import Stored, StoredFile
from shardbook.checkpoint.safetensors import Entry, packed_header

BLOCK_NBYTES = 4 << 20
"""Bytes that one checksum stands for: what is read at once, and at most read too much at each end of a range."""


_WORTH_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written. ``start``: see :class:`.manifest.Stored`."""

    what: str
    name: str
    start: int
    tensor: Tensor

    @property
    def key(self) -> str:
        return f"{self.what}:{self.name}:{self.start}"


def write_file(path: Path, items: Sequence[Item]) -> StoredFile:
    """Write the tensors to a new file and wait until the disk has them.

    Raises:
        OSError: as the file system says it.
    """
    header, entries = packed_header(
        [Entry(item.key, CODES[item.tensor.dtype], (item.tensor.numel(),)) for item in items], {"format": "pt", "writer": "shardbook"}
    )
    with ThreadPoolExecutor(1, "checkpoint") as pool, path.open("xb", buffering=0) as file:
        write_bytes(file.fileno(), memoryview(header))
        sums = [tuple(_write_and_sum(pool, file.fileno(), block) for block in blocks_of(item.tensor)) for item in items]
        os.fsync(file.fileno())
        nbytes = file.tell()
    stored = tuple(
        Stored(
            key=item.key, what=item.what, name=item.name, start=item.start, dtype=entry.dtype, begin=entry.begin, end=entry.end, crc32=of
        )
        for item, entry, of in zip(items, entries, sums, strict=True)
    )
    return StoredFile(path.name, nbytes, len(header), zlib.crc32(header), stored)


def _write_and_sum(pool: ThreadPoolExecutor, descriptor: int, block: memoryview) -> int:
    """Both at once: each takes about as long as the other, and neither holds the interpreter."""
    if len(block) < _WORTH_A_THREAD:
        write_bytes(descriptor, block)
        return zlib.crc32(block)
    try:
        total = pool.submit(zlib.crc32, block)
    except RuntimeError:  # the interpreter is ending, and begins no thread any more
        write_bytes(descriptor, block)
        return zlib.crc32(block)
    try:
        write_bytes(descriptor, block)
    finally:
        value = total.result()  # the block's memory must outlive it
    return value


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a flat tensor, block by block; a device's come through host memory one block at a time."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), BLOCK_NBYTES):
        block = flat[begin : begin + BLOCK_NBYTES].cpu()
        yield bytes_of(block)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, for as long as the caller keeps the tensor.

    Not through numpy: storage that numpy has seen can never be given back again.
    """
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def write_bytes(descriptor: int, data: Tensor | memoryview) -> None:
    """All of the data, however many calls it takes."""
    left = data if isinstance(data, memoryview) else bytes_of(data)
    while left:
        left = left[os.write(descriptor, left) :]
