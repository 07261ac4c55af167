"""``shardbook``: picks the command, and turns what it raises into one line and an exit code.

0: it fits, it agrees, it is done. 1: it doesn't, or it failed. 2: wrong usage.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import tyro

from shardbook.cli.checkpoint import checkpoint
from shardbook.cli.doctor import doctor
from shardbook.cli.explore import explore
from shardbook.cli.forecast import forecast
from shardbook.cli.measure import measure, with_own_boundary
from shardbook.cli.report import report
from shardbook.cli.train import train
from shardbook.cli.verify import verify
from shardbook.errors import ConfigError

COMMANDS: dict[str, Callable[..., Any]] = {
    "forecast": forecast,
    "train": train,
    "verify": verify,
    "measure": measure,
    "report": report,
    "checkpoint": checkpoint,
    "explore": explore,
    "doctor": doctor,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: ends the process with the command's exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one command line, ``sys.argv`` by default; argument errors and help end the process as argparse does."""
    # Until a command has something to unwind: an exception inside torch's import would abort the process.
    before = signal.signal(signal.SIGINT, _end_at_once)
    try:
        code = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="shardbook",
            description="Trains PyTorch models under ZeRO and keeps the books.",
            args=with_own_boundary(sys.argv[1:] if arguments is None else arguments),
        )
    except ConfigError as error:
        return fail(str(error), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    return int(code)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"shardbook: interrupted\n")
    os._exit(128 + number)


def fail(message: str, code: int) -> int:
    """Says on stderr what is wrong, and gives the code back."""
    print(f"shardbook: {message}", file=sys.stderr, flush=True)
    return code
