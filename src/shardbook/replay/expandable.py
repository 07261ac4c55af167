"""Expandable segments: address space for the whole device, and memory mapped behind it page by page.

``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and ``unmap_block`` of
``c10/cuda/CUDACachingAllocator.cpp``. A page is 2 MiB in the small pool and 20 MiB (``large_segment_size``) in the large one.
"""

from shardbook.replay.blocks import Block, Pool, Region
from shardbook.replay.sizes import SMALL_SEGMENT_NBYTES, rounded_up
from shardbook.replay.state import State


def take(state: State, pool: Pool, stream: int, nbytes: int) -> Block | None:
    """A mapped block of ``nbytes`` or more, out of its pool; ``None`` if the device has no page left.

    Free and unmapped blocks that follow each other are mapped until they are large enough. Pages that were mapped before the
    device ran short stay mapped, as a free block.
    """
    block = _find(state, pool, stream, nbytes)
    if not block.mapped and not _map(state, block, min(block.nbytes, nbytes)):
        return None
    while block.nbytes < nbytes:
        behind = block.next
        assert behind is not None, "an expandable segment ends in address space that is large enough"
        if not _map(state, behind, min(nbytes - block.nbytes, behind.nbytes)):
            return None
        block = behind
    pool.remove(block)
    return block


def _find(state: State, pool: Pool, stream: int, nbytes: int) -> Block:
    """The lowest address at which unmapped space, and free blocks around it, come to ``nbytes``; else a new segment."""
    for _, unmapped in pool.unmapped.get(stream, ()):
        before = unmapped.prev
        start = before if before is not None and not before.is_busy else unmapped
        if _has_room(start, nbytes):
            return start
    return _new_segment(state, pool, stream)


def _has_room(block: Block | None, nbytes: int) -> bool:
    room = 0
    while room < nbytes and block is not None and not block.is_busy:
        room += block.nbytes
        block = block.next
    return room >= nbytes


def _new_segment(state: State, pool: Pool, stream: int) -> Block:
    page = SMALL_SEGMENT_NBYTES if pool.small else state.settings.large_segment
    space = state.device.space_nbytes(page)
    region = Region(pool, stream, state.device.place(space), space, page)
    region.first.mapped = False
    pool.add_unmapped(region.first)
    state.regions.add(region)
    return region.first


def _map(state: State, block: Block, nbytes: int) -> bool:
    """Maps the first pages of an unmapped block, enough for ``nbytes``, and joins them with free neighbours: all pages or none."""
    region = block.region
    pool = region.pool
    mapped = rounded_up(nbytes, region.page_nbytes)
    if not state.device.take(mapped):
        return False
    address = block.address
    pool.remove_unmapped(block)
    if mapped < block.nbytes:
        pool.add_unmapped(block.insert_after(block.nbytes - mapped))
    block.mapped = True
    block.absorb(block.prev)
    block.absorb(block.next)
    pool.add(block)
    state.reserved_more(region, address, mapped)
    return True


def unmap(state: State, block: Block) -> None:
    """Gives back every page that a free block covers completely; what is left at both ends stays, as free blocks."""
    region = block.region
    pool, page = region.pool, region.page_nbytes
    begin = region.address + rounded_up(block.address - region.address, page)
    end = region.address + (block.address + block.nbytes - region.address) // page * page
    if begin >= end:
        return
    pool.remove(block)
    if (before := begin - block.address) > 0:
        pool.add(block.insert_before(before))
    if (after := block.address + block.nbytes - end) > 0:
        pool.add(block.insert_after(after))
    block.mapped = False
    block.absorb(block.prev)
    block.absorb(block.next)
    pool.add_unmapped(block)
    state.reserved_less(region, begin, end - begin)
    if not block.is_split:
        # the whole address space is unmapped: `release_expandable_segment`
        pool.remove_unmapped(block)
        state.regions.discard(region)
