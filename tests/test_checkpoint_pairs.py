"""What was saved under one stage, N, unit layout and precision is loaded under another, exactly: parameters, master and moments."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.checkpoints import PRECISIONS, Net, Setup, loaded, saved, together
from tests.pairwise import pairwise

UNITS: list[Any] = [None, ("blocks.0", "blocks.1", "blocks.2", "embed")]
SIDES = {"stage": [0, 1, 2, 3], "num_ranks": [1, 2, 3], "precision": sorted(PRECISIONS), "units": UNITS}
FIELDS = {f"{side}_{name}": values for side in ("from", "to") for name, values in SIDES.items()}


def setups_of(row: dict[str, Any]) -> tuple[Setup, Setup]:
    sides = [Setup(**{name: row[f"{side}_{name}"] for name in SIDES}) for side in ("from", "to")]
    return sides[0], sides[1]


STAGES = [(Setup(first, 2, "bf16"), Setup(second, num_ranks, "bf16")) for first in range(4) for second in range(4) for num_ranks in (2, 3)]
PAIRS = list(dict.fromkeys([*(setups_of(row) for row in pairwise(FIELDS, lambda row: True)), *STAGES]))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    return every_pair(tmp_path_factory.mktemp("pairs"))


def every_pair(folder: Path) -> dict[Any, list[dict[str, Any]]]:
    """Of each setup that is saved, and of each pair, what all ranks held."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for num_ranks in (1, 2, 3):
        setups = list(dict.fromkeys(source for source, _ in PAIRS if source.num_ranks == num_ranks))
        for setup, values in zip(setups, zip(*ranks.call(num_ranks, saved, setups, folder), strict=True), strict=True):
            found[setup] = list(values)
    for num_ranks in (1, 2, 3):
        pairs = [pair for pair in PAIRS if pair[1].num_ranks == num_ranks]
        for pair, values in zip(pairs, zip(*ranks.call(num_ranks, loaded, pairs, folder), strict=True), strict=True):
            found[pair] = list(values)
    return found


def test_there_are_enough_pairs():
    assert len(PAIRS) >= 40
    assert {(first.stage, second.stage) for first, second in PAIRS} == {(a, b) for a in range(4) for b in range(4)}
    assert {(first.num_ranks, second.num_ranks) for first, second in PAIRS} == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)}
    assert {(first.precision, second.precision) for first, second in PAIRS} == {(a, b) for a in PRECISIONS for b in PRECISIONS}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_a_pair(pair: tuple[Setup, Setup], everything: dict[Any, list[dict[str, Any]]]):
    check(pair, everything)


def check(pair: tuple[Setup, Setup], everything: dict[Any, list[dict[str, Any]]]) -> None:
    source, target = pair
    before, after = everything[source], everything[pair]
    numels = {name: parameter.numel() for name, parameter in Net().named_parameters()}
    theirs, mine = together(before, numels), together(after, numels)
    assert set(theirs) == set(mine)
    for name, values in theirs.items():
        assert set(values) == set(mine[name]), name
        for key, value in values.items():
            expected = value if key == "step" else value.to(target.weight)
            assert torch.equal(mine[name][key], expected), (name, key)
            assert mine[name][key].dtype == expected.dtype
    for name, value in after[0]["model"].items():
        kept = "embed.weight" if name == "head.weight" else name
        if kept in theirs:
            expected = theirs[kept]["weight"].to(target.weight).to(target.param).view(value.shape)
        else:
            expected = before[0]["model"][name].to(value.dtype)
        assert torch.equal(value, expected), name
    for rank, own in enumerate(after):
        source_rank = before[rank] if rank < len(before) else before[0]
        assert all(torch.equal(own["buffers"][name], value) for name, value in source_rank["buffers"].items())
        assert own["groups"] == source_rank["groups"]
        assert own["steps"] == source_rank["steps"] == 2
        assert own["scheduler"] == source_rank["scheduler"]
    same = target.num_ranks <= source.num_ranks
    assert not same or all(torch.equal(mine["rng"], theirs["rng"]) for mine, theirs in zip(after, before, strict=False))
