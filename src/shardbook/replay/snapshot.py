"""Reads the file of ``torch.cuda.memory._dump_snapshot()`` without running anything that stands in it.

A snapshot is a pickle of dictionaries, lists, text and numbers. A pickle may also name functions to call; here any name at all is
refused, so that a file from somebody else is only read.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from shardbook.checks import listed, refuse
from shardbook.replay.segments import Action, BlockFacts, BlockState, SegmentFacts
from shardbook.replay.settings import Settings
from shardbook.replay.sizes import MIB, NUM_INTERVALS

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom", "snapshot")
SEGMENT_ACTIONS: tuple[Action, ...] = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
STATES: Mapping[str, BlockState] = {
    "active_allocated": "allocated",
    "active_pending_free": "waiting",
    "active_awaiting_free": "waiting",
    "inactive": "free",
}
HOW = "write it with torch.cuda.memory._record_memory_history(), the steps, then torch.cuda.memory._dump_snapshot(FILE)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a snapshot's trace. ``address`` of an ``oom`` is 0; ``label``: the innermost frame outside torch, if frames are there."""

    action: str
    address: int
    nbytes: int
    stream: int
    time: int
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One device's part of a snapshot: its segments at the end, and the trace that leads there. ``settings`` are the allocator's."""

    device: int
    segments: tuple[SegmentFacts, ...]
    entries: tuple[Entry, ...]
    settings: Settings


def read_snapshot(path: str | Path, *, device: int | None = None, capacity: int | None = None, elsewhere: int = 0) -> Snapshot:
    """The snapshot in a file.

    Args:
        path: of the file.
        device: whose part; ``None``: of the only device that has a trace.
        capacity: bytes of the device, which a snapshot does not say; ``None``: it never ran short.
        elsewhere: of those, the bytes that somebody else has.

    Raises:
        ConfigError: no such file, a file that is cut off or no snapshot, one that names code, an empty trace, an unknown action,
            a negative size, private pools.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        refuse(f"snapshot {str(path)!r}", "a file that can be read", f"{error.strerror or error}; {HOW}")
    return snapshot_of(plain_data(content, str(path)), device=device, capacity=capacity, elsewhere=elsewhere)


class _PlainUnpickler(pickle.Unpickler):
    """Knows no name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        refuse(f"the snapshot names {module_name}.{global_name}", "plain data", "a file of torch's names nothing: do not open it elsewhere")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        refuse(f"the snapshot refers to an outside object {pid!r}", "plain data", HOW)


def plain_data(content: bytes, name: str = "snapshot") -> object:
    """What a pickle of plain data holds; ``name`` is for the error.

    Raises:
        ConfigError: anything else, with the name that stands in it.
    """
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except (EOFError, pickle.UnpicklingError) as error:
        refuse(f"snapshot {name!r} of {len(content)} bytes", "a complete pickle", f"it is cut off or no pickle ({error}); {HOW}")
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, UnicodeDecodeError, MemoryError) as error:
        refuse(f"snapshot {name!r} of {len(content)} bytes", "a pickle of plain data", f"{type(error).__name__}: {error}; {HOW}")


def snapshot_of(data: object, *, device: int | None = None, capacity: int | None = None, elsewhere: int = 0) -> Snapshot:
    """The snapshot in what ``torch.cuda.memory._snapshot()`` returned; arguments and errors as :func:`read_snapshot`."""
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in ("segments", "device_traces")):
        refuse(f"a snapshot that is a {type(data).__name__}", "a dictionary with the lists segments and device_traces", HOW)
    parts = cast("dict[str, Any]", data)
    traces = cast("list[Any]", parts["device_traces"])
    number = _device(traces, device)
    segments = [_mapping(segment, f"segment {place}") for place, segment in enumerate(parts["segments"])]
    return Snapshot(
        device=number,
        segments=tuple(_segment(segment) for segment in segments if segment.get("device", 0) == number),
        entries=tuple(_entry(entry, place) for place, entry in enumerate(traces[number])),
        settings=_settings(parts.get("allocator_settings"), capacity, elsewhere),
    )


def _device(traces: list[Any], device: int | None) -> int:
    traced = [number for number, trace in enumerate(traces) if isinstance(trace, list) and trace]
    if not traced or (device is not None and device not in traced):
        whose = "every device" if device is None else f"device {device}"
        refuse(f"the trace of {whose} is empty", "a trace of at least one event", f"devices with one: {traced}; {HOW}")
    if device is None and len(traced) > 1:
        refuse("device = None", f"one of {traced}, which all have a trace", "say which")
    return traced[0] if device is None else device


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{what} of the snapshot is a {type(value).__name__}", "a dictionary", HOW)
    return cast("Mapping[str, Any]", value)


def _integer(source: Mapping[str, Any], key: str, what: str, *, default: int | None = None) -> int:
    value = source.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        refuse(f"{key} of {what} = {value!r}", "an integer from 0 up", HOW)
    return value


def _entry(value: object, place: int) -> Entry:
    what = f"trace entry {place}"
    source = _mapping(value, what)
    action = source.get("action")
    if action not in ACTIONS:
        refuse(f"action of {what} = {action!r}", listed(ACTIONS), "the snapshot is of a torch whose allocator does something else")
    _refuse_private(source.get("pool_id"), what)
    return Entry(
        action=action,
        address=0 if action in ("oom", "snapshot") else _integer(source, "addr", what),
        nbytes=_integer(source, "size", what),
        stream=_integer(source, "stream", what, default=0),
        time=_integer(source, "time_us", what, default=place),
        label=_label(source.get("frames")),
    )


def _segment(source: Mapping[str, Any]) -> SegmentFacts:
    address = _integer(source, "address", "a segment")
    what = f"the segment at {address:#x}"
    _refuse_private(source.get("segment_pool_id"), what)
    blocks = [_mapping(block, f"a block of {what}") for block in cast("Sequence[Any]", source.get("blocks", ()))]
    return SegmentFacts(
        address=address,
        nbytes=_integer(source, "total_size", what),
        stream=_integer(source, "stream", what, default=0),
        small=source.get("segment_type") == "small",
        expandable=bool(source.get("is_expandable", False)),
        blocks=tuple(_block(block, f"a block of {what}") for block in blocks),
    )


def _block(source: Mapping[str, Any], what: str) -> BlockFacts:
    state = source.get("state")
    if not isinstance(state, str) or state not in STATES:
        refuse(f"state of {what} = {state!r}", listed(STATES), HOW)
    nbytes = _integer(source, "size", what)
    return BlockFacts(nbytes=nbytes, state=STATES[state], requested=_integer(source, "requested_size", what, default=nbytes))


def _refuse_private(pool: object, what: str) -> None:
    """A pool of a CUDA graph or a ``MemPool`` has an id other than (0, 0)."""
    if isinstance(pool, (tuple, list)) and any(cast("Sequence[Any]", pool)):
        refuse(
            f"{what} belongs to private pool {pool!r}", "the default pool, (0, 0)", "private pools are not modelled: record without graphs"
        )


def _label(frames: object) -> str:
    """``file.py:12 name`` of the innermost frame that is not torch's own."""
    for frame in cast("list[Any]", frames) if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        source = cast("dict[str, Any]", frame)
        filename = str(source.get("filename", ""))
        if filename.endswith(".py") and "/torch/" not in filename:
            return f"{Path(filename).name}:{source.get('line', 0)} {source.get('name', '')}".strip()
    return ""


def _settings(source: object, capacity: int | None, elsewhere: int) -> Settings:
    """The snapshot's own ``allocator_settings``: the string if it is there, and the parsed fields, which also know later changes."""
    known = cast("dict[str, Any]", source) if isinstance(source, dict) else {}
    text = known.get("PYTORCH_CUDA_ALLOC_CONF") or known.get("PYTORCH_ALLOC_CONF") or ""
    if capacity is None:  # the share is meaningless without the whole
        text = ",".join(part for part in str(text).split(",") if not part.strip().startswith("per_process_memory_fraction"))
    base = Settings.parse(str(text), capacity=capacity, elsewhere=elsewhere)
    split, threshold = known.get("max_split_size"), known.get("garbage_collection_threshold")
    divisions = known.get("roundup_power2_divisions")
    if isinstance(divisions, dict):
        counts = tuple(cast("dict[str, Any]", divisions).values())
        divisions = counts if len(counts) == NUM_INTERVALS else None
    return Settings(
        # torch writes "no limit" as the largest number there is, read as -1 or 2**63 - 1
        max_split_size=split if isinstance(split, int) and base.large_segment <= split < 2**40 * MIB else base.max_split_size,
        max_non_split_rounding=base.max_non_split_rounding,
        roundup_power2_divisions=base.roundup_power2_divisions if divisions is None else divisions,
        garbage_collection_threshold=base.garbage_collection_threshold if threshold is None else threshold,
        expandable_segments=bool(known.get("expandable_segments", base.expandable_segments)),
        large_segment=base.large_segment,
        capacity=capacity,
        elsewhere=elsewhere,
        memory_fraction=base.memory_fraction,
    )
