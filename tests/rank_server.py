"""The process that real ranks are forked from: it imports torch once, so that a rank costs milliseconds. Started by ``tests.ranks``.

It reads lines of JSON from standard input, each the description of one worker to fork. A worker connects back, joins
its process group and runs jobs: it receives (module, function, arguments) and answers with the value or the traceback. It
treats warnings as errors, and dies with the process that started all this, whatever happens.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

JOIN_SECONDS = 60


def die_with_parent() -> None:
    """Linux: SIGKILL when the process above goes away. Elsewhere a lost connection does, between two jobs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def serve(address: str, key: str) -> None:
    """Forks a worker for each line until standard input closes."""
    import torch._dynamo  # the first optimizer of a process imports it
    import torch.distributed.device_mesh
    import torch.utils.checkpoint  # noqa: F401

    for name in ("shardbook.engine.engine", "tests.equality", "pytest"):
        importlib.import_module(name)

    die_with_parent()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            work(json.loads(line), address, bytes.fromhex(key))


def work(spec: dict[str, Any], address: str, key: bytes) -> None:
    """A worker's life. Never returns into the server."""
    code = 1
    try:
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        warnings.simplefilter("error")
        connection = Client(address, authkey=key)
        connection.send_bytes(pickle.dumps((spec["pool"], spec["rank"], os.getpid())))
        try:
            join(spec)
            answer(connection, ("ready", None))
        except BaseException as error:
            answer(connection, failure(error))
            raise
        jobs(connection)
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join(spec: dict[str, Any]) -> None:
    """Joins the process group that the description asks for: ``gloo``, ``fake`` or ``none``."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, num_ranks = spec["rank"], spec["num_ranks"]
    if spec["group"] == "none":
        return
    if spec["group"] == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        return
    store = dist.TCPStore("127.0.0.1", 0 if rank == 0 else read_port(Path(spec["port_file"])), num_ranks, rank == 0, wait_for_workers=False)
    if rank == 0:
        partial = Path(spec["port_file"] + ".partial")
        partial.write_text(str(store.port))
        partial.rename(spec["port_file"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, store=store, timeout=datetime.timedelta(minutes=5))


def read_port(path: Path) -> int:
    until = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < until:
        if path.exists():
            return int(path.read_text())
        time.sleep(0.002)
    raise TimeoutError(f"rank 0 named no port in {JOIN_SECONDS} s")


def jobs(connection: Connection) -> None:
    """One job after the other until the connection closes, or until one after which the process is to end as any program does."""
    while True:
        module, function, args, kwargs, leave = pickle.loads(connection.recv_bytes())
        try:
            job: Any = importlib.import_module(module)
            for part in function.split("."):
                job = getattr(job, part)
            reply = ("value", job(*args, **kwargs))
        except BaseException as error:
            reply = failure(error)
        answer(connection, reply)
        if leave:
            atexit._run_exitfuncs()
            return
        del reply
        close_engines()
        gc.collect()


def close_engines() -> None:
    """An engine holds a process group and a thread until it is closed: a rank that lasts must not gather them."""
    from shardbook.engine.engine import Engine

    for engine in [found for found in gc.get_objects() if type(found) is Engine]:  # isinstance would ask weak proxies
        with contextlib.suppress(Exception):
            engine.close()


def failure(error: BaseException) -> tuple[str, tuple[str, str, str]]:
    return "error", (type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def answer(connection: Connection, reply: tuple[str, Any]) -> None:
    connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    serve(*sys.argv[1:])
