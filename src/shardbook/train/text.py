"""Real text as bytes: the Python standard library's own sources, or any file or folder of text.

Reading is lazy and capped: files come in a fixed order, folder by folder, and once ``limit_nbytes`` are there no further file
is opened. What was read, and what was passed over, is said. A token is a byte, so that there are 256 values and nothing to
download or train first.
"""

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardbook.errors import ConfigError

VOCAB = 256
"""Token values: a token is a byte."""

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Text:
    """What was read. ``content`` is the files' bytes one after the other; ``sha256`` tells whether all ranks read the same."""

    source: str
    content: bytes
    num_files: int
    num_skipped: int
    capped: bool

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of the content."""
        return hashlib.sha256(self.content).hexdigest()

    def describe(self) -> str:
        """What was read, in one line."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files:,} files"
        parts = [f"{len(self.content):,} bytes of {files} from {self.source}"]
        if self.capped:
            parts.append("stopped at data.limit_nbytes")
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} passed over (not text, or not readable)")
        return "; ".join(parts)


def read_text(path: Path | None, limit_nbytes: int) -> Text:
    """Reads ``path``, a file or a folder, or the standard library's ``*.py`` where it is ``None``.

    In a folder, hidden entries, files that contain a NUL byte (which text doesn't) and files that can't be read are passed
    over and counted. Symbolic links to folders are not followed.

    Raises:
        ConfigError: nothing there, nothing readable, no text in it, or a single file that is not text.
    """
    if path is None:
        root, suffix = Path(sysconfig.get_paths()["stdlib"]), ".py"
        source = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
    else:
        root, suffix, source = path, "", str(path)
        if not path.is_dir():
            return _read_file(path, limit_nbytes)
    chunks: list[bytes] = []
    left, skipped, capped = limit_nbytes, 0, False
    for file in _walk(root, suffix):
        if left == 0:
            capped = True
            break
        chunk = _head(file, left + 1)
        if chunk is None:
            skipped += 1
            continue
        capped = len(chunk) > left
        chunks.append(chunk[:left])
        left -= len(chunks[-1])
    if not any(chunks):
        passed = f" ({skipped} files passed over: not text, or not readable)" if skipped else ""
        raise ConfigError(f"{root}: no text in this folder{passed}; give a file or a folder of text, or leave data.text out")
    return Text(source=source, content=b"".join(chunks), num_files=len(chunks), num_skipped=skipped, capped=capped)


def split(text: Text, sequence: int, validation: float) -> tuple[memoryview, memoryview]:
    """Training bytes and validation bytes, the last ``validation`` of them; both hold at least one sequence and its target.

    Raises:
        ConfigError: too few bytes for that; both numbers are shown.
    """
    view = memoryview(text.content)
    least = sequence + 1
    num_validation = max(least, int(len(view) * validation))
    if len(view) < 2 * least:
        raise ConfigError(
            f"{text.source}: {len(view):,} bytes are too few for batch.sequence = {sequence:,}: training and validation need "
            f"{least:,} bytes each, {2 * least:,} together; give more text or a sequence of at most {max(len(view) // 2 - 1, 1):,}"
        )
    cut = max(least, len(view) - num_validation)
    return view[:cut], view[cut:]


def _read_file(path: Path, limit_nbytes: int) -> Text:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: is neither a file nor a folder; give one of them as data.text")
        with path.open("rb") as file:
            content = file.read(limit_nbytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); give a file or a folder of text as data.text") from error
    if b"\0" in content:
        raise ConfigError(
            f"{path}: has a NUL byte at {content.index(0):,}, so it is not text; give a file or a folder of text as data.text"
        )
    capped = len(content) > limit_nbytes
    return Text(source=str(path), content=content[:limit_nbytes], num_files=1, num_skipped=0, capped=capped)


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    """Regular files below ``root``: of each folder first its own, sorted by name, then its folders'."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in _NOT_THE_LIBRARY)
        for name in sorted(files):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(folder, name)


def _head(path: Path, nbytes: int) -> bytes | None:
    """The first bytes of a text file; ``None`` for what is no regular, readable file without NUL bytes."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(nbytes)
    except OSError:
        return None
    return None if b"\0" in content else content
