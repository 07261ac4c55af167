"""How large a block and a segment are for a request: the arithmetic of PyTorch's caching allocator, without any state.

The constants stand in ``c10/core/AllocatorConfig.h`` of torch 2.13, lines 15 to 25, under the names given below; the rules in
``c10/cuda/CUDACachingAllocator.cpp``, in the function that each docstring names. All figures are bytes.
"""

KIB = 1024
MIB = 1024 * KIB

MIN_BLOCK_NBYTES = 512
"""``kMinBlockSize``: every block is a multiple of it."""
SMALL_NBYTES = MIB
"""``kSmallSize``: the largest block of the small pool; a larger one lies in the large pool."""
SMALL_SEGMENT_NBYTES = 2 * MIB
"""``kSmallBuffer``: every segment of the small pool, and a page of an expandable one."""
LARGE_SEGMENT_NBYTES = 20 * MIB
"""``large_segment_size_``, the default: a segment for requests above 1 and below 10 MiB, and a page of an expandable one."""
MIN_LARGE_NBYTES = 10 * MIB
"""``kMinLargeAlloc``: from here on a request has a segment of its own size."""
ROUND_LARGE_NBYTES = 2 * MIB
"""``kRoundLarge``: such a segment is a multiple of it."""
NUM_INTERVALS = 16
"""``kRoundUpPowerOfTwoIntervals``: powers of two from 1 MiB up that may be divided differently."""


def rounded_up(nbytes: int, multiple: int) -> int:
    """The first multiple from ``nbytes`` up.

    >>> rounded_up(513, 512), rounded_up(1024, 512)
    (1024, 1024)
    """
    return -(-nbytes // multiple) * multiple


def block_nbytes(nbytes: int, divisions: tuple[int, ...] | None = None) -> int:
    """The block that a request of ``nbytes`` (1 or more) gets: ``round_size``.

    ``divisions``: as :attr:`shardbook.replay.settings.Settings.divisions`. Between two powers of two there are then that many
    sizes instead of every multiple of 512.

    >>> block_nbytes(1), block_nbytes(513), block_nbytes(1200, (4,) * 16), block_nbytes(9000, (4,) * 16)
    (512, 1024, 1536, 10240)
    """
    if nbytes < MIN_BLOCK_NBYTES:
        return MIN_BLOCK_NBYTES
    if divisions is not None:
        # `roundup_power2_divisions`: the interval that begins at 1 MiB also serves what is smaller
        interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), NUM_INTERVALS - 1)
        count = divisions[interval]
        if count > 1 and nbytes > MIN_BLOCK_NBYTES * count:
            return _next_division(nbytes, count)
    return rounded_up(nbytes, MIN_BLOCK_NBYTES)


def _next_division(nbytes: int, count: int) -> int:
    """``roundup_power2_next_division``; ``count`` is a power of two, and smaller than ``nbytes`` / 512."""
    if nbytes & (nbytes - 1) == 0:
        return nbytes
    floor = 1 << (nbytes.bit_length() - 1)
    return rounded_up(nbytes, floor // count)


def segment_nbytes(nbytes: int, large_segment_nbytes: int = LARGE_SEGMENT_NBYTES) -> int:
    """The segment that is asked of the device for a block of ``nbytes``: ``get_allocation_size``.

    >>> [segment_nbytes(size) // MIB for size in (512, 1 * MIB, 1 * MIB + 512, 10 * MIB, 11 * MIB)]
    [2, 2, 20, 10, 12]
    """
    if nbytes <= SMALL_NBYTES:
        return SMALL_SEGMENT_NBYTES
    if nbytes < MIN_LARGE_NBYTES:
        return large_segment_nbytes
    return rounded_up(nbytes, ROUND_LARGE_NBYTES)
