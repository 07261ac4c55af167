"""The figures of ``torch.cuda.memory_stats``, kept as the allocator works."""

FIGURES = {
    "allocated": "allocated_bytes.all",
    "active": "active_bytes.all",
    "requested": "requested_bytes.all",
    "reserved": "reserved_bytes.all",
    "inactive_split": "inactive_split_bytes.all",
    "num_allocations": "allocation.all",
    "num_active": "active.all",
    "num_inactive_split": "inactive_split.all",
    "num_segments": "segment.all",
}
"""Attribute of :class:`Counters` -> its name in ``memory_stats``, which follows it with ``.current`` or ``.peak``."""

COUNTS = {
    "num_retries": "num_alloc_retries",
    "num_ooms": "num_ooms",
    "num_device_alloc": "num_device_alloc",
    "num_device_free": "num_device_free",
}
"""The same for what only ever grows."""


class Counters:
    """Bytes and blocks now, and the most there ever were (``Counters.peaks``).

    * ``allocated``: bytes of blocks that the program has. ``requested``: what it asked for, before rounding, until the block is
      free again.
    * ``active``: those, and blocks that wait for another stream.
    * ``reserved``: what was taken from the device. ``num_segments`` counts ``cudaMalloc``: as in torch, an expandable segment is
      not among them.
    * ``inactive_split``: bytes of free blocks that cannot be given back, because a neighbour in their segment is in use or waits.
      Expandable segments have none.
    * ``num_retries``: how often everything free had to be given back before trying again.
    """

    def __init__(self) -> None:
        self.allocated = self.active = self.requested = self.reserved = self.inactive_split = 0
        self.num_allocations = self.num_active = self.num_inactive_split = self.num_segments = 0
        self.num_retries = self.num_ooms = self.num_device_alloc = self.num_device_free = 0
        self.peaks = dict.fromkeys(FIGURES, 0)

    def note(self, *names: str) -> None:
        """Peaks of figures that have just grown."""
        for name in names:
            if (value := getattr(self, name)) > self.peaks[name]:
                self.peaks[name] = value

    def memory_stats(self) -> dict[str, int]:
        """The figures under torch's own names, ready to be laid beside ``torch.cuda.memory_stats()``."""
        stats = {f"{shown}.current": getattr(self, name) for name, shown in FIGURES.items()}
        stats |= {f"{shown}.peak": self.peaks[name] for name, shown in FIGURES.items()}
        return stats | {shown: getattr(self, name) for name, shown in COUNTS.items()}
