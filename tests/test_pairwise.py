"""The selection covers what it promises, whatever is not allowed, and is always the same."""

from typing import Any

import pytest

from tests.pairwise import covers, pairwise

FIELDS = {"stage": [0, 1, 2, 3], "ranks": [1, 2, 3], "type": ["fp32", "bf16", "fp16"], "clip": [None, 1.0], "micro": [1, 3]}


def no_half_with_many(row: dict[str, Any]) -> bool:
    return not (row.get("type") == "fp16" and row.get("micro") == 3)


def three_way(row: dict[str, Any]) -> bool:
    return not (row.get("stage") == 3 and row.get("ranks") == 1 and row.get("clip") == 1.0)


@pytest.mark.parametrize("allowed", [lambda row: True, no_half_with_many, three_way])
def test_every_allowed_pair_occurs(allowed: Any) -> None:
    rows = pairwise(FIELDS, allowed)
    assert covers(rows, FIELDS, allowed)
    assert len(rows) <= 20
    assert rows == pairwise(FIELDS, allowed)


def test_a_missing_pair_is_noticed() -> None:
    rows = pairwise(FIELDS)
    assert not covers(rows[:-1], FIELDS)
