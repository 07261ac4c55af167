"""An observer that adds up bookings: balances now, and at the instant of the highest total.

Tiers are kept apart: what is called the peak is the device's, and the host's memory and the disk have highest instants of their own.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from shardbook.accounts import Tier
from shardbook.document import Moved, RunDocument, TierMemory
from shardbook.events import Booking, Event, Observer, Traffic, Transfer

_MEMORIES = {"device": (Tier.DEVICE,), "host": (Tier.HOST, Tier.PINNED), "disk": (Tier.DISK,)}
_MEMORY_OF = {str(tier): name for name, tiers in _MEMORIES.items() for tier in tiers}
"""Pinned memory is the host's as well."""


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
        self._totals = dict.fromkeys(_MEMORIES, 0)
        self._highest: dict[str, _Highest] = {}
        self._sent = 0
        self._moved: Counter[str] = Counter()
        self._context = engine.observe(self) if engine is not None else None
        if self._context is not None:
            self._context.__enter__()

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Traffic):
            self._sent += event.sent_nbytes
        elif isinstance(event, Transfer):
            self._moved[event.link] += event.nbytes
        elif isinstance(event, Booking):
            self.move(event.account, event.tier, event.unit, event.nbytes, event.phase)

    def move(self, account: str, tier: str, unit: str, nbytes: int, phase: str) -> None:
        """``nbytes`` go into an account, or out of it when negative."""
        key, place = (account, tier), (account, tier, unit)
        self._balances[key] = self._balances.get(key, 0) + nbytes
        self._units[place] = self._units.get(place, 0) + nbytes
        memory = _MEMORY_OF[tier]
        total = self._totals[memory] = self._totals[memory] + nbytes
        highest = self._highest.get(memory)
        if highest is None or total > highest.nbytes:
            self._highest[memory] = _Highest(total, phase, self._balances.copy())

    def balances(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes now; accounts that hold nothing are left out."""
        return {(str(account), str(tier)): nbytes for (account, tier), nbytes in self._balances.items() if nbytes}

    def balances_by_unit(self) -> Mapping[tuple[str, str, str], int]:
        """(account, tier, unit) to bytes now."""
        return {(str(account), str(tier), unit): nbytes for (account, tier, unit), nbytes in self._units.items() if nbytes}

    def held(self, memory: str = "device") -> Mapping[str, int]:
        """Account to bytes now, in one memory: ``"device"``, ``"host"`` (pinned or not) or ``"disk"``."""
        return _of_memory(self._balances, memory)

    def highest(self, memory: str = "device") -> Mapping[str, int]:
        """Account to bytes in one memory at the instant when that one held most."""
        return _of_memory(self._highest[memory].balances, memory) if memory in self._highest else {}

    @property
    def total(self) -> int:
        """Bytes in all accounts of the device now."""
        return self._totals["device"]

    def total_of(self, memory: str) -> int:
        """Bytes in all accounts of one memory now."""
        return self._totals[memory]

    @property
    def peak(self) -> Mapping[tuple[str, str], int]:
        """(account, tier) to bytes at the instant when all accounts of the device together held most."""
        found = self._highest.get("device")
        return {} if found is None else {(str(account), str(tier)): held for (account, tier), held in found.balances.items() if held}

    @property
    def peak_phase(self) -> str:
        """The phase in which that was."""
        return self._highest["device"].phase if "device" in self._highest else "idle"

    @property
    def moved(self) -> Mapping[str, int]:
        """Link to bytes that have crossed it, as the engine told: ``"host to device"`` and the others."""
        return dict(self._moved)

    def tiers(self, rank: int) -> tuple[TierMemory, ...]:
        """What was held outside of the device, each memory at its own highest instant; those that were used."""
        found = ((memory, self.highest(memory)) for memory in ("host", "disk"))
        return tuple(TierMemory(rank=rank, tier=memory, nbytes=sum(held.values()), accounts=held) for memory, held in found if held)

    def document(self) -> RunDocument:
        """The books alone, of this rank: nothing was measured, so nothing is held against them."""
        return RunDocument(
            peak=self.highest(), peak_phase=self.peak_phase, tiers=self.tiers(0),
            moved=tuple(Moved(rank=0, link=link, nbytes=nbytes, nbytes_per_step=0) for link, nbytes in self._moved.items()),
            peak_allocated=None, peak_reserved=None, allocator="not measured: books alone",
            convention="", num_parameters=0, settings={}, versions={}, data="", losses=(), validation_loss=None, num_tokens=0, seconds=0.0,
            sent_nbytes=(self._sent,), sent_nbytes_per_step=0, memory=(), mode="books",
            notes=("the books of one rank's engine, without a measurement: accounts that an engine does not book are missing",),
        )  # fmt: skip

    def close(self) -> None:
        """Stop following the engine."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


class _Highest:
    """When one memory held most: how much, in which phase, and what all accounts held then."""

    __slots__ = ("balances", "nbytes", "phase")

    def __init__(self, nbytes: int, phase: str, balances: dict[tuple[str, str], int]) -> None:
        self.nbytes, self.phase, self.balances = nbytes, phase, balances


def _of_memory(balances: Mapping[tuple[str, str], int], memory: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for (account, tier), nbytes in balances.items():
        if nbytes and _MEMORY_OF[tier] == memory:
            found[str(account)] = found.get(str(account), 0) + nbytes
    return found
