"""Host memory as a copy or a disk likes it: at an aligned address, in large pages where much of it is about to be filled."""

import ctypes
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

PAGE_NBYTES = 4096
"""Where direct I/O may begin and end, in memory and in a file: a multiple of every disk's own blocks."""

LARGE_PAGE_NBYTES = 2 << 20

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_COLLAPSE = getattr(mmap, "MADV_COLLAPSE", 25) if sys.platform == "linux" else None  # Linux 6.1; older ones refuse it
_WORTH_ASKING = 2 * LARGE_PAGE_NBYTES  # bytes: less may hold no whole large page


def _found_madvise() -> Any:
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


_madvise = None if _HUGE is None else _found_madvise()


def in_large_pages(fresh: Tensor) -> Tensor:
    """The same tensor, whose memory nobody has touched yet: filling it takes a third less time than page by small page.

    Where the system has none, or has them switched off, nothing happens.
    """
    if _madvise is not None and fresh.device.type == "cpu" and fresh.nbytes >= _WORTH_ASKING:
        begin = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (fresh.data_ptr() + fresh.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(begin, end - begin, _HUGE)
    return fresh


def aligned_empty(nbytes: int) -> Tensor:
    """Host memory for direct I/O, ``nbytes`` of type uint8, its content undefined.

    It begins at a multiple of 4096 bytes; from 4 MiB on at one of 2 MiB, in large pages: a disk was seen to fill those three times as
    fast as small ones. The memory is torch's own, with up to that much slack (:func:`slack_nbytes`), so that books of the allocator
    see it.

    >>> aligned_empty(10_000).data_ptr() % PAGE_NBYTES
    0
    """
    return aligned(torch.empty(nbytes + slack_nbytes(nbytes), dtype=torch.uint8), nbytes)


def aligned(fresh: Tensor, nbytes: int) -> Tensor:
    """The part of a tensor with that much slack which :func:`aligned_empty` would return."""
    part = in_large_pages(fresh)[-fresh.data_ptr() % slack_nbytes(nbytes) :][:nbytes]
    if _madvise is not None and _COLLAPSE is not None and nbytes >= _WORTH_ASKING:
        # memory that the process has had before is in small pages already, and advice comes too late for it
        _madvise(part.data_ptr(), nbytes // LARGE_PAGE_NBYTES * LARGE_PAGE_NBYTES, _COLLAPSE)
    return part


def slack_nbytes(nbytes: int) -> int:
    """What :func:`aligned_empty` takes beyond ``nbytes``."""
    return LARGE_PAGE_NBYTES if nbytes >= _WORTH_ASKING else PAGE_NBYTES


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, for as long as the caller keeps the tensor.

    Not through numpy: storage that numpy has seen can never be given back again.
    """
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")
