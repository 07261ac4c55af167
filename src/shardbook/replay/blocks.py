"""Regions of device memory, the blocks they are cut into, and the pools in which free blocks wait.

A **region** is what the device handed out at once: a segment of ``cudaMalloc``, or the address space of an expandable segment.
Its **blocks** tile it, each knowing its neighbours. A block is *allocated* (the program has it), *waiting* (the program has given
it back and another stream has not), *free*, or *unmapped* (address space of an expandable segment without memory behind it).
"""

from bisect import bisect_left, insort


class Region:
    """One segment, or the address space of one expandable segment.

    ``page_nbytes`` is 0 for a segment of ``cudaMalloc``; an expandable one is mapped and unmapped in pages of that size.
    """

    __slots__ = ("address", "first", "nbytes", "page_nbytes", "pool", "stream")

    def __init__(self, pool: "Pool", stream: int, address: int, nbytes: int, page_nbytes: int = 0) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.nbytes = nbytes
        self.page_nbytes = page_nbytes
        self.first = Block(self, address, nbytes)

    @property
    def expandable(self) -> bool:
        return self.page_nbytes > 0


class Block:
    """A piece of a region. ``age_base``: the pool's count of look-ups when it was last put there."""

    __slots__ = ("address", "age_base", "allocated", "mapped", "nbytes", "next", "prev", "region", "requested", "streams", "waiting")

    def __init__(self, region: Region, address: int, nbytes: int) -> None:
        self.region = region
        self.address = address
        self.nbytes = nbytes
        self.requested = 0
        self.allocated = False
        self.waiting = False
        self.mapped = True
        self.age_base = 0
        self.streams: set[int] = set()
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def is_busy(self) -> bool:
        return self.allocated or self.waiting

    def insert_before(self, nbytes: int) -> "Block":
        """A new block of the first ``nbytes`` of this one, which keeps the rest. Neither may lie in a pool."""
        front = Block(self.region, self.address, nbytes)
        front.mapped = self.mapped
        front.prev, front.next = self.prev, self
        if self.prev is None:
            self.region.first = front
        else:
            self.prev.next = front
        self.prev = front
        self.address += nbytes
        self.nbytes -= nbytes
        return front

    def insert_after(self, nbytes: int) -> "Block":
        """A new block of the last ``nbytes`` of this one, which keeps the front. Neither may lie in a pool."""
        back = Block(self.region, self.address + self.nbytes - nbytes, nbytes)
        back.mapped = self.mapped
        back.prev, back.next = self, self.next
        if self.next is not None:
            self.next.prev = back
        self.next = back
        self.nbytes -= nbytes
        return back

    def absorb(self, other: "Block | None") -> int:
        """Takes in a neighbour that is free, and as mapped as this one: ``try_merge_blocks``. Returns its bytes, 0 where it is not."""
        if other is None or other.is_busy or other.mapped != self.mapped:
            return 0
        pool = self.region.pool
        (pool.remove if other.mapped else pool.remove_unmapped)(other)
        if other is self.prev:
            self.address = other.address
            self.prev = other.prev
            if self.prev is None:
                self.region.first = self
            else:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.prev = self
        self.nbytes += other.nbytes
        return other.nbytes


class Pool:
    """The free blocks of one size class, apart for each stream: ``BlockPool``.

    A stream's blocks are sorted by size, then by address (``BlockComparatorSize``), its unmapped ones by address. ``num_lookups``
    is the clock of garbage collection; it stands still unless that is switched on.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.num_lookups = 0
        self.free: dict[int, list[tuple[int, int, Block]]] = {}
        self.unmapped: dict[int, list[tuple[int, Block]]] = {}

    def add(self, block: Block) -> None:
        block.age_base = self.num_lookups
        insort(self.free.setdefault(block.region.stream, []), (block.nbytes, block.address, block))

    def remove(self, block: Block) -> None:
        blocks = self.free[block.region.stream]
        del blocks[bisect_left(blocks, (block.nbytes, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped.setdefault(block.region.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        blocks = self.unmapped[block.region.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def age(self, block: Block) -> int:
        """Look-ups since the block was put here."""
        return self.num_lookups - block.age_base

    def blocks(self) -> list[Block]:
        """Every free block, by stream, size and address."""
        return [block for stream in sorted(self.free) for _, _, block in self.free[stream]]

    @property
    def largest_nbytes(self) -> int:
        """The largest free block, of whichever stream; 0 if there is none."""
        return max((blocks[-1][0] for blocks in self.free.values() if blocks), default=0)
