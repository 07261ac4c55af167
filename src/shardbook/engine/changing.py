"""Buffers that a block's forward changes (running statistics, counters), for a forward that runs twice.

The second run must find them as the first one did, and leave them as they are: it gets copies of what was held. Which buffers change is
found out: the first forward holds a copy of all until it is over, later ones of those that have ever changed.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardbook.accounts import Account
from shardbook.engine.storage import Storage


@dataclass(slots=True)
class Held:
    """A buffer before a forward: the object, how often it had been written to, and a copy of its values."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor | None

    @property
    def has_changed(self) -> bool:
        """Written to, or replaced. Norms count no writes to their statistics."""
        counts = self.owner._buffers.get(self.name) is not self.buffer or self.buffer._version != self.version
        return counts or (isinstance(self.owner, _NormBase) and self.owner.training)


class Changing:
    """The buffers below one module."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._known: set[int] | None = None  # numbers of those that change; None: no forward has been seen

    def hold(self, storage: Storage, unit: str) -> list[Held]:
        """A forward begins."""
        held: list[Held] = []
        for number, (owner, name) in enumerate(self._places):
            buffer = owner._buffers.get(name)
            if buffer is not None:
                copied = self._known is None or number in self._known
                values = storage.copy_of(buffer, Account.ACTIVATION, unit) if copied else None
                held.append(Held(owner, name, buffer, buffer._version, values))
        return held

    def changed(self, held: Sequence[Held]) -> list[Held]:
        """It is over: what a second run needs of what was held."""
        found = [each for each in held if each.has_changed]
        names = {(id(each.owner), each.name) for each in found}
        if names or self._known is None:
            self._known = (self._known or set()) | {
                number for number, (owner, name) in enumerate(self._places) if (id(owner), name) in names
            }
        return found

    @contextmanager
    def as_held(self, held: Sequence[Held], storage: Storage, unit: str) -> Generator[None]:
        """The second run: buffers are what they were before the first."""
        now = [each.owner._buffers.get(each.name) for each in held]
        for each in held:
            source = each.buffer if each.values is None else each.values
            each.owner._buffers[each.name] = storage.copy_of(source, Account.WORKSPACE, unit)
        try:
            yield
        finally:
            for each, buffer in zip(held, now, strict=True):
                each.owner._buffers[each.name] = buffer
