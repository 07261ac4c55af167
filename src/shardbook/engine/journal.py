"""What the engine says about itself: phase, live bytes per account, and events to whoever observes.

With no observer an event costs one test of an empty list. The table of live bytes is always kept (one dictionary entry per
buffer), so that an observer that comes late starts from the truth.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, cast

from shardbook.accounts import Account, Tier
from shardbook.events import Booking, Event, LinkName, Mark, Observer, Traffic, Transfer

Kind = Literal["gather", "reduce", "refresh", "return", "step", "init"]


class Journal:
    """One per engine. ``phase`` is written by the engine and stands in every event."""

    def __init__(self) -> None:
        self.phase = "build"
        self._observers: list[Observer] = []
        self._live: dict[tuple[Account, Tier, str, int], list[int]] = {}
        self._totals: Counter[Account] = Counter()

    def book(self, account: Account, tier: Tier, unit: str, nbytes: int, padding: int = 0, address: int = 0) -> None:
        """Move ``nbytes`` (of them ``padding``) into an account, or out of it when negative; ``address`` is where they lie."""
        if not nbytes:
            return
        key = (account, tier, unit, address)
        entry = self._live.setdefault(key, [0, 0])
        entry[0] += nbytes
        entry[1] += padding
        if not entry[0]:
            del self._live[key]
        self._totals[account] += nbytes
        if self._observers:
            self._emit(Booking(account=account, tier=tier, unit=unit, nbytes=nbytes, phase=self.phase, padding=padding, address=address))

    def traffic(self, kind: Kind, unit: str, sequence: int, sent_nbytes: int) -> None:
        """Tell of one collective's bytes sent by this rank."""
        if self._observers:
            self._emit(Traffic(kind=kind, unit=unit, sequence=sequence, sent_nbytes=sent_nbytes, phase=self.phase))

    def transfer(self, link: LinkName, unit: str, nbytes: int) -> None:
        """Tell of bytes that move between tiers."""
        if self._observers and nbytes:
            self._emit(Transfer(link=link, unit=unit, nbytes=nbytes, phase=self.phase))

    def mark(self, name: str, unit: str, edge: Literal["begin", "end"]) -> None:
        """Open or close a phase of one unit."""
        if self._observers:
            self._emit(Mark(name=cast(Literal["forward"], name), unit=unit, edge=edge, seconds=perf_counter()))

    @contextmanager
    def observed(self, observer: Observer) -> Generator[None]:
        """Send every event to ``observer``, first a booking for everything that is held already."""
        for (account, tier, unit, address), (nbytes, padding) in list(self._live.items()):
            observer(Booking(account=account, tier=tier, unit=unit, nbytes=nbytes, phase=self.phase, padding=padding, address=address))
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    @property
    def is_observed(self) -> bool:
        """Whether anybody listens: what is only told, never needed, is worth its trouble."""
        return bool(self._observers)

    def live(self, account: Account) -> int:
        """Bytes that the account holds now, over all tiers and units."""
        return self._totals[account]

    def _emit(self, event: Event) -> None:
        for observer in tuple(self._observers):
            observer(event)
