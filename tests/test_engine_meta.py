"""Models on the meta device, initialised unit by unit: the same values whatever N, and no rank ever holds the whole model."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardbook.accounts import Account
from shardbook.events import Booking
from tests import ranks
from tests.equality import SEED, Trace, differences, reported
from tests.oracle import PlainRun
from tests.zoo import ZOO, Decoder

pytestmark = pytest.mark.ranks


def init(module: nn.Module) -> None:
    """Initialises every layer below ``module`` in place, as torch's layers do themselves; other parameters become 0.9."""
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
        else:
            for parameter in child.parameters(recurse=False):
                nn.init.constant_(parameter, 0.9)


def meta_engine(stage: int, precision: str, entry: str = "plain") -> tuple[Any, nn.Module]:
    import shardbook as sb

    with torch.device("meta"):
        model = ZOO[entry].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(SEED)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision), clip_grad_norm=1.0)
    return sb.Engine(model, optimizer, config, init=init), model


def start(stage: int, precision: str, entry: str) -> dict[str, Tensor]:
    engine, model = meta_engine(stage, precision, entry)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return {name: value.clone() for name, value in engine.full_parameters()}


@pytest.mark.parametrize("entry", ["plain", "tied", "several_lists", "nested", "shared_between_units"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_do_not_depend_on_ranks_or_stage(entry: str, precision: str) -> None:
    expected = ranks.call(1, start, 0, precision, entry)[0]
    assert all(bool(torch.isfinite(value).all()) for value in expected.values())
    assert len({float(value.float().sum()) for name, value in expected.items() if "norm" not in name}) > 3
    for num_ranks in (1, 2, 3):
        for stage in (0, 2, 3):
            values = ranks.call(num_ranks, start, stage, precision, entry)[0]
            assert differences(Trace([], values), Trace([], expected)) == []


def train(stage: int) -> tuple[dict[str, Tensor], Trace]:
    import torch.distributed as dist

    engine, _ = meta_engine(stage, "fp32")
    began = {name: value.clone() for name, value in engine.full_parameters()}
    steps = []
    for step in range(3):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(dist.get_rank(), step, 0))
        engine.backward(loss, weight=weight)
        steps.append(reported(engine.step()))
    return began, Trace(steps, {name: value.clone() for name, value in engine.full_parameters()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_from_there_equals_the_plain_loop(stage: int) -> None:
    began, trace = ranks.call(2, train, stage)[0]
    model = Decoder()
    model.load_state_dict(began)
    run = PlainRun(
        model,
        lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
        ZOO["plain"].forward,
        num_ranks=2,
        clip=1.0,
        reduce_each=True,
    )
    steps = [vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])) for step in range(3)]
    assert differences(trace, Trace(steps, run.full_parameters())) == []


class Alive(TorchDispatchMode):
    """Follows every CPU tensor that is made under it: ``peak`` is the most bytes of their storages at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._made.append(weakref.ref(value))
        self._made = [made for made in self._made if made() is not None]
        with torch._C.DisableTorchFunctionSubclass():  # parameters whose values are away must not notice
            found = [tensor.untyped_storage() for made in self._made if (tensor := made()) is not None]
        storages = {storage._cdata: storage.nbytes() for storage in found}
        self.peak = max(self.peak, sum(storages.values()))
        return result


def largest_held(stage: int) -> tuple[int, int, int]:
    """Most bytes held at once while the engine is built; bytes of the whole model; of its largest unit."""
    import shardbook as sb

    with torch.device("meta"):
        model = Decoder(depth=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Alive() as alive:
        engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage), init=init)
    whole = sum(parameter.numel() for parameter in model.parameters()) * 4
    unit = sum(parameter.numel() for parameter in model.get_submodule("blocks.0").parameters()) * 4
    del engine
    return alive.peak, whole, unit


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_ever_holds_the_whole_model_at_stage_3(num_ranks: int) -> None:
    """Its shard, and a few units under construction."""
    for peak, whole, unit in ranks.call(num_ranks, largest_held, 3):
        assert unit <= peak <= whole / num_ranks + 5 * unit < whole


def booked_while_built() -> int:
    """The balance of the engine's accounts after it is built on the meta device at stage 3."""
    engine, _ = meta_engine(3, "bf16")
    total: dict[Account, int] = {}

    def add(event: Any) -> None:
        if isinstance(event, Booking):
            total[event.account] = total.get(event.account, 0) + event.nbytes

    with engine.observe(add):
        pass
    assert total.get(Account.GATHERED, 0) == 0
    assert total.get(Account.GRAD, 0) == total.get(Account.GRAD_FULL, 0) == total.get(Account.COMM, 0) == 0
    return total[Account.MASTER]


def test_the_master_is_all_that_stays_of_bf16_at_stage_3() -> None:
    numel = sum(parameter.numel() for parameter in Decoder().parameters())
    alone = ranks.call(1, booked_while_built)[0]
    for held in ranks.call(2, booked_while_built):
        assert numel * 4 / 2 <= held <= numel * 4 / 2 * 1.25
        assert held <= alone * 0.75
