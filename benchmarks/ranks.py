"""Starts ranks on this machine, lets each call one function, and returns what they returned.

The caller holds the store, on a port that the system chose, so nothing can collide. A rank is a fresh process with one intra-op
thread. Any rank that fails ends all of them, and its traceback is what is raised.
"""

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = timedelta(minutes=5)
PORT_VARIABLE = "BENCHMARK_STORE_PORT"
"""In a rank's environment: where the store listens, so that its connections can be told from those between ranks."""


class RankFailedError(RuntimeError):
    """A rank raised; the message holds its traceback."""


def run(num_ranks: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo", seconds: float = 600.0) -> list[Any]:
    """``function(*arguments)`` on every rank of a process group, by rank; after ``seconds`` without all answers, all are ended."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    processes = [
        context.Process(target=_work, args=(rank, num_ranks, store.port, backend, send, function, arguments), daemon=True)
        for rank, (_, send) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for _, send in ends:
        send.close()
    try:
        return _collect([receive for receive, _ in ends], time.monotonic() + seconds)
    except RankFailedError:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(pipes: list[Connection], until: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        ready = wait([pipes[rank] for rank in missing], timeout=max(0.0, until - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {missing} did not answer in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                failed, value = pipe.recv()
            except EOFError:
                raise RankFailedError(f"rank {rank} died") from None
            if failed:
                raise RankFailedError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(
    rank: int, num_ranks: int, port: int, backend: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """A rank's life."""
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ[PORT_VARIABLE] = str(port)
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
        dist.init_process_group(backend, rank=rank, world_size=num_ranks, store=store, timeout=TIMEOUT)
        answer = (False, function(*arguments))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - whatever it is, the caller is told
        answer = (True, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(int(answer[0]))  # no engine's threads or groups are waited for: the answer is out


def _end_with_parent() -> None:
    """Whatever ends the caller (Ctrl-C, a signal) ends its ranks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
