"""Reads ranges of a checkpoint's files: what is stored where, whether it is what was written, and its bytes into tensors."""

import os
import stat
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import torch
import xxhash
from torch import Tensor

from shardbook.checkpoint import manifest
from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.manifest import Manifest, Stored, StoredFile, check_file
from shardbook.checkpoint.safetensors import ITEMSIZE, read_header
from shardbook.checkpoint.write import BLOCK_NBYTES, checksum
from shardbook.tiers.pages import bytes_of

_MAX_OPEN = 64
_NUM_THREADS = 3
_MAX_PENDING = 8  # blocks
_WORTH_A_THREAD = 1 << 18  # bytes
_CHUNK_NBYTES = 1 << 19
"""What a thread reads at once: it is still in the processor's own cache when it is added up, or goes to its second target."""
_Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``start`` to ``stop``, counted within a stored tensor."""

    file: StoredFile
    stored: Stored
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> tuple[str, int]:
        """By which ranges come in the order of the bytes."""
        return self.file.name, self.stored.begin + self.start * ITEMSIZE[self.stored.dtype]


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes ``begin`` to ``end`` of a file, which have one checksum. ``target``: memory for the file's bytes from one of them on."""

    file: StoredFile
    stored: Stored
    begin: int
    end: int
    xxh3: str
    target: tuple[int, memoryview] | None


class Scratch:
    """Memory of one thread at a time: for a chunk as it was read, and for the same in another type."""

    def __init__(self) -> None:
        self._own = bytearray(2 * _CHUNK_NBYTES)
        self.read = memoryview(self._own)[:_CHUNK_NBYTES]

    def values(self, numel: int, dtype: torch.dtype, through: torch.dtype) -> Tensor:
        """What was read, rounded to ``through``; nothing is allocated."""
        found = torch.frombuffer(self._own, dtype=dtype, count=numel)
        if through == dtype:
            return found
        rounded = torch.frombuffer(self._own, dtype=through, count=numel, offset=_CHUNK_NBYTES)
        return rounded.copy_(found)


class Reader:
    """The files of one checkpoint. Each is held against the manifest before the first byte of it is used."""

    def __init__(self, folder: Path, found: Manifest) -> None:
        self.folder, self.manifest, self._block_nbytes = folder, found, int(found.content["block_nbytes"])
        if not 1 <= self._block_nbytes <= 1 << 30:
            raise CheckpointError(f"{folder}: block_nbytes is {self._block_nbytes}; 1 to 2^30 is allowed: written by no shardbook")
        self._open: OrderedDict[str, int] = OrderedDict()
        self._identities: dict[str, _Identity] = {}
        self._verified: set[tuple[str, int, int]] = set()
        self._pool, self._pending = ThreadPoolExecutor(_NUM_THREADS, "checkpoint"), deque[Future[None]]()
        self._scratch: SimpleQueue[Scratch] = SimpleQueue()
        for _ in range(_NUM_THREADS + 1):  # the caller reads too
            self._scratch.put(Scratch())
        self._places: dict[tuple[str, str], list[tuple[StoredFile, Stored]]] = {}
        for file in found.files:
            for stored in file.tensors:
                self._places.setdefault((stored.what, stored.name), []).append((file, stored))
        for places in self._places.values():
            places.sort(key=lambda pair: pair[1].start)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        while self._open:
            os.close(self._open.popitem()[1])

    def kinds(self, name: str) -> list[str]:
        """What is stored of a parameter."""
        return sorted(what for what, of in self._places if of == name and what != "buffer")

    def stored(self, what: str, name: str) -> list[Stored]:
        return [stored for _, stored in self._places.get((what, name), ())]

    def whole(self, what: str, name: str, start: int) -> Range | None:
        """The stored tensor that begins with element ``start``."""
        for file, stored in self._places.get((what, name), ()):
            if stored.start == start:
                return Range(file, stored, 0, stored.numel)
        return None

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

    def verify(self, *wanted: tuple[Range, Tensor | None]) -> None:
        """Look whether every block that the ranges touch has the checksum it was written with.

        Threads read each a stream of blocks that follow each other, through a descriptor of its own, so that the system reads ahead in
        each of them, and the disk has something to do while one adds up.

        Args:
            wanted: ranges in the order of their bytes; with each, where there is any, contiguous memory of the host, of the range's type
                and length, that takes its bytes at the same time.

        Raises:
            CheckpointError: a block has not; the message names tensor and file.
        """
        blocks = [block for one, into in wanted for block in self._blocks(one, into)]
        failed = Event()
        streams = [self._pool.submit(self._check_stream, stream, failed) for stream in _streams(blocks)]
        try:
            wait(streams)
        finally:  # an interrupt ends them too
            failed.set()
        for stream in streams:
            stream.result()

    def _blocks(self, wanted: Range, into: Tensor | None) -> Iterator[Block]:
        """Those that nobody has looked at, or that have to be read anyway."""
        stored, width = wanted.stored, ITEMSIZE[wanted.stored.dtype]
        if len(stored.xxh3) != -(-(stored.end - stored.begin) // self._block_nbytes):
            raise CheckpointError(f"{self.folder / wanted.file.name}: {stored.key!r} has {len(stored.xxh3)} checksums, too many or too few")
        target = None if into is None else (wanted.place[1], bytes_of(into))
        for index in range(wanted.start * width // self._block_nbytes, -(-wanted.stop * width // self._block_nbytes)):
            mark = (wanted.file.name, stored.begin, index)
            if into is not None or mark not in self._verified:
                self._verified.add(mark)
                begin = stored.begin + index * self._block_nbytes
                yield Block(wanted.file, stored, begin, min(stored.end, begin + self._block_nbytes), stored.xxh3[index], target)

    def _check_stream(self, blocks: Sequence[Block], failed: Event) -> None:
        """Until one of them is not what was written, in this stream or in another."""
        try:
            for file, those in groupby(blocks, lambda block: block.file):
                self._check_blocks(file, those, failed)
        except BaseException:
            failed.set()
            raise

    def _check_blocks(self, file: StoredFile, blocks: Iterable[Block], failed: Event) -> None:
        """Those of one file."""
        descriptor = self._opened(file)
        try:
            for block in blocks:
                if failed.is_set():
                    return
                self._check_block(descriptor, block)
        finally:
            os.close(descriptor)

    def drain(self) -> None:
        """Wait for what :meth:`fill` has begun.

        Raises:
            CheckpointError: a file is shorter than it was.
        """
        while self._pending:
            self._pending.popleft().result()

    def _check_block(self, descriptor: int, block: Block) -> None:
        """What is wanted of the block is read where it belongs, and added up there while the processor has it in its cache."""
        total = xxhash.xxh3_64()
        begin, end = block.begin, block.end
        first, room = block.target or (end, memoryview(b""))
        with self._a_scratch() as scratch:
            while begin < end:
                if first <= begin < first + len(room):
                    chunk = room[begin - first :][: min(_CHUNK_NBYTES, end - begin)]
                else:
                    chunk = scratch.read[: min(_CHUNK_NBYTES, (first if begin < first < end else end) - begin)]
                self._read(descriptor, block.file, chunk, begin)
                total.update(chunk)
                begin += len(chunk)
        if total.hexdigest() != block.xxh3:
            raise CheckpointError(
                f"{self.folder / block.file.name}: {block.stored.what} of {block.stored.name!r} is damaged near byte {block.begin}: other "
                f"bytes than were written; take another checkpoint, or copy this one again"
            )

    def fill(self, wanted: Range, targets: tuple[Tensor, ...], through: torch.dtype | None) -> None:
        """The elements of a range into ``targets[0]``, and from each target into the next; complete after :meth:`drain`."""
        width = ITEMSIZE[wanted.stored.dtype]
        step = BLOCK_NBYTES // width
        for at in range(0, wanted.numel, step):
            part = Range(wanted.file, wanted.stored, wanted.start + at, min(wanted.stop, wanted.start + at + step))
            parts = tuple(target[at : at + step] for target in targets)
            descriptor = self._descriptor(wanted.file)
            if part.numel * width >= _WORTH_A_THREAD and all(target.device.type == "cpu" for target in targets):
                self._pending.append(self._pool.submit(self._fill, descriptor, part, parts, through))
                if len(self._pending) > _MAX_PENDING:
                    self._pending.popleft().result()
            else:  # a device's stream is the caller's
                self._fill(descriptor, part, parts, through)

    @torch.no_grad()  # of this thread
    def _fill(self, descriptor: int, wanted: Range, targets: tuple[Tensor, ...], through: torch.dtype | None) -> None:
        dtype, first = TYPES[wanted.stored.dtype], targets[0]
        begin = wanted.place[1]
        is_direct = first.dtype == dtype and first.device.type == "cpu" and first.is_contiguous() and through in (None, dtype)
        if is_direct and len(targets) == 1:
            self._read(descriptor, wanted.file, bytes_of(first), begin)
            return
        step = _CHUNK_NBYTES // max(dtype.itemsize, through.itemsize if through else 1)
        with self._a_scratch() as scratch:
            for at in range(0, wanted.numel, step):
                parts = [target[at : at + step] for target in targets]
                read = bytes_of(parts[0]) if is_direct else scratch.read[: parts[0].numel() * dtype.itemsize]
                self._read(descriptor, wanted.file, read, begin + at * dtype.itemsize)
                if not is_direct:
                    parts[0].copy_(scratch.values(parts[0].numel(), dtype, through or dtype))
                for source, target in pairwise(parts):
                    target.copy_(source)

    @contextmanager
    def _a_scratch(self) -> Generator["Scratch"]:
        scratch = self._scratch.get()
        try:
            yield scratch
        finally:
            self._scratch.put(scratch)

    def _read(self, descriptor: int, file: StoredFile, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(descriptor, [into], offset)
            if not count:
                raise CheckpointError(f"{self.folder / file.name}: it ends at byte {offset}, inside a tensor: truncated")
            into, offset = into[count:], offset + count

    def _descriptor(self, file: StoredFile) -> int:
        """The open file, kept open for the next range."""
        if file.name in self._open:
            self._open.move_to_end(file.name)
            return self._open[file.name]
        descriptor = self._open[file.name] = self._opened(file)
        if len(self._open) > _MAX_OPEN:
            self.drain()  # a thread may be reading what is closed now
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _opened(self, file: StoredFile) -> int:
        """A new descriptor of a file: of the same, unchanged one each time."""
        path = self.folder / file.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would let us wait for ever
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror}); the checkpoint is incomplete: copy it again") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: can't be read (a folder, a pipe or a device); the checkpoint is incomplete: copy it again")
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if self._identities.setdefault(file.name, _identity(status)) != _identity(status):
                raise CheckpointError(f"{path}: it was changed while it was being read; let nobody write into a finished checkpoint")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def check_unchanged(self) -> None:
        """Nobody has written to the files, or put others in their place, since they were opened.

        Raises:
            CheckpointError: somebody has.
        """
        for name, identity in self._identities.items():
            path = self.folder / name
            if not path.exists() or _identity(path.lstat()) != identity:
                raise CheckpointError(f"{path}: it was changed while it was being read; let nobody write into a finished checkpoint")

    def check_file(self, file: StoredFile) -> None:
        """Header, sums and manifest of one file agree."""
        path = self.folder / file.name
        descriptor = self._descriptor(file)
        entries = read_header(path)
        check_file(self.folder, file, entries)
        header = bytearray(file.header_nbytes)
        self._read(descriptor, file, memoryview(header), 0)
        if checksum(header) != file.header_xxh3 or self._identities[file.name][1] != file.nbytes:
            raise CheckpointError(f"{path}: its header is not the one that was written: another file, or damaged")


def _streams(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    """As many as there are threads, of about as many bytes each, in order."""
    ends = list(accumulate(block.end - block.begin for block in blocks))
    cuts = [bisect_left(ends, ends[-1] * index // _NUM_THREADS) for index in range(1, _NUM_THREADS)] if ends else []
    return [blocks[first:end] for first, end in pairwise([0, *cuts, len(blocks)]) if first < end]


def _identity(status: os.stat_result) -> _Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_checkpoint(folder: Path) -> Reader:
    """A reader of the files of a checkpoint, of which nothing but the manifest is checked yet.

    Raises:
        CheckpointError: the manifest can't be read, or is damaged.
    """
    found = manifest.read(folder)
    try:
        return Reader(folder, found)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / manifest.NAME}: a field is missing or of another kind ({error!r})") from error
