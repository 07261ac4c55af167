"""Tests that are green must be able to go red: each fault of ``tests.faults`` is put into the engine, and one test must find it.

The test itself runs, unchanged, with its ranks replaced by ranks that have the fault. It must fail by what it compares; an
error of the code's own shape (an attribute that is not there any more) does not count.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests import ranks
from tests import test_engine_equality as equality
from tests import test_engine_misc as misc
from tests import test_engine_objective as objective
from tests import test_engine_reading as reading
from tests.equality import Case
from tests.faults import CRASHES, FAULTS, under_fault

pytestmark = pytest.mark.ranks


def equals(**fields: Any) -> Callable[[], None]:
    """The comparison of one case with the plain loop."""
    return partial(equality.test_equals_the_plain_loop, Case(**fields))


RED: dict[str, Callable[[], None]] = {
    "ranks are added in reverse order": equals(num_ranks=3),
    "only one rank's gradient counts": equals(),
    "a missing gradient adds 0.0": equals(entry="minus_zero", num_ranks=2, optimizer="sgd"),
    "a parameter without a gradient is stepped on": equals(entry="never_used"),
    "shards are cut at multiples of 16": equals(num_ranks=3),
    "one unit is not refreshed": equals(stage=1),
    "the scale is applied twice": equals(),
    "gradients are averaged over ranks": equals(clip=False, optimizer="sgd"),
    "masters are copied from rounded weights": equals(precision="bf16"),
    "the tied gradient is dropped": equals(entry="tied"),
    "a second micro-batch replaces the first": equals(stage=0, accumulate=3),
    "the norm leaves out a rank": equals(clip=False),
    "the weight leaves out a rank": equals(),
    "the loss leaves out a rank": equals(),
    "shards land in each other's place": equals(num_ranks=3),
    "clipping comes before unscaling": equals(precision="fp16"),
    "an empty micro-batch counts one": equals(empty=True),
    "optimizer state is cut in the wrong place": partial(misc.test_optimizer_state_goes_on, 3, "adamw_plain"),
    "gradients are added in bf16": equals(precision="bf16", num_ranks=3),
    "pieces are in each other's group": equals(optimizer="adamw_plain"),
    "what is not finite is applied": partial(
        objective.test_a_step_that_is_not_finite_is_skipped_by_all_and_the_next_is_fine, "gradient", 2
    ),
    "the loss scale does not notice an overflow": partial(objective.test_fp16_overflow_skips_all_ranks_halves_the_scale_and_goes_on, 1),
    "version counters are not bumped": partial(misc.test_backward_through_values_of_before_the_step_raises, 2, 2),
    "stage 2 adds micro-batches before ranks": equals(stage=2, accumulate=3, num_ranks=3),
    "initial weights are not sent": equals(),
    "sharded parameters stay readable": partial(reading.test_reading_a_sharded_value_is_refused_by_name, "model.state_dict"),
}


def call_with(fault: str, num_ranks: int, job: Callable[..., Any], *args: Any, seconds: float = 60, **kwargs: Any) -> list[Any]:
    """Stands in for ``ranks.call``: fresh ranks with the fault. Their failure is a failure; a fault that does not fit is an error."""
    endings = ranks.fresh_ranks(num_ranks, under_fault, fault, job.__module__, job.__qualname__, args, kwargs, seconds=seconds)
    values: list[Any] = []
    for ending in endings:
        if ending.how in ("lost", "hung"):  # also a way to be noticed
            raise ranks.RankFailure(ending.rank, ending.how, "under a fault", ending.text)
        if ending.how == "error":
            raise RuntimeError(f"the fault could not be put in: {ending.kind}: {ending.message}\n{ending.text}")
        calls, kind, value = ending.value
        if kind in CRASHES:
            raise RuntimeError(f"the fault does not fit the engine any more:\n{value}")
        if not calls:
            raise RuntimeError(f"the fault {fault!r} was never reached")
        if kind:
            raise ranks.RankFailure(ending.rank, kind, value.strip().splitlines()[-1], value)
        values.append(value)
    return values


def test_every_fault_has_a_test() -> None:
    assert list(RED) == list(FAULTS)
    assert len(FAULTS) >= 12


@pytest.mark.parametrize("fault", FAULTS)
def test_goes_red(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "call", partial(call_with, fault))
    with pytest.raises(AssertionError):
        RED[fault]()


@pytest.mark.parametrize("fault", FAULTS)
def test_is_green_without_the_fault(fault: str) -> None:
    RED[fault]()
