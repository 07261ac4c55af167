"""How the ranks of one measured script meet after it has ended: through files beside the document that one of them writes.

No process group is asked, as the script may have closed its own, and a rank that died would be waited for. Every rank says in
a file when it begins, and leaves its part in another when it ends. Rank 0 waits for the others and writes. Where it ended badly
or is gone, whoever ends last writes, and says which rank told nothing.
"""

import json
import os
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardbook.document import RunDocument, write_atomically
from shardbook.ledger.assemble import Part, document_of

PATIENCE_SECONDS = 60.0
"""So long does rank 0, having ended well, wait for ranks that still run."""

DYING_SECONDS = 1.0
"""So long does a rank that ended badly look whether it is the last one."""

_POLL_SECONDS = 0.05
_CLOCK_SLACK_SECONDS = 60.0  # a rank may end before another one has begun, but not by more


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of one run leave their parts.

    Args:
        out: the document's file; the parts lie in a hidden folder beside it until it is written.
        rank: of this process.
        num_ranks: of the run.
        key: the same on all ranks, and another one in another run that may write to the same file.
    """

    out: Path
    rank: int
    num_ranks: int
    key: str

    def begin(self) -> None:
        """Say that this rank is here, before its script runs.

        Raises:
            OSError: the folder can't be written.
        """
        self._part(self.rank).unlink(missing_ok=True)  # of an earlier run with the same key
        with suppress(FileNotFoundError):
            self._mark("left").unlink()
        with suppress(OSError):
            (self._folder / "writer").rmdir()
        me = {"host": socket.gethostname(), "pid": os.getpid(), "born": psutil.Process().create_time()}
        write_atomically(self._begun(self.rank), json.dumps(me))

    def end(self, part: Part, *, well: bool) -> RunDocument | None:
        """Leave this rank's part. The document of all ranks, if it is for this one to write; then :meth:`close`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.num_ranks == 1:
            return document_of([part], [])
        temporary = self._folder / f"{self.rank}.pickle.new"
        temporary.write_bytes(pickle.dumps(part))
        temporary.replace(self._part(self.rank))
        if self.rank == 0 and not well:
            self._mark("left").touch()
        return self._gather() if self._writes(well=well) and self._first() else None

    def close(self) -> None:
        """The document is written: the parts are not needed any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.out.parent / f".{self.out.name}.{self.key}"

    def _part(self, rank: int) -> Path:
        return self._folder / f"{rank}.pickle"

    def _begun(self, rank: int) -> Path:
        return self._folder / f"{rank}.begun"

    def _mark(self, name: str) -> Path:
        return self._folder / name

    def _writes(self, *, well: bool) -> bool:
        """Whether this rank is the one to write."""
        if self.rank == 0 and well:
            self._wait(PATIENCE_SECONDS, lambda: not self._running())
            return True
        # A process that is being killed closes its sockets, which ends the others, before it counts as gone.
        return self._wait(0 if well else DYING_SECONDS, lambda: self._rank_0_left() and not self._running())

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> bool:
        until = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return found

    def _running(self) -> list[int]:
        """Ranks that have left no part yet and may still do so."""
        return [rank for rank in range(self.num_ranks) if not self._has_left_part(rank) and not self._is_gone(rank)]

    def _rank_0_left(self) -> bool:
        return self._mark("left").exists() or (self._is_gone(0) and not self._has_left_part(0))

    def _has_left_part(self, rank: int) -> bool:
        """In this run: the folder may have been left behind by an earlier one that was killed as a whole."""
        try:
            return self._part(rank).stat().st_mtime > self._begun(self.rank).stat().st_mtime - _CLOCK_SLACK_SECONDS
        except FileNotFoundError:
            return False

    def _is_gone(self, rank: int) -> bool:
        """Whether its process has ended. Of one on another host nobody knows, nor of one that has not begun."""
        try:
            found = json.loads(self._begun(rank).read_text(encoding="utf-8"))
            if found["host"] != socket.gethostname():
                return False
            process = psutil.Process(found["pid"])
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() != found["born"]
        except psutil.NoSuchProcess:
            return True
        except FileNotFoundError:
            return False

    def _first(self) -> bool:
        """Two that end at once may both find nobody left; one of them writes."""
        try:
            self._mark("writer").mkdir()
        except FileExistsError:
            return False
        return True

    def _gather(self) -> RunDocument:
        left = [rank for rank in range(self.num_ranks) if self._has_left_part(rank)]
        parts: list[Part] = [pickle.loads(self._part(rank).read_bytes()) for rank in left]
        return document_of(parts, list(self._missing(left)))

    def _missing(self, left: list[int]) -> Iterator[str]:
        for rank in range(self.num_ranks):
            if rank not in left and self._is_gone(rank):
                yield f"rank {rank} told nothing of what it saw: its process ended without a word (killed, or os._exit)"
            elif rank not in left:
                yield f"rank {rank} told nothing of what it saw: it had not come to its end when rank {self.rank} wrote this"
