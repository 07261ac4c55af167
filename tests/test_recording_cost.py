"""What recording may cost, on a model that is small enough for the overhead of calls to show."""

import pytest

from benchmarks import recording_cost


@pytest.mark.full
def test_a_long_run_costs_at_most_a_seventh_more():
    assert recording_cost.main("small", rows=8, steps=40) < 1.15
