"""An observer that adds up bookings: balances now, and at the instant of the highest total."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from shardbook.events import Booking, Event, Observer


class Observable(Protocol):
    """Whatever sends events to an observer, from the ``with`` on."""

    def observe(self, observer: Observer) -> Any: ...


class Ledger:
    """Balances by (account, tier), and by unit below that.

    Opened on an engine it follows it until :meth:`close`; without one, it is an observer to be registered: ``engine.observe(ledger)``.
    """

    def __init__(self, engine: Observable | None = None) -> None:
        self._entries: Counter[tuple[str, str, str]] = Counter()
        self._total = 0
        self._peak_total = 0
        self._peak: dict[tuple[str, str], int] = {}
        self._peak_phase = "idle"
        self._context = engine.observe(self) if engine is not None else None
        if self._context is not None:
            self._context.__enter__()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if not isinstance(event, Booking):
            return
        self._entries[str(event.account), str(event.tier), event.unit] += event.nbytes
        self._total += event.nbytes
        if self._total > self._peak_total:
            self._peak_total, self._peak_phase, self._peak = self._total, event.phase, dict(self.balances())

    def balances(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes now; accounts that hold nothing are left out."""
        return _added(self._entries)

    def balances_by_unit(self) -> Mapping[tuple[str, str, str], int]:
        """(account, tier, unit) to bytes now."""
        return {key: nbytes for key, nbytes in self._entries.items() if nbytes}

    @property
    def peak(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes at the instant when all accounts together held most."""
        return dict(self._peak)

    @property
    def peak_phase(self) -> str:
        """The phase in which that was."""
        return self._peak_phase

    def close(self) -> None:
        """Stop following the engine."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def _added(entries: Mapping[tuple[str, str, str], int]) -> dict[tuple[str, str], int]:
    sums: dict[tuple[str, str], int] = {}
    for (account, tier, _), nbytes in entries.items():
        if nbytes:
            sums[account, tier] = sums.get((account, tier), 0) + nbytes
    return {key: nbytes for key, nbytes in sums.items() if nbytes}
