"""Master and optimizer state in a file of this rank: what lies where, and the few slots of host memory that they come through.

A *chunk* is a contiguous part of one flat buffer's shard, at most as many elements as a slot is planned for. In the file it is one
extent: the master of its elements, then one segment for each state the optimizer keeps of them. The optimizer's pieces are cut where
chunks end, so that what is read at once is stepped on at once. This file knows bytes, not pieces; `disk_step` lends them to an optimizer.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account, Tier
from shardbook.engine.journal import Journal
from shardbook.engine.layout import ALIGNMENT
from shardbook.engine.storage import Buffer, Storage, is_memory_known
from shardbook.errors import UsageError
from shardbook.tiers.direct import DirectFile, Extent
from shardbook.tiers.pages import PAGE_NBYTES
from shardbook.tiers.pipeline import Pipeline

NUM_SLOTS = 3
"""One is read, one worked on, one written."""

CHUNK_NUMEL = 1 << 22
"""Elements of a chunk, at most: 48 MiB with two moments in fp32, of which a disk takes several at once."""

_LEAST_NUMEL = 1 << 14
_SHARE = 16
"""A model that is small gets chunks of this part of it, so that slots stay small beside what they serve."""

Kept = Mapping[str, torch.dtype]
"""What an optimizer keeps for each element of a parameter: types by name, in the order of segments."""


def planned_numel(numel: int) -> int:
    """Elements of a chunk where this rank holds ``numel`` in all.

    >>> planned_numel(1_000_000), planned_numel(10**9)
    (62528, 4194304)
    """
    return min(CHUNK_NUMEL, max(_LEAST_NUMEL, _up(-(-numel // _SHARE), ALIGNMENT)))


@dataclass(frozen=True, slots=True)
class Form:
    """How an element of a flat buffer is kept: the master's type, and the bytes of one element of each segment behind it."""

    master: torch.dtype
    widths: tuple[int, ...]

    @property
    def element_nbytes(self) -> int:
        return self.master.itemsize + sum(self.widths)

    @classmethod
    def of(cls, master: torch.dtype, kept: Sequence[Kept]) -> "Form":
        """Room for what any of the parameters of the buffer has kept of it."""
        sizes = [[dtype.itemsize for dtype in one.values()] for one in kept]
        longest = max(map(len, sizes), default=0)
        return cls(master, tuple(max(one[at] for one in sizes if at < len(one)) for at in range(longest)))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Elements ``begin`` to ``end`` of a flat buffer's shard."""

    unit: str
    begin: int
    end: int
    form: Form
    extent: Extent

    @property
    def nbytes(self) -> int:
        """Without what the extent has to fill its last page."""
        return (self.end - self.begin) * self.form.element_nbytes

    def master(self, memory: Tensor, first: int, numel: int) -> Tensor:
        """The master of ``numel`` elements from element ``first`` of the shard, in a slot that has this chunk."""
        return _part(memory, (first - self.begin) * self.form.master.itemsize, numel, self.form.master)

    def state(self, memory: Tensor, segment: int, dtype: torch.dtype, first: int, numel: int) -> Tensor:
        """The same of a state, whose type may be narrower than its segment is made for."""
        before = self.form.master.itemsize + sum(self.form.widths[:segment])
        at = (self.end - self.begin) * before + (first - self.begin) * self.form.widths[segment]
        return _part(memory, at, numel, dtype)


class Disk:
    """One per engine.

    Args:
        folder: where the file is made.
        label: of the file.
        storage, journal: of the engine.
        kept: what the optimizer keeps of a parameter whose master has a type.
    """

    def __init__(
        self, folder: Path, label: str, storage: Storage, journal: Journal, kept: Callable[[nn.Parameter, torch.dtype], Kept]
    ) -> None:
        self.kept = kept
        self.present: dict[nn.Parameter, tuple[str, ...]] = {}  # by piece: the states that have values
        self._folder, self._label, self._storage, self._journal = folder, label, storage, journal
        self._file: DirectFile | None = None
        self._pipeline: Pipeline | _Memory | None = None
        self._buffers: list[Buffer] = []
        self._booked: set[Chunk] = set()  # first chunks of flat buffers whose states are booked
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._slot_nbytes = self._room = self._used = 0
        self._running: Generator[Any] | None = None
        self._torn = ""  # by what, where a change was ended half-way

    # ---- room -------------------------------------------------------------------------------------------------------------

    def make_room(self, parts: Sequence[tuple[int, Form]]) -> None:
        """Take space for flat buffers of so many elements of this rank, which :meth:`lay_out` will be asked for; slots at the first time.

        Raises:
            ConfigError: the folder can't be written, or its disk has too little space.
        """
        if not self._slot_nbytes and parts:
            self._plan_slots(parts)
        self._room += sum(extent.nbytes for numel, form in parts for _, _, extent in self._cut(numel, form, 0))
        if not parts or not self._has_values:
            return
        if self._file is None:
            self._file = DirectFile(self._folder, self._room, self._label)
            self._pipeline = Pipeline(self._file, [self._slot() for _ in range(NUM_SLOTS)])
        else:
            self._file.extend(self._room)

    @property
    def _has_values(self) -> bool:
        return is_memory_known(torch.empty(0, device=self._storage.device))

    def _plan_slots(self, parts: Sequence[tuple[int, Form]]) -> None:
        numel = planned_numel(sum(numel for numel, _ in parts))
        self._slot_nbytes = max(_up(min(numel, most) * form.element_nbytes, PAGE_NBYTES) for most, form in parts)
        if not self._has_values:
            self._pipeline = _Memory([self._slot() for _ in range(NUM_SLOTS)])

    def _slot(self) -> Tensor:
        buffer, memory = self._storage.aligned_buffer(Account.WORKSPACE, "disk", self._slot_nbytes)
        self._buffers.append(buffer)
        return memory

    def lay_out(self, unit: str, numel: int, form: Form, padding: int) -> tuple[Chunk, ...]:
        """The chunks of a flat buffer's shard, booked; ``padding`` of its elements belong to no parameter."""
        found = [Chunk(unit, begin, end, form, extent) for begin, end, extent in self._cut(numel, form, self._used)]
        self._used = found[-1].extent.offset + found[-1].extent.nbytes
        assert self._used <= self._room
        width = form.master.itemsize
        self._journal.book(Account.MASTER, Tier.DISK, unit, numel * width, padding * width, address=found[0].extent.offset)
        return tuple(found)

    def _cut(self, numel: int, form: Form, offset: int) -> Iterator[tuple[int, int, Extent]]:
        most = self._slot_nbytes // form.element_nbytes // ALIGNMENT * ALIGNMENT
        for begin in range(0, numel, most):
            end = min(numel, begin + most)
            extent = Extent(offset, _up((end - begin) * form.element_nbytes, PAGE_NBYTES))
            yield begin, end, extent
            offset += extent.nbytes

    def book_states(self, unit: str, chunks: Sequence[Chunk], padding: int, *, there: bool) -> None:
        """Whether the optimizer's states of a flat buffer have values."""
        first, width = chunks[0], sum(chunks[0].form.widths)
        if there != (first in self._booked):
            sign = 1 if there else -1
            self._booked ^= {first}
            nbytes, unused = sign * chunks[-1].end * width, sign * padding * width
            self._journal.book(Account.MOMENT, Tier.DISK, unit, nbytes, unused, address=first.extent.offset)

    def nothing(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What a piece is while it is on the disk: of the right length, all NaN, in the memory of one element."""
        if dtype not in self._nothing:
            one = self._storage.away_buffer(Account.WORKSPACE, "disk", 1, dtype)
            self._nothing[dtype] = one.tensor.fill_(torch.nan)
        return self._nothing[dtype].expand(numel)

    # ---- visits -----------------------------------------------------------------------------------------------------------

    def visit(self, chunks: Sequence[Chunk], *, reads: bool = True, writes: bool = True) -> Generator[tuple[Chunk, Tensor]]:
        """Each chunk with the memory that has it, valid until the next one is asked for, when it is written.

        Raises:
            DiskError: the disk failed.
            UsageError: a step or a load was ended half-way.
        """
        pipeline = self._ready()
        slots = pipeline.run([chunk.extent for chunk in chunks], reads=reads, writes=writes)
        self._running = running = self._visits(chunks, slots, reads=reads, writes=writes)
        return running

    def _visits(
        self, chunks: Sequence[Chunk], slots: Generator[Any], *, reads: bool, writes: bool
    ) -> Generator[tuple[Chunk, Tensor]]:  # fmt: skip
        try:
            for chunk, slot in zip(chunks, slots, strict=True):
                if reads:
                    self._journal.transfer("disk to host", chunk.unit, chunk.nbytes)
                yield chunk, slot.memory
                if writes:
                    self._journal.transfer("host to disk", chunk.unit, chunk.nbytes)
        finally:
            slots.close()

    def ahead(self, chunks: Sequence[Chunk]) -> None:
        """Begin to read what the next visit will ask for first."""
        if self._pipeline is not None:
            self._pipeline.start([chunk.extent for chunk in chunks])

    @contextmanager
    def changing(self, what: str) -> Generator[None]:
        """Around visits that belong together: where they are ended half-way, chunks are of different steps, and are used no more."""
        self.check_whole()
        self._torn = f"{what} was ended half-way"
        yield
        self._torn = ""

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Around visits that change everything: what was torn is whole again. What is read of it meanwhile may be anything."""
        self._torn = ""
        with self.changing("a load"):
            yield

    def check_whole(self) -> None:
        """Raise UsageError where the file has chunks of different steps."""
        if isinstance(self._pipeline, Pipeline):
            self._pipeline.check()
        if self._torn:
            raise UsageError(
                f"Offload(optimizer='disk'): {self._torn}, so what is on the disk is of different steps and is used no more; "
                f"load the last checkpoint (after an error of the disk: into a new engine, with Offload(path=...) on another disk)"
            )

    def settle(self) -> None:
        """Everything is written.

        Raises:
            DiskError: it is not.
        """
        self._ready().finish()

    def close(self) -> None:
        """End the threads, and give space and slots back."""
        if self._running is not None:
            self._running.close()
        if isinstance(self._pipeline, Pipeline):
            self._pipeline.close()
        if self._file is not None:
            self._file.close()
        for buffer in self._buffers:
            buffer.give_back()
        self._buffers = []
        self._torn = "the engine was closed"

    def _ready(self) -> "Pipeline | _Memory":
        if self._running is not None:
            self._running.close()
        assert self._pipeline is not None, "there is room before there are chunks"
        return self._pipeline


@dataclass(frozen=True, slots=True)
class _FakeSlot:
    memory: Tensor


class _Memory:
    """Stands for file and pipeline where tensors have no values."""

    def __init__(self, slots: Sequence[Tensor]) -> None:
        self._slots = [_FakeSlot(memory) for memory in slots]

    def start(self, extents: Sequence[Extent]) -> None: ...
    def finish(self) -> None: ...

    def run(self, extents: Sequence[Extent], *, reads: bool = True, writes: bool = True) -> Generator[_FakeSlot]:
        for number, _ in enumerate(extents):
            yield self._slots[number % len(self._slots)]


def _part(memory: Tensor, at: int, numel: int, dtype: torch.dtype) -> Tensor:
    return memory[at : at + numel * dtype.itemsize].view(dtype)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
