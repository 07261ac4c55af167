"""Puts an allocator into a given state: segments, and the blocks that tile them."""

from collections.abc import Iterable, Iterator

from shardbook.checks import refuse
from shardbook.replay.blocks import Block, Region
from shardbook.replay.segments import BlockFacts, SegmentFacts
from shardbook.replay.sizes import SMALL_SEGMENT_NBYTES
from shardbook.replay.state import State


def restore(state: State, segments: Iterable[SegmentFacts]) -> Iterator[tuple[BlockFacts, Block]]:
    """Builds the segments, counts them, and returns each block with its facts.

    Stretches of expandable segments of one stream and pool become one address space if they lie in whole pages from the first;
    where the real one began is not known, so nothing is ever mapped below the first.

    Raises:
        ConfigError: blocks that do not add up to their segment.
    """
    spaces: dict[tuple[int, bool], Region] = {}
    for facts in sorted(segments, key=lambda facts: facts.address):
        if not facts.blocks or sum(block.nbytes for block in facts.blocks) != facts.nbytes:
            refuse(f"SegmentFacts at {facts.address:#x}, {facts.nbytes} bytes", "blocks that add up to it", "name the free ones too")
        block = _stretch(state, facts, spaces) if facts.expandable else _segment(state, facts)
        yield from _cut(state, block, facts)


def _segment(state: State, facts: SegmentFacts) -> Block:
    pool = state.small if facts.small else state.large
    region = Region(pool, facts.stream, facts.address, facts.nbytes)
    state.regions.add(region)
    _count(state, region, facts.nbytes)
    return region.first


def _stretch(state: State, facts: SegmentFacts, spaces: dict[tuple[int, bool], Region]) -> Block:
    """A mapped block cut out of the unmapped end of its address space; a new address space if it does not fit there."""
    key = (facts.stream, facts.small)
    region = spaces.get(key)
    if region is None or not _fits(region, facts):
        pool = state.small if facts.small else state.large
        page = SMALL_SEGMENT_NBYTES if facts.small else state.settings.large_segment
        region = Region(pool, facts.stream, facts.address, max(state.device.space_nbytes(page), facts.nbytes), page)
        region.first.mapped = False
        state.regions.add(region)
        pool.add_unmapped(region.first)
        spaces[key] = region
    block = _last(region)
    region.pool.remove_unmapped(block)
    if (hole := facts.address - block.address) > 0:
        region.pool.add_unmapped(block.insert_before(hole))
    if (rest := block.nbytes - facts.nbytes) > 0:
        region.pool.add_unmapped(block.insert_after(rest))
    block.mapped = True
    _count(state, region, facts.nbytes)
    return block


def _last(region: Region) -> Block:
    block = region.first
    while block.next is not None:
        block = block.next
    return block


def _fits(region: Region, facts: SegmentFacts) -> bool:
    offset, last = facts.address - region.address, _last(region)
    return offset % region.page_nbytes == 0 and not last.mapped and last.address <= facts.address and offset + facts.nbytes <= region.nbytes


def _count(state: State, region: Region, nbytes: int) -> None:
    """What was reserved before the trace began: counted, and no change of it. It is taken even if the device had less."""
    counters = state.counters
    state.device.used_nbytes += nbytes
    counters.reserved += nbytes
    counters.num_segments += not region.expandable
    counters.note("reserved", "num_segments")


def _cut(state: State, block: Block, facts: SegmentFacts) -> Iterator[tuple[BlockFacts, Block]]:
    """Cuts a block that spans the whole stretch into those of the facts; free ones go into the pool."""
    counters, pieces = state.counters, list[tuple[BlockFacts, Block]]()
    for piece in facts.blocks[:-1]:
        pieces.append((piece, block.insert_before(piece.nbytes)))
    pieces.append((facts.blocks[-1], block))
    for piece, cut in pieces:
        if piece.state == "free":
            block.region.pool.add(cut)
            if cut.is_split and not block.region.expandable:
                counters.inactive_split += cut.nbytes
                counters.num_inactive_split += 1
            continue
        cut.requested = piece.requested
        cut.allocated, cut.waiting = piece.state == "allocated", piece.state == "waiting"
        counters.active += cut.nbytes
        counters.requested += cut.requested
        counters.num_active += 1
        counters.allocated += cut.nbytes * cut.allocated
        counters.num_allocations += cut.allocated
    counters.note(*counters.peaks)
    return iter(pieces)
