"""Reads ranges of a checkpoint's files: what is stored where, whether it is what was written, and its bytes into tensors."""

import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from shardbook.checkpoint import manifest
from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.manifest import Manifest, Stored, StoredFile, check_file
from shardbook.checkpoint.safetensors import ITEMSIZE, read_header
from shardbook.checkpoint.write import bytes_of

_MAX_OPEN = 64
_Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start`` to ``stop``, counted within a stored tensor."""

    file: StoredFile
    stored: Stored
    start: int
    stop: int


class Reader:
    """The files of one checkpoint. Each is held against the manifest before the first byte of it is used."""

    def __init__(self, folder: Path, found: Manifest) -> None:
        self.folder, self._block_nbytes = folder, int(found.content["block_nbytes"])
        if not 1 <= self._block_nbytes <= 1 << 30:
            raise CheckpointError(f"{folder}: block_nbytes is {self._block_nbytes}; 1 to 2^30 is allowed: written by no shardbook")
        self._open: OrderedDict[str, int] = OrderedDict()
        self._identities: dict[str, _Identity] = {}
        self._verified: set[tuple[str, int, int]] = set()
        self._places: dict[tuple[str, str], list[tuple[StoredFile, Stored]]] = {}
        for file in found.files:
            for stored in file.tensors:
                self._places.setdefault((stored.what, stored.name), []).append((file, stored))
        for places in self._places.values():
            places.sort(key=lambda pair: pair[1].start)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter."""
        return sorted(what for what, of in self._places if of == name and what != "buffer")

    def stored(self, what: str, name: str) -> list[Stored]:
        return [stored for _, stored in self._places.get((what, name), ())]

    def check_complete(self, what: str, name: str, numel: int) -> None:
        """The stored pieces of a parameter follow each other without gap or overlap, in one type.

        Raises:
            CheckpointError: they don't.
        """
        found = self.stored(what, name)
        place = 0
        for stored in found:
            if stored.start != place or stored.dtype != found[0].dtype:
                break
            place = stored.stop
        else:
            if place == numel:
                return
        raise CheckpointError(
            f"{self.folder}: {what} of parameter {name!r}: what the files hold is not its {numel} elements, each once and in one type "
            f"(element {place} is missing, or there is too much): incomplete or damaged"
        )

    def ranges(self, what: str, name: str, start: int, stop: int) -> Iterator[Range]:
        """Where elements ``start`` to ``stop`` of a parameter are."""
        for file, stored in self._places.get((what, name), ()):
            first, end = max(start, stored.start), min(stop, stored.stop)
            if first < end:
                yield Range(file, stored, first - stored.start, end - stored.start)

    def verify(self, wanted: Range) -> None:
        """Every block that the range touches has the checksum it was written with.

        Raises:
            CheckpointError: one has not; the message names tensor and file.
        """
        stored, width = wanted.stored, ITEMSIZE[wanted.stored.dtype]
        nbytes = stored.end - stored.begin
        if len(stored.crc32) != -(-nbytes // self._block_nbytes):
            raise CheckpointError(
                f"{self.folder / wanted.file.name}: {stored.key!r} has {len(stored.crc32)} checksums, too many or too few"
            )
        scratch = bytearray(min(self._block_nbytes, nbytes))
        for block in range(wanted.start * width // self._block_nbytes, -(-wanted.stop * width // self._block_nbytes)):
            mark = (wanted.file.name, stored.begin, block)
            if mark in self._verified:
                continue
            begin = stored.begin + block * self._block_nbytes
            view = memoryview(scratch)[: min(stored.end - begin, self._block_nbytes)]
            self._read(wanted.file, view, begin)
            if zlib.crc32(view) != stored.crc32[block]:
                raise CheckpointError(
                    f"{self.folder / wanted.file.name}: {stored.what} of {stored.name!r} is damaged near byte {begin}: other bytes than "
                    f"were written; take another checkpoint, or copy this one again"
                )
            self._verified.add(mark)

    def fill(self, wanted: Range, targets: tuple[Tensor, ...], through: torch.dtype | None, staging: Tensor) -> None:
        """The elements of a range into ``targets[0]``, and from each target into the next. ``staging``: bytes on the host."""
        dtype, first = TYPES[wanted.stored.dtype], targets[0]
        begin = wanted.stored.begin + wanted.start * dtype.itemsize
        if first.dtype == dtype and first.device.type == "cpu" and first.is_contiguous() and through in (None, dtype):
            self._read(wanted.file, bytes_of(first), begin)
        else:
            step = staging.numel() // dtype.itemsize
            for at in range(0, first.numel(), step):
                part = first[at : at + step]
                values = staging[: part.numel() * dtype.itemsize]
                self._read(wanted.file, bytes_of(values), begin + at * dtype.itemsize)
                typed = values.view(dtype)
                part.copy_(typed if through is None else typed.to(through))
        for source, target in pairwise(targets):
            target.copy_(source)

    def _read(self, file: StoredFile, into: memoryview, offset: int) -> None:
        descriptor = self._descriptor(file)
        while into:
            count = os.preadv(descriptor, [into], offset)
            if not count:
                raise CheckpointError(f"{self.folder / file.name}: it ends at byte {offset}, inside a tensor: truncated")
            into, offset = into[count:], offset + count

    def _descriptor(self, file: StoredFile) -> int:
        """The open file: the same, unchanged one each time."""
        if file.name in self._open:
            self._open.move_to_end(file.name)
            return self._open[file.name]
        path = self.folder / file.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror}); the checkpoint is incomplete: copy it again") from error
        self._open[file.name] = descriptor
        if len(self._open) > _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        status = os.fstat(descriptor)
        identity = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._identities.setdefault(file.name, identity) != identity:
            raise CheckpointError(f"{path}: it was changed while it was being read; let nobody write into a finished checkpoint")
        return descriptor

    def check_file(self, file: StoredFile) -> None:
        """Header, sums and manifest of one file agree."""
        path = self.folder / file.name
        entries = read_header(path)
        check_file(self.folder, file, entries)
        header = bytearray(file.header_nbytes)
        self._read(file, memoryview(header), 0)
        if zlib.crc32(header) != file.header_crc32 or self._identities[file.name][1] != file.nbytes:
            raise CheckpointError(f"{path}: its header is not the one that was written: another file, or damaged")


def open_checkpoint(folder: Path) -> tuple[Manifest, Reader]:
    """The manifest, and a reader of the files; nothing of the files is checked yet.

    Raises:
        CheckpointError: the manifest can't be read, or is damaged.
    """
    found = manifest.read(folder)
    try:
        return found, Reader(folder, found)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / manifest.NAME}: a field is missing or of another kind ({error!r})") from error
