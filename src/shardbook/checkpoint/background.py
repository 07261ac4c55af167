"""A save that goes on while the training does: a snapshot in host memory, and a thread that writes it.

Each rank's thread writes its own file and tells how that went. Rank 0's hears all, writes the manifest and gives the folder its name, or
gives the save up, and tells the others which: all ranks end with the same word. A thread allocates no tensor, books nothing and sends no
collective; the engine's own thread frees the snapshot, at the first step after the save has ended.
"""

import logging
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardbook.accounts import Account
from shardbook.checkpoint.agree import Ranks, words
from shardbook.checkpoint.board import Board, SilentError
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.save import Begun, Given, Own, begun, own_of, write_own
from shardbook.checkpoint.write import Item
from shardbook.engine.engine import Engine
from shardbook.engine.state import loaded
from shardbook.engine.storage import Buffer, Storage
from shardbook.errors import ShardbookError

UNIT = "checkpoint"
"""The name under which a snapshot is booked."""

_ALIGNED = 64
_log = logging.getLogger("shardbook")


def snapshot_of(storage: Storage, items: list[Item]) -> tuple[Buffer, list[Item]]:
    """The tensors as they are now, one after the other in one buffer of host memory, each from a multiple of 64 bytes on.

    Raises:
        CheckpointError: there is not as much memory.
    """
    lengths = [item.numel * item.tensor.dtype.itemsize for item in items]
    places = [-(-nbytes // _ALIGNED) * _ALIGNED for nbytes in lengths]
    try:
        buffer = storage.host_buffer(Account.WORKSPACE, UNIT, sum(places), torch.uint8, padding=sum(places) - sum(lengths))
    except ShardbookError:
        raise
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"wait=False: no {sum(places):,} bytes of host memory for the snapshot; save with wait=True, which needs none"
        ) from error
    begin, copies = 0, list[Item]()
    for item, nbytes, place in zip(items, lengths, places, strict=True):
        copy = buffer.tensor[begin : begin + nbytes].view(item.tensor.dtype)
        copy.copy_(loaded(item.tensor))
        copies.append(Item(item.what, item.name, item.start, copy))
        begin += place
    return buffer, copies


class Saving:
    """One save under way, on this rank. Built with everything that is to be written, it begins at once."""

    def __init__(self, under_way: Begun, own: Own, snapshot: Buffer, board: Board) -> None:
        self.path = under_way.path
        self.failure = ""
        """Why there is no checkpoint; empty: there is one, once the save is over."""
        self.cause: BaseException | None = None
        self._begun, self._own, self._snapshot, self._board = under_way, own, snapshot, board
        self._thread = threading.Thread(target=self._run, name="shardbook-save")  # no daemon: the interpreter waits for it
        board.open()
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end, and free the snapshot."""
        self._thread.join()
        self._snapshot.give_back()

    def _run(self) -> None:
        try:
            mine = self._write()
            self.failure = self._lead(mine) if self._begun.ranks.rank == 0 else self._follow(mine)
        except BaseException as error:  # noqa: BLE001 - kept for the engine's thread, which raises it
            self._fail(error)
            self._begun.give_up()
        finally:
            self._board.close()
        if self.failure and (self._begun.ranks.rank == 0 or self.cause is not None):
            _log.error("%s", self.failure)

    def _write(self) -> str:
        """This rank's file; why not, if it failed."""
        try:
            write_own(self._begun.folder, self._begun.ranks.rank, self._own)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            return self._fail(error)
        return ""

    def _lead(self, mine: str) -> str:
        others = range(1, self._begun.ranks.num_ranks)
        found = [text for text in (mine, *(self._heard("written", rank) for rank in others)) if text]
        failure = found[0] if found else self._publish()
        if failure:
            self._begun.give_up()
        self._board.say("ended", failure)
        for rank in others:  # the store may end with this process
            with suppress(SilentError):
                self._board.hear("known", rank)
        return failure

    def _follow(self, mine: str) -> str:
        self._board.say("written", mine)
        failure = self._board.hear("ended", 0)
        self._board.say("known")
        return failure

    def _heard(self, what: str, rank: int) -> str:
        try:
            return self._board.hear(what, rank)
        except SilentError as error:
            return self._fail(error)

    def _publish(self) -> str:
        try:
            self._begun.publish()
        except Exception as error:  # noqa: BLE001 - told to all ranks
            return self._fail(error)
        return ""

    def _fail(self, error: BaseException) -> str:
        """Words for all ranks."""
        ranks, self.cause = self._begun.ranks, error
        known = isinstance(error, (CheckpointError, OSError))
        text = words(error, f"writing {self.path}") if known else f"{str(error) or type(error).__name__}"
        who = f"rank {ranks.rank}: " if ranks.num_ranks > 1 else ""
        self.failure = f"{self.path}: the save in the background has failed, and nothing of it is kept: {who}{text}"
        return self.failure


class Background:
    """What an engine saves while it trains: at most one checkpoint at a time, on all ranks alike."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._store: Any = None

    def begin(self, engine: Engine, path: Path, given: Given) -> Path:
        """Take a snapshot and begin to write it; all ranks call it, between two steps, when no save is under way.

        Raises:
            CheckpointError: something given is no plain data, the folder can't be made, or the snapshot does not fit.
        """
        assert self._saving is None
        with begun(engine, path, given) as under_way:
            ranks, held = under_way.ranks, list[Buffer]()
            try:
                with ranks.together(f"taking a snapshot for {path}"), torch.no_grad():
                    own = own_of(engine, ranks)
                    buffer, copies = snapshot_of(engine._context.storage, own.items)
                    held.append(buffer)
                board = Board(self._connection(engine), under_way.token, ranks.rank, lambda watch=engine._watch: watch.is_well)
                self._saving = Saving(under_way, Own(copies, own.part), held[0], board)
            except BaseException:
                for buffer in held:
                    buffer.give_back()
                raise
        return path

    def tidy(self) -> None:
        """Free the snapshot of a save that is over; how it ended is told by :meth:`wait`."""
        if self._saving is not None and self._saving.is_over:
            self._saving.join()

    def wait(self, ranks: Ranks | None) -> Path | None:
        """Wait for the save under way; its path, None if there was none.

        Args:
            ranks: all of them, which call it together; None: this one alone.

        Raises:
            CheckpointError: it has failed, the same on all ranks. It is told once.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        saving.join()
        failures = [saving.failure] if ranks is None else ranks.told(saving.failure)
        for failure in filter(None, failures):
            raise CheckpointError(failure) from saving.cause
        return saving.path

    def _connection(self, engine: Engine) -> Any:
        if self._store is None:
            self._store = engine._context.announcer.connection()
        return self._store
