"""What all parts of one engine share: what it was told, and where it allocates, sends and reports."""

from dataclasses import dataclass

from shardbook.accounts import Tier
from shardbook.config import ZeroConfig
from shardbook.engine.announce import Announcer
from shardbook.engine.comm import Transport
from shardbook.engine.disk import Disk
from shardbook.engine.homes import Homes
from shardbook.engine.journal import Journal
from shardbook.engine.link import Link
from shardbook.engine.residency import Residency
from shardbook.engine.storage import Storage
from shardbook.engine.watch import Watch


@dataclass(slots=True)
class Context:
    """Made once, when the engine is built."""

    config: ZeroConfig
    residency: Residency
    homes: Homes
    transport: Transport
    storage: Storage
    link: Link
    journal: Journal
    watch: Watch
    announcer: Announcer
    disk: Disk | None = None  # where master and optimizer state are on one
    num_channels: int = 0

    def next_channel(self) -> int:
        """The number of the next flat buffer: the same on all ranks, as all make them in the same order."""
        self.num_channels += 1
        return self.num_channels - 1

    @property
    def moments_tier(self) -> Tier:
        """Where the optimizer keeps its state in memory: pageable will do, as it crosses no link. (What is on a disk `disk` books.)"""
        return Tier.HOST if self.homes.optimizer_away else Tier.DEVICE

    @property
    def adds_locally(self) -> bool:
        """Whether a rank adds several micro-batches itself before their gradients are reduced."""
        return self.residency.full_gradients and self.config.accumulate > 1
