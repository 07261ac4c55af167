"""``sb.simulate`` where it is easily wrong: blocks that only seem alike, unusual models, wrong arguments, odd surroundings."""

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook.errors import ConfigError
from shardbook.simulation.extrapolate import WORTHWHILE
from tests import ranks

WIDTH, DEEP, ODD = 16, WORTHWHILE + 2, 12


class Block(nn.Module):
    """``setting``: something that a description of the module does not have."""

    def __init__(self, setting: Any = None) -> None:
        super().__init__()
        self.setting = setting
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = DEEP, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(number) for number in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.one(number, block, x)
        return self.head(x).tanh()  # FSDP2 warns of a view

    def one(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


def thrice(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Takes three times as much, and gives one."""
    return block(x.repeat(3, 1, 1)).unflatten(0, (3, -1)).sum(0)


def batch() -> tuple[Tensor]:
    return (torch.randn(4, 8, WIDTH),)


def loss(output: Tensor) -> tuple[Tensor, None]:
    return output.sum(), None


def simulate(build: Callable[[], nn.Module] = Net, **how: Any) -> sb.Forecast:
    asked: dict[str, Any] = {"ranks": 4, "optimizer": partial(torch.optim.AdamW, fused=True), "loss": loss} | how
    config = asked.pop("config", sb.ZeroConfig(stage=3))
    return sb.simulate(asked.pop("build_model", build), asked.pop("build_batch", batch), config, **asked)


# ---- blocks that seem alike ----------------------------------------------------------------------------------------------------


class NinthApart(Net):
    """The loop treats one block as no other, by its number."""

    def one(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return thrice(block, x) if number == ODD else block(x)


class EveryEighth(Net):
    def one(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return thrice(block, x) if number % 8 == 7 else block(x)


class FirstCheckpointed(Net):
    def one(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if number < ODD else block(x)


class FromAList(Net):
    """A list that all share, asked for one's own number, as transformers' ``layer_types`` is."""

    times = tuple(3 if number == ODD else 1 for number in range(DEEP))

    def one(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return thrice(block, x) if self.times[number] == 3 else block(x)


class OwnNumber(Block):
    def forward(self, x: Tensor) -> Tensor:
        return thrice(super().forward, x) if self.setting == ODD else super().forward(x)


class OfAnObject(Block):
    def forward(self, x: Tensor) -> Tensor:
        return thrice(super().forward, x) if self.setting(1) == 3 else super().forward(x)


class HoldsATensor(Block):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.table = [torch.zeros(900 if number == ODD else 1, WIDTH)]


def times(factor: int, number: int) -> int:
    return factor * number


def one_has_a_hook() -> nn.Module:
    model = Net()
    model.blocks[ODD].register_forward_hook(lambda _, __, output: thrice(F.gelu, output))
    return model


SEEM_ALIKE: dict[str, Callable[[], nn.Module]] = {
    "by number": NinthApart,
    "every eighth": EveryEighth,
    "some recomputed": FirstCheckpointed,
    "a shared list": FromAList,
    "own number": partial(Net, block=OwnNumber),
    "an object's answer": partial(Net, block=lambda number: OfAnObject(partial(times, 3 if number == ODD else 1))),
    "a tensor in a list": partial(Net, block=HoldsATensor),
    "a hook": one_has_a_hook,
}


SAMPLED = ("own number",)


@pytest.mark.parametrize(
    "build", [pytest.param(build, id=name, marks=() if name in SAMPLED else pytest.mark.full) for name, build in SEEM_ALIKE.items()]
)
def test_blocks_that_only_seem_alike_all_run(build):
    """Under FSDP2 the peak is in the blocks, so that a wrong line would show."""
    few, every = (simulate(build, engine="fsdp2", blocks=blocks) for blocks in ("auto", "all"))
    assert few.simulated.blocks is None
    assert few.accounts == every.accounts
    assert every.peak_phase == "backward"


class LastApart(Net):
    """The last one is shorter, however many there are."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return self.head(self.blocks[-1](x[:, :1]))


class LossOfEach(Net):
    def forward(self, x: Tensor) -> Tensor:
        told: Any = 0
        for block in self.blocks:
            x = block(x)
            told = told + self.head(x).relu().sum()
        return told


@pytest.mark.parametrize("build", [Net, *(pytest.param(build, marks=pytest.mark.full) for build in (LastApart, LossOfEach))])
def test_blocks_that_are_alike_don_t(build):
    few, every = (simulate(build, blocks=blocks) for blocks in ("auto", "all"))
    assert few.simulated.blocks == 7
    assert (few.accounts, few.persistent, few.phases) == (every.accounts, every.persistent, every.phases)


@pytest.mark.full
def test_a_step_that_two_instants_share_is_not_told_from_few_blocks():
    """Of frozen blocks FSDP2's gathers make two peaks of the same height and of other accounts."""

    def build() -> nn.Module:
        model = Net()
        model.blocks.requires_grad_(False)
        return model

    few, every = (simulate(build, engine="fsdp2", blocks=blocks) for blocks in ("auto", "all"))
    assert few.simulated.first_accounts == every.simulated.first_accounts


# ---- unusual models and settings, beside real ranks ----------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer and a trained one of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Routed(nn.Module):
    """Each expert takes the rows that it wants most: their number does not depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, WIDTH, 24)), nn.Parameter(torch.randn(3, 24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).t().topk(8, dim=-1)
        taken = torch.gather(rows.expand(3, -1, -1), 1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH))
        out = torch.bmm(F.silu(torch.bmm(taken, self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, chosen.reshape(-1), out.reshape(-1, WIDTH))


class Odd(Net):
    """No-dimensional, empty, unused; and buffers."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(40, WIDTH))
        self.register_buffer("places", torch.arange(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale + self.table[self.places]) + self.nothing.sum()


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    found = list(parameters)
    wide, narrow = [one for one in found if one.ndim > 1], [one for one in found if one.ndim < 2]
    return torch.optim.Adam([{"params": wide, "weight_decay": 0.1}, {"params": narrow}], amsgrad=True, foreach=True)


Case = tuple[Callable[[], nn.Module], dict[str, Any], Callable[[Any], torch.optim.Optimizer]]
FUSED = partial(torch.optim.AdamW, fused=True)
CASES: dict[str, Case] = {
    "adapters": (lambda: nn.Sequential(*(Adapted() for _ in range(3))), {}, FUSED),
    "experts": (Routed, {}, FUSED),
    "encoder": (lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True) for _ in range(2))), {}, FUSED),
    "odd": (Odd, {}, FUSED),
    "nothing ahead": (partial(Net, 3), {"prefetch": sb.Prefetch(ahead=0)}, FUSED),
    "micro-batches": (partial(Net, 3), {"accumulate": 3}, FUSED),
    "groups": (partial(Net, 3), {"clip_grad_norm": 1.0}, in_groups),
    "no state": (partial(Net, 3), {}, partial(torch.optim.SGD, lr=0.1)),
    "units": (partial(Net, 3), {"units": ["blocks.0", "blocks.2"]}, FUSED),
}


def measured(name: str, stage: Any) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    """On each rank: of the first step and the second the peak, its accounts, and the height of each phase."""
    build, settings, optimizer = CASES[name]
    torch.manual_seed(0)
    model = build()
    stepped = optimizer(model.parameters())
    engine = sb.Engine(model, stepped, sb.ZeroConfig(stage=stage, **settings))
    found = []
    for _ in range(2):
        gc.collect()
        with sb.measure(model, stepped) as run:
            for _ in range(settings.get("accumulate", 1)):
                one = batch()
                output = engine(*one)
                engine.backward(output.sum())
                del one, output  # the loss goes with backward, the batch and the output before the step
            engine.step()
        if stage < 3:
            with engine.gathered():
                pass
        mine = next(one for one in run.document().reconciliations if one.rank == (dist.get_rank() if dist.is_initialized() else 0))
        books = {account: nbytes for account, nbytes in mine.books.items() if nbytes}
        found.append((mine.allocated, books, {height.phase: height.allocated for height in run.heights()}))
    engine.close()
    return found


def heights(told: sb.Forecast, *, first: bool) -> dict[str, int]:
    return {phase.phase: phase.nbytes for phase in told.phases if phase.first == first}


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_unusual_ones_are_as_real_ranks_have_them(name, num_ranks):
    build, settings, optimizer = CASES[name]
    stage: Any = 3 if len(name) % 2 else 2
    for rank, (first, later) in enumerate(ranks.call(num_ranks, measured, name, stage)):
        config = sb.ZeroConfig(stage=stage, **settings)
        told = simulate(build, config=config, optimizer=optimizer, ranks=num_ranks, rank=rank)
        assert (told.simulated.first_peak, told.simulated.first_accounts, heights(told, first=True)) == first
        assert (told.peak_allocated, told.accounts, heights(told, first=False)) == later


# ---- wrong arguments ------------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer": ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))])}, "optimizer = a SGD: allowed is a function"),
    "a name": ({"optimizer": "adamw"}, "optimizer = a str: allowed is a function"),
    "a model": ({"build_model": nn.Linear(2, 2)}, "build_model = a Linear: allowed is a function"),
    "a batch": ({"build_batch": torch.zeros(2)}, "build_batch = a Tensor: allowed is a function"),
    "a loss's name": ({"loss": "mean"}, "loss = a str: allowed is a function"),
    "a scalar": ({"loss": torch.sum}, r"loss\(...\) returned a FakeTensor; it must return \(loss_sum, weight\)"),
    "three": ({"loss": lambda output: (output.sum(), 1, 1)}, r"loss\(...\) returned a tuple of 3; it must"),
    "no scalar": ({"loss": lambda output: (output, 1)}, r"a tensor of shape \[4, 8, 4\] as loss_sum; it must be a scalar"),
    "a number": ({"loss": lambda _: (1.0, 1)}, "a float as loss_sum; it must be a scalar"),
    "an allocator": ({"allocator": 3, "device": "a100-40gb"}, "allocator = 3: allowed is text as in PYTORCH_CUDA_ALLOC_CONF"),
}


@pytest.mark.parametrize(("how", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_with_what_is_allowed(how, says):
    with pytest.raises(ConfigError, match=says):
        simulate(partial(Net, 2), **how)


# ---- odd surroundings -----------------------------------------------------------------------------------------------------------


def left_behind() -> tuple[Any, ...]:
    hooks = len(module_hooks._global_forward_pre_hooks)
    return dist.is_initialized(), _get_current_dispatch_mode_stack(), torch.UntypedStorage.resize_, torch.utils.swap_tensors, hooks


@pytest.mark.full
@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda one: one.__name__)
def test_a_step_is_one_of_training_whatever_is_open(surroundings):
    expected = simulate(partial(Net, 2))
    with surroundings():
        assert simulate(partial(Net, 2)).accounts == expected.accounts


def test_a_thread_has_the_same_answer():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(simulate(partial(Net, 2)).accounts))
    thread.start()
    thread.join()
    assert found == [simulate(partial(Net, 2)).accounts]


@pytest.mark.parametrize("depth", [2, DEEP])
def test_ctrl_c_leaves_nothing(depth):
    """Also where the whole model is looked at, to see whether a few blocks will do."""

    def interrupted(_: Tensor) -> tuple[Tensor, None]:
        raise KeyboardInterrupt

    before = left_behind()
    with pytest.raises(KeyboardInterrupt):
        simulate(partial(Net, depth), loss=interrupted)
    assert left_behind() == before
