"""DeepSpeed's runs beside a plain loop: what it does otherwise is named, and what it does alike is called the same."""

import importlib.util
import warnings

import pytest

import shardbook as sb
from benchmarks import verify_peers
from shardbook.verifying.callables import Reruns, baseline_reruns
from shardbook.verifying.judge import judge
from tests import ranks

pytestmark = [
    pytest.mark.peers,
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make peers"),
]


def quietly(folder: str, stage: int, variant: str) -> None:
    warnings.simplefilter("ignore")  # DeepSpeed's own
    verify_peers.deepspeed(folder, stage, variant)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Reruns]:
    found = {}
    for dtype in ("fp32", "bf16"):
        folder = tmp_path_factory.mktemp(dtype)
        found[dtype] = baseline_reruns(lambda path, dtype=dtype: verify_peers.plain(path, dtype), folder)
    return found


@pytest.mark.parametrize(("stage", "variant"), verify_peers.RUNS)
def test_what_deepspeed_does_otherwise_is_named(stage, variant, plain, tmp_path):
    ranks.call(verify_peers.NUM_RANKS, quietly, str(tmp_path), stage, variant)
    found = plain["bf16" if variant == "bf16" else "fp32"]
    record = sb.Record.open(tmp_path / verify_peers.name_of(stage, variant))
    verdict = judge(record, found.record, steps=verify_peers.STEPS, reruns=found.reruns, notes=found.notes)
    assert verdict.rule == {"fp32": None, "default": "clip.unexpected", "bf16": "precision.master_rounded"}[variant], str(verdict)
