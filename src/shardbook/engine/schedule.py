"""Orders that all ranks agree on: in which order units are gathered, and in which they are reduced. No tensors here.

An order is what this rank saw in a step. At the step boundary the ranks compare a digest of it; only if all saw the same is it
used, so that looking ahead never depends on one rank's branch. What does not follow the order is still right, only not ahead.
"""

import zlib
from collections.abc import Iterable, Sequence


class GatherOrder:
    """The sequence in which one pass (forward or backward) enters units, followed while it repeats."""

    def __init__(self) -> None:
        self.agreed: tuple[int, ...] = ()
        self._seen: list[int] = []
        self._recorded = False
        self._active = False
        self._position: int | None = None
        self.is_announced = True

    def begin(self, *, announced: bool = True) -> None:
        """A pass starts; ``announced``: ranks without data take part in it (they take part in training, not in evaluation)."""
        self._active, self.is_announced = True, announced
        self._position = -1 if self.agreed else None

    def end(self) -> None:
        """The pass is over; the first of a step is the one that is remembered."""
        self._active = False
        self._recorded = bool(self._seen)
        self._position = None

    def enter(self, unit: int) -> None:
        """The pass enters ``unit``: the next of the order, or else the order is not followed to the end of the pass."""
        if self._active and not self._recorded:
            self._seen.append(unit)
        if self._position is not None:
            self._position += 1
            if self._position >= len(self.agreed) or self.agreed[self._position] != unit:
                self._position = None

    @property
    def is_followed(self) -> bool:
        return self._position is not None

    def ahead(self, num_units: int) -> Sequence[int]:
        """The next units of the order, at most ``num_units`` different ones."""
        if self._position is None:
            return ()
        found: list[int] = []
        current = self.agreed[self._position] if self._position >= 0 else None
        for unit in self.agreed[self._position + 1 :]:
            if len(found) == num_units:
                break
            if unit != current and unit not in found:
                found.append(unit)
        return found

    def digest(self) -> int:
        return digest(self._seen)

    def settle(self, *, agreed: bool) -> None:
        """At the step boundary: adopt what was seen if all ranks saw it."""
        self.agreed = tuple(self._seen) if agreed else ()
        self._recorded = False
        self._seen = []


class ReduceOrder:
    """The order in which units are reduced. A unit that waits for a gradient holds back those behind it until backward ends.

    ``last`` are units around others: only the end of backward tells that no gradient of theirs is to come, and a rank must not hold
    back, for one, reductions that another rank waits for inside backward. They stay behind all ``units``.
    """

    def __init__(self, units: Iterable[int], last: Iterable[int] = ()) -> None:
        self._last = tuple(last)
        self.agreed: tuple[int, ...] = (*units, *self._last)
        self._completed: list[int] = []
        self._seen: tuple[int, ...] = ()
        self._ready: set[int] = set()
        self._next = 0

    def complete(self, unit: int) -> list[int]:
        """``unit`` has all its gradients: the units that may be reduced now, in order."""
        self._completed.append(unit)
        self._ready.add(unit)
        due: list[int] = []
        while self._next < len(self.agreed) and self.agreed[self._next] in self._ready:
            due.append(self.agreed[self._next])
            self._next += 1
        return due

    def take(self) -> list[int]:
        """The next unit, whether complete here or not: another rank reduces it now."""
        due = list(self.agreed[self._next : self._next + 1])
        self._next += len(due)
        return due

    def rest(self) -> list[int]:
        """Backward is over: everything not yet reduced, in order."""
        due = list(self.agreed[self._next :])
        self._next = len(self.agreed)
        return due

    def restart(self) -> None:
        """The next micro-batch."""
        self._next = 0
        self._ready = set()
        self._seen = tuple(self._completed)
        self._completed = []

    def digest(self) -> int:
        return digest(self._candidate())

    def settle(self, *, agreed: bool) -> None:
        """At the step boundary: reduce in the order of completion from now on, if it was the same on all ranks."""
        if agreed:
            self.agreed = self._candidate()

    def _candidate(self) -> tuple[int, ...]:
        """Units as they were completed in the last micro-batch, then those that never were, as before."""
        seen = tuple(dict.fromkeys(unit for unit in self._seen if unit in self.agreed and unit not in self._last))
        return seen + tuple(unit for unit in self.agreed if unit not in seen)


def digest(units: Iterable[int]) -> int:
    """A number that differs, in all likelihood, where the sequence does; small enough to be exact in float64."""
    return zlib.crc32(",".join(map(str, units)).encode())
