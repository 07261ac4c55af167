"""What the parts of the allocator share: pools, regions, counters, the device, and the record of what was asked of it."""

from shardbook.replay.blocks import Pool, Region
from shardbook.replay.counters import Counters
from shardbook.replay.device import Device
from shardbook.replay.segments import Action, SegmentChange
from shardbook.replay.settings import Settings
from shardbook.replay.sizes import SMALL_NBYTES


class State:
    """``event`` is the number of the event that is being answered; changes are filed under it."""

    def __init__(self, settings: Settings, device: Device) -> None:
        self.settings = settings
        self.device = device
        self.counters = Counters()
        self.small = Pool(small=True)
        self.large = Pool(small=False)
        self.regions: set[Region] = set()
        self.changes: list[SegmentChange] = []
        self.event = 0

    def pool(self, nbytes: int) -> Pool:
        """``get_pool``: by the size of the block, never by the size of a free one."""
        return self.small if nbytes <= SMALL_NBYTES else self.large

    @property
    def largest_free(self) -> int:
        return max(self.small.largest_nbytes, self.large.largest_nbytes)

    @property
    def collects(self) -> bool:
        """Garbage is collected: a threshold is set, and a limit that it is a share of."""
        return self.settings.limit is not None and self.settings.garbage_collection_threshold > 0

    def reserved_more(self, region: Region, address: int, nbytes: int) -> None:
        counters = self.counters
        counters.reserved += nbytes
        counters.num_device_alloc += 1
        counters.num_segments += not region.expandable
        counters.note("reserved", "num_segments")
        self._changed("segment_map" if region.expandable else "segment_alloc", region, address, nbytes)

    def reserved_less(self, region: Region, address: int, nbytes: int) -> None:
        counters = self.counters
        counters.reserved -= nbytes
        counters.num_device_free += 1
        counters.num_segments -= not region.expandable
        self.device.give_back(nbytes)
        self._changed("segment_unmap" if region.expandable else "segment_free", region, address, nbytes)

    def _changed(self, action: Action, region: Region, address: int, nbytes: int) -> None:
        self.changes.append(SegmentChange(event=self.event, action=action, address=address, nbytes=nbytes, stream=region.stream))
