"""What a simulation costs: the same on any number of ranks, and seconds for a model of 7B, start included.

``make evidence-simulation`` has the figures; the bounds here are generous, as other work goes on beside.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardbook as sb
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.simulation.memory import FakeMemory

COMMAND = Path(sys.executable).parent / "shardbook"
SEVEN_BILLION = ("llama-2-7b", "--micro-batch", "1", "--sequence", "4096")
SECONDS, RESIDENT = 30.0, 2**30
SIZES = DecoderConfig(vocab=256, layers=3, width=64, heads=4, kv_heads=2, ffn=176)

MEASURED = """
import json, resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stdout, done.stderr, time.monotonic() - began, used.ru_maxrss * 1024]))
"""


def told(num_ranks):
    """What the command says, the seconds it takes, and its largest resident set."""
    command = [COMMAND, "forecast", *SEVEN_BILLION, "--ranks", str(num_ranks), "--simulate", "--json"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *command], capture_output=True, text=True, check=True, timeout=100)
    code, output, errors, seconds, resident = json.loads(done.stdout)
    assert code in (0, 1), errors
    return json.loads(output), seconds, resident


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a resident set is asked of the system")
def test_a_model_of_seven_billion_takes_seconds():
    found, seconds, resident = told(64)
    assert found["witness"] == "simulation"
    assert found["num_parameters"] == 6_738_415_616
    assert found["peak_allocated"] > found["persistent"] > 12 * found["num_parameters"] // 64
    assert seconds < SECONDS
    assert resident < RESIDENT


def num_operators(monkeypatch, num_ranks):
    """How many operators a simulation runs."""
    ran = []
    dispatch = FakeMemory.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        ran.append(func)
        return dispatch(self, func, types, args, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(FakeMemory, "__torch_dispatch__", counting)
        found = sb.simulate(
            lambda: Decoder(SIZES),
            lambda: (torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)),
            sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16")),
            ranks=num_ranks,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        )
    assert found.ranks == num_ranks
    return len(ran)


def test_the_cost_does_not_grow_with_the_number_of_ranks(monkeypatch):
    """Operators are what costs: 64 ranks and fewer exchange point by point, more of them in one collective."""
    few, *more = [num_operators(monkeypatch, num_ranks) for num_ranks in (2, 8, 64, 1024, 16_384)]
    assert few > 100
    assert max(more) <= few  # shorter pieces have fewer blocks
    assert more[-1] == more[-2]
