"""Elements of foreign files into memory: byte ranges, block by block, from the files whose headers were checked."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.foreign import Found
from shardbook.checkpoint.write import BLOCK_NBYTES
from shardbook.tiers.pages import bytes_of


class Files:
    """Foreign files, each held open from when its header is known until all is read: what takes its name meanwhile is not read.

    ``staging``: at least :data:`BLOCK_NBYTES` on the host, for values that change their type or go to a device; made if none was lent.
    """

    staging: Tensor | None = None

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._identities: dict[Path, tuple[int, int]] = {}

    def open(self, path: Path) -> None:
        """From here on its tensors can be read. A link is followed, as the caches of model hubs are made of them.

        Raises:
            CheckpointError: it can't be opened.
        """
        if path in self._open:
            return
        try:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
        self._identities[path] = _identity(self._open[path])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def check_unchanged(self) -> None:
        """Nobody has written to the files since they were opened.

        Raises:
            CheckpointError: somebody has.
        """
        for path, descriptor in self._open.items():
            if _identity(descriptor) != self._identities[path]:
                raise CheckpointError(f"{path}: it was changed while it was being read; let nobody write into it, and do it again")

    def blocks(self, found: Found, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements ``start`` to ``stop``, flat, a block at a time: (the first one's number, values in the file's type and valid until
        the next).
        """
        if self.staging is None:
            self.staging = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
        dtype = TYPES[found.entry.dtype]
        step = BLOCK_NBYTES // dtype.itemsize
        for at in range(start, stop, step):
            block = self.staging[: min(step, stop - at) * dtype.itemsize]
            self.read(found, at, block)
            yield at, block.view(dtype)

    def read(self, found: Found, start: int, into: Tensor) -> None:
        """The bytes from element ``start`` on, as many as ``into`` (on the host, contiguous) holds."""
        left, offset = bytes_of(into), found.entry.begin + start * TYPES[found.entry.dtype].itemsize
        while left:
            count = os.preadv(self._open[found.path], [left], offset)
            if not count:
                raise CheckpointError(f"{found.path}: it ends at byte {offset}, inside tensor {found.entry.key!r}: truncated meanwhile")
            left, offset = left[count:], offset + count

    def check_equal(self, one: Found, other: Found, dtype: torch.dtype) -> None:
        """Two names of one tied parameter hold the same values, in the type that they get here.

        Raises:
            CheckpointError: they don't.
        """
        second = torch.empty(BLOCK_NBYTES, dtype=torch.uint8)
        step = BLOCK_NBYTES // max(TYPES[found.entry.dtype].itemsize for found in (one, other))
        for start in range(0, one.entry.numel, step):
            stop = min(one.entry.numel, start + step)
            part = second[: (stop - start) * TYPES[other.entry.dtype].itemsize]
            self.read(other, start, part)
            theirs = part.view(TYPES[other.entry.dtype]).to(dtype)
            values = torch.cat([block.to(dtype) for _, block in self.blocks(one, start, stop)])
            if not torch.equal(values.view(torch.uint8), theirs.view(torch.uint8)):
                raise CheckpointError(
                    f"{one.path.name}: {one.entry.key!r} and {other.entry.key!r} are one tied parameter here, and their values differ near "
                    f"element {start}: leave one of them out of the files, or untie them in the model. Nothing was changed"
                )


def fill(files: Files, found: Found, start: int, targets: Sequence[Tensor], through: torch.dtype | None = None) -> None:
    """Elements from ``start`` on into ``targets[0]`` (flat), by way of the type ``through``, and from each target into the next."""
    first, dtype = targets[0], TYPES[found.entry.dtype]
    if first.dtype == dtype and through in (None, dtype) and first.device.type == "cpu" and first.is_contiguous():
        files.read(found, start, first)
        put(first, targets[1:])
        return
    for at, values in files.blocks(found, start, start + first.numel()):
        here = slice(at - start, at - start + values.numel())
        put(values, [target[here] for target in targets], through)


def put(values: Tensor, targets: Sequence[Tensor], through: torch.dtype | None = None) -> None:
    """Values into ``targets[0]``, by way of ``through``, and from each target into the next: a parameter is its master, rounded."""
    if through is not None and torch.promote_types(values.dtype, through) != through:  # widening is exact, and would need memory
        values = values.to(through)
    for target in targets:
        values = target.copy_(values)


def whole(files: Files, found: Found, dtype: torch.dtype) -> Tensor:
    """A whole tensor on the host, in its shape, cast to ``dtype``."""
    values = torch.empty(found.entry.numel, dtype=dtype)
    fill(files, found, 0, (values,))
    return values.view(found.entry.shape)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
