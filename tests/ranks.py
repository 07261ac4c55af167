"""Real ranks for tests: processes on gloo that live as long as the test session, and fresh ones for tests that break them.

    values = ranks.call(3, job, *args)          every rank of three runs job(*args); its values, by rank
    endings = ranks.fresh_ranks(3, job, *args)  the same on ranks of their own; how each one ended, nothing raised
    values = ranks.fake_rank(1024, job, *args)  one process in a fake group of 1024

A job is a function at the top level of a module below ``tests``. With one rank there is no process group at all. An
exception on any rank is raised again here with that rank's traceback; a job that does not end in time fails the test with
the stacks of all ranks, which are then killed. After either, the next call gets new ranks.
"""

import atexit
import contextlib
import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
SECONDS = 60.0
GRACE_SECONDS = 15.0  # for the other ranks to end by themselves once one has raised

Group = Literal["gloo", "fake", "none"]


class RankFailure(AssertionError):
    """A job raised on a rank. ``kind`` and ``message`` are those of its exception."""

    def __init__(self, rank: int, kind: str, message: str, text: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{text}")
        self.rank, self.kind, self.message = rank, kind, message


class RanksTimedOut(AssertionError):
    """A job did not end in time on some ranks."""


@dataclass(frozen=True)
class Ending:
    """How a job ended on one rank: with a value, an error (its class and message), lost (killed, ended), or hung."""

    rank: int
    how: Literal["value", "error", "lost", "hung"]
    seconds: float
    value: Any = None
    kind: str = ""
    message: str = ""
    text: str = ""


class Server:
    """The process that ranks are forked from, and where they call back."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        key = secrets.token_bytes(16)
        self._listener = Listener(str(self.folder / "socket"), authkey=key, backlog=64)
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_server.py")), str(self._listener.address), key.hex()],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        atexit.register(self.close)

    def fork(self, num_ranks: int, group: Group, only: int | None = None) -> "list[Worker]":
        """New workers: all ranks of a group, or ``only`` one."""
        assert self._process.stdin is not None
        pool = secrets.token_hex(4)
        chosen = range(num_ranks) if only is None else [only]
        for rank in chosen:
            spec = {"pool": pool, "rank": rank, "num_ranks": num_ranks, "group": group}
            spec |= {"log": str(self.folder / f"{pool}-{rank}.log"), "port_file": str(self.folder / f"{pool}.port")}
            self._process.stdin.write(json.dumps(spec) + "\n")
        self._process.stdin.flush()
        workers: list[Worker] = []
        for _ in chosen:
            connection = self._listener.accept()
            of_pool, rank, pid = pickle.loads(connection.recv_bytes())
            assert of_pool == pool
            workers.append(Worker(rank, pid, connection, self.folder / f"{pool}-{rank}.log"))
        workers.sort(key=lambda worker: worker.rank)
        raise_first(collect(workers, SECONDS))
        return workers

    def close(self) -> None:
        self._listener.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Worker:
    """One rank, seen from the test."""

    rank: int
    pid: int
    connection: Connection
    log: Path

    def send(self, job: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, leave: bool = False) -> None:
        """``leave``: after the job the process ends as any program does, its exit functions included."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps((job.__module__, job.__qualname__, args, kwargs, leave)))

    def stacks(self) -> str:
        """Where all its threads stand."""
        before = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.log.read_text(errors="replace")[before:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


@cache
def server() -> Server:
    return Server()


POOLS: dict[int, list[Worker]] = {}


def collect(workers: list[Worker], seconds: float, grace: float = GRACE_SECONDS, after_error: bool = True) -> list[Ending]:
    """Waits for one reply of each. Once a rank has failed, the others get ``grace`` seconds where ``after_error`` asks for it."""
    began = time.monotonic()
    until = began + seconds
    waiting = {worker.connection: worker for worker in workers}
    endings: dict[int, Ending] = {}
    while waiting and (left := until - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            worker = waiting.pop(ready)  # type: ignore[index]
            spent = time.monotonic() - began
            try:
                how, value = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, ConnectionError):
                endings[worker.rank] = Ending(worker.rank, "lost", spent, text=worker.log.read_text(errors="replace")[-4000:])
            else:
                if how == "error":
                    endings[worker.rank] = Ending(worker.rank, "error", spent, None, *value)
                else:
                    endings[worker.rank] = Ending(worker.rank, "value", spent, value)
            if endings[worker.rank].how != "value" and after_error:
                until = min(until, time.monotonic() + grace)
    for worker in waiting.values():
        endings[worker.rank] = Ending(worker.rank, "hung", time.monotonic() - began, text=worker.stacks())
    return [endings[worker.rank] for worker in workers]


def raise_first(endings: list[Ending]) -> None:
    """The first failure that is not merely the echo of another rank's, as an exception; the others as notes."""
    failed = [ending for ending in endings if ending.how != "value"]
    if not failed:
        return
    failed.sort(key=lambda ending: (ending.how == "hung", ending.kind in ("RankLostError", "DivergenceError"), ending.seconds))
    first, *others = failed
    if first.how == "hung":
        error: AssertionError = RanksTimedOut(f"rank {first.rank} did not end in {first.seconds:.0f} s; its threads:\n{first.text}")
    elif first.how == "lost":
        error = RankFailure(first.rank, "lost", "the process ended", first.text)
    else:
        error = RankFailure(first.rank, first.kind, first.message, first.text)
    for ending in others:
        error.add_note(
            f"rank {ending.rank} {ending.how} after {ending.seconds:.1f} s: {ending.kind}: {ending.message}\n{ending.text[-3000:]}"
        )
    raise error


def call(num_ranks: int, job: Callable[..., Any], *args: Any, seconds: float = SECONDS, **kwargs: Any) -> list[Any]:
    """Runs a job on all of ``num_ranks`` lasting ranks; the values, by rank."""
    if num_ranks not in POOLS:
        POOLS[num_ranks] = server().fork(num_ranks, "gloo" if num_ranks > 1 else "none")
    workers = POOLS[num_ranks]
    for worker in workers:
        worker.send(job, args, kwargs)
    endings = collect(workers, seconds)
    if any(ending.how != "value" for ending in endings):
        stop(POOLS.pop(num_ranks))
    raise_first(endings)
    return [ending.value for ending in endings]


def fresh_ranks(
    num_ranks: int, job: Callable[..., Any], *args: Any, seconds: float = SECONDS, leave: bool = False, **kwargs: Any
) -> list[Ending]:
    """Runs a job on ranks made for it and stopped afterwards. Raises nothing: says how it ended on each rank, and after how long.

    ``leave``: each process ends by itself as soon as its job is done, while others may still be at work.
    """
    workers = server().fork(num_ranks, "gloo" if num_ranks > 1 else "none")
    try:
        for worker in workers:
            worker.send(job, args, kwargs, leave=leave)
        return collect(workers, seconds, after_error=False)
    finally:
        stop(workers)


def fake_rank(num_ranks: int, job: Callable[..., Any], *args: Any, rank: int = 0, seconds: float = SECONDS, **kwargs: Any) -> Any:
    """Runs a job in a process of its own, as one rank of a fake group of any size; its value."""
    workers = server().fork(num_ranks, "fake", only=rank)
    try:
        workers[0].send(job, args, kwargs)
        endings = collect(workers, seconds)
        raise_first(endings)
        return endings[0].value
    finally:
        stop(workers)


def alone(job: Callable[..., Any], *args: Any, seconds: float = SECONDS, **kwargs: Any) -> Ending:
    """Runs a job in a process of its own without any group; how it ended, a crash of the interpreter included."""
    return fresh_ranks(1, job, *args, seconds=seconds, **kwargs)[0]


def stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.kill()


def stop_all() -> None:
    """All lasting ranks, and the process they come from."""
    for workers in POOLS.values():
        stop(workers)
    POOLS.clear()
    if server.cache_info().currsize:
        server().close()
        server.cache_clear()
