"""Forecasts of shardbook's own engine beside real steps: what is live at the peak, account by account, to the byte.

``make evidence-forecast`` does the same on a grid of larger models; these are the smallest in which every rule of residence shows.
"""

import pytest

from benchmarks.forecast_grid import Point, compare_with, measure_all
from tests import ranks

EXACT = ("PARAM", "MASTER", "MOMENT", "GRAD", "GATHERED", "GRAD_FULL", "COMM", "ACTIVATION")
WRAPPED = 512
"""Bytes of what torch makes of numbers: losses, weights, counters, flags."""

POINTS = (
    Point(shape="small gpt", stage=0, ranks=1, sequence=32),
    Point(shape="small decoder", stage=3, ranks=1, sequence=64, precision="bf16", kernel="foreach"),
    Point(shape="small decoder tied", stage=3, ranks=1, sequence=64),
    Point(shape="small decoder", stage=1, ranks=1, sequence=64, optimizer="sgd-momentum", kernel="for-loop"),
    Point(shape="small decoder", stage=0, ranks=2, sequence=64, precision="bf16"),
    Point(shape="small gpt", stage=1, ranks=2, sequence=32, accumulate=2, kernel="for-loop"),
    Point(shape="small decoder tied", stage=2, ranks=2, sequence=64, accumulate=2, clip=True),
    Point(shape="small gpt", stage=2, ranks=2, sequence=32, precision="2+2+4+8"),
    Point(shape="small decoder", stage=3, ranks=2, sequence=64, micro_batch=8),
    Point(shape="small gpt", stage=3, ranks=2, sequence=32, precision="pure-bf16", kernel="foreach"),
    Point(shape="small decoder tied", stage=3, ranks=2, sequence=64, precision="bf16", accumulate=3),
)


@pytest.fixture(scope="module")
def compared():
    measured = {}
    for num_ranks in (1, 2):
        together = [point for point in POINTS if point.ranks == num_ranks]
        for point, *found in zip(together, *ranks.call(num_ranks, measure_all, together), strict=True):
            measured[point] = max(found, key=lambda one: one.allocated)
    return {point: compare_with(point, found) for point, found in measured.items()}


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_accounts_are_equal_to_the_byte(compared, point):
    one = compared[point]
    assert {account: one.difference(account) for account in EXACT} == dict.fromkeys(EXACT, 0)
    assert abs(one.difference("WORKSPACE")) <= WRAPPED


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_the_peak_is_where_it_is_said_to_be(compared, point):
    one = compared[point]
    assert abs(one.peak_error) <= 0.001
    assert one.forecast.peak_phase == one.measured.phase
    assert not one.misses()


def test_a_difference_would_be_seen(compared):
    """The bounds bind: the same measurement beside the forecast of twice the batch."""
    point = POINTS[0]
    other = compare_with(Point(shape=point.shape, stage=0, ranks=1, sequence=64, micro_batch=16), compared[point].measured)
    assert "peak" in other.misses()
    assert other.difference("ACTIVATION") > 0
