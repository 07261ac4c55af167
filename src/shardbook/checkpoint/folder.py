"""A checkpoint's folder comes into being at once, and only when all of it is on the disk.

While ``runs/step-10`` is written there is ``runs/.step-10.writing``: a lock, and one folder with a random name into which the ranks
write. When all have synchronised their files, that folder takes its final name in one rename. A crash leaves the last checkpoint as it
was, and rubbish that the next save of the same name clears away. The lock is the operating system's: it ends with its process.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardbook.checkpoint import manifest
from shardbook.checkpoint.errors import CheckpointError

_AT_FDCWD = -100
_EXCHANGE = 2
_OLD = "replaced"
_HEAD_NBYTES = 4096


class Lock:
    """Held by one process of one run; released when it ends, however it ends.

    Raises:
        CheckpointError: another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            try:
                self._take()
            except BaseException:
                os.close(self._file)
                raise
            if self._is_in_place():
                break
            os.close(self._file)  # whoever held it has removed it meanwhile

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._path.parent}: in use: another process is writing there; give each run a folder of its own, or end the other one"
            ) from error

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back and leave no trace of it."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


class Place:
    """Where rank 0 lets a checkpoint come into being. Built when the save begins; ends with :meth:`publish` or :meth:`give_up`.

    Args:
        path: of the finished checkpoint.
        token: the name of the folder in which it is written; the same on all ranks.

    Raises:
        CheckpointError: something that is no checkpoint is there already; another run is writing there.
        OSError: the folder can't be made.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._around = around(path)
        self.folder = self._around / token
        self._is_open = True
        if os.path.lexists(path) and not is_checkpoint(path):
            raise CheckpointError(f"{path}: exists and is no checkpoint; nothing is overwritten that isn't one: choose another path")
        _clear_series(path)
        self._lock = _locked(self._around)
        try:
            recover(path)
            _clear(self._around)
            self.folder.mkdir()
        except BaseException:
            self._leave()  # else this process would be in its own way the next time
            raise

    def publish(self, *, keep: int | None) -> None:
        """Everything is written: give it its name, and of its series leave the last ``keep``."""
        synchronise(self.folder)
        if self._path.exists():
            _replace(self.folder, self._path)
        else:
            self.folder.rename(self._path)
        synchronise(self._path.parent)
        if keep is not None:
            self._prune(keep)
        self.give_up()

    def give_up(self) -> None:
        """Clear away what was written so far."""
        if self._is_open:
            self._is_open = False
            try:
                _clear(self._around)
            finally:
                self._leave()

    def _leave(self) -> None:
        self._lock.release()
        with contextlib.suppress(OSError):  # another process may have put its lock there already
            self._around.rmdir()

    def _prune(self, keep: int) -> None:
        others = [found for found in series(self._path) if found != self._path]
        for found in others[: max(0, len(others) - keep + 1)]:
            found.rename(self._around / f"{found.name}.{_OLD}")  # never half a checkpoint under its name


def around(path: Path) -> Path:
    """The folder that exists beside a checkpoint while it is written."""
    return path.parent / f".{path.name}.writing"


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was written by ``engine.save``, damaged or not: others have files of that name, and nothing of theirs is touched."""
    if not (path / manifest.NAME).is_file():
        return False
    return manifest.FORMAT.encode() in _head(path) or any(path.glob("rank-*.safetensors"))


def _head(path: Path) -> bytes:
    """The first fields of a manifest."""
    try:
        with (path / manifest.NAME).open("rb") as file:
            return file.read(_HEAD_NBYTES)
    except OSError:
        return b""


def _locked(folder: Path) -> Lock:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # whoever was here before has just removed the folder
            return Lock(folder / "lock")


def recover(path: Path) -> None:
    """Where a crash came between the two renames of a replacement, put the old checkpoint back."""
    old = around(path) / _OLD
    if not path.exists() and is_checkpoint(old):
        old.rename(path)


def _recover_unless_in_use(path: Path) -> None:
    """As :func:`recover`, by whoever only wants to read: a run that is at work there is left alone."""
    if not path.exists() and is_checkpoint(around(path) / _OLD):
        with contextlib.suppress(CheckpointError):
            lock = Lock(around(path) / "lock")
            recover(path)
            lock.release()


def _clear_series(path: Path) -> None:
    """Rubbish of saves of this series that ended by a crash, and are never tried again under their name."""
    for found in list(path.parent.glob(".*.writing")) if path.parent.is_dir() else []:
        name = found.name.removeprefix(".").removesuffix(".writing")
        if name != path.name and _pattern(name) == _pattern(path.name):
            with contextlib.suppress(CheckpointError, OSError):
                lock = Lock(found / "lock")  # another run may be at work there, or it is another person's
                recover(path.parent / name)
                _clear(found)
                lock.release()
                found.rmdir()


def series(path: Path) -> list[Path]:
    """The finished checkpoints beside ``path`` whose names differ from its in the last number only, the one written last at the end."""
    pattern = _pattern(path.name)
    return [found for found in finished(path.parent) if _pattern(found.name) == pattern]


def finished(folder: Path) -> list[Path]:
    """The checkpoints right in a folder, the one written last at the end."""
    found = [path for path in folder.iterdir() if not path.name.startswith(".") and is_checkpoint(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (_written(path), [int(number) for number in re.findall(r"[0-9]+", path.name)], path.name))


def _written(path: Path) -> int:
    """When, in nanoseconds: as the manifest says, since a copy may have other times than its original."""
    said = re.search(rb'"time_ns": (\d{1,19})', _head(path))
    return int(said[1]) if said else (path / manifest.NAME).stat().st_mtime_ns


def find(path: Path) -> Path:
    """The checkpoint that a person means by ``path``: itself, or the last one in it.

    Raises:
        CheckpointError: there is none.
    """
    _recover_unless_in_use(path)
    if is_checkpoint(path):
        return path
    found = finished(path)
    if not found:
        raise CheckpointError(f"{path}: no checkpoint there (no {manifest.NAME} that engine.save wrote), and none in it")
    return found[-1]


def synchronise(folder: Path) -> None:
    """The folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pattern(name: str) -> str:
    """What names of one series have in common: all but the last number."""
    return re.sub(r"[0-9]+(?=[^0-9]*$)", "#", name)


def _clear(folder: Path) -> None:
    for found in _contents(folder):
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()


def _contents(folder: Path) -> Iterator[Path]:
    return (found for found in folder.iterdir() if found.name != "lock")


def _replace(new: Path, path: Path) -> None:
    """Swap two folders in one operation where the file system can; else in two renames, which :func:`recover` completes."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _EXCHANGE) == 0:
        return
    path.rename(new.parent / _OLD)
    new.rename(path)
