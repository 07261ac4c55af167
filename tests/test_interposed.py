"""The measured peak is the allocator's: a counter between torch and the C library says the same, in a process of its own."""

import pytest

from benchmarks import interposed

WHY = interposed.not_run()
pytestmark = [pytest.mark.full, pytest.mark.ranks, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


@pytest.mark.parametrize("engine, num_ranks", interposed.SETTINGS)
def test_the_measured_peak_is_that_of_an_interposed_counter(engine: str, num_ranks: int) -> None:
    found = interposed.compare(engine, num_ranks, shape="small")
    assert [one.rank for one in found] == list(range(num_ranks))
    for one in found:
        assert one.lost == 0
        assert one.interposed > 40 * 2**20  # it counted: parameters, moments and gradients of eleven million elements, sharded or not
        assert one.measured == pytest.approx(one.interposed, rel=interposed.BOUND)


def test_the_counter_sees_what_no_tensor_has() -> None:
    """Were it blind to what the books don't know, equal figures would say nothing."""
    (plain,), (hiding,) = (interposed.compare("plain", 1, shape=shape) for shape in ("small", "hiding"))
    assert hiding.interposed - plain.interposed == 2**24
