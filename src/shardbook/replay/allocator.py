"""A model of PyTorch's caching allocator for CUDA: the decisions of ``c10/cuda/CUDACachingAllocator.cpp``, without a device.

One request, in the order of ``malloc`` there:

1. blocks whose last use on another stream is over become free (``process_events``);
2. the size is rounded, which decides the pool (:mod:`shardbook.replay.sizes`);
3. the smallest free block of this stream and pool that is large enough is taken (``get_free_block``);
4. else garbage is collected, if that is switched on, and the device is asked for a segment;
5. if it has none: oversized free blocks are given back and it is asked again; then everything free is given back, and once more;
6. the block is split if enough is left (``should_split``, ``alloc_found_block``).

Two streams share nothing: what one has freed, the other cannot have until it went back to the device.
"""

from bisect import bisect_left
from collections.abc import Iterable

from shardbook.checks import refuse
from shardbook.replay import expandable, release
from shardbook.replay.blocks import Block, Pool, Region
from shardbook.replay.device import Device
from shardbook.replay.restore import restore
from shardbook.replay.segments import BlockFacts, SegmentChange, SegmentFacts, Shortage
from shardbook.replay.settings import Settings
from shardbook.replay.sizes import MIN_BLOCK_NBYTES, SMALL_NBYTES, block_nbytes, segment_nbytes
from shardbook.replay.state import State
from shardbook.replay.trace import Event


class Allocator:
    """The allocator of one device, told what a program asks of it.

    >>> allocator = Allocator()
    >>> allocator.alloc(1, 1000)
    >>> allocator.counters.allocated, allocator.counters.reserved
    (1024, 2097152)
    """

    def __init__(self, settings: Settings | None = None, *, device: Device | None = None) -> None:
        self.settings = settings if settings is not None else Settings()
        self._state = State(self.settings, device if device is not None else Device(self.settings.available))
        self.counters = self._state.counters
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, Block] = {}
        self._complete: list[int] = []
        # allocations without memory, of 0 bytes or refused, and whether another stream uses them; and those that wait for nothing
        # any more although their completion is still to be told
        self._without_memory: dict[int, bool] = {}
        self._synchronized: set[int] = set()
        self._divisions = self.settings.divisions

    # -- what a program asks ---------------------------------------------------------------------------------------------------

    def apply(self, event: Event, number: int = 0) -> Shortage | None:
        """Answers one event of a trace; ``number`` is the one that changes and shortages are filed under."""
        self._state.event = number
        if event.kind == "alloc":
            return self.alloc(event.id, event.nbytes, stream=event.stream, label=event.label)
        if event.kind == "free":
            self.free(event.id)
        elif event.kind == "use":
            self.use(event.id, event.stream)
        elif event.kind == "complete":
            self.complete(event.id)
        else:
            self.empty_cache()
        return None

    def alloc(self, id: int, nbytes: int, *, stream: int = 0, label: str = "") -> Shortage | None:  # noqa: A002
        """Gives ``nbytes`` on ``stream`` to ``id``. Returns ``None``, or why there is no memory for it.

        Raises:
            ConfigError: ``id`` is in use, or still waits for another stream.
        """
        if nbytes > 0:  # torch does not ask the allocator for 0 bytes at all
            self._free_complete()
        if id in self._blocks or id in self._waiting or id in self._without_memory:
            refuse(f"alloc of id {id}", "an id that is not in use", "free it first, or number the allocations")
        if nbytes == 0:
            self._without_memory[id] = False
            return None
        wanted = block_nbytes(nbytes, self._divisions)
        pool = self._state.pool(wanted)
        block = self._cached(pool, stream, wanted) or self._fresh(pool, stream, wanted)
        if block is None:
            self._without_memory[id] = False
            return self._shortage(wanted, label)
        self._blocks[id] = self._hand_out(block, wanted, nbytes)
        return None

    def free(self, id: int) -> None:  # noqa: A002
        """Takes ``id`` back; if another stream has used it, its block stays active until :meth:`complete`.

        Raises:
            ConfigError: nothing of that id is allocated.
        """
        if id in self._without_memory:
            if self._without_memory.pop(id):
                self._synchronized.add(id)
            return
        block = self._blocks.pop(id, None)
        if block is None:
            refuse(f"free of id {id}", "an id that is allocated", "check the order of the events")
        block.allocated = False
        self.counters.allocated -= block.nbytes
        self.counters.num_allocations -= 1
        if block.streams:
            block.waiting = True
            self._waiting[id] = block
        else:
            self._free_block(block)

    def use(self, id: int, stream: int) -> None:  # noqa: A002
        """``stream`` works on ``id`` as well: ``record_stream``. Its own stream does not count."""
        if id in self._without_memory:
            self._without_memory[id] = True
            return
        if id not in self._blocks:
            refuse(f"use of id {id} on stream {stream}", "an id that is allocated", "record a use before the free")
        block = self._blocks[id]
        if stream != block.region.stream:
            block.streams.add(stream)

    def complete(self, id: int) -> None:  # noqa: A002
        """Every stream that used ``id`` is past its free. Its block becomes free at the next :meth:`alloc`, where torch looks."""
        if id in self._synchronized:
            self._synchronized.discard(id)
        elif id in self._waiting:
            self._complete.append(id)
        else:
            refuse(f"complete of id {id}", "an id that was freed and waits for a stream", "record a use before its free")

    def empty_cache(self) -> None:
        """Waits for every stream, and gives back what is free: whole segments, and whole pages of expandable ones."""
        self._synchronize()
        release.release_all(self._state)

    # -- what it holds ---------------------------------------------------------------------------------------------------------

    @property
    def changes(self) -> list[SegmentChange]:
        """Everything that was taken from the device and given back, in order."""
        return self._state.changes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block, of whichever stream and pool."""
        return self._state.largest_free

    def address(self, id: int) -> int:  # noqa: A002
        """Where the block of an allocation begins.

        Raises:
            ConfigError: nothing of that id is allocated.
        """
        if id not in self._blocks:
            refuse(f"address of id {id}", "an id that is allocated", "ask before its free")
        return self._blocks[id].address

    def segments(self) -> tuple[SegmentFacts, ...]:
        """The map of everything reserved, by address."""
        ids = {block: id for held in (self._blocks, self._waiting) for id, block in held.items()}  # noqa: A001
        found = [facts for region in self._state.regions for facts in _stretches(region, ids)]
        return tuple(sorted(found, key=lambda facts: facts.address))

    def restore(self, segments: Iterable[SegmentFacts]) -> None:
        """Begins with these segments; for an allocator that has not been asked for anything yet.

        Raises:
            ConfigError: blocks that do not tile their segment, or ids that come twice.
        """
        held = (self._blocks, self._waiting)
        for facts, block in restore(self._state, segments):
            if facts.state != "free":
                if facts.id in self._blocks or facts.id in self._waiting:
                    refuse(f"BlockFacts.id = {facts.id}", "an id that comes once", "number the allocations")
                held[facts.state == "waiting"][facts.id] = block

    # -- one request -----------------------------------------------------------------------------------------------------------

    def _cached(self, pool: Pool, stream: int, wanted: int) -> Block | None:
        """The smallest free block that is large enough, out of its pool: ``get_free_block``."""
        if self._state.collects:
            pool.num_lookups += 1
        blocks = pool.free.get(stream)
        if not blocks:
            return None
        index = self._suitable(blocks, bisect_left(blocks, (wanted, 0)))
        if index is None:
            return None
        size, _, block = blocks[index]
        limit = self.settings.max_split_size
        if limit is not None:
            if wanted < limit <= size:
                return None
            if wanted >= limit and size >= wanted + self.settings.non_split_rounding:
                return None
        del blocks[index]
        return block

    def _suitable(self, blocks: list[tuple[int, int, Block]], index: int) -> int | None:
        """From the best fit on, the first that may be taken where segments are expandable.

        A block that can grow counts with what it can grow to, so that it is left for later while a larger one cannot. Where
        expandable segments are off and some are left from before, torch's loop steps over the first of them and those behind.
        """
        if index == len(blocks):
            return None
        if not blocks[index][2].region.expandable:
            return index
        if self.settings.expandable_segments:
            while blocks[index][2].region.expandable and index + 1 < len(blocks) and _room(blocks[index + 1][2]) < _room(blocks[index][2]):
                index += 1
            return index
        while index < len(blocks) and blocks[index][2].region.expandable:
            index += 1
        return index if index < len(blocks) else None

    def _fresh(self, pool: Pool, stream: int, wanted: int) -> Block | None:
        """A block of new memory, after giving back as much as it takes; ``None`` if that was not enough."""
        if self._state.collects:
            release.collect_garbage(self._state)
        if block := self._from_device(pool, stream, wanted):
            return block
        if release.release_oversize(self._state, pool, stream, wanted) and (block := self._from_device(pool, stream, wanted)):
            return block
        self._synchronize()
        release.release_all(self._state)
        self.counters.num_retries += 1
        return self._from_device(pool, stream, wanted)

    def _from_device(self, pool: Pool, stream: int, wanted: int) -> Block | None:
        """Asks the device once: ``alloc_block``. The limit counts a whole segment even where only pages are mapped."""
        state, nbytes = self._state, segment_nbytes(wanted, self.settings.large_segment)
        if self.settings.limit is not None and self.counters.reserved + nbytes > self.settings.limit:
            return None
        if self.settings.expandable_segments:
            return expandable.take(state, pool, stream, wanted)
        if not state.device.take(nbytes):
            return None
        region = Region(pool, stream, state.device.place(nbytes), nbytes)
        state.regions.add(region)
        state.reserved_more(region, region.address, nbytes)
        return region.first

    def _hand_out(self, block: Block, wanted: int, nbytes: int) -> Block:
        """Splits if enough is left, and counts: ``should_split`` and ``alloc_found_block``."""
        counters, was_split, plain = self.counters, block.is_split, not block.region.expandable
        if self._splits(block, wanted):
            rest, block = block, block.insert_before(wanted)
            rest.region.pool.add(rest)
            if plain:
                counters.inactive_split += -wanted if was_split else rest.nbytes
                counters.num_inactive_split += not was_split
        elif was_split and plain:
            counters.inactive_split -= block.nbytes
            counters.num_inactive_split -= 1
        block.allocated, block.requested = True, nbytes
        counters.allocated += block.nbytes
        counters.active += block.nbytes
        counters.requested += nbytes
        counters.num_allocations += 1
        counters.num_active += 1
        counters.note("allocated", "active", "requested", "num_allocations", "num_active", "inactive_split", "num_inactive_split")
        return block

    def _splits(self, block: Block, wanted: int) -> bool:
        rest = block.nbytes - wanted
        if block.region.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_NBYTES
        limit = self.settings.max_split_size
        return rest > SMALL_NBYTES and (limit is None or wanted < limit)

    def _shortage(self, wanted: int, label: str) -> Shortage:
        counters = self.counters
        counters.num_ooms += 1
        return Shortage(
            event=self._state.event,
            label=label,
            wanted=wanted,
            segment=segment_nbytes(wanted, self.settings.large_segment),
            device_free=self._state.device.free_nbytes,
            free=counters.reserved - counters.active,
            largest_free=self.largest_free,
            allocated=counters.allocated,
            reserved=counters.reserved,
        )

    # -- giving back -----------------------------------------------------------------------------------------------------------

    def _free_block(self, block: Block) -> None:
        """Joins the block with free neighbours and puts it into its pool: ``free_block``."""
        counters = self.counters
        counters.active -= block.nbytes
        counters.requested -= block.requested
        counters.num_active -= 1
        block.requested, block.waiting = 0, False
        block.streams.clear()
        absorbed = [nbytes for neighbour in (block.prev, block.next) if (nbytes := block.absorb(neighbour))]
        block.region.pool.add(block)
        if not block.region.expandable:
            counters.num_inactive_split += block.is_split - len(absorbed)
            counters.inactive_split += block.nbytes * block.is_split - sum(absorbed)
            counters.note("inactive_split", "num_inactive_split")

    def _free_complete(self) -> None:
        for id in self._complete:  # noqa: A001
            if block := self._waiting.pop(id, None):
                self._free_block(block)
        self._complete.clear()

    def _synchronize(self) -> None:
        """Waits for every stream: ``synchronize_and_free_events``."""
        complete = set(self._complete)
        for id, block in self._waiting.items():  # noqa: A001
            if id not in complete:
                self._synchronized.add(id)
            self._free_block(block)
        self._waiting.clear()
        self._complete.clear()


def _room(block: Block) -> int:
    """What the block could grow to: ``expandable_size``."""
    behind = block.next
    return block.nbytes + (behind.nbytes if behind is not None and not behind.mapped else 0)


def _stretches(region: Region, ids: dict[Block, int]) -> Iterable[SegmentFacts]:
    """The mapped stretches of a region."""
    block: Block | None = region.first
    while block is not None:
        start, blocks = block.address, list[BlockFacts]()
        while block is not None and block.mapped:
            state = "allocated" if block.allocated else "waiting" if block.waiting else "free"
            blocks.append(BlockFacts(nbytes=block.nbytes, state=state, requested=block.requested, id=ids.get(block, -1)))
            block = block.next
        if blocks:
            yield SegmentFacts(
                address=start,
                nbytes=sum(facts.nbytes for facts in blocks),
                stream=region.stream,
                small=region.pool.small,
                expandable=region.expandable,
                blocks=tuple(blocks),
            )
        if block is not None:
            block = block.next
