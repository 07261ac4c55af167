"""Keeps torch's native code from remarking, on the user's stderr, on each start and stop of its profiler.

What is said there (``USDT: ... profiler_start``, and once that the freeing of older blocks is not recorded, which `allocator` knows and
provides for) can't be switched off by a public call; the environment variables that can are read when torch is loaded, and where the
user has set one of them it is left alone.
"""

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

_NOTHING_BUT_ERRORS = {
    ("KINETO_LOG_LEVEL", "torch_cpu", "_ZN9libkineto6Logger14severityLevel_E"): 99,
    ("TORCH_CPP_LOG_LEVEL", "c10", "FLAGS_caffe2_log_level"): 2,
}
"""Environment variable, library and symbol of each log level; an int, found by name as long as torch exports it."""


def quieten() -> None:
    """From now on native code tells of errors only. Needed again after the profiler's first start, which sets its level anew."""
    for (variable, library, symbol), level in _NOTHING_BUT_ERRORS.items():
        if variable in os.environ:
            continue
        path = Path(torch.__file__).parent / "lib" / f"lib{library}.{'dylib' if sys.platform == 'darwin' else 'so'}"
        try:
            ctypes.c_int.in_dll(ctypes.CDLL(str(path)), symbol).value = level
        except (OSError, ValueError):
            continue  # another build of torch: it goes on remarking


@contextmanager
def without_remarks() -> Generator[None]:
    """Native code writes nothing to stderr inside: for the profiler's first start in a process, a moment without anybody else's work."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    sys.stderr.flush()
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:
        yield
        return
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
