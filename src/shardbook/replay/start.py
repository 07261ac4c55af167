"""The state of the allocator when a snapshot's trace began, found by undoing the trace from its end."""

from bisect import bisect_right
from dataclasses import dataclass

from shardbook.checks import refuse
from shardbook.replay.segments import BlockFacts, BlockState, SegmentFacts
from shardbook.replay.sizes import SMALL_NBYTES, SMALL_SEGMENT_NBYTES, block_nbytes
from shardbook.replay.snapshot import Entry, Snapshot


@dataclass(slots=True)
class _Held:
    """A block in use. ``nbytes`` is 0 where only the request is known."""

    requested: int
    state: BlockState
    nbytes: int = 0


@dataclass(slots=True)
class _Stretch:
    """Reserved memory without a hole: ``[address, end)``."""

    address: int
    end: int
    stream: int
    small: bool
    expandable: bool


def start_of(snapshot: Snapshot) -> tuple[tuple[SegmentFacts, ...], dict[int, int]]:
    """The segments at the beginning, and address -> id of what was in use there; ids count from 0.

    Raises:
        ConfigError: an allocation or a segment of the trace that the state after it does not have.
    """
    held, stretches = _end(snapshot)
    for place in range(len(snapshot.entries) - 1, -1, -1):
        _undo(snapshot.entries[place], place, held, stretches, snapshot.settings.large_segment)
    addresses = sorted(held)
    ids = {address: number for number, address in enumerate(addresses)}
    segments = [_segment(stretches[address], held, addresses, ids, snapshot) for address in sorted(stretches)]
    return tuple(segments), ids


def _end(snapshot: Snapshot) -> tuple[dict[int, _Held], dict[int, _Stretch]]:
    held: dict[int, _Held] = {}
    stretches: dict[int, _Stretch] = {}
    for segment in snapshot.segments:
        end = segment.address + segment.nbytes
        stretches[segment.address] = _Stretch(segment.address, end, segment.stream, segment.small, segment.expandable)
        address = segment.address
        for block in segment.blocks:
            if block.state != "free":
                held[address] = _Held(block.requested, block.state, block.nbytes)
            address += block.nbytes
    return held, stretches


def _undo(entry: Entry, place: int, held: dict[int, _Held], stretches: dict[int, _Stretch], page: int) -> None:
    if entry.action == "alloc":
        if held.pop(entry.address, None) is None:
            _contradiction(entry, place, "that allocation is in use afterwards")
    elif entry.action == "free_completed":
        held[entry.address] = _Held(entry.nbytes, "waiting")
    elif entry.action == "free_requested":
        if entry.address not in held:
            _contradiction(entry, place, "that allocation waits or is freed afterwards")
        held[entry.address].state = "allocated"
    elif entry.action in ("segment_alloc", "segment_map"):
        _cut(entry, place, stretches)
    elif entry.action in ("segment_free", "segment_unmap"):
        _join(entry, stretches, page)


def _contradiction(entry: Entry, place: int, expected: str) -> None:
    refuse(
        f"trace entry {place} ({entry.action} at {entry.address:#x}, {entry.nbytes} bytes)",
        f"a trace after which {expected}",
        "the segments are not from the end of this trace: take both from one snapshot, without a pause in recording",
    )


def _cut(entry: Entry, place: int, stretches: dict[int, _Stretch]) -> None:
    """Undoes memory being taken: it goes out of the stretch it lies in."""
    begin, end = entry.address, entry.address + entry.nbytes
    stretch = stretches.get(begin) or next((one for one in stretches.values() if one.address <= begin < one.end), None)
    if stretch is None or end > stretch.end:
        _contradiction(entry, place, "that memory is reserved")
        return
    del stretches[stretch.address]
    for left, right in ((stretch.address, begin), (end, stretch.end)):
        if left < right:
            stretches[left] = _Stretch(left, right, stretch.stream, stretch.small, stretch.expandable)


def _join(entry: Entry, stretches: dict[int, _Stretch], page: int) -> None:
    """Undoes memory being given back: pages join the stretches that they touch.

    Which pool it belonged to is told from a stretch that it touches, else from its size: a segment of 2 MiB is a small one, and
    pages that do not come to whole large ones are small.
    """
    begin, end = entry.address, entry.address + entry.nbytes
    if entry.action == "segment_free":
        stretches[begin] = _Stretch(begin, end, entry.stream, entry.nbytes == SMALL_SEGMENT_NBYTES, False)
        return
    touching = [one for one in stretches.values() if one.expandable and (one.end == begin or one.address == end)]
    small = touching[0].small if touching else entry.nbytes % page != 0
    for one in touching:
        del stretches[one.address]
        begin, end = min(begin, one.address), max(end, one.end)
    stretches[begin] = _Stretch(begin, end, entry.stream, small, True)


def _segment(stretch: _Stretch, held: dict[int, _Held], addresses: list[int], ids: dict[int, int], snapshot: Snapshot) -> SegmentFacts:
    """The stretch, tiled by what was in use in it and by free blocks between."""
    blocks: list[BlockFacts] = []
    address = stretch.address
    place = bisect_right(addresses, stretch.address - 1)
    while address < stretch.end:
        start = min(addresses[place], stretch.end) if place < len(addresses) else stretch.end
        if start > address:
            blocks.append(BlockFacts(nbytes=start - address, state="free"))
            address = start
            continue
        block, place = held[start], place + 1
        following = min(addresses[place], stretch.end) if place < len(addresses) else stretch.end
        nbytes = min(block.nbytes or _guess(block, following - start, stretch, snapshot), following - start)
        blocks.append(BlockFacts(nbytes=nbytes, state=block.state, requested=block.requested, id=ids[start]))
        address += nbytes
    return SegmentFacts(
        address=stretch.address,
        nbytes=stretch.end - stretch.address,
        stream=stretch.stream,
        small=stretch.small,
        expandable=stretch.expandable,
        blocks=tuple(blocks),
    )


def _guess(block: _Held, room: int, stretch: _Stretch, snapshot: Snapshot) -> int:
    """The block that a request had: what it rounds to, and a rest behind it that is too small to have been split off."""
    nbytes = block_nbytes(max(block.requested, 1), snapshot.settings.divisions)
    splits_finely = stretch.small or stretch.expandable
    return room if not splits_finely and 0 < room - nbytes <= SMALL_NBYTES else nbytes
