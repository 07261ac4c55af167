"""Ctrl-C and SIGTERM end a script as exceptions, so that there is a time after it; and where it can't be reached, from outside.

Python runs a signal's handler between two of its own instructions: never, while the main thread waits inside a collective for a
rank that is gone. The number of the signal also goes down a pipe, at once, to a thread that waits for nothing else.
"""

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_SECONDS = 5.0
"""So long may the main thread take to hear of SIGTERM; launchers kill after 30."""


@contextmanager
def signals_raise(end_from_outside: Callable[[int], None]) -> Generator[None]:
    """SIGINT raises KeyboardInterrupt and SIGTERM SystemExit; nothing of it in other threads than the main one.

    Args:
        end_from_outside: what to do, in another thread, if the main thread does not hear of a SIGTERM in time; it gets the exit code
            that the process ends with after it. A script that handles SIGTERM by itself is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = threading.Event()

    def terminate(number: int, _frame: FrameType | None) -> None:
        heard.set()
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    process, (reading, writing) = os.getpid(), os.pipe()
    os.set_blocking(writing, False)
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while (found := os.read(reading, 1)) and found[0]:
            if found[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is terminate and not heard.wait(GRACE_SECONDS):
                with suppress(Exception):
                    end_from_outside(128 + signal.SIGTERM)
                os._exit(128 + signal.SIGTERM)

    watcher = threading.Thread(target=watch, name="shardbook signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        if os.getpid() == process:
            signal.set_wakeup_fd(former)
            os.write(writing, b"\0")
            watcher.join()
            for number, handler in before.items():
                signal.signal(number, handler)


def ignore_signals() -> None:
    """From now on, until they are put back."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
