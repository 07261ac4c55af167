"""What the ranks tell each other while a save goes on in the background.

Collectives are the training's, which goes on: a thread must send none. So each rank writes short texts into the store of the process
group, over a connection of its own, and beats there as long as it is at work. Whoever waits for a rank that has stopped beating gives up.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 1.0

PATIENCE_SECONDS = 60.0
"""Without a beat for so long a rank has gone. One that writes slowly beats."""

PATIENCE_AFTER_FAILURE_SECONDS = 5.0
"""The same where the training has failed: most likely a rank is gone."""

_LONGEST_PAUSE_SECONDS = 0.25


class SilentError(Exception):
    """A rank is not heard of any more."""


class Board:
    """One rank's side of one save.

    Args:
        store: of the process group; None: nobody else is there.
        save: a name of 16 characters for this save, the same on all ranks.
        rank: this one.
        is_well: whether the training goes on, as far as this rank knows.
    """

    def __init__(self, store: Any, save: str, rank: int, is_well: Callable[[], bool]) -> None:
        self._store, self._save, self._rank, self._is_well = store, save, rank, is_well
        self._is_over = threading.Event()
        self._beating: threading.Thread | None = None

    def open(self) -> None:
        """Begin to beat."""
        if self._store is not None:
            self._beating = threading.Thread(target=self._beat, name="shardbook-save-beat")
            self._beating.start()

    def close(self) -> None:
        """Stop beating: this rank waits for nobody and nobody for it."""
        self._is_over.set()
        if self._beating is not None:
            self._beating.join()

    def say(self, what: str, text: str = "") -> None:
        """Tell the others, until the next save that says ``what``."""
        if self._store is not None:
            self._store.set(self._key(what, self._rank), f"{self._save}{text}")

    def hear(self, what: str, rank: int) -> str:
        """What a rank says of it, as soon as it does.

        Raises:
            SilentError: it has stopped beating, or the store has gone.
        """
        beat, since, pause = "", time.monotonic(), 0.01
        while True:
            try:
                text, now = self._read(what, rank), self._read("beat", rank)
            except Exception as error:
                raise SilentError(f"the store of the process group has gone ({str(error).splitlines()[0]})") from error
            if text is not None:
                return text
            if now is not None and now != beat:
                beat, since = now, time.monotonic()
            patience = PATIENCE_SECONDS if self._is_well() else PATIENCE_AFTER_FAILURE_SECONDS
            if time.monotonic() - since > patience:
                raise SilentError(f"rank {rank} has not been heard of for {patience:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _read(self, what: str, rank: int) -> str | None:
        key = self._key(what, rank)
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        return text.removeprefix(self._save) if text.startswith(self._save) else None  # else an earlier save's

    def _beat(self) -> None:
        count = 0
        try:
            while not self._is_over.is_set():
                self.say("beat", str(count))
                count += 1
                self._is_over.wait(BEAT_SECONDS)
        except RuntimeError:
            pass  # the store has gone, as whoever waits will find

    @staticmethod
    def _key(what: str, rank: int) -> str:
        return f"{what}/{rank}"
