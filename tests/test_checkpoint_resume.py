"""A run that is saved and gone on with is the run that was never interrupted, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ranks
from tests.checkpoints import Setup, build, held, train

SETUPS = [
    Setup(0, 2, "fp32"),
    Setup(1, 2, "bf16"),
    Setup(2, 3, "bf16-no-master"),
    Setup(3, 3, "2+2+4+8"),
    Setup(3, 1, "bf16"),
    Setup(3, 2, "fp16", loss_scale="dynamic"),
]


def interrupted(setup: Setup, folder: Path) -> tuple[Any, Any]:
    """A job: what the run that went on held, and what the one that was loaded in its place held."""
    whole = build(setup)
    train(whole, 3)
    whole.save(folder / "step-3")
    going_on = train(whole, 3)
    expected = held(whole)
    whole.close()
    again = build(setup, seed=5)
    again.load(folder)  # the last one in it
    reports = train(again, 3)
    assert reports == going_on
    found = held(again)
    again.close()
    return expected, found


@pytest.mark.ranks
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_same_bits_at_the_same_n(setup: Setup, tmp_path: Path):
    for expected, found in ranks.call(setup.num_ranks, interrupted, setup, tmp_path):
        assert same(expected, found)
        assert expected["rng"].numel() > 0
        if setup.loss_scale == "dynamic":
            assert expected["scale"][0] < 2.0**16, "the scale has not moved: nothing is shown"
        else:
            assert expected["steps"] == 6


def test_good_steps_in_a_row_are_counted_on(tmp_path: Path):
    """The scale is doubled after 2,000 of them, whoever trains in between."""
    setup = Setup(3, 1, "fp16", loss_scale="dynamic")
    engine, again = build(setup), build(setup)
    for one, num_good in ((engine, 1998), (again, 5)):
        stepper = one._stepper
        assert stepper is not None
        stepper.loss_scale.value, stepper.loss_scale.num_good = 2.0**-4, num_good
        one._passes.loss_scale = stepper.loss_scale.value
    engine.save(tmp_path / "c")
    again.load(tmp_path / "c")
    for one in (engine, again):
        train(one, 2)
        assert one._stepper is not None
        assert one._stepper.loss_scale.value == 2.0**-3
        one.close()


def same(first: Any, second: Any) -> bool:
    """Equal to the last bit and of the same types, all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(one, other) for one, other in zip(first, second, strict=True))
    return bool(first == second)


def test_same_sees_a_bit():
    assert same({"a": [torch.ones(2), 1.0]}, {"a": [torch.ones(2), 1.0]})
    assert not same({"a": [torch.ones(2), 1.0]}, {"a": [torch.ones(2), 1]})
    assert not same({"a": [torch.ones(2), 1.0]}, {"a": [torch.tensor([1.0, 1.0 + 2**-23]), 1.0]})


def chance(folder: Path, alike: bool) -> tuple[float, float]:
    """A job: save where each rank has its own random numbers (or all the same); the next number then and after loading."""
    import torch.distributed as dist

    setup = Setup(2, dist.get_world_size() if dist.is_initialized() else 1)
    if setup.num_ranks == 2:
        engine = build(setup)
        torch.manual_seed(1 if alike else engine.transport.rank)
        engine.save(folder / "c")
        expected = torch.rand(()).item()
    else:
        engine, expected = build(setup), 0.0
        engine.load(folder / "c")
    engine.close()
    return expected, torch.rand(()).item()


@pytest.mark.ranks
@pytest.mark.parametrize("alike", [False, True])
def test_random_numbers_at_another_n(alike: bool, tmp_path: Path):
    before = [expected for expected, _ in ranks.call(2, chance, tmp_path, alike)]
    after = [found for _, found in ranks.call(3, chance, tmp_path, alike)]
    assert after[:2] == before
    assert len(set(after)) == (1 if alike else 3)
