"""What the host's memory has left, and how the process holds on to what it has had."""

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes: glibc takes no more
_PAD_NBYTES = 16 << 20
_MAPPED_NBYTES = 1 << 20


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process: steps take the same pages again instead of having the system clear new ones.

    Blocks of up to 32 MiB, which each step takes and frees, come from memory that is never given back. glibc's allocator only; anywhere
    else nothing happens.

    Returns:
        Whether the allocator took it.
    """
    return _set((_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD_NBYTES))


def map_large_blocks() -> bool:
    """Let each block from 1 MiB on be memory of its own, as long as what is to stay and what is not are taken in turn.

    Side by side in one heap, freed blocks would lie between those that stay, too short for the next: a model built unit by unit was seen
    to take three times what it held. :func:`keep_freed_memory` ends it.

    Returns:
        Whether the allocator took it.
    """
    return _set((_MMAP_THRESHOLD, _MAPPED_NBYTES))


def _set(*settings: tuple[int, int]) -> bool:
    found = _found_mallopt()
    taken = [] if found is None else [found(name, value) for name, value in settings]  # all of them, whatever one says
    return bool(taken) and all(taken)


@functools.cache
def _found_mallopt() -> Any:
    try:
        found = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return found


def available_nbytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process can still take without swapping; None where the system does not say.

    The least of what the machine has available and what each control group around the process (a container's limit, say) leaves.

    Args:
        root: of the file system in which ``proc`` and ``sys`` are looked for.
    """
    found = [nbytes for nbytes in (_of_machine(root), *_of_groups(root)) if nbytes is not None]
    return min(found) if found else None


def _of_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_groups(root: Path) -> Iterator[int | None]:
    """What each control group leaves, from the process's own outwards. A container may see its own as the root."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used, cache = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        folder = base / name.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                yield _left(group, limit, used, cache)


def _left(group: Path, limit: str, used: str, cache: str) -> int | None:
    """The limit less what is used, of which the files' cache that nobody uses counts as free."""
    most, taken = _number(group / limit), _number(group / used)
    if most is None or taken is None:
        return None
    files = [int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith(f"{cache} ")]
    return max(0, most - taken + sum(files))


def _number(path: Path) -> int | None:
    """None: no such file, or "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
