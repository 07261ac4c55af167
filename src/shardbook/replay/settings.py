"""The allocator's settings, as ``PYTORCH_CUDA_ALLOC_CONF`` names them, and the device it works on.

Names, defaults and bounds: ``c10/core/AllocatorConfig.h`` and ``.cpp``, ``c10/cuda/CUDAAllocatorConfig.h`` of torch 2.13.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from shardbook.checks import Check, nearest, refuse
from shardbook.replay.sizes import LARGE_SEGMENT_NBYTES, MIB, MIN_LARGE_NBYTES, NUM_INTERVALS

WITHOUT_EFFECT = (
    "backend",
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
"""Keys that torch knows and that change no byte on the device: ``parse`` passes over them (``backend`` must be ``native``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the allocator behaves, and how much there is for it. All sizes are bytes.

    Args:
        max_split_size: free blocks from here on are neither split nor used for smaller requests; ``None``: all are split.
        max_non_split_rounding: how much larger than such a request the block may be; ``None``: ``large_segment``.
        roundup_power2_divisions: sizes between two powers of two: one power of two for all, or one for each of the 16 intervals
            that begin at 1 MiB, 2 MiB, ... 32 GiB; 0 and 1 leave the multiples of 512.
        garbage_collection_threshold: share of ``limit`` above which old free segments are given back before a new one is taken;
            0: never. Without effect unless ``memory_fraction`` is below 1, as in torch.
        expandable_segments: one address space for each stream and pool, mapped page by page, in place of segments.
        large_segment: the segment for requests between 1 and 10 MiB, and the page of expandable segments for large requests.
        capacity: bytes of the device; ``None``: it never runs short.
        elsewhere: of those, the bytes that somebody else has: context, communicators, other processes.
        memory_fraction: ``per_process_memory_fraction``; the share of ``capacity`` that the allocator may reserve.

    Raises:
        ConfigError: naming each field that is out of bounds, and what is allowed.
    """

    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment: int = LARGE_SEGMENT_NBYTES
    capacity: int | None = None
    elsewhere: int = 0
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("large_segment", least=MIN_LARGE_NBYTES + 1, remedy="20 MiB is torch's own; 10 MiB itself is too little")
        check.done()
        for name in ("max_split_size", "max_non_split_rounding"):
            check.integer(name, least=self.large_segment, remedy="it may not be below large_segment; None is torch's own", optional=True)
        check.integer("capacity", least=1, remedy="give the bytes of the device, or None", optional=True)
        check.integer("elsewhere", least=0, remedy="0 where nobody else uses the device")
        check.flag("expandable_segments")
        self._check_shares(check)
        check.done()
        if self.elsewhere > (self.capacity or 0):
            check.add("elsewhere", self.elsewhere, "no more than capacity", "give capacity as the bytes of the whole device")
        if self.memory_fraction < 1 and self.capacity is None:
            check.add("memory_fraction", self.memory_fraction, "1.0 without a capacity", "give capacity, which it is a share of")
        check.done()

    def _check_shares(self, check: Check) -> None:
        threshold, fraction, divisions = self.garbage_collection_threshold, self.memory_fraction, self.roundup_power2_divisions
        if not isinstance(threshold, (int, float)) or not 0 <= threshold < 1:
            check.add("garbage_collection_threshold", threshold, "from 0 to below 1", "0 switches it off")
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            check.add("memory_fraction", fraction, "from 0 to 1", "1.0 is the whole device")
        counts = divisions if isinstance(divisions, tuple) else (divisions,) * NUM_INTERVALS
        if len(counts) != NUM_INTERVALS or not all(_is_division(count) for count in counts):
            check.add("roundup_power2_divisions", divisions, f"0 or a power of two, or {NUM_INTERVALS} of them", "8 is a usual choice")

    @property
    def divisions(self) -> tuple[int, ...] | None:
        """``roundup_power2_divisions`` for each interval; ``None`` where it changes nothing."""
        value = self.roundup_power2_divisions
        counts = value if isinstance(value, tuple) else (value,) * NUM_INTERVALS
        return counts if max(counts) > 1 else None

    @property
    def limit(self) -> int | None:
        """Bytes that may be reserved, ``allowed_memory_maximum``; ``None`` unless ``memory_fraction`` is below 1."""
        return None if self.capacity is None or self.memory_fraction >= 1 else int(self.memory_fraction * self.capacity)

    @property
    def available(self) -> int | None:
        """Bytes that the device can hand out; ``None``: any number."""
        return None if self.capacity is None else self.capacity - self.elsewhere

    @property
    def non_split_rounding(self) -> int:
        return self.large_segment if self.max_non_split_rounding is None else self.max_non_split_rounding

    @classmethod
    def parse(cls, text: str, *, capacity: int | None = None, elsewhere: int = 0) -> Self:
        """The settings of a string as ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``) has it.

        >>> settings = Settings.parse("expandable_segments:True, max_split_size_mb:128")
        >>> settings.expandable_segments, settings.max_split_size
        (True, 134217728)

        Raises:
            ConfigError: a key that torch does not know, or a value that it refuses.
        """
        found: dict[str, Any] = {}
        for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            if not part:
                continue
            key, colon, value = part.partition(":")
            if key in WITHOUT_EFFECT:
                _check_backend(key, value)
            elif key not in _READERS:
                refuse(f"allocator setting {key!r}", "a key of PYTORCH_CUDA_ALLOC_CONF", nearest(key, [*_READERS, *WITHOUT_EFFECT]))
            elif not colon or not value:
                refuse(f"allocator setting {part!r}", f"{key}:VALUE", "write the value behind a colon")
            else:
                name, read = _READERS[key]
                found[name] = read(key, value)
        return cls(**found, capacity=capacity, elsewhere=elsewhere)


def _is_division(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 0 and count & (count - 1) == 0


def _check_backend(key: str, value: str) -> None:
    if key == "backend" and value != "native":
        refuse(f"allocator setting backend:{value}", "backend:native", "another backend is another allocator, which is not modelled")


def _megabytes(key: str, value: str) -> int:
    if not value.isdecimal():
        refuse(f"allocator setting {key}:{value}", "a whole number of MiB", f"for example {key}:128")
    return int(value) * MIB


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        refuse(f"allocator setting {key}:{value}", "a number", f"for example {key}:0.8")


def _threshold(key: str, value: str) -> float:
    if not 0 < (number := _number(key, value)) < 1:
        refuse(f"allocator setting {key}:{value}", "a number above 0 and below 1", "leave it out to switch garbage collection off")
    return number


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        refuse(f"allocator setting {key}:{value}", "True or False", "torch reads exactly these two words")
    return value == "True"


def _divisions(key: str, value: str) -> int | tuple[int, ...]:
    """One number, or ``[256:1,512:2,>:4]``: a boundary in MiB and the divisions from there to the next one.

    As in torch: the first entry also serves the intervals below it, ``>`` those above the last, and an interval between two
    entries that none names is not divided.
    """
    if not value.startswith("["):
        return _power(key, value)
    counts = [0] * NUM_INTERVALS
    last: int | None = None
    for entry in value.strip("[]").split(","):
        boundary, _, count = entry.partition(":")
        number = _power(key, count)
        if boundary == ">":
            after = 0 if last is None else last + 1
            counts[after:] = [number] * (NUM_INTERVALS - after)
            continue
        if not _power(key, boundary):
            refuse(f"allocator setting {key}: boundary {boundary!r}", "a power of two from 1 up", "boundaries are MiB")
        index = min(int(boundary).bit_length() - 1, NUM_INTERVALS - 1)
        if last is None:
            counts[:index] = [number] * index
        counts[index] = number
        last = index
    return tuple(counts)


def _power(key: str, value: str) -> int:
    if not value.isdecimal() or not _is_division(int(value)):
        refuse(f"allocator setting {key}: {value!r}", "0 or a power of two", f"for example {key}:8 or {key}:[256:1,512:2,>:8]")
    return int(value)


_READERS = cast(
    "Mapping[str, tuple[str, Callable[[str, str], Any]]]",
    {
        "max_split_size_mb": ("max_split_size", _megabytes),
        "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes),
        "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
        "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
        "expandable_segments": ("expandable_segments", _flag),
        "large_segment_size_mb": ("large_segment", _megabytes),
        "per_process_memory_fraction": ("memory_fraction", _number),
    },
)
