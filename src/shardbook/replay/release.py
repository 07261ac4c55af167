"""The three ways in which free segments go back to the device: by age, the oversized ones, and all of them."""

from bisect import bisect_left

from shardbook.replay import expandable
from shardbook.replay.blocks import Block, Pool
from shardbook.replay.state import State


def release_segment(state: State, block: Block) -> None:
    """Gives back one free block that is a whole segment of ``cudaMalloc``: ``release_block``."""
    region = block.region
    region.pool.remove(block)
    state.regions.discard(region)
    state.reserved_less(region, block.address, block.nbytes)


def collect_garbage(state: State) -> None:
    """Gives back whole free segments of the large pool that are at least of average age: ``garbage_collect_cached_blocks``.

    It runs before the device is asked for a segment, if more than the threshold is reserved, and goes on in rounds until that
    much is reclaimed or nothing is left. A round takes every segment at or above the average age of those that are left when it
    begins, even if fewer would do. Age counts look-ups in the pool since the block became free.
    """
    settings = state.settings
    assert settings.limit is not None
    target = state.counters.reserved - int(settings.garbage_collection_threshold * settings.limit)
    if target <= 0:
        return
    pool = state.large
    whole = [block for block in pool.blocks() if not block.is_split and not block.region.expandable]
    total_age, reclaimed = sum(map(pool.age, whole)), 0
    while reclaimed < target and whole:
        average = total_age / len(whole)
        old = [block for block in whole if pool.age(block) >= average]
        if not old:
            return
        whole = [block for block in whole if pool.age(block) < average]
        for block in old:
            reclaimed += block.nbytes
            total_age -= pool.age(block)
            release_segment(state, block)


def release_oversize(state: State, pool: Pool, stream: int, nbytes: int) -> bool:
    """Gives back free blocks of ``max_split_size`` or more until ``nbytes`` are reached: ``release_available_cached_blocks``.

    The smallest one that is large enough, or else several, the largest first. Whether enough was given back for a new try.
    """
    limit = state.settings.max_split_size
    if limit is None:
        return False
    nbytes = max(nbytes, limit)
    blocks = pool.free.get(stream, [])
    index = bisect_left(blocks, (nbytes, 0))
    if index < len(blocks) and not blocks[index][2].region.expandable:
        release_segment(state, blocks[index][2])
        return True
    released = 0
    for size, _, block in reversed(blocks[:index]):
        if released >= nbytes or size < limit:
            break
        if not block.region.expandable:
            released += size
            release_segment(state, block)
    return released >= nbytes


def release_all(state: State) -> None:
    """Gives back every segment that is free as a whole, and every free page of expandable segments: ``release_blocks``."""
    for pool in (state.large, state.small):
        free = pool.blocks()
        for block in free:
            if not block.region.expandable and not block.is_split:
                release_segment(state, block)
        for block in free:
            if block.region.expandable:
                expandable.unmap(state, block)
