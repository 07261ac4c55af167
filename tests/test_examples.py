"""The examples run as they stand, small, and what they print follows from what they found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ("--vocab", "500", "--layers", "3", "--width", "84", "--sequence", "64", "--micro-batch", "4", "--real", "1", "2", "--fake", "8")


def run(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / "does_the_peak_divide.py"), *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.ranks
def test_does_the_peak_divide():
    told = json.loads(run("--json"))
    one, two, eight = told["found"]
    assert [(each["num_ranks"], each["group"]) for each in told["found"]] == [(1, "gloo"), (2, "gloo"), (8, "fake")]
    for each in told["found"]:
        assert sum(each["accounts"].values()) == each["peak"]
        assert each["accounts"].get("UNACCOUNTED", 0) <= 0.001 * each["peak"]
    # the persistent state divides but for padding and step counters; the peak doesn't
    for each in (two, eight):
        exact = (one["persistent"] - one["padding"]) / each["num_ranks"]
        assert 0.99 * exact < each["persistent"] < 1.1 * exact
    assert eight["peak"] > 2 * one["peak"] / 8
    # what belongs to the micro-batch, to the unit in use and to the module is on each rank as on one
    for account in ("BUFFER", "INPUT"):
        assert one["accounts"][account] == two["accounts"][account] == eight["accounts"][account] > 0
    for each in (two, eight):  # the peak may be a unit earlier or later than on one rank
        assert 0.7 * one["accounts"]["ACTIVATION"] < each["accounts"]["ACTIVATION"] < 1.3 * one["accounts"]["ACTIVATION"]
    assert one["accounts"]["GATHERED"] <= eight["accounts"]["GATHERED"]
    assert "COMM" not in one["accounts"]
    assert two["accounts"]["COMM"] < eight["accounts"]["COMM"]
    assert one["padding"] > 0
    assert told["check"].startswith("The fake group of 2 shows the bytes of the real one")
    assert told["answer"].startswith("No: on 8 ranks")
    assert f"{eight['peak'] / one['peak']:.3f}" in told["answer"]
