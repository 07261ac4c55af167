"""The public names: complete, lazy, and with the fields and defaults that others rely on."""

import subprocess
import sys
from dataclasses import MISSING, fields
from importlib import metadata
from pathlib import Path

import pytest

import shardbook as sb

# Grows as parts are built; a name that is once here stays.
PUBLIC = {
    "BudgetError", "CheckpointError", "Choices", "Convention", "Engine", "Forecast", "Ledger", "Measurement", "Offload",
    "Precision", "Prefetch", "Recompute", "RULES", "Record", "Recorder", "ReplicaError", "RunDocument", "StepReport", "Verdict",
    "ZeroConfig", "check_replicas", "forecast", "measure", "record", "simulate", "verify",
}  # fmt: skip

DEFAULTS = {
    "Precision": {
        "param": "fp32",
        "reduce": "fp32",
        "grad": None,
        "master": "fp32",
        "keep_param_shard": False,
        "keep": {},
        "cast_inputs": True,
    },
    "Prefetch": {"ahead": 1, "limit": None},
    "Recompute": {"policy": "none", "every": 1, "offload": False},
    "Offload": {"optimizer": "none", "params": "none", "path": None},
    "ZeroConfig": {
        "stage": 3,
        "precision": sb.Precision(),
        "prefetch": sb.Prefetch(),
        "recompute": sb.Recompute(),
        "offload": sb.Offload(),
        "accumulate": 1,
        "clip_grad_norm": None,
        "reduction": "auto",
        "units": None,
        "loss_scale": None,
        "init_sync": "rank0",
    },
}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_list_is_complete():
    assert set(sb.__all__) == PUBLIC
    assert set(dir(sb)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"RULES"}))
def test_every_name_is_found(name):
    assert getattr(sb, name).__name__ == name


def test_the_rules_are_found():
    assert len(sb.RULES) == len(set(sb.RULES)) > 20


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_fields_and_defaults(name):
    kind = getattr(sb, name)
    found = {field.name: field.default if field.default is not MISSING else field.default_factory() for field in fields(kind)}
    assert found == DEFAULTS[name]


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'Zero'; it has RULES, BudgetError, CheckpointError, Choices, "):
        _ = sb.Zero


def test_the_version_is_the_packages():
    assert sb.__version__ == metadata.version("shardbook")
    assert Path(sb.__file__).with_name("py.typed").exists()


def test_importing_brings_no_torch_and_takes_no_time():
    code = (
        "import time; t = time.perf_counter(); import shardbook; s = time.perf_counter() - t; import sys; print(s, 'torch' in sys.modules)"
    )
    runs = [run(code).split() for _ in range(3)]
    assert {torch for _, torch in runs} == {"False"}
    assert min(float(seconds) for seconds, _ in runs) < 0.15


def test_configuration_needs_no_torch():
    assert run("import shardbook, sys; shardbook.ZeroConfig(stage=2); print('torch' in sys.modules)") == "False"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import shardbook
try:
    shardbook.Engine
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_torch_the_remedy_is_said():
    assert run(WITHOUT_TORCH) == "shardbook.Engine needs torch: pip install 'shardbook[train]'"
