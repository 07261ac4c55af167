"""Reads ahead and writes behind while somebody works in between, in a small fixed set of equal pieces of memory.

A *slot* is one of them. It goes round: free, being read into, ready, with whoever works, being written, free again. One thread reads and
one writes, each one extent at a time and in order; they allocate nothing. Whatever a thread meets is raised where the work is done.
"""

import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from shardbook.errors import UsageError
from shardbook.tiers.direct import Extent
from shardbook.tiers.pages import bytes_of


class File(Protocol):
    """What is read and written: :class:`~shardbook.tiers.direct.DirectFile`, say."""

    def read(self, into: memoryview, offset: int) -> None: ...
    def write(self, data: memoryview, offset: int) -> None: ...


class Slot:
    """``memory`` (uint8, flat), and the ``extent`` whose bytes stand at its beginning."""

    __slots__ = ("bytes", "extent", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.bytes = memory, bytes_of(memory)
        self.extent = Extent(0, 0)


class _Lanes:
    """What the threads and the caller share; every field under ``changed``. Knows no :class:`Pipeline`, so that one can be collected."""

    def __init__(self, file: File, slots: Sequence[Slot]) -> None:
        self.file = file
        self.changed = threading.Condition()
        self.free: deque[Slot] = deque(slots)
        self.ready: deque[Slot] = deque()
        self.to_read: deque[Extent] = deque()
        self.to_write: deque[Slot] = deque()
        self.reading: Slot | None = None
        self.writing: Slot | None = None
        self.error: BaseException | None = None
        self.is_closed = False

    @property
    def writes_left(self) -> bool:
        return bool(self.to_write) or self.writing is not None

    def can_read(self) -> bool:
        """What is still to be written there has to be written first."""
        if self.error is not None or not self.to_read or not self.free:
            return False
        behind = [*self.to_write, *([] if self.writing is None else [self.writing])]
        return not any(slot.extent.meets(self.to_read[0]) for slot in behind)

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.to_read.clear()


class Pipeline:
    """Takes extents of a file through memory.

    Args:
        file: with the bytes.
        slots: flat uint8 tensors on the host, all of one length, as :func:`~shardbook.tiers.pages.aligned_empty` makes them; three keep a
            read, some work and a write going.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardbook.tiers.direct import DirectFile
    >>> from shardbook.tiers.pages import aligned_empty
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pipeline = Pipeline(DirectFile(Path(folder), 1 << 16), [aligned_empty(1 << 14) for _ in range(3)])
    ...     extents = [Extent(offset, 1 << 14) for offset in range(0, 1 << 16, 1 << 14)]
    ...     for slot in pipeline.run(extents, reads=False):
    ...         _ = slot.memory.fill_(1)
    ...     for slot in pipeline.run(extents):
    ...         _ = slot.memory.add_(1)
    ...     sums = [int(slot.memory.sum()) for slot in pipeline.run(extents, writes=False)]
    ...     pipeline.close()
    >>> sums == [2 << 14] * 4
    True
    """

    def __init__(self, file: File, slots: Sequence[Tensor]) -> None:
        self._lanes = lanes = _Lanes(file, [Slot(memory) for memory in slots])
        self._started: tuple[Extent, ...] | None = None
        self._is_running = False
        self._threads = [
            threading.Thread(target=run, args=(lanes,), name=f"shardbook disk {name}", daemon=True)
            for name, run in (("reads", _read), ("writes", _write))
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, lanes)

    def start(self, extents: Sequence[Extent]) -> None:
        """Begin to read for a :meth:`run` over these extents, as far as there are slots. A start that is under way is given up.

        Raises:
            DiskError: an earlier read or write has failed.
        """
        self._check_idle()
        self._drop()
        with self._lanes.changed:
            self._raise_if_failed()
            self._started = tuple(extents)
            self._lanes.to_read.extend(extents)
            self._lanes.changed.notify_all()

    def run(self, extents: Sequence[Extent], *, reads: bool = True, writes: bool = True) -> Generator[Slot]:
        """Give a slot for each extent in turn; it is written when the next one is asked for.

        At the end the last writes may be under way: see :meth:`finish`. Left early (an exception in the work), what was handed back is
        written, the rest is not, and nothing is under way any more.

        Args:
            extents: in the order of the work; none twice.
            reads: whether slots come with what the file has; else with anything.
            writes: whether slots go back to the file.

        Raises:
            DiskError: a read or a write has failed; all other writes have ended. From then on every call raises it.
        """
        self._check_idle()
        if not reads or self._started != tuple(extents):
            self._drop()
            if reads:
                self.start(extents)
        self._is_running, self._started = True, None
        slot, is_done = None, False
        try:
            for extent in extents:
                slot = self._next(extent, reads=reads)
                yield slot
                self._hand_back(slot, writes=writes)
                slot = None
            is_done = True
        finally:
            self._is_running = False
            if not is_done:
                if slot is not None:
                    self._hand_back(slot, writes=False)
                self._drop()
                self._wait_for_writes()

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            DiskError: a read or a write has failed.
        """
        self._wait_for_writes()
        with self._lanes.changed:
            self._raise_if_failed()

    def check(self) -> None:
        """Raise the DiskError of a read or a write that has failed, if one has; waits for nothing."""
        with self._lanes.changed:
            self._raise_if_failed()

    def forget(self) -> None:
        """Give up what :meth:`start` has begun: the file is about to be changed by somebody else."""
        self._check_idle()
        self._drop()

    def close(self) -> None:
        """Write what is left, and end the threads. A pipeline that nobody holds any more ends them by itself."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _next(self, extent: Extent, *, reads: bool) -> Slot:
        lanes = self._lanes
        waiting = lanes.ready if reads else lanes.free
        with lanes.changed:
            while not waiting and lanes.error is None:
                lanes.changed.wait()
            if lanes.error is not None:
                lanes.changed.wait_for(lambda: not lanes.writes_left)
            self._raise_if_failed()
            slot = waiting.popleft()
            slot.extent = extent
            return slot

    def _hand_back(self, slot: Slot, *, writes: bool) -> None:
        with self._lanes.changed:
            (self._lanes.to_write if writes else self._lanes.free).append(slot)
            self._lanes.changed.notify_all()

    def _drop(self) -> None:
        """Nothing is read ahead any more."""
        lanes = self._lanes
        self._started = None
        with lanes.changed:
            lanes.to_read.clear()
            lanes.changed.wait_for(lambda: lanes.reading is None)
            lanes.free.extend(lanes.ready)
            lanes.ready.clear()

    def _wait_for_writes(self) -> None:
        with self._lanes.changed:
            self._lanes.changed.wait_for(lambda: not self._lanes.writes_left)

    def _check_idle(self) -> None:
        if self._is_running or self._lanes.is_closed:
            raise UsageError(f"the pipeline is {'closed' if self._lanes.is_closed else 'running already'}")

    def _raise_if_failed(self) -> None:
        if self._lanes.error is not None:
            raise self._lanes.error


def _read(lanes: _Lanes) -> None:
    """The thread that reads."""
    while True:
        with lanes.changed:
            lanes.changed.wait_for(lambda: lanes.is_closed or lanes.can_read())
            if lanes.is_closed:
                return
            slot = lanes.reading = lanes.free.popleft()
            slot.extent = extent = lanes.to_read.popleft()
        error: BaseException | None = None
        try:
            lanes.file.read(slot.bytes[: extent.nbytes], extent.offset)
        except BaseException as found:  # noqa: BLE001 - raised where the work is done
            error = found
        with lanes.changed:
            lanes.reading = None
            if error is None:
                lanes.ready.append(slot)
            else:
                lanes.free.append(slot)
                lanes.fail(error)
            lanes.changed.notify_all()


def _write(lanes: _Lanes) -> None:
    """The thread that writes, whatever else has failed: each write that succeeds leaves less undone."""
    while True:
        with lanes.changed:
            lanes.changed.wait_for(lambda: lanes.is_closed or lanes.to_write)
            if not lanes.to_write:
                return
            slot = lanes.writing = lanes.to_write.popleft()
        error: BaseException | None = None
        try:
            lanes.file.write(slot.bytes[: slot.extent.nbytes], slot.extent.offset)
        except BaseException as found:  # noqa: BLE001 - raised where the work is done
            error = found
        with lanes.changed:
            lanes.writing = None
            lanes.free.append(slot)
            if error is not None:
                lanes.fail(error)
            lanes.changed.notify_all()


def _end(lanes: _Lanes) -> None:
    """Not waited for here: the collector may call this in one of the threads, which has the lock that the other needs to end."""
    with lanes.changed:
        lanes.is_closed = True
        lanes.to_read.clear()
        lanes.changed.notify_all()
