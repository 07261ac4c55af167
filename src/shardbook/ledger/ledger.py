"""An observer that adds up bookings: balances now, and at the instant of the highest total."""

from collections.abc import Mapping
from typing import Any, Protocol

from shardbook.document import RunDocument
from shardbook.events import Booking, Event, Observer, Traffic


class Observable(Protocol):
    """Whatever sends events to an observer, from the ``with`` on."""

    def observe(self, observer: Observer) -> Any: ...


class Ledger:
    """Balances by (account, tier), and by unit below that.

    Opened on an engine it follows it until :meth:`close`; without one, it is an observer to be registered: ``engine.observe(ledger)``.
    An engine tells of its own memory alone; :func:`shardbook.measure` books activations, inputs and temporaries as well.
    """

    def __init__(self, engine: Observable | None = None) -> None:
        self._units: dict[tuple[str, str, str], int] = {}
        self._balances: dict[tuple[str, str], int] = {}
        self._total = 0
        self._sent = 0
        self._peak_total = 0
        self._peak: dict[tuple[str, str], int] = {}
        self._peak_phase = "idle"
        self._context = engine.observe(self) if engine is not None else None
        if self._context is not None:
            self._context.__enter__()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Traffic):
            self._sent += event.sent_nbytes
        if isinstance(event, Booking):
            self.move(event.account, event.tier, event.unit, event.nbytes, event.phase)

    def move(self, account: str, tier: str, unit: str, nbytes: int, phase: str) -> None:
        """``nbytes`` go into an account, or out of it when negative."""
        key, place = (account, tier), (account, tier, unit)
        self._balances[key] = self._balances.get(key, 0) + nbytes
        self._units[place] = self._units.get(place, 0) + nbytes
        self._total += nbytes
        if self._total > self._peak_total:
            self._peak_total, self._peak_phase = self._total, phase
            self._peak = self._balances.copy()

    def balances(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes now; accounts that hold nothing are left out."""
        return {(str(account), str(tier)): nbytes for (account, tier), nbytes in self._balances.items() if nbytes}

    def balances_by_unit(self) -> Mapping[tuple[str, str, str], int]:
        """(account, tier, unit) to bytes now."""
        return {(str(account), str(tier), unit): nbytes for (account, tier, unit), nbytes in self._units.items() if nbytes}

    @property
    def total(self) -> int:
        """Bytes in all accounts now."""
        return self._total

    @property
    def peak(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes at the instant when all accounts together held most."""
        return {(str(account), str(tier)): nbytes for (account, tier), nbytes in self._peak.items() if nbytes}

    @property
    def peak_phase(self) -> str:
        """The phase in which that was."""
        return self._peak_phase

    def document(self) -> RunDocument:
        """The books alone, of this rank: nothing was measured, so nothing is held against them."""
        books: dict[str, int] = {}
        for (account, _), nbytes in self.peak.items():
            books[account] = books.get(account, 0) + nbytes
        return RunDocument(
            peak=books, peak_phase=self._peak_phase, peak_allocated=None, peak_reserved=None, allocator="not measured: books alone",
            convention="", num_parameters=0, settings={}, versions={}, data="", losses=(), validation_loss=None, num_tokens=0, seconds=0.0,
            sent_nbytes=(self._sent,), sent_nbytes_per_step=0, memory=(), mode="books",
            notes=("the books of one rank's engine, without a measurement: accounts that an engine does not book are missing",),
        )  # fmt: skip

    def close(self) -> None:
        """Stop following the engine."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
