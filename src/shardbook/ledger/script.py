"""Runs a script as Python would run it, with measurement around it, and sees to it that what was seen is told however it ends."""

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

import torch

from shardbook.document import RunDocument
from shardbook.ledger.measurement import Measurement, Mode, measure
from shardbook.ledger.parts import Meeting
from shardbook.ledger.signals import ignore_signals, signals_raise

_HERE = str(Path(__file__).parent) + os.sep
_STUCK = "ended by SIGTERM inside a call that did not return: the step that was under way is not in here"
_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


@dataclass(frozen=True, kw_only=True)
class Script:
    """What to run.

    Args:
        path: of the script, as it was given.
        arguments: its own, ``sys.argv[1:]``.
        mode: of measurement.
        budget: bytes; ``None``: none.
    """

    path: Path
    arguments: Sequence[str] = ()
    mode: Mode = "full"
    budget: int | None = None


@dataclass(frozen=True)
class Ending:
    """How a script ended. ``error`` is what Python would show a traceback of; ``well``: by itself or by ``sys.exit(0)``."""

    code: int
    error: BaseException | None = None

    @property
    def well(self) -> bool:
        return self.code == 0 and self.error is None


def run_script(script: Script, meeting: Meeting, tell: Callable[[RunDocument], None]) -> int:
    """The script's exit code. ``tell`` gets the document of all ranks, unless another rank has it; the script's traceback is shown before.

    A child that the script forked and that runs out of it leaves as without us.
    """
    process = os.getpid()
    _wake_gpu()
    run = measure(mode=script.mode, budget=script.budget)

    def end(ending: Ending, *notes: str) -> None:
        part = run.part()
        document = meeting.end(replace(part, notes=(*part.notes, *notes)), well=ending.well)
        if document is not None:
            tell(document)
            meeting.close()

    with _as_main(script) as module, signals_raise(lambda code: end(Ending(code), _STUCK)):
        ending = _run(script, module, run, process)
        show(ending.error)
        end(ending)
    return ending.code


def ending_of(error: BaseException) -> Ending:
    """What Python would do about an exception that leaves a script.

    >>> ending_of(SystemExit(3)).code, ending_of(SystemExit()).code, ending_of(ValueError()).code, ending_of(KeyboardInterrupt()).code
    (3, 0, 1, 130)
    """
    if not isinstance(error, SystemExit):
        return Ending(130 if isinstance(error, KeyboardInterrupt) else 1, error)
    if error.code is None or isinstance(error.code, int):
        return Ending((error.code or 0) & 0xFF)
    print(error.code, file=sys.stderr, flush=True)  # noqa: T201
    return Ending(1)


def show(error: BaseException | None) -> None:
    """The traceback as Python, or the script's own ``sys.excepthook``, shows it: without the frames of this package's ledger."""
    with suppress(Exception):
        sys.stdout.flush()
    if error is not None:
        _trim(error, set())
        sys.excepthook(type(error), error, error.__traceback__)
        with suppress(Exception):
            sys.stderr.flush()


def _wake_gpu() -> None:
    """Where torch sees GPUs, theirs is the memory that is measured, from the first byte on; this rank's is the one that launchers mean."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.init()


def _run(script: Script, module: ModuleType, run: Measurement, process: int) -> Ending:
    try:
        with run:
            _execute(script, module, process)
    except BaseException as error:
        if os.getpid() != process:
            raise
        return ending_of(error)
    return Ending(0)


def _execute(script: Script, module: ModuleType, process: int) -> None:
    try:
        exec(compile(script.path.read_bytes(), str(script.path), "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        if os.getpid() != process or error.code:
            raise
    finally:
        ignore_signals()  # what was seen is being written: nothing is gained by ending half-way
    if os.getpid() != process:
        raise SystemExit(0)


@contextmanager
def _as_main(script: Script) -> Generator[ModuleType]:
    """``__main__``, ``sys.argv`` and ``sys.path[0]`` are the script's; then as before."""
    name = str(script.path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=name, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", name))
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"], sys.argv = module, [name, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.path.resolve().parent)
    warnings.filterwarnings("ignore", message=_GLOBAL_HOOKS)  # there are: they find the model
    try:
        yield module
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def _trim(error: BaseException, seen: set[int]) -> None:
    """Take the frames of measurement out of a traceback, and out of those of the exceptions it came from."""
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without_ours(error.__traceback__)
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _trim(other, seen)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(trace)
        trace = trace.tb_next
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
