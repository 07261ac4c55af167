"""``shardbook forecast`` answers at once, in an environment that has neither torch nor the libraries of pictures."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ABSENT = ("torch", "numpy", "altair", "vl_convert", "transformers", "safetensors", "psutil", "pandas")
# As in an environment without them: `find_spec` says None, and an import raises ModuleNotFoundError.
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else PathFinder.find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from shardbook.cli.main import main
try:
    main()
finally:
    sys.stdout.flush()
    loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & set({ABSENT!r}))
    assert not loaded, loaded
"""
LARGEST = ("llama-3.1-405b", "--ranks", "16384", "--stage", "3")


def shardbook(*arguments, start=WITHOUT):
    """The finished process, and the processor seconds it took, start included: it waits for nothing, so a busy machine adds nothing."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "120"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(
        [sys.executable, "-P", "-c", start, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("arguments", [("forecast", *LARGEST), ("forecast", *LARGEST, "--json"), ("forecast", "--help"), ("--help",)])
def test_answers_without_torch(arguments):
    found, _ = shardbook(*arguments)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout


def seconds(*arguments):
    found, taken = shardbook(*arguments)
    assert found.returncode in (0, 1)
    assert found.stderr == ""
    assert "Traceback" not in found.stdout
    return taken


def test_the_largest_model_takes_less_than_a_second():
    assert min(seconds("forecast", *LARGEST) for _ in range(3)) < 1.0


def test_a_step_of_the_largest_model_takes_less_than_two_seconds():
    options = ("--micro-batch", "1", "--sequence", "8192", "--tensor", "8", "--recompute", "full", "--device", "h100-80gb")
    assert min(seconds("forecast", *LARGEST, *options) for _ in range(3)) < 2.0


def test_what_needs_an_extra_says_so():
    found, _ = shardbook("forecast", "7e9", "--save", "chart.svg")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "shardbook: --save needs altair and vl_convert, which is not here: pip install 'shardbook[report]'\n"
    found, _ = shardbook("forecast", "shardbook/__init__.py:build")
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1


def test_the_blocker_blocks():
    found, _ = shardbook("--help", start=WITHOUT.replace("from shardbook.cli.main", "import torch\nfrom shardbook.cli.main"))
    assert found.returncode == 1
    assert "No module named 'torch'" in found.stderr
