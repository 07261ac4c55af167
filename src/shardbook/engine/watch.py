"""Who waits for whom: turns a hang into a named error, and never ends a rank that is merely slow.

Each rank keeps in memory how often it has posted each operation and which one it waits for. Only when a wait lasts does its
watchdog thread publish that through the store. From everyone's records follows a graph: rank a points at rank b while a waits
for an operation that b has not posted. A cycle can never resolve: ranks have committed to operations that cannot meet. A rank
that has raised or gone answers nobody. Everything else is a slow rank, reported after a minute and left in peace.
"""

import atexit
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardbook.engine.journal import Kind
from shardbook.errors import DivergenceError, RankError, RankLostError

BEAT_SECONDS = 0.5
"""How often a watchdog looks."""

PUBLISH_AFTER_SECONDS = 1.0
"""A wait is published when it has lasted this long."""

WITHOUT_STORE_SECONDS = 5.0
"""A wait that has lasted this long is given up where the store has gone, and with it all knowledge of the others."""

REPORT_AFTER_SECONDS = 60.0
"""A wait that is nobody's fault is reported when it has lasted this long."""

_log = logging.getLogger("shardbook")


@dataclass(frozen=True, slots=True)
class Label:
    """One operation: its kind, the channel (flat buffer) it is for, and how many of the kind went before on that channel."""

    kind: Kind
    channel: int
    sequence: int
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r} (number {self.sequence})"


class Watch:
    """One per engine and rank. The main thread writes plain attributes; the watchdog thread reads them."""

    def __init__(self, rank: int, num_ranks: int, store: Any, prefix: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store, self._prefix = store, prefix  # no store: nobody to tell (one rank, or a fake group)
        self._counts: dict[tuple[Kind, int], int] = {}
        self._last: Label | None = None
        self._waiting: tuple[Label, int | None, float] | None = None
        self._progress = 0
        self._verdict: RankError | None = None
        self._stopped = threading.Event()
        self._free: Callable[[], None] = _nothing
        self._store_lost = False
        self._thread: threading.Thread | None = None
        self._published = False
        self._has_raised = False
        self._suspicion: _Cycle | None = None
        self._reported: Label | None = None
        self.activity = "build"

    def start(self, free: Callable[[], None]) -> None:
        """Begin to watch; ``free`` makes waits that are blocked fail, from another thread."""
        if self._store is None:
            return
        self._free = free
        thread = threading.Thread(target=_beat, args=(weakref.ref(self), self._stopped), name="shardbook-watch", daemon=True)
        thread.start()
        self._thread = thread
        # a daemon thread inside the store's client when the interpreter ends would crash it
        atexit.register(_join, self._stopped, thread)

    @property
    def is_well(self) -> bool:
        """Whether neither this rank nor, as far as it knows, another one has failed."""
        return self._verdict is None and not self._has_raised

    def stop(self) -> None:
        """The engine is closed: whoever still waits for this rank learns it."""
        if not self._stopped.is_set():
            self._stopped.set()
            if not self._has_raised:  # what it raised says more
                self._publish(self._record(ended="closed its engine"))
            self._store, self._free = None, _nothing  # the last hold on the store and the group: their threads end with them
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout=1.0)

    def post(self, kind: Kind, channel: int, name: str) -> Label:
        """Number the operation that this rank commits to now."""
        key = (kind, channel)
        sequence = self._counts.get(key, 0)
        self._counts[key] = sequence + 1
        self._last = Label(kind, channel, sequence, name)
        if self._has_raised:  # the error was caught, and this rank goes on
            self._has_raised = False
            self._publish(self._record())
        return self._last

    def wait(self, label: Label, peer: int | None, work: Any) -> None:
        """Wait for one work of the operation; raises RankError with both ranks' operations when it can never complete."""
        self._waiting = (label, peer, time.monotonic())
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failure(label, peer, error) from error
        finally:
            self._waiting = None
            self._progress += 1

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank leaves its step because of ``error``."""
        if self.num_ranks > 1 and not isinstance(error, RankError):
            self._has_raised = True
            self._publish(self._record(ended=f"raised {type(error).__name__}: {_first_line(error)}"))

    def failure(self, label: Label, peer: int | None, error: Exception) -> RankError:
        """Why the operation failed, as far as the ranks have told: the verdict, else the peer's end."""
        deadline = time.monotonic() + 2.0
        while self._verdict is None and time.monotonic() < deadline and not self._store_lost:
            self._verdict = self._known_failure() or self._ended(label, posted_too=True)
            if self._verdict is None:
                time.sleep(0.1)
        if self._verdict is None:
            record = self._read(peer) if peer is not None else None
            seen = f"; last heard of it: {record['last']} during {record['during']}" if record else ""
            who = f"rank {peer}" if peer is not None else "another rank"
            self._verdict = RankLostError(
                f"rank {self.rank}: {who} has gone (its connection closed) while this rank was in {label} during {self.activity}{seen}. "
                f"A process that was killed leaves no traceback: look for its signal (-9 is often the out-of-memory killer). "
                f"({_first_line(error)})"
            )
        self._announce(self._verdict)
        return self._verdict

    def raise_if_lost(self) -> None:
        """For a rank that waits without an operation: raise what the others have found out, if they have ended."""
        ended = [
            record["ended"] for rank in range(self.num_ranks) if rank != self.rank and (record := self._read(rank)) and record["ended"]
        ]
        verdict = self._known_failure() or (
            RankLostError(f"another rank {ended[0]}; rank {self.rank} has no data and waited for it") if ended else None
        )
        if verdict is not None:
            raise verdict

    # ---- the watchdog's side ------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """One look, from the watchdog thread."""
        waiting = self._waiting
        if self._verdict is not None:
            return
        lasted = 0.0 if waiting is None else time.monotonic() - waiting[2]
        if waiting is None or lasted < PUBLISH_AFTER_SECONDS:
            if self._published:
                self._published = False
                self._publish(self._record())
            return
        label, peer, _ = waiting
        self._published = True
        self._publish({**self._record(), "waits": str(label), "key": [label.kind, label.channel, label.sequence], "peer": peer})
        verdict = self._known_failure() or self._ended(label, posted_too=False) or self._deadlock() or self._without_store(label, lasted)
        if verdict is not None and self._waiting is waiting:
            self._verdict = verdict
            self._announce(verdict)
            self._free()  # the main thread's wait returns with an error
        elif lasted > REPORT_AFTER_SECONDS:
            self._report(label, lasted)

    def _record(self, ended: str | None = None) -> dict[str, Any]:
        counts = [[*key, count] for key, count in self._counts.items()]
        return {"ended": ended, "during": self.activity, "last": str(self._last), "progress": self._progress, "counts": counts}

    def _deadlock(self) -> RankError | None:
        """A cycle through this rank, each waiting for an operation the next has not posted; seen unchanged twice.

        No record in such a cycle can be out of date: this rank's is fresh, so whoever waits for it still does, and so on round.
        """
        cycle = _cycle(self._waits_for(), self.rank)
        before, self._suspicion = self._suspicion, cycle
        if cycle is None or cycle != before:
            return None
        lines = [f"rank {rank} waits in {waits} for rank {other}, which has not posted it" for rank, waits, other, _ in cycle]
        return DivergenceError(
            f"ranks have committed to operations that can never meet: {'; '.join(lines)}. "
            f"All ranks must enter the same units, with as many "
            f"micro-batches (engine.backward(None) for an empty one), in each step"
        )

    def _waits_for(self) -> dict[int, tuple[str, int, int]]:
        """rank -> (what it waits for, a rank that has not posted it, its progress), for those whose wait has lasted."""
        records = {rank: record for rank in range(self.num_ranks) if (record := self._read(rank)) and record.get("key")}
        edges: dict[int, tuple[str, int, int]] = {}
        for rank, record in records.items():
            others = [record["peer"]] if record["peer"] is not None else [other for other in range(self.num_ranks) if other != rank]
            absent = [other for other in others if other in records and not _has_posted(records[other], record["key"])]
            if absent:
                edges[rank] = (record["waits"], absent[0], record["progress"])
        return edges

    def _ended(self, label: Label, *, posted_too: bool) -> RankError | None:
        """A rank that has left; unless ``posted_too``, only one that left without posting ``label``, whose message cannot come."""
        for rank in range(self.num_ranks):
            record = self._read(rank) if rank != self.rank else None
            if record and record["ended"] and (posted_too or not _has_posted(record, (label.kind, label.channel, label.sequence))):
                return RankLostError(
                    f"rank {rank} {record['ended']} (during {record['during']}, its last operation was {record['last']}); "
                    f"rank {self.rank} was in {label} during {self.activity} and cannot go on"
                )
        return None

    def _known_failure(self) -> RankError | None:
        """What another rank has found out first."""
        key = f"{self._prefix}/failure"
        found = self._ask(lambda store: json.loads(store.get(key)) if store.check([key]) else None)
        if found is None:
            return None
        kind, text = found
        return DivergenceError(text) if kind == "DivergenceError" else RankLostError(text)

    def _announce(self, verdict: RankError) -> None:
        text = json.dumps([type(verdict).__name__, str(verdict)])
        self._ask(lambda store: store.compare_set(f"{self._prefix}/failure", "", text))

    def _report(self, label: Label, lasted: float) -> None:
        if self._reported == label:
            return
        self._reported = label
        running = [rank for rank in range(self.num_ranks) if rank != self.rank and not (self._read(rank) or {}).get("key")]
        _log.warning("rank %d has waited %.0f s in %s; not in any collective: rank %s (slow is not wrong: nothing is ended)",
                     self.rank, lasted, label, ", ".join(map(str, running)) or "none")  # fmt: skip

    def _publish(self, record: Mapping[str, Any]) -> None:
        self._ask(lambda store: store.set(f"{self._prefix}/{self.rank}", json.dumps(record)))

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/{rank}"
        return self._ask(lambda store: json.loads(store.get(key)) if store.check([key]) else None)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Ask the store; None where there is none, or none any more: it goes with the process that hosts it."""
        store = self._store
        if store is None or self._store_lost:
            return None
        try:
            return question(store)
        except RuntimeError:
            self._store_lost = True
            return None

    def _without_store(self, label: Label, lasted: float) -> RankError | None:
        if not self._store_lost or lasted < WITHOUT_STORE_SECONDS:
            return None
        return RankLostError(
            f"the process that hosts the store (rank 0, or its launcher) has gone; rank {self.rank} has waited {lasted:.0f} s in {label} "
            f"during {self.activity}, and nobody can tell it whether what it waits for will come"
        )


_Cycle = tuple[tuple[int, str, int, int], ...]


def _cycle(edges: Mapping[int, tuple[str, int, int]], start: int) -> _Cycle | None:
    """The cycle through ``start``, as (rank, waits, other, progress) beginning with its lowest rank."""
    path: list[int] = []
    rank = start
    while rank in edges and rank not in path:
        path.append(rank)
        rank = edges[rank][1]
    if rank != start or not path:
        return None
    first = path.index(min(path))
    return tuple((member, *edges[member]) for member in path[first:] + path[:first])


def _has_posted(record: Mapping[str, Any], key: Sequence[Any]) -> bool:
    kind, channel, sequence = key
    return any(k == kind and c == channel and count > sequence for k, c, count in record["counts"])


def _nothing() -> None:
    pass


def _beat(reference: "weakref.ref[Watch]", stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_SECONDS):
        watch = reference()
        if watch is None:
            return
        watch.beat()
        del watch


def _join(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    thread.join(timeout=5)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
