"""In which tier each state rests between its uses: what :class:`~shardbook.config.Offload` means, as a table.

Beside `residency`, which says how much of a state a rank keeps, this is the only place that knows an offload by its name.
"""

from dataclasses import dataclass

from shardbook.config import Offload


@dataclass(frozen=True, slots=True)
class Homes:
    """Which states rest outside of the device."""

    optimizer_away: bool  # master, moments and the reduced gradient are on the host, where the optimizer steps
    optimizer_on_disk: bool  # and between steps master and moments are on a disk
    params_away: bool  # shards rest on the host, and are copied to the device for each gather

    def makes_master(self, *, has_master: bool, trainable: bool) -> bool:
        """Whether this rank keeps a master in memory: an optimizer that is away steps on a copy of its own."""
        return (has_master or (self.optimizer_away and trainable)) and not (self.optimizer_on_disk and trainable)

    def makes_shard(self, *, makes_master: bool, keeps_both: bool) -> bool:
        """Whether released parameters rest as a shard in their own type, where that is not the master."""
        return not makes_master or keeps_both or (self.params_away and not self.optimizer_away)


def homes_of(offload: Offload) -> Homes:
    """The row of the table."""
    return Homes(
        optimizer_away=offload.optimizer != "none",
        optimizer_on_disk=offload.optimizer == "disk",
        params_away=offload.params != "none",
    )
