"""Right configurations are called right: a few of those that `make evidence-verify` tries, over shardbook, DDP and FSDP2."""

import pytest

from benchmarks.evidence_verify import CASES
from benchmarks.verify_cases import draw
from benchmarks.verify_loops import run

FEW = (4, 58)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [*FEW, *(pytest.param(number, marks=pytest.mark.full) for number in range(24) if number not in FEW)])
def test_no_false_alarm(number, tmp_path):
    case = draw(number)
    verdict = run(case, tmp_path).verdict
    assert verdict.kind == "identical" if case.engine == "shardbook" else verdict.same, f"{case}: {verdict}"
    assert verdict.num_steps == 3
    assert verdict.notes == ()


def test_draws_are_repeatable_and_reach_everything():
    cases = [draw(number) for number in range(CASES)]
    assert cases == [draw(number) for number in range(CASES)]
    assert {(one.stage, one.num_ranks, one.dtype) for one in cases if one.engine == "shardbook"} >= {
        (stage, num_ranks, dtype) for stage in range(4) for num_ranks in (2, 3, 4) for dtype in ("fp32", "bf16")
    }
    assert {(one.engine, one.dtype, one.objective) for one in cases if one.engine != "shardbook"} == {
        (engine, dtype, objective) for engine in ("ddp", "fsdp2") for dtype in ("fp32", "bf16") for objective in ("mean", "tokens")
    }
    for mark in ("grouped", "tied", "frozen", "recompute", "padded", "short", "empty", "clip", "dropout"):
        assert 10 < sum(bool(getattr(one, mark)) for one in cases) < CASES - 10, mark
