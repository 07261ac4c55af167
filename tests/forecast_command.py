"""The command ``shardbook forecast``, run in this process and in one that has no torch."""

import os
import subprocess
import sys
from pathlib import Path

from shardbook.cli.main import run

SOURCE = Path(__file__).parents[1] / "src"
_WITHOUT = """
import sys
from importlib.machinery import PathFinder
GONE = ("torch", "numpy", "altair", "vl_convert", "transformers")
class Rest:
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in GONE else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Rest if finder is PathFinder else finder for finder in sys.meta_path]
try:
    import torch
    sys.exit("torch is still here")
except ModuleNotFoundError:
    from shardbook.cli.main import main
main()
"""


def forecast(capsys, *arguments):
    """Exit code, stdout and stderr of one command line."""
    try:
        code = run(["forecast", *map(str, arguments)])
    except SystemExit as error:  # argparse's own
        code = error.code
    said = capsys.readouterr()
    return code, said.out, said.err


def forecast_without_torch(*arguments, **environment):
    """A process of its own in which neither torch nor the libraries of any extra can be found."""
    command = [sys.executable, "-c", _WITHOUT, "forecast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=SOURCE, env={**os.environ, **environment})


def assert_refused(found, said):
    code, out, err = found
    assert (code, out) == (2, "")
    assert err.startswith("shardbook: ")
    assert err.count("\n") == 1
    assert said in err
