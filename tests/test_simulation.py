"""``sb.simulate`` beside the engine on real tensors: peak, accounts, phase, unit and operator, to the byte, in the first step and later.

``make evidence-simulation`` does the same on a grid of larger models; these are the smallest in which every rule of residence shows.
"""

import gc
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import shardbook as sb
from benchmarks.forecast_grid import Point, build, forecast, measure_all_from_the_start
from benchmarks.simulation_grid import pairs_of, simulate
from tests import ranks

POINTS = (
    Point(shape="small gpt", stage=0, ranks=1, sequence=32),
    Point(shape="small decoder", stage=1, ranks=1, sequence=64, optimizer="sgd-momentum", kernel="for-loop"),
    Point(shape="small decoder", stage=3, ranks=1, sequence=64, micro_batch=8, precision="bf16", accumulate=2),
    Point(shape="small decoder tied", stage=2, ranks=2, sequence=64, micro_batch=8, accumulate=2, clip=True),
    Point(shape="small gpt", stage=2, ranks=2, sequence=32, micro_batch=8, precision="2+2+4+8"),
    Point(shape="small decoder", stage=3, ranks=2, sequence=64, precision="pure-bf16", optimizer="sgd"),
    Point(shape="small decoder", stage=0, ranks=3, sequence=64, clip=True, optimizer="sgd"),
    Point(shape="small decoder", stage=1, ranks=3, sequence=64, micro_batch=8, precision="bf16", kernel="foreach"),
    Point(shape="small decoder tied", stage=2, ranks=3, sequence=64, kernel="for-loop"),
    Point(shape="small gpt", stage=3, ranks=3, sequence=32, micro_batch=8, clip=True),
)
"""Peaks lie in backward and in the step. In 16 bits the shapes are those whose matrix products take no scratch at a phase's height."""

IN_FULL = POINTS[1::3]
IN_DEFAULT = tuple(point for point in POINTS if point not in IN_FULL)
every_point = pytest.mark.parametrize("point", [*IN_DEFAULT, *(pytest.param(point, marks=pytest.mark.full) for point in IN_FULL)], ids=str)
every_rank = pytest.mark.parametrize(
    ("point", "rank"),
    [
        *((point, rank) for point in IN_DEFAULT for rank in range(point.ranks)),
        *(pytest.param(point, rank, marks=pytest.mark.full) for point in IN_FULL for rank in range(point.ranks)),
    ],
    ids=str,
)


@cache
def of_ranks(points, num_ranks):
    """Point to what its ranks saw."""
    together = [point for point in points if point.ranks == num_ranks]
    by_rank = ranks.call(num_ranks, measure_all_from_the_start, together)
    return {point: saw for point, *saw in zip(together, *by_rank, strict=True)}


def measured(point):
    """What its ranks saw."""
    return of_ranks(IN_FULL if point in IN_FULL else IN_DEFAULT, point.ranks)[point]


@cache
def simulated(point, rank):
    torch.set_num_threads(1)
    return simulate(point, rank)


@pytest.mark.ranks
@every_rank
def test_the_peak_and_every_account_are_those_of_a_real_run(point, rank):
    for pair in pairs_of(point, measured(point)[rank], simulated(point, rank)):
        assert pair.simulated.allocated == pair.measured.allocated, pair.steps
        assert {name: nbytes for name, nbytes in pair.measured.books.items() if nbytes} == pair.simulated.books, pair.steps


@pytest.mark.ranks
@every_rank
def test_the_peak_is_in_the_same_phase_unit_and_operator(point, rank):
    first, later = pairs_of(point, measured(point)[rank], simulated(point, rank))
    assert later.is_same_place
    assert later.is_same_operator
    assert first.is_same_place


@pytest.mark.ranks
@every_rank
def test_so_is_the_highest_instant_of_every_phase(point, rank):
    for pair in pairs_of(point, measured(point)[rank], simulated(point, rank)):
        assert {one.phase: (one.where, one.accounts) for one in pair.simulated.phases} == {
            one.phase: (one.where, one.accounts) for one in pair.measured.phases
        }


@pytest.mark.ranks
@every_rank
def test_sent_bytes_are_those_that_the_engine_counted(point, rank):
    assert simulated(point, rank).sent == measured(point)[rank].later.sent
    assert bool(simulated(point, rank).sent) == (point.ranks > 1)


@every_rank
def test_nothing_is_unaccounted(point, rank):
    told = simulated(point, rank)
    assert sum(told.accounts.values()) == told.peak_allocated
    assert sum(told.simulated.first_accounts.values()) == told.simulated.first_peak
    assert "UNACCOUNTED" not in {*told.accounts, *told.simulated.first_accounts}
    assert all("UNACCOUNTED" not in phase.accounts for phase in told.phases)


@every_point
def test_what_persists_is_what_the_closed_form_says_of_the_rank_that_holds_most(point):
    assert max(simulated(point, rank).persistent for rank in range(point.ranks)) == forecast(point).persistent


@pytest.mark.full
def test_the_tests_look_at_ranks_that_differ():
    apart = {point for point in POINTS if len({simulated(point, rank).peak_allocated for rank in range(point.ranks)}) > 1}
    assert {point.stage for point in apart if point.ranks == 3} >= {1, 2, 3}


def test_the_first_step_differs_where_state_is_made_in_it():
    """A step whose peak is in the optimizer holds no moments yet when it is the first."""
    told = simulated(POINTS[0], 0)
    assert told.simulated.first_accounts.get("MOMENT", 0) < told.accounts["MOMENT"]
    assert told.simulated.first_peak < told.peak_allocated == told.simulated.later_peak


# ---- the same again, and nothing left behind ----------------------------------------------------------------------------------

SMALL = Point(shape="small decoder", stage=1, ranks=3, sequence=64, micro_batch=8, precision="bf16", kernel="foreach")  # one of them


def test_the_same_question_has_the_same_answer():
    again, before = simulate(SMALL), simulated(SMALL, 0)
    assert (again.accounts, again.phases, again.sent) == (before.accounts, before.phases, before.sent)
    assert again.simulated.first_accounts == before.simulated.first_accounts
    assert again.simulated.items == before.simulated.items


def test_the_generator_is_where_it_was():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    simulate(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def left_behind():
    gc.collect()
    fake = sum(issubclass(type(found), FakeTensor) for found in gc.get_objects())  # isinstance would ask what stands for another
    return dist.is_initialized(), _get_current_dispatch_mode_stack(), torch.UntypedStorage.resize_, gc.isenabled(), fake


def test_nothing_is_left_behind():
    before = left_behind()
    simulate(SMALL)
    assert left_behind() == before
    assert before[:2] == (False, [])


def test_nothing_is_left_behind_by_a_model_that_fails():
    class Failing(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("of the model's own")

    before = left_behind()
    with pytest.raises(RuntimeError, match="of the model's own"):
        sb.simulate(
            lambda: Failing(8, 8),
            lambda: torch.ones(2, 8),
            sb.ZeroConfig(),
            ranks=4,
            optimizer=torch.optim.AdamW,
            loss=lambda out: (out.sum(), 2),
        )
    assert left_behind() == before
    assert simulate(SMALL).peak_allocated > 0


def test_a_real_model_trains_afterwards():
    simulate(SMALL)
    model = build(SMALL)
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters()), sb.ZeroConfig(stage=3))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    loss, weight = engine(tokens, tokens)
    engine.backward(loss, weight=int(weight))
    assert engine.step().loss > 0
    engine.close()


def test_persistent_accounts_are_a_share_of_the_ranks():
    """A group of a thousand: what is partitioned is a thousandth, to within padding."""
    many = simulate(Point(shape="small gpt", stage=3, ranks=1024, sequence=32))
    alone = simulate(Point(shape="small gpt", stage=3, ranks=1, sequence=32))
    assert alone.persistent / 1024 <= many.persistent <= alone.persistent / 1024 * 6  # shards begin at multiples of 64 elements
