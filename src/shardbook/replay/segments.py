"""Plain records of what the allocator holds and of what it did with the device."""

from dataclasses import dataclass
from typing import Literal

BlockState = Literal["allocated", "waiting", "free"]
Action = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One block. ``requested``: bytes that the program asked for, 0 if it is free. ``id``: of its allocation, -1 if it is free."""

    nbytes: int
    state: BlockState
    requested: int = 0
    id: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """One stretch of mapped memory and the blocks that tile it, in the order of their addresses.

    An expandable segment is one record for each stretch without a hole, as in ``torch.cuda.memory_snapshot()``.
    """

    address: int
    nbytes: int
    stream: int = 0
    small: bool
    expandable: bool = False
    blocks: tuple[BlockFacts, ...] = ()

    @property
    def free_nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks if block.state == "free")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChange:
    """Memory taken from the device or given back, in the words of a snapshot's trace. ``event``: number of the event that caused it."""

    event: int
    action: Action
    address: int
    nbytes: int
    stream: int = 0

    @property
    def signed_nbytes(self) -> int:
        return self.nbytes if self.action in ("segment_alloc", "segment_map") else -self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A request that could not be met, whatever was given back first.

    Args:
        event: its number in the trace, from 0.
        label: of that event.
        wanted: bytes that the block needs, after rounding; ``segment`` bytes were asked of the device for it.
        device_free: bytes that the device still has, ``None`` without a capacity.
        free: bytes that the allocator holds and nobody uses; ``largest_free`` of them in one block.
        allocated, reserved: as :class:`shardbook.replay.counters.Counters`.
    """

    event: int
    label: str = ""
    wanted: int
    segment: int
    device_free: int | None
    free: int
    largest_free: int
    allocated: int
    reserved: int
