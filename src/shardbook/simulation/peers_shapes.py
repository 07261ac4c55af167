"""DTensor's finding out of shapes: tensors that an operator on the whole would give, which nobody ever has.

Before an operator on distributed tensors runs for the first time, DTensor runs it on fake tensors of the full shapes to learn the
result's. In a real run they take nothing. In a simulated one they are of the same fake mode as the run's own tensors, and nothing about
them tells that they aren't memory: the first optimizer step would make the moments once more, whole, on each of any number of ranks. What
tells is when they are made. Torch holds a lock around it, there to be put in (``ShardingPropagator._fake_mode_lock``), and this is one
that knows whether it is held.
"""

from contextlib import AbstractContextManager
from typing import Any, Self


class ShapesOnly:
    """While it is open, ``is_on`` says whether the operator that runs is run for its result's shape alone."""

    def __init__(self) -> None:
        self._depth = 0
        self._others: AbstractContextManager[Any] | None = None

    @property
    def is_on(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> Self:
        owner = _owner()
        self._others = owner._fake_mode_lock
        owner._fake_mode_lock = _Lock(self, owner._fake_mode_lock)
        return self

    def __exit__(self, *raised: Any) -> None:
        _owner()._fake_mode_lock = self._others


class _Lock:
    """The lock that was there, and a count of how often it is held."""

    def __init__(self, counted: ShapesOnly, lock: AbstractContextManager[Any]) -> None:
        self._counted, self._lock = counted, lock

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._counted._depth += 1

    def __exit__(self, *raised: Any) -> None:
        self._counted._depth -= 1
        self._lock.__exit__(*raised)


def _owner() -> Any:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator
