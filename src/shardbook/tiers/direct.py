"""A file of fixed length for training state, read and written past the system's cache (``O_DIRECT``).

Its name is taken off the folder as soon as it is open. So it lives exactly as long as the process that has it, killed or not: nothing is
left behind to be cleared away or to be taken for a checkpoint, and no two runs can meet in one file. Until then the bytes show in
``df``, and in ``/proc/PID/fd``. (A process killed between the two calls leaves an empty file: space is taken after them.)

Its space is taken when it is made, so that a full disk is known before a run begins.
"""

import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from shardbook.errors import ConfigError, DiskError
from shardbook.tiers.pages import PAGE_NBYTES

_log = logging.getLogger("shardbook")

_DIRECT = getattr(os, "O_DIRECT", 0)
_GIB = 2**30
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` of a file from ``offset``; both are multiples of 4096."""

    offset: int
    nbytes: int

    def meets(self, other: "Extent") -> bool:
        """Whether they have a byte in common."""
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


class DirectFile:
    """``nbytes`` of space below ``folder``; freed by :meth:`close`, or with the object, or with the process.

    Args:
        folder: where; made if only itself is missing.
        nbytes: rounded up to a multiple of 4096.
        label: part of the name that the file has for an instant, for who watches the folder.

    Raises:
        ConfigError: the folder's parent is missing, it is no folder, nothing can be written there, or it has too little space.

    >>> import tempfile
    >>> from shardbook.tiers.pages import aligned_empty, bytes_of
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = DirectFile(Path(folder), 8192)
    ...     one, other = aligned_empty(8192).fill_(7), aligned_empty(8192)
    ...     file.write(bytes_of(one), 0)
    ...     file.read(bytes_of(other), 0)
    ...     file.close()
    >>> bool((one == other).all())
    True
    """

    def __init__(self, folder: Path, nbytes: int, label: str = "state") -> None:
        self.nbytes = 0
        _make(folder)
        self.path = folder / f"{label}-{uuid4().hex}.shardbook"
        self._descriptor = _opened(self.path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self.extend(nbytes)
            self.is_direct = _is_made_direct(self._descriptor)
        except BaseException:
            self.close()
            raise
        if not self.is_direct:
            _log.warning(
                "%s: the file system has no direct I/O; reads and writes go through the system's cache, which takes host memory and time; "
                "a folder on a local disk is faster", folder,
            )  # fmt: skip

    def read(self, into: memoryview, offset: int) -> None:
        """Fill ``into`` from ``offset`` on; both begin and end at multiples of 4096.

        Raises:
            DiskError: the disk returned an error, or nothing.
        """
        self._transfer(os.preadv, "reading", into, offset)

    def write(self, data: memoryview, offset: int) -> None:
        """Write ``data`` from ``offset`` on; both begin and end at multiples of 4096.

        Raises:
            DiskError: the disk returned an error, or took nothing.
        """
        self._transfer(os.pwritev, "writing", data, offset)

    def extend(self, nbytes: int) -> None:
        """Take space up to so many bytes, rounded up; nothing where they are there already.

        Raises:
            ConfigError: the disk has too little.
        """
        whole = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if whole <= self.nbytes:
            return
        try:
            os.posix_fallocate(self._descriptor, self.nbytes, whole - self.nbytes)
        except OSError as error:
            if error.errno not in _FULL:
                _refuse(self.path.parent, error)
            raise ConfigError(
                f"Offload.path = {str(self.path.parent)!r}: needs {_in_words(whole - self.nbytes)} of "
                f"{_in_words(_free(self._descriptor))} free ({error.strerror}); free some space, or choose a folder on another disk"
            ) from error
        self.nbytes = whole

    def close(self) -> None:
        """Give the space back."""
        self._close()

    def _transfer(self, call: Callable[[int, Sequence[memoryview], int], int], doing: str, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                moved = call(self._descriptor, (data[done:],), offset + done)
            except OSError as error:
                self._fail(doing, offset + done, len(data) - done, error)
            # what ends inside of a page is done again from there: direct I/O begins at pages only
            ahead = (done + moved) // PAGE_NBYTES * PAGE_NBYTES
            if ahead == done:
                self._fail(doing, offset + done, len(data) - done, None, moved)
            done = ahead

    def _fail(self, doing: str, offset: int, nbytes: int, error: OSError | None, moved: int = 0) -> NoReturn:
        code = None if error is None else error.errno
        said = f"{moved} bytes and no error" if error is None else f"{errno.errorcode.get(code or 0, code)} ({error.strerror})"
        raise DiskError(
            f"{self.path}: {doing} {nbytes:,} bytes at offset {offset:,} returned {said}: the disk fails, or its file system is gone; "
            f"begin again from the last checkpoint, with Offload(path=...) on another disk",
            path=str(self.path), offset=offset, nbytes=nbytes, errno=code,
        ) from error  # fmt: skip


def _in_words(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB // 8 else f"{nbytes / 2**20:.2f} MiB"


def free_nbytes(folder: Path) -> int:
    """What the disk of a folder (or of the nearest one above it that is there) has left for this user, in bytes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _free(descriptor: int) -> int:
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"Offload.path = {str(folder)!r}: its parent is missing; make it first, or mount the disk (a folder made there by mistake "
            f"would be on another one)"
        ) from error
    except FileExistsError as error:
        raise ConfigError(f"Offload.path = {str(folder)!r}: is no folder; choose another path") from error
    except OSError as error:
        _refuse(folder, error)


def _opened(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _refuse(path.parent, error)
    path.unlink()
    return descriptor


def _refuse(folder: Path, error: OSError) -> NoReturn:
    raise ConfigError(
        f"Offload.path = {str(folder)!r}: nothing can be written there ({errno.errorcode.get(error.errno or 0, error.errno)}: "
        f"{error.strerror}); choose a folder that this user may write to"
    ) from error


def _is_made_direct(descriptor: int) -> bool:
    """Switch direct I/O on if the file system has it. Some take the flag and refuse the first access, so one is tried."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not _DIRECT:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        _try_access(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _try_access(descriptor: int) -> None:
    if os.fstat(descriptor).st_size:
        page = mmap.mmap(-1, PAGE_NBYTES)
        with page, memoryview(page) as view:
            os.pwritev(descriptor, (view,), 0)
