"""Recomputation against the plain loop, bit for bit, and what it does to gathers and to memory.

The default suite runs a selection in which every pair of values of two fields meets; ``-m full`` every model of the zoo at every stage.
"""

import contextlib
import copy
import gc
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardbook as sb
from benchmarks.forecast_grid import Point, measure_all_from_the_start
from benchmarks.simulation_grid import pairs_of, simulate
from shardbook.accounts import Account, Tier
from shardbook.engine import selective
from shardbook.engine.engine import Engine
from shardbook.errors import ConfigError, UsageError
from shardbook.events import Booking, Event, Transfer
from tests import ranks
from tests.equality import OPTIMIZERS, PRECISIONS, RECOMPUTES, Case
from tests.pairwise import pairwise
from tests.test_engine_equality import FIELDS, allowed, check
from tests.tier_books import Books
from tests.zoo import ZOO, Decoder

KINDS = [name for name in RECOMPUTES if name != "none"]
WITHOUT_BLOCKS = ("minus_zero", "strided", "passes_through", "no_blocks", "one_layer", "huge_layer")
REFUSED = ("in_place_input",)

SELECTION = [
    Case(**row)
    for row in pairwise(
        {
            **{name: values for name, values in FIELDS.items() if name not in ("scheduled", "weighted", "optimizer")},
            "entry": ["dropout", "nested", "tied", "block_twice", "frozen", "keywords", "buffers", "checkpoint_part"],
            "num_ranks": [2],
            "precision": ["fp32", "bf16"],
            "recompute": KINDS,
        },
        allowed,
    )
]  # fmt: skip


@pytest.mark.ranks
def test_equals_the_plain_loop() -> None:
    check(SELECTION)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("entry", sorted({*ZOO} - {*WITHOUT_BLOCKS, *REFUSED}))
def test_whole_product(entry: str) -> None:
    """Every stage and kind, with types that take turns."""
    kinds = [(stage, recompute) for stage in range(4) for recompute in KINDS]
    others = sorted({*PRECISIONS} - {"fp32", "bf16"})
    rows = [
        {
            "entry": entry, "num_ranks": 2, "stage": stage, "recompute": recompute, "precision": precision,
            "optimizer": "adamw_plain" if entry == "gaps" else sorted(OPTIMIZERS)[index % len(OPTIMIZERS)], "clip": index // 2 % 2 == 0,
            "accumulate": 3 if index % 2 and precision in ("fp32", "bf16") else 1, "empty": index % 3 == 0,
        }
        for index, (stage, recompute) in enumerate(kinds)
        for precision in (("fp32", "bf16", others[index % len(others)])[(index + zlib.crc32(entry.encode())) % 3],)
    ]  # fmt: skip
    check([Case(**row) for row in rows if allowed(row)])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("offload", ["optimizer", "params", "both"])
def test_equals_the_plain_loop_with_offload(offload: str) -> None:
    stages = (1, 2, 3) if offload == "optimizer" else (3,)
    check(
        [
            Case(entry=entry, num_ranks=2, stage=stage, precision=precision, offload=offload, recompute=recompute)
            for entry in ("dropout", "tied")
            for stage in stages
            for precision in ("fp32", "bf16")
            for recompute in KINDS
        ]
    )


# ---- gathers and memory --------------------------------------------------------------------------------------------------


class Feed(nn.Module):
    """Much is saved in it, and only its input has to be."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def feeds(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Feed() for _ in range(depth)))


def engine_of(model: nn.Module, recompute: str = "full", **settings: Any) -> Engine:
    settings = {"stage": 3, "recompute": sb.Recompute(**RECOMPUTES[recompute]), **settings}
    return sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), sb.ZeroConfig(**settings))


def observed_step(stage: int, recompute: str) -> Books:
    """The books of a second step."""
    engine, books = engine_of(feeds(), recompute, stage=stage), Books()
    for step in range(2):
        inputs = torch.ones(64, 64)
        if step:
            with engine.observe(books):
                engine.backward(engine(inputs).square().sum())
                engine.step()
        else:
            engine.backward(engine(inputs).square().sum())
            engine.step()
    engine.close()
    return books


@pytest.mark.ranks
def test_a_unit_is_gathered_as_often_as_without_and_other_accounts_are_the_same() -> None:
    for stage in (0, 3):
        plain = ranks.call(2, observed_step, stage, "none")
        for kind in KINDS:
            for before, after in zip(plain, ranks.call(2, observed_step, stage, kind), strict=True):
                assert after.gathers == before.gathers
                assert sum(after.gathers.values()) == (2 * 6 if stage == 3 else 0)
                mine = (Account.ACTIVATION, Account.WORKSPACE)
                assert {key: value for key, value in after.most.items() if key[0] not in mine} == {
                    key: value for key, value in before.most.items() if key[0] not in mine
                }


def measured(recompute: str) -> tuple[dict[str, int], int]:
    """The books at the peak of a measured step whose activations weigh most, and that peak."""
    model = feeds()
    config = sb.ZeroConfig(stage=0, recompute=sb.Recompute(**RECOMPUTES[recompute]))
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-9), config)
    with sb.measure(model, engine.optimizer) as run:
        for _ in range(2):
            loss = engine(torch.ones(4096, 64)).square().sum()
            engine.backward(loss)
            del loss
            engine.step()
    engine.close()
    found = run.document().reconciliations[0]
    assert sum(found.books.values()) == found.allocated
    return dict(found.books), found.allocated


def test_activations_go_down_and_every_byte_of_a_recomputing_step_is_in_an_account() -> None:
    before, peak = measured("none")
    for kind in KINDS:
        books, allocated = measured(kind)
        assert books["UNACCOUNTED"] == 0, kind
        assert books["ACTIVATION"] < before["ACTIVATION"] * (0.75 if kind in ("second", "selective") else 0.5), kind
        assert allocated < peak, kind
        assert books["PARAM"] == before["PARAM"]


def bookings_of(kind: str, stage: int, fake: bool) -> tuple[list[Any], dict[Any, int]]:
    """Every booking of two steps, and what crossed the link."""
    with FakeTensorMode() if fake else contextlib.nullcontext():
        torch.manual_seed(0)
        model = ZOO["dropout"].build()
        engine, events = engine_of(model, kind, stage=stage), list[Event]()
        with engine.observe(events.append):
            for _ in range(2):
                engine.backward(engine(torch.zeros(2, 6, dtype=torch.long)).logsumexp(-1).sum(), weight=12)
                engine.step()
        engine.close()
    bookings = [(event.account, event.tier, event.unit, event.nbytes, event.phase) for event in events if isinstance(event, Booking)]
    moved = Counter({(event.link, event.unit): 0 for event in events if isinstance(event, Transfer)})
    for event in events:
        if isinstance(event, Transfer):
            moved[event.link, event.unit] += event.nbytes
    return [booking for booking in bookings if booking[0] != Account.COMM], dict(moved)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_book_what_a_real_run_books(kind: str) -> None:
    for stage in (0, 3):
        real = ranks.call(2, bookings_of, kind, stage, False)[0]
        assert ranks.fake_rank(2, bookings_of, kind, stage, True) == real
        assert bool(real[1]) is (kind == "inputs")


POINTS = [
    Point(shape="small decoder", stage=stage, micro_batch=8, optimizer="sgd", recompute=recompute)
    for stage, recompute in product((0, 3), ("full", "every 2", "selective", "offload"))
]


@pytest.mark.full
@pytest.mark.ranks
def test_a_simulated_peak_is_that_of_a_real_run() -> None:
    """To the byte and by account, in the first step and later."""
    torch.set_num_threads(1)
    for point, saw in zip(POINTS, ranks.call(2, measure_all_from_the_start, POINTS)[0], strict=True):
        for pair in pairs_of(point, saw, simulate(point, 0)):
            assert pair.simulated.allocated == pair.measured.allocated, point
            assert pair.simulated.books == {name: nbytes for name, nbytes in pair.measured.books.items() if nbytes}, point


# ---- inputs on the host --------------------------------------------------------------------------------------------------

INPUT_NBYTES = 64 * 64 * 4


def test_inputs_leave_in_forward_and_come_back_one_block_ahead() -> None:
    engine, books = engine_of(feeds(), "inputs", stage=0), Books()
    with engine.observe(books):
        loss = engine(torch.ones(64, 64)).square().sum()
        # block 0 gets the batch, which is no result of the graph; there is nothing to save in keeping a copy of it
        assert books.held[Account.ACTIVATION, Tier.HOST] == 5 * INPUT_NBYTES
        assert books.moved_by_unit == {("device to host", f"{number}"): INPUT_NBYTES for number in range(1, 6)}
        engine.backward(loss)
        del loss
        assert {unit: nbytes for (link, unit), nbytes in books.moved_by_unit.items() if link == "host to device"} == {
            f"{number}": INPUT_NBYTES for number in range(1, 6)
        }
        # at most two inputs are here, beside the generator's states
        assert books.most[Account.ACTIVATION, Tier.DEVICE] == 2 * INPUT_NBYTES + 6 * 5056
        assert not books.held[Account.ACTIVATION, Tier.HOST]
        assert not books.held[Account.ACTIVATION, Tier.DEVICE]
        assert books.most[Account.ACTIVATION, Tier.HOST] == 5 * INPUT_NBYTES
        engine.step()
    engine.close()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("on purpose")


class Unlucky(Feed):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise RuntimeError("on purpose")
        return super().forward(Failing.apply(x) if self.fails == "backward" else x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", ["forward", "backward", "dropped"])
def test_nothing_is_left_of_a_pass_that_ends_early(kind: str, fails: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Feed(), Feed(), Unlucky(), Feed())
    engine = engine_of(model, kind, units=["Feed", "Unlucky"])
    books = Books()
    with engine.observe(books):
        for attempt in (fails, ""):
            model[2].fails = attempt
            if attempt == "dropped":
                loss = engine(torch.ones(8, 64)).sum()
                assert books.held[Account.ACTIVATION, Tier.DEVICE]
                del loss
            elif attempt:
                with pytest.raises(RuntimeError, match="on purpose"):
                    engine.backward(engine(torch.ones(8, 64)).sum())
            else:
                engine.backward(engine(torch.ones(8, 64)).sum())
                engine.step()
            gc.collect()
            assert not books.held[Account.ACTIVATION, Tier.HOST]
            assert not books.held[Account.ACTIVATION, Tier.DEVICE]
    engine.close()


def test_a_retained_graph_is_recomputed_again() -> None:
    for kind in KINDS:
        found: list[list[Tensor]] = []
        for used in (kind, "none"):
            model = feeds(3)
            engine = engine_of(model, used, stage=0)
            inputs = torch.linspace(-1, 1, 64 * 8).view(8, 64).requires_grad_()
            loss = engine(inputs).square().sum()
            found.append([torch.autograd.grad(loss, inputs, retain_graph=True)[0] for _ in range(3)])
            engine.close()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), kind


# ---- selective -----------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Seven products of matrices and attention, as in a decoder's block."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return F.dropout(x + self.down(F.silu(self.gate(x)) * self.up(x)), 0.1)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def operators_of(kind: str) -> Counter[str]:
    """What runs in one step of two such blocks."""
    torch.manual_seed(0)
    engine = engine_of(nn.Sequential(Attending(), Attending()), kind, stage=0)
    with Counted() as counted:
        engine.backward(engine(torch.ones(2, 4, 32).requires_grad_()).sum())
    engine.close()
    return counted.ran


def test_selective_computes_no_attention_and_only_every_second_product_again() -> None:
    plain, full, selective = (operators_of(kind) for kind in ("none", "full", "selective"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    products = {name: counted["mm"] + counted["addmm"] for name, counted in (("none", plain), ("full", full), ("selective", selective))}
    assert (plain[attention], full[attention], selective[attention]) == (2, 4, 2)
    assert products["full"] - products["none"] == 2 * 7
    assert products["selective"] - products["none"] == 2 * 3


class Written(nn.Module):
    """Forward writes to results of products: inside of an operator, by itself, and behind the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        y += x
        y = self.second(torch.tanh(y))
        for part in y.unsafe_chunk(2, -1):
            part.mul_(2)
        y = self.third(torch.sin(y))
        return y, torch.sin(y + 1)  # what backward needs, y + 1, has no write to y behind it


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Written() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, y = block(x)
            x = x.add_(1) + y
        return x


def gradients(make: Callable[[], nn.Module], kind: str, batch: Tensor, num_steps: int = 2) -> list[Tensor]:
    """Of the parameters, and their values after the steps, under a seed."""
    torch.manual_seed(0)
    model = make()
    engine, found = engine_of(model, kind, stage=2), list[Tensor]()
    for _ in range(num_steps):
        engine.backward(engine(batch).square().sum(), weight=100)
        with engine.grads() as held:
            found += [value.clone() for value in held.values()]
        engine.step()
    found += [value.clone() for value in engine.state_dict().values()] + [torch.get_rng_state()]
    engine.close()
    return found


@pytest.mark.parametrize(
    "make",
    [Behind, lambda: nn.Sequential(Attending(dropout=0.3), Attending(dropout=0.3)), lambda: nn.Sequential(Attending(), Attending())],
    ids=["written to", "attention with dropout", "attention"],
)
def test_what_is_kept_never_changes_a_bit(make: Callable[[], nn.Module]) -> None:
    batch = torch.randn(2, 4, 16 if make is Behind else 32, generator=torch.Generator().manual_seed(1))
    plain = gradients(make, "none", batch)
    for kind in KINDS:
        assert all(torch.equal(one, other) for one, other in zip(gradients(make, kind, batch), plain, strict=True)), kind


@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"])
def test_attention_is_kept_unless_it_draws_numbers(name: str) -> None:
    func = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    place = [argument.name for argument in func._schema.arguments].index("dropout_p")
    for dropout in (0.0, 0.1):
        by_place = (*(None for _ in range(place)), dropout)
        assert selective.Choice()(func, by_place, {}) is selective.Choice()(func, (), {"dropout_p": dropout}) is (dropout == 0.0)
    assert selective.Choice()(func, (), {})


def test_buffers_are_the_same_objects_with_the_values_of_one_forward() -> None:
    found: list[list[Tensor]] = []
    for kind in (*KINDS, "none"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
        before = list(model.buffers())
        engine = engine_of(model, kind, stage=0)
        loss = sum(engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))).square().sum() for number in range(2))
        engine.backward(loss)
        engine.step()
        assert all(one is other for one, other in zip(model.buffers(), before, strict=True))
        found.append([value.clone() for value in (*model.buffers(), *engine.state_dict().values())])
        engine.close()
    assert all(torch.equal(one, other) for other in found for one, other in zip(found[-1], other, strict=True))


# ---- which blocks, and what becomes of the model -------------------------------------------------------------------------


def recomputed(model: nn.Module, every: int = 1, units: list[str] | None = None) -> list[str]:
    config = sb.ZeroConfig(stage=0, recompute=sb.Recompute(policy="full", every=every), units=units)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    chosen = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    engine.close()
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    return chosen


def test_which_blocks() -> None:
    assert recomputed(Decoder(depth=5)) == [f"blocks.{number}" for number in range(5)]
    assert recomputed(Decoder(depth=5), every=2) == ["blocks.0", "blocks.2", "blocks.4"]
    assert recomputed(ZOO["nested"].build()) == ["blocks.0", "blocks.1"]
    inner = [f"blocks.{outer}.layers.{number}" for outer in range(2) for number in range(2)]
    assert recomputed(ZOO["nested"].build(), units=["Outer", "Block"]) == inner
    assert recomputed(Decoder(depth=3), units=["embedding", "blocks.1", "head"]) == ["blocks.1"]
    assert recomputed(ZOO["huge_layer"].build(), units=["Block"]) == ["blocks.0"]
    assert recomputed(ZOO["several_lists"].build(), every=3) == ["encoder.0", "decoder.1"]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ZeroConfig\.recompute: the model has no repeated blocks.*units="):
        recomputed(nn.Linear(2, 2))


def test_a_block_that_changes_its_input_is_named() -> None:
    class Changing(Feed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    for kind in KINDS:
        engine = engine_of(nn.Sequential(Feed(), Feed(), Changing(), Changing()), kind)
        with pytest.raises(UsageError, match=r"unit '2' changes an input in place.*x\.clone\(\)"):
            engine(torch.ones(2, 64))
        engine.close()


def test_evaluation_recomputes_nothing() -> None:
    engine = engine_of(feeds(), "full", stage=0)
    with Counted() as graded:
        engine(torch.ones(2, 64))
    books = Books()
    with engine.observe(books), Counted() as evaluated, torch.no_grad():
        engine(torch.ones(2, 64))
    assert not books.most[Account.ACTIVATION, Tier.DEVICE]
    assert evaluated.ran["addmm"] == graded.ran["addmm"] == 12
    engine.model.eval()  # the mode of the model is not that of the pass
    with engine.observe(books), Counted() as trained:
        engine.backward(engine(torch.ones(2, 64)).sum())
    assert trained.ran["addmm"] == 12 + 6
    engine.close()


def test_copies_are_under_no_engine_and_the_engine_leaves_with_its_last_holder() -> None:
    model, batch = feeds(3), torch.linspace(-1, 1, 128).view(2, 64)
    expected = model(batch)
    engine = engine_of(model, "full", stage=0)
    twin = copy.deepcopy(model)
    assert all("forward" in module.__dict__ for module in model)
    with torch.no_grad():
        twin[0].up.weight.zero_()  # a copy's forward is its own
    assert not torch.equal(twin(batch), expected)
    assert torch.equal(model(batch), expected)
    del engine
    gc.collect()
    assert not any("forward" in module.__dict__ for module in model)


def test_a_forward_of_ones_own_comes_back() -> None:
    model = feeds(2)
    mine = model[0].forward
    model[0].forward = lambda x: mine(x) * 2
    before = model[0].forward
    engine = engine_of(model, "full", stage=0)
    assert model[0].forward is not before
    engine.close()
    assert model[0].forward is before
    assert "forward" not in model[1].__dict__
