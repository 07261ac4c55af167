"""Recomputation and offload in all witnesses: closed form, simulation, books and allocator, tier by tier, on two ranks.

The default suite runs a few in which every value of every field comes; ``-m full`` the whole product.
"""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.forecast_grid import RECOMPUTES, Point, forecast, measure_all_from_the_start
from benchmarks.simulation_grid import pairs_of, simulate
from benchmarks.tiers_grid import disagreements
from tests import ranks

FIELDS: dict[str, Any] = {
    "stage": [1, 2, 3],
    "optimizer_on": ["none", "host", "disk"],
    "params_on": ["none", "host"],
    "precision": ["fp32", "bf16", "2+2+4+8", "pure-bf16"],
    "recompute": list(RECOMPUTES),
}


def allowed(row: dict[str, Any]) -> bool:
    return row.get("params_on", "none") == "none" or row.get("stage", 3) == 3


def point(**fields: Any) -> Point:
    return Point(shape="small decoder", micro_batch=8, sequence=64, ranks=2, **fields)


def deep(**fields: Any) -> Point:
    """Peaks in the backward of a block, where the small decoder does in the loss."""
    return Point(shape="decoder 12 layers", micro_batch=2, sequence=256, ranks=2, **fields)


IN_DEFAULT = [
    point(stage=1, optimizer_on="host", precision="pure-bf16", recompute="full"),
    point(stage=2, optimizer_on="host", precision="fp32", recompute="every 2"),
    point(stage=3, optimizer_on="host", precision="bf16", recompute="none"),
    point(stage=3, params_on="host", precision="2+2+4+8", recompute="selective"),
    point(stage=3, optimizer_on="host", params_on="host", precision="fp32", recompute="offload", accumulate=2),
    point(stage=2, optimizer_on="disk", precision="bf16", recompute="offload"),
    deep(stage=2, optimizer_on="host", precision="fp32", recompute="selective"),
]
IN_FULL = [
    # every fourth of the product; `python -m benchmarks.tiers_grid --all` takes all of them
    *[point(**row) for values in product(*FIELDS.values()) if allowed(row := dict(zip(FIELDS, values, strict=True)))][::4],
    point(stage=3, optimizer_on="host", recompute="offload", accumulate=2, kernel="for-loop"),
    point(stage=2, precision="bf16", optimizer_on="host", recompute="selective", accumulate=3, clip=True),
    point(stage=3, precision="bf16", params_on="host", optimizer="sgd-momentum", accumulate=2),
    point(stage=3, precision="2+2+4+8", optimizer_on="disk", optimizer="sgd", kernel="foreach", accumulate=1),
    point(stage=1, precision="bf16", optimizer_on="disk", optimizer="sgd-momentum", accumulate=2),
    point(stage=3, precision="pure-bf16", optimizer_on="host", kernel="foreach"),
    *[deep(stage=3, optimizer_on="host", precision="bf16", recompute=recompute) for recompute in RECOMPUTES],
]
every_point = pytest.mark.parametrize(
    "at", [*IN_DEFAULT, *(pytest.param(one, marks=pytest.mark.full) for one in IN_FULL if one not in IN_DEFAULT)], ids=str
)


@cache
def of_ranks(points: tuple[Point, ...]) -> dict[Point, Any]:
    by_rank = ranks.call(2, measure_all_from_the_start, points, seconds=900)
    return {at: saw for at, *saw in zip(points, *by_rank, strict=True)}


def measured(at: Point) -> Any:
    """What its two ranks saw."""
    if at in IN_DEFAULT:
        return of_ranks(tuple(IN_DEFAULT))[at]
    place = (at.stage, at.optimizer_on, at.params_on)
    return of_ranks(tuple(one for one in IN_FULL if (one.stage, one.optimizer_on, one.params_on) == place))[at]


@cache
def simulated(at: Point) -> Any:
    torch.set_num_threads(1)
    return simulate(at, 0)


@pytest.mark.ranks
@every_point
def test_books_and_allocator_agree_and_so_do_both_forecasts(at: Point) -> None:
    """To the byte: the peak of the simulation with every account, phase by phase; what each tier holds between steps and at its highest;
    what moves over each link. The closed form knows all but a few numbers of a kernel's.
    """
    saw, told = measured(at), simulated(at)
    assert disagreements(at, saw[0].later, told, forecast(at)) == []
    for pair in pairs_of(at, saw[0], told):
        assert pair.is_equal, pair.steps
        assert pair.is_same_place, pair.steps
        assert not any(pair.phases.values()), pair.steps


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_on_the_host_leaves_parameters_alone_on_the_device(stage: int) -> None:
    """2Ψ at stages 1 and 2, nothing at 3 where the master is the source of gathers; from reduction to step no gradient either."""
    at = next(one for one in IN_DEFAULT if (one.stage, one.optimizer_on, one.params_on) == (stage, "host", "none"))
    saw = measured(at)[0].later
    assert set(saw.between.get("device", ())) == ({"PARAM"} if stage < 3 else set())
    step = next(one for one in saw.phases if one.phase == "step")
    assert not step.accounts.get("GRAD")
    assert {"MASTER", "MOMENT"} <= set(saw.between["host"])
