"""Starts local ranks through torch's elastic launcher, and turns whatever ends them into one line and an exit code.

The ranks are processes of their own sessions, so that Ctrl-C reaches only the launcher, which passes it on. Whichever way it
ends, no rank is left running: the launcher ends them, and each watches for the launcher's own end.
"""

import json
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shardbook.errors import ConfigError, ShardbookError
from shardbook.train.rank import FAILED, Failure, quiet_environment

LOOPBACK = "127.0.0.1"


class LaunchError(ShardbookError, RuntimeError):
    """A rank raised, was killed, or ended by itself. ``trace`` is its traceback, empty where it left none."""

    def __init__(self, message: str, *, exit_code: int = FAILED, trace: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.trace = trace


def launch(job: Mapping[str, Any], *, ranks: int, port: int | None = None) -> Any:
    """Runs ``job`` on ``ranks`` processes of this machine and waits for them: rank 0's :func:`shardbook.train.rank.run_job`.

    Raises:
        ConfigError: the port is in use.
        LaunchError: a rank failed, or a signal ended the launcher; the message is one line.
    """
    if port is not None:
        check_port(port)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_elastic()
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder, _environment(ranks), _handlers_kept():
        job_file = Path(folder, "job.json")
        result = Path(folder, "result.json")
        job_file.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:{port or 0}",
            rdzv_configs={"timeout": 60, "is_host": True},
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=LOOPBACK,  # the machine's own name needn't resolve
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        interrupted = _interrupt_by(SignalException)
        try:
            # -P: the folder a user happens to stand in must not shadow modules, as it doesn't for the command itself.
            elastic_launch(config, sys.executable)("-P", "-m", "shardbook.train.rank", str(job_file))
        except ChildFailedError as error:
            raise _cause(error.failures) from None
        except SignalException as error:
            number = signal.SIGINT if interrupted else error.sigval
            raise LaunchError(f"{number.name}: all ranks ended", exit_code=128 + number) from None
        return json.loads(result.read_text(encoding="utf-8"))


def _interrupt_by(exception: type[Exception]) -> list[int]:
    """From now on Ctrl-C raises, once, what makes elastic end the ranks by SIGTERM; the list then holds the signal.

    By SIGTERM, as a Python that is just starting would answer SIGINT with a traceback.
    """
    seen: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        seen.append(number)
        raise exception(f"signal {number}", signal.SIGTERM)

    signal.signal(signal.SIGINT, interrupt)
    return seen


def check_port(port: int) -> None:
    """Raises ConfigError if something listens on ``port`` of this machine, or it may not be used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"run.port = {port}: can't be used ({error.strerror}); leave it out for a free port, or give another"
            ) from error


def _cause(failures: Mapping[int, Any]) -> LaunchError:
    """What started it. Once one rank is gone the others lose their connections, or are ended: that is not told."""
    told = {rank: Failure(**found) for rank, failure in failures.items() if (found := _told(failure))}
    killed = [rank for rank, failure in failures.items() if failure.exitcode < 0]
    causes = sorted((failure.seconds, rank) for rank, failure in told.items() if failure.cause)
    others = sorted((failure.seconds, rank) for rank, failure in told.items())
    if killed:
        return LaunchError(_killed(killed[0], -failures[killed[0]].exitcode))
    if causes or others:
        rank = (causes or others)[0][1]
        if told[rank].exit_code > 128:
            return LaunchError(_killed(rank, told[rank].exit_code - 128))
        return LaunchError(told[rank].describe(rank), exit_code=told[rank].exit_code, trace=told[rank].trace)
    rank, failure = min(failures.items(), key=lambda item: item[1].exitcode > 128)
    return LaunchError(f"rank {rank} ended with exit code {failure.exitcode} and without a word", exit_code=failure.exitcode)


def _told(failure: Any) -> dict[str, Any] | None:
    """What a rank wrote down before it ended."""
    data = failure.error_file_data
    return data.get("shardbook") if isinstance(data, dict) else None


def _killed(rank: int, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    why: dict[int, str] = {
        signal.SIGKILL: "; the kernel's out-of-memory killer does that (see dmesg): try a higher stage, more ranks or a smaller batch",
        signal.SIGSEGV: "; native code touched memory that isn't its own",
        signal.SIGBUS: "; often a full shared-memory file system",
    }
    return f"rank {rank} was killed by signal {number} ({name}){why.get(number, '')}; the other ranks were ended"


def _silence_elastic() -> None:
    """The launcher's own log repeats, in many lines, what :func:`_cause` says in one."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") or name == "torch.distributed.launcher.api":
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _handlers_kept() -> Generator[None]:
    """Elastic leaves its own handlers behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _environment(ranks: int) -> Generator[None]:
    """The ranks' environment is this process's while they start; nothing of it stays."""
    added = quiet_environment(os.environ)
    if ranks > 1 and "GLOO_SOCKET_IFNAME" not in os.environ and platform.system() in ("Linux", "Darwin"):
        # All ranks are on this machine: its name needn't resolve, and no firewall has a say.
        added["GLOO_SOCKET_IFNAME"] = "lo" if platform.system() == "Linux" else "lo0"
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
