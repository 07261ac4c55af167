"""How a rank without data learns what the others do: they say it through the store.

A rank with data announces each gather and each reduction of a micro-batch as it comes to it, about 2 µs apiece. A rank that has
no data for that micro-batch follows one of them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardbook.engine.watch import Watch

Word = Literal["forward", "backward", "ahead", "reduce", "end", "empty"]


@dataclass(frozen=True, slots=True)
class Said:
    """One announcement: a pass enters the unit, or fetches it ahead (``gathers``: by a gather that starts now), or it is reduced."""

    word: Word
    unit: int
    gathers: bool

    @property
    def enters(self) -> bool:
        return self.word in ("forward", "backward")


_CHECK_SECONDS = 0.5


class Announcer:
    """One rank's announcements, a sequence for each micro-batch."""

    def __init__(self, store: Any, prefix: str, watch: Watch) -> None:
        self._store, self._prefix, self._watch = store, f"{prefix}/announce", watch
        self._micro_batch = 0
        self._count = 0
        self._old: list[str] = []
        self._older: list[str] = []

    def connection(self) -> Any:
        """A connection to the store for one more thread; None where there is nobody to tell."""
        return self._store.clone() if hasattr(self._store, "clone") else self._store

    def tell(self, word: Word, unit: int = 0, *, gathers: bool = False) -> None:
        """Say what this rank does next."""
        if self._store is not None:
            key = self._key(self._watch.rank, self._count)
            self._store.set(key, f"{word} {unit} {int(gathers)}")
            self._old.append(key)
            self._count += 1

    def next_micro_batch(self) -> None:
        """Count on; what was said two micro-batches ago has been heard by all."""
        for key in self._older:
            self._store.delete_key(key)
        self._older, self._old = self._old, []
        self._micro_batch += 1
        self._count = 0

    def follow(self) -> Iterator[Said]:
        """What the first rank that has data says, up to the end of the micro-batch; nothing where no rank has data."""
        leader: int | None = None
        others = [rank for rank in range(self._watch.num_ranks) if rank != self._watch.rank]
        while leader is None and others:
            rank = others[0]
            if self._hear(rank, 0).word == "empty":
                others.remove(rank)
            else:
                leader = rank
        position = 0
        while leader is not None:
            said = self._hear(leader, position)
            if said.word == "end":
                return
            yield said
            position += 1

    def _hear(self, rank: int, position: int) -> Said:
        key = self._key(rank, position)
        checked = time.monotonic()
        while not self._store.check([key]):
            time.sleep(0.0005)
            if time.monotonic() - checked > _CHECK_SECONDS:
                checked = time.monotonic()
                self._watch.raise_if_lost()
        word, unit, gathers = self._store.get(key).decode().split()
        return Said(word, int(unit), gathers == "1")

    def _key(self, rank: int, position: int) -> str:
        return f"{self._prefix}/{rank}/{self._micro_batch}/{position}"
