"""What shardbook's engine keeps for blocks that run once more: random states, and inputs that rest on the host.

An input leaves as its block's forward begins, is let go when it is over, and comes back when backward enters the block behind it or the
block itself; the copy on the host stays until the block's backward is over (docs/tiers.md).
"""

from shardbook.accounts import Account
from shardbook.forecasting.tape import Entry, Memory, Tape

CPU_STATE_NBYTES = 5056
"""``torch.get_rng_state()``: a Mersenne twister's 624 words, and what of normal numbers is left over."""

CUDA_STATE_NBYTES = 16
"""``torch.cuda.get_rng_state()``: seed and offset, in the host's memory."""


class Call:
    """The input of one call of a block."""

    def __init__(self, tape: Tape, unit: str, nbytes: int) -> None:
        self._tape, self.unit, self.nbytes = tape, unit, nbytes
        self._host: Entry = tape.take_on_host(Account.ACTIVATION, nbytes, f"input of {unit}")
        self._fetched: Memory | None = None

    def fetch(self) -> None:
        """Copy it to the device, if it is not there."""
        if self._fetched is None:
            self._fetched = Memory(self._tape, Account.ACTIVATION, self.nbytes, f"{self.unit}.input")

    def take(self) -> Memory:
        """The copy, which from now on lives as long as the block needs it."""
        self.fetch()
        found, self._fetched = self._fetched, None
        assert found is not None
        return found

    def end(self) -> None:
        """Backward is past the block."""
        self._tape.give(self._host)


class Recomputing:
    """Of all recomputed blocks. ``moved``: bytes to the host so far, as many as come back."""

    def __init__(self, tape: Tape, *, rests: bool, on_cuda: bool) -> None:
        self._tape, self._rests, self._on_cuda = tape, rests, on_cuda
        self._calls: list[Call] = []
        self.moved = 0

    def leave(self, unit: str, nbytes: int) -> Call | None:
        """A block's forward begins; None: its input stays where it is."""
        if not self._rests:
            return None
        call = Call(self._tape, unit, nbytes)
        self._calls.append(call)
        self.moved += nbytes
        return call

    def look_ahead(self, unit: str) -> None:
        """Backward has come to a unit: its input is fetched, and that of the block that backward comes to next."""
        numbers = [number for number, call in enumerate(self._calls) if call.unit == unit]
        if numbers:
            for call in reversed(self._calls[max(0, numbers[-1] - 1) : numbers[-1] + 1]):
                call.fetch()

    def end(self, call: Call) -> None:
        """Backward is past the call's block."""
        self._calls.remove(call)
        call.end()

    def hold_states(self, account: Account) -> Memory | None:
        """Random states, as a forward finds them; beside a GPU they are the host's, and small."""
        return None if self._on_cuda else Memory(self._tape, account, CPU_STATE_NBYTES, "random states")
