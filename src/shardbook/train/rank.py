"""What one rank runs: ``python -m shardbook.train.rank job.json``, started by :mod:`shardbook.train.launch`.

Whatever happens, the process ends: an exception is written down for the launcher, a signal unwinds the stack and, should
something keep it from unwinding, ends the process a second later. The launcher's own death ends it too.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from shardbook.errors import ConfigError, RankError
from shardbook.train.recipe import Recipe
from shardbook.train.world import World

WRONG_USAGE = 2
FAILED = 1
_GRACE_SECONDS = 1.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(BaseException):
    """A signal asked this process to end. Not an Exception, so that nothing on the way takes it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as the launcher reads it. ``cause`` is false for one that only says that another rank is gone."""

    kind: str
    message: str
    place: str
    seconds: float
    cause: bool
    exit_code: int
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Of an exception that is being handled."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return cls(
            kind=type(error).__name__,
            message=str(error).strip() or "(no message)",
            place=place,
            seconds=time.time(),
            cause=not isinstance(error, RankError),
            exit_code=error.exit_code if isinstance(error, Ended) else WRONG_USAGE if isinstance(error, ConfigError) else FAILED,
            trace="".join(traceback.format_exception(error)),
        )

    def describe(self, rank: int) -> str:
        """One line: whose, what, and where. A wrong setting is nobody's in particular, nor are replicas that differ."""
        if self.exit_code == WRONG_USAGE or self.kind == "ReplicaError":
            return self.message
        return f"rank {rank} raised {self.kind}: {self.message} ({self.place})"


def quiet_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank's environment gets where the user left it open: one thread a rank, and only our own words on the terminal."""
    usual = {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the other ranks' sockets complain when one of them ends
        "KINETO_LOG_LEVEL": "99",  # the profiler announces its start and stop on stderr
    }
    return {name: value for name, value in usual.items() if name not in environment}


def watch_signals() -> None:
    """From now on SIGINT and SIGTERM raise :class:`Ended`, and end the process for good a second later.

    A handler in Python waits for the main thread, which may wait inside a collective for a rank that is gone. The number of
    the signal also goes down a pipe, at once, to a thread that can wait for nothing else.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _ENDING_SIGNALS:
        signal.signal(number, _raise_ended)

    def end_for_good() -> None:
        while (number := os.read(reading, 1)[0]) not in _ENDING_SIGNALS:
            pass
        time.sleep(_GRACE_SECONDS)
        os._exit(128 + number)

    threading.Thread(target=end_for_good, name="shardbook-signals", daemon=True).start()


def watch_parent() -> None:
    """From now on this process ends within a second of the one that started it."""
    parent = os.getppid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(FAILED)

    threading.Thread(target=end_with_parent, name="shardbook-parent", daemon=True).start()


def run_job(job: Mapping[str, Any]) -> Any:
    """One rank's part in a job: ``{"task": "train", "recipe": ..., "json": ...}``, ``{"task": "probe"}``,
    ``{"task": "calibrate", "device": ..., "path": ...}``, or ``{"task": "record", ...}``.

    Plain data comes back.
    """
    if job["task"] == "probe":
        from shardbook.train.probe import probe

        return probe()
    if job["task"] == "calibrate":
        from shardbook.train.calibration.run import calibrate

        return calibrate(job)
    if job["task"] == "record":
        from shardbook.train.recorded import record_request

        return record_request(job)
    from shardbook.train.run import run_request

    return run_request(job["recipe"], as_json=job["json"])


def run_here(recipe: Recipe, world: World, *, as_json: bool) -> int:
    """Trains in this process, which is the only rank, or one of those that somebody else started. The exit code.

    With other ranks about, the process ends here: a rank that waits for one that is gone can't be left in any other way.
    """
    os.environ.update(quiet_environment(os.environ))
    watch_signals()
    try:
        from shardbook.train.run import run

        code = run(recipe, world, as_json=as_json)
    except Ended as ended:
        code = ended.exit_code
        print(f"shardbook: {signal.Signals(code - 128).name}: rank {world.rank} ended", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - told in one line, with the traceback for whoever started the ranks
        _ignore_signals()
        failure = Failure.of(error)
        write_failure(failure)
        print(f"shardbook: {failure.describe(world.rank)}", file=sys.stderr)
        code = failure.exit_code
    if world.num_ranks > 1:
        finish(code)
    return code


def finish(exit_code: int) -> NoReturn:
    """Ends the process now. A normal exit would wait for threads, and for a process group whose other ranks may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _raise_ended(number: int, _frame: FrameType | None) -> NoReturn:
    _ignore_signals()  # one is enough: a second must not cut short what the first one set off
    raise Ended(number)


def _ignore_signals() -> None:
    """From now on a signal only starts the second after which the process ends for good."""
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)  # not SIG_IGN, which wakes nobody


def write_failure(failure: Failure) -> None:
    """For the launcher, in the form torch's elastic agent reads (``message`` and its ``timestamp``), with our fields beside it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"timestamp": str(int(failure.seconds)), "py_callstack": failure.trace}
        content = {"message": {"message": f"{failure.kind}: {failure.message}", "extraInfo": details}, "shardbook": vars(failure)}
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def main() -> NoReturn:
    """Entry point of a rank that the launcher started. Its result is rank 0's."""
    watch_signals()
    watch_parent()
    try:
        code = _run_and_tell(Path(sys.argv[1]))
    except Ended as ended:  # just when a failure was about to be told
        code = ended.exit_code
    finish(code)


def _run_and_tell(job_file: Path) -> int:
    try:
        job = json.loads(job_file.read_text(encoding="utf-8"))
        result = run_job(job)
        if os.environ["RANK"] == "0":
            Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
    except BaseException as error:  # noqa: BLE001 - a rank has no caller: whatever it was, the launcher tells it
        _ignore_signals()  # the launcher ends the others once one rank is gone: this one's own words come first
        failure = Failure.of(error)
        write_failure(failure)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    main()
