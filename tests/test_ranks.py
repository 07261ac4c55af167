"""The ranks of the tests themselves: values come back by rank, errors keep their traceback, a hang ends, a warning is an error."""

import os
import signal
import time
import warnings
from typing import Any

import pytest

from tests import ranks


def add_up(value: float) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return 0, 1, value
    total = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), float(total)


def fail_on(rank: int) -> int:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise KeyError("this very rank")
    return dist.get_rank()


def sleep_on(rank: int, seconds: float) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        time.sleep(seconds)


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


def process() -> int:
    return os.getpid()


def kill_self(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def fake_size() -> tuple[int, int]:
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def threads() -> Any:
    import torch

    return torch.get_num_threads()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_values_come_back_by_rank(num_ranks: int) -> None:
    total = 1.5 * num_ranks + sum(range(num_ranks))
    assert ranks.call(num_ranks, add_up, 1.5) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_ranks_last_from_one_call_to_the_next() -> None:
    assert ranks.call(2, process) == ranks.call(2, process)
    assert ranks.call(2, threads) == [1, 1]


def test_an_error_is_raised_here_and_the_next_call_has_new_ranks() -> None:
    before = ranks.call(2, process)
    with pytest.raises(ranks.RankFailure, match=r"rank 1: KeyError(.|\n)*in fail_on") as caught:
        ranks.call(2, fail_on, 1)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert not set(before) & set(ranks.call(2, process))


def test_a_hang_ends_and_shows_where() -> None:
    with pytest.raises(ranks.RanksTimedOut, match=r"rank 1 did not end(.|\n)*sleep_on"):
        ranks.call(2, sleep_on, 1, 100, seconds=0.5)
    assert len(ranks.call(2, process)) == 2


def test_a_warning_is_an_error() -> None:
    with pytest.raises(ranks.RankFailure, match="UserWarning"):
        ranks.call(1, warn)


def test_fresh_ranks_say_how_each_ended() -> None:
    first, second, third = ranks.fresh_ranks(3, kill_self, 1)
    assert (first.how, second.how, third.how) == ("value", "lost", "value")
    assert [ending.kind for ending in ranks.fresh_ranks(2, fail_on, 0)] == ["KeyError", ""]


def test_one_rank_of_a_fake_group() -> None:
    assert ranks.fake_rank(1000, fake_size, rank=7) == (7, 1000)
