"""``shardbook explore``: the notebook, served on this machine."""

import importlib.resources
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from shardbook.cli.report import read_document
from shardbook.errors import ConfigError

NOT_HERE = "explore needs {missing}, which is not here: pip install 'shardbook[explore]'"
_HOST = "127.0.0.1"

_Headless = Annotated[bool, tyro.conf.arg(help="open no browser, say the address only"), tyro.conf.FlagCreatePairsOff]
_Port = Annotated[int | None, tyro.conf.arg(metavar="PORT", help="on this machine (default: a free one)", help_behavior_hint="")]
_Run = Annotated[Path | None, tyro.conf.arg(metavar="RUN.JSON", help="a measured run to lay over the forecast", help_behavior_hint="")]


def explore(*, headless: _Headless = False, port: _Port = None, run: _Run = None) -> int:
    """Open the notebook: turn a knob and see where the bytes go; needs no network. Ends with Ctrl-C."""
    command = command_line(headless=headless, port=port, run=run)
    if missing := [name for name in ("marimo", "altair", "vl_convert") if find_spec(name) is None]:
        print(f"shardbook: {NOT_HERE.format(missing=' and '.join(missing))}", file=sys.stderr, flush=True)
        return 1
    return _become(command)


def _become(command: list[str]) -> NoReturn:
    """The server takes this process's place, so that whoever ends the one ends the other."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def command_line(*, headless: bool, port: int | None, run: Path | None) -> list[str]:
    """What starts the server: without a token, as only this machine reaches it.

    Raises:
        ConfigError: no such port; a run's document that can't be read.
    """
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"--port {port}: allowed is 1 to 65535; leave it out for a free one")
    if run is not None:
        read_document(run)
    app = str(importlib.resources.files("shardbook.explore") / "app.py")
    command = [sys.executable, "-m", "marimo", "run", app, "--host", _HOST, "--no-token"]
    command += ["--headless"] if headless else []
    command += ["--port", str(port)] if port is not None else []
    return [*command, "--", "--run", str(run.absolute())] if run is not None else command
