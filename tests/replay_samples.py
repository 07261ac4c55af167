"""Random traces for the allocator's tests, and a snapshot as torch would write it of such a run, made by the model itself.

The snapshots prove that reading them loses nothing. That the model is right is for the hand-worked traces and a real device.
"""

from hypothesis import strategies as st

from shardbook.replay import Allocator, Event, Settings

M = 2**20
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * M),
    st.integers(M, 24 * M),
    st.sampled_from([512, M, M + 1, 2 * M, 10 * M - 512, 10 * M, 11 * M, 12 * M, 20 * M, 40 * M, 64 * M]),
)
SETTINGS = st.builds(
    lambda capacity, fraction, **others: Settings(capacity=capacity, memory_fraction=fraction if capacity else 1.0, **others),
    capacity=st.sampled_from([None, None, 60 * M, 150 * M, 400 * M]),
    fraction=st.sampled_from([1.0, 0.9, 0.5]),
    max_split_size=st.sampled_from([None, None, 20 * M, 32 * M]),
    roundup_power2_divisions=st.sampled_from([0, 0, 4, 8, (1,) * 4 + (4,) * 12]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
    expandable_segments=st.booleans(),
    large_segment=st.sampled_from([20 * M, 12 * M]),
)


@st.composite
def traces(draw, *, most=60):
    """Events that a program could ask for: ids count up, and only what is held is freed."""
    held, waiting, events = [], [], []
    for number in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["alloc"] * 5 + ["free"] * 4 + ["use", "complete", "empty_cache"]))
        if kind == "alloc":
            events.append(Event(kind=kind, id=number, nbytes=draw(SIZES), stream=draw(st.integers(0, 1)), time=number))
            held.append([number, events[-1].stream, events[-1].nbytes == 0])
        elif kind == "empty_cache":
            events.append(Event(kind=kind, time=number))
        elif kind == "complete" and waiting:
            events.append(Event(kind=kind, id=waiting.pop(draw(st.integers(0, len(waiting) - 1))), time=number))
        elif kind in ("free", "use") and held:
            place = draw(st.integers(0, len(held) - 1))
            key, stream, _ = held[place]
            if kind == "use":
                events.append(Event(kind=kind, id=key, stream=stream + 1, time=number))
                events.append(Event(kind="free", id=key, time=number))
                waiting.append(key)
            else:
                events.append(Event(kind=kind, id=key, time=number))
            del held[place]
    return events


def record(events, settings, *, begin=0):
    """What ``torch.cuda.memory._snapshot()`` would say after these events, if its history was switched on before event ``begin``."""
    allocator, entries = Allocator(settings), []
    requested, streams, seen = {}, {}, 0

    def entry(action, addr, size, stream, time):
        entries.append({"action": action, "addr": addr, "size": size, "stream": stream, "time_us": time, "frames": []})

    for number, event in enumerate(events):
        if number == begin:
            entries.clear()
        address = allocator.address(event.id) if event.kind == "free" and event.id in requested else None
        waits = address is not None and bool(allocator._blocks[event.id].streams)
        completed = list(allocator._complete) if event.kind == "alloc" and event.nbytes else []
        before = dict(allocator._waiting)
        where = {key: block.address for key, block in before.items()}
        short = allocator.apply(event, number)
        gone = [key for key in before if key not in allocator._waiting]
        for key in sorted(gone, key=lambda key: key not in completed):
            entry("free_completed", where[key], requested[key], streams[key], event.time)
        if address is not None:
            entry("free_requested", address, requested[event.id], streams[event.id], event.time)
            if not waits:
                entry("free_completed", address, requested[event.id], streams[event.id], event.time)
        for change in allocator.changes[seen:]:
            entry(change.action, change.address, change.nbytes, change.stream, event.time)
        seen = len(allocator.changes)
        if event.kind == "alloc" and short is not None:
            entries.append({"action": "oom", "device_free": 0, "size": short.wanted, "stream": event.stream, "time_us": event.time})
        elif event.kind == "alloc" and event.nbytes:
            requested[event.id], streams[event.id] = event.nbytes, event.stream
            entry("alloc", allocator.address(event.id), event.nbytes, event.stream, event.time)
    return snapshot(allocator, entries), allocator


def snapshot(allocator, entries):
    settings = allocator.settings
    return {
        "segments": [_segment(segment) for segment in allocator.segments()],
        "device_traces": [entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": f"large_segment_size_mb:{settings.large_segment // M}"
            + (f",per_process_memory_fraction:{settings.memory_fraction}" if settings.memory_fraction < 1 else ""),
            "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {str(2**place): count for place, count in enumerate(settings.divisions or (0,) * 16)},
        },
    }


def _segment(segment):
    states = {"allocated": "active_allocated", "waiting": "active_pending_free", "free": "inactive"}
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.nbytes,
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [{"size": one.nbytes, "requested_size": one.requested, "state": states[one.state]} for one in segment.blocks],
    }
