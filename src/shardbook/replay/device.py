"""The device below the allocator: how many bytes it still has, and where it puts them."""

FIRST_ADDRESS = 1 << 40
UNLIMITED_NBYTES = 1 << 50
"""Address space of an expandable segment on a device without a stated capacity."""


class Device:
    """Hands out memory until ``nbytes`` are gone; ``None``: it never runs short.

    Addresses only grow: an address that was given back is not given out again. They matter in one place: of two free blocks of
    the same size, the one at the lower address is taken.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        self.nbytes = nbytes
        self.used_nbytes = 0
        self._next_address = FIRST_ADDRESS

    @property
    def free_nbytes(self) -> int | None:
        """Bytes that can still be had; ``None``: any number."""
        return None if self.nbytes is None else self.nbytes - self.used_nbytes

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` were there to be taken."""
        if self.nbytes is not None and self.used_nbytes + nbytes > self.nbytes:
            return False
        self.used_nbytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        self.used_nbytes -= nbytes

    def place(self, nbytes: int) -> int:
        """The address of ``nbytes`` of address space that nobody has had before."""
        address = self._next_address
        self._next_address += nbytes
        return address

    def space_nbytes(self, page_nbytes: int) -> int:
        """The address space of an expandable segment: one and one eighth of the device, in whole pages (``max_handles_``)."""
        total = UNLIMITED_NBYTES if self.nbytes is None else self.nbytes + self.nbytes // 8
        return -(-total // page_nbytes) * page_nbytes
