"""Replicas that drift apart: found on every rank, and the odd one named."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from shardbook.errors import ConfigError
from tests import ranks

pytestmark = pytest.mark.ranks


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def caught(model: object, step: int) -> tuple[str, str | None, tuple[int, ...], int | None] | None:
    try:
        sb.check_replicas(model, step=step)
    except sb.ReplicaError as error:
        return str(error), error.parameter, error.ranks, error.step
    return None


def drifting(odd: list[int], by: str = "bit") -> list[object]:
    """What a check finds before and after some ranks have changed a parameter."""
    model = nn.parallel.DistributedDataParallel(tiny())
    found: list[object] = [caught(model, 1)]
    rank = dist.get_rank()
    if rank in odd:
        with torch.no_grad():
            if by == "bit":
                model.module[2].bias.view(torch.int32)[1] ^= 1
            else:
                for parameter in model.parameters():
                    parameter += 1e-3 * (rank + 1)
    return [*found, caught(model, 2)]


def under_shardbook(stage: int, precision: str) -> object:
    """Two steps with a check after each; then rank 1 changes one bit of what it holds in full."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision)))
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(4, 6)).sum(), weight=4)
        engine.step()
        assert caught(engine, step) is None
        assert caught(model, step) is None
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.view(torch.int32 if precision == "fp32" else torch.int16)[0, 0] ^= 1
    found = caught(engine, 3)
    engine.close()
    return found


def of_stage_3() -> str:
    model = tiny()
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3))
    try:
        sb.check_replicas(model)
    except ConfigError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def of_fsdp2() -> str:
    from torch.distributed.fsdp import fully_shard

    model = tiny()
    fully_shard(model)
    try:
        sb.check_replicas(model)
    except ConfigError as error:
        return str(error)
    return ""


def test_one_bit_on_one_of_three_ranks_is_found_and_named_on_all():
    for before, after in ranks.call(3, drifting, [1]):
        assert before is None
        message, parameter, odd, step = after
        assert (parameter, odd, step) == ("2.bias", (1,), 2)
        assert message.startswith("step 2: replicas of '2.bias' have drifted apart: rank 1 holds other bits than the other 2.")


def test_of_two_ranks_none_is_the_odd_one():
    for before, after in ranks.call(2, drifting, [1], "all"):
        assert before is None
        assert after[1:] == ("0.weight", (0, 1), 2)
        assert "ranks 0 and 1 hold different bits (of two, none is the odd one); so do 3 further parameters of 4" in after[0]


def test_without_a_majority_all_ranks_are_named():
    for _, after in ranks.call(3, drifting, [1, 2], "all"):
        assert after[2] == (0, 1, 2)
        assert "its 3 ranks hold 3 different values, none of them a majority" in after[0]


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "fp32"),
        (2, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(0, "fp32"), (0, "bf16"), (1, "fp16"), (2, "fp32")]),
    ],
)
def test_what_shardbook_keeps_full_is_compared(stage, precision):
    for found in ranks.call(2, under_shardbook, stage, precision):
        assert found is not None
        assert found[1:3] == ("0.weight", (0, 1))


def test_where_nothing_is_replicated_the_check_is_refused():
    expected = "check_replicas: the parameters of this model are sharded, so that no two ranks hold the same ones"
    assert ranks.call(2, of_stage_3) == [f"{expected} under stage 3; leave the check out, or use stage 0, 1 or 2"] * 2
    assert ranks.call(2, of_fsdp2) == [f"{expected}; leave the check out"] * 2


def test_a_rank_alone_agrees_with_itself():
    sb.check_replicas(tiny(), step=1)
