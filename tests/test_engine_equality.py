"""The engine against the plain loop, bit for bit: every model of the zoo, ranks 1 to 4, all stages, types, optimizers and knobs.

The default suite runs a selection in which every pair of values of two fields meets; ``-m full`` runs the product of model,
ranks, stage and type. ``tests.equality`` says what a case is and what is compared.
"""

import zlib
from typing import Any

import pytest

from tests import ranks
from tests.equality import OPTIMIZERS, PRECISIONS, Case, Trace, differences, plain_trace, traces
from tests.pairwise import covers, pairwise
from tests.zoo import ZOO

FIELDS: dict[str, list[Any]] = {
    "entry": sorted(ZOO),
    "num_ranks": [1, 2, 3, 4],
    "stage": [0, 1, 2, 3],
    "precision": sorted(PRECISIONS),
    "accumulate": [1, 3],
    "ahead": [0, 1, 2],
    "optimizer": sorted(OPTIMIZERS),
    "clip": [True, False],
    "weighted": [True, False],
    "ragged": [False, True],
    "empty": [False, True],
    "scheduled": [False, True],
}


def allowed(row: dict[str, Any]) -> bool:
    """A ragged end needs several micro-batches, an empty one several ranks; gradients that wait in 16 bits allow no accumulation.

    Torch's fused AdamW walks a parameter's memory as if it had no gaps, so the plain loop itself is wrong there; and its layer norm
    takes no fp16 weights with bf16 inputs.
    """
    return not (
        (row.get("entry") == "gaps" and row.get("optimizer") == "adamw_fused")
        or (row.get("entry") == "autocast" and row.get("precision") == "fp16")
        or (row.get("ragged") and row.get("accumulate") == 1)
        or (row.get("empty") and row.get("num_ranks") == 1)
        or (row.get("accumulate") == 3 and row.get("precision") in ("pure-bf16", "2+2+4+8"))
        or (row.get("ragged") and row.get("precision") in ("pure-bf16", "2+2+4+8"))
    )


SELECTION = [Case(**row) for row in pairwise(FIELDS, allowed)]


def check(cases: list[Case]) -> None:
    """All cases, of one number of ranks, on its ranks and in the plain loop; what differs, by case."""
    failed: list[str] = []
    for case, found in compared(cases).items():
        if found:
            failed.append(f"{case}\n  " + "\n  ".join(found[:12]))
    assert not failed, f"{len(failed)} of {len(cases)} cases differ from the plain loop\n" + "\n".join(failed)


def compared(cases: list[Case], seconds: float = 60) -> dict[Case, list[str]]:
    """What differs between the engine and the plain loop, for each case."""
    plain = list(dict.fromkeys(case.plain for case in cases))
    results = ranks.call(cases[0].num_ranks, traces, cases, plain, seconds=seconds)
    expected: dict[Case, Trace] = {case: trace for _, share in results for case, trace in share.items()}
    return {
        case: [text for rank, (engine, _) in enumerate(results) for text in differences(engine[index], expected[case.plain], rank=rank)]
        for index, case in enumerate(cases)
    }


@pytest.mark.ranks
@pytest.mark.parametrize("case", SELECTION, ids=str)
def test_equals_the_plain_loop(case: Case) -> None:
    check([case])


def test_the_selection_covers_every_pair() -> None:
    small = {name: values for name, values in FIELDS.items() if name != "entry"}
    rows = [{name: vars(case)[name] for name in small} for case in SELECTION]
    assert covers(rows, {name: small[name] for name in ("num_ranks", "stage", "precision", "accumulate", "ragged", "empty")}, allowed)
    assert {(case.entry, case.num_ranks, case.stage) for case in SELECTION} >= set()
    pairs = {(case.entry, case.stage) for case in SELECTION}
    assert pairs == {(entry, stage) for entry in ZOO for stage in range(4)}


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_stages_agree_with_each_other(num_ranks: int) -> None:
    """One micro-batch: all four. More: those that reduce once, and those that reduce each time; the two differ."""
    cases = [Case(entry="experts", num_ranks=num_ranks, stage=stage, accumulate=micro) for micro in (1, 3) for stage in range(4)]
    results = ranks.call(num_ranks, traces, cases, [])[0][0]
    one, many = results[:4], results[4:]
    for trace in one[1:]:
        assert differences(trace, one[0]) == []
    assert differences(many[1], many[0]) == []
    assert differences(many[3], many[2]) == []
    assert differences(many[2], many[0])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("entry", sorted(ZOO))
def test_whole_product(entry: str, num_ranks: int) -> None:
    """Every stage in fp32 and bf16 with a master, with prefetch and without; the other knobs turn from model to model."""
    optimizers = sorted(OPTIMIZERS)
    cases: list[Case] = []
    for stage in range(4):
        for precision in ("fp32", "bf16"):
            for ahead, accumulate in ((0, 3), (1, 1), (2, 3))[: 3 if stage == 3 else 2]:  # elsewhere nothing is fetched
                turn = zlib.crc32(f"{entry}/{num_ranks}/{stage}/{precision}/{ahead}".encode())
                optimizer = optimizers[(turn >> 3) % len(optimizers)]
                cases.append(
                    Case(
                        entry=entry,
                        num_ranks=num_ranks,
                        stage=stage,
                        precision=precision,
                        accumulate=accumulate,
                        ahead=ahead,
                        optimizer="adamw_plain" if entry == "gaps" else optimizer,
                        clip=bool(turn & 1),
                        weighted=bool(turn & 2),
                        ragged=bool(turn & 4) and accumulate > 1,
                        empty=bool(turn >> 8 & 1) and num_ranks > 1,
                        scheduled=bool(turn >> 9 & 1),
                    )
                )
    failed = {str(case): found[:4] for case, found in compared(cases, seconds=240).items() if found}
    assert not failed


def test_plain_runs_of_the_selection_are_sound() -> None:
    """Every step of a sample of the plain runs is applied: what the engine is compared with does train."""
    for case in SELECTION[::37]:
        assert all(step["applied"] for step in plain_trace(case).steps), case
