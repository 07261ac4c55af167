"""The closed form against the engine's own books: to the byte where it claims equality, never below where it is a bound."""

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardbook.config import Precision, Prefetch, ZeroConfig
from shardbook.engine.layout import lay_out
from shardbook.errors import ConfigError
from shardbook.events import Booking
from shardbook.forecasting.buffers import piece_numels, shard_numel
from shardbook.forecasting.closed_form import OPTIMIZERS, Moments, closed_form, padding
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.structure import FlatFacts, GroupFacts, Orders, Structure, UnitFacts
from tests import ranks
from tests.pairwise import pairwise
from tests.sampled import every
from tests.zoo import ZOO

PERSISTENT = ("PARAM", "MASTER", "MOMENT")
STATED = (*PERSISTENT, "GRAD")  # accounts whose padding is stated
PRECISIONS: dict[str, Precision] = {
    **{name: Precision.preset(name) for name in ("fp32", "bf16", "fp16", "pure-bf16", "2+2+4+8")},
    "fp64 sums": Precision(param="bf16", reduce="fp64", grad="fp32"),
    "no master": Precision(param="bf16", master=None),
}
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
}
SMALL = DecoderConfig(layers=3, width=36, heads=6, kv_heads=2, ffn=50, vocab=47)
DECODERS = {"llama": SMALL, "llama tied": replace(SMALL, tied=True), "llama wide head": replace(SMALL, vocab=1009, layers=2)}

# Units used one after the other, all gradients there, the root's first: every form claims equality.
STRAIGHT = ("llama", "llama wide head")
# All gradients there: what persists is equal, what is highest within a step is never below.
COMPLETE = (
    "plain", "llama tied", "tied", "frozen", "adapters", "odd_shapes", "fewer_than_ranks", "nested", "mixed_types", "kept_types",
    "integer_weights", "no_blocks", "shared_between_units", "shared_with_root", "block_twice", "block_listed_twice", "called_twice",
    "strided", "gaps", "checkpoint_block", "checkpoint_block_reentrant", "checkpoint_twice", "checkpoint_pair", "buffers", "dropout",
)  # fmt: skip
# Some parameters never have a gradient, or only on some ranks: the moments that are counted need not all be there.
INCOMPLETE = ("never_used", "used_on_some_ranks", "experts")
KINDS = ("llama wide head", "tied", "frozen", "odd_shapes", "fewer_than_ranks", "nested", "mixed_types", "kept_types", "experts")
ON_FAKE_TENSORS = ("llama", "frozen", "odd_shapes")
FAKE_STAGES = ((0, "bf16"), (1, "bf16"), (2, "2+2+4+8"), (3, "bf16"), (3, "2+2+4+8"))


@dataclass(frozen=True)
class Case:
    """One engine to build; the fields from ``accumulate`` on are ZeroConfig's."""

    model: str
    stage: int
    precision: str = "fp32"
    optimizer: str = "adamw"
    accumulate: int = 1
    ahead: int = 1
    limit: int | None = None
    reduction: str = "auto"

    @property
    def config(self) -> ZeroConfig:
        precision = PRECISIONS[self.precision]
        return ZeroConfig(
            stage=self.stage,
            precision=replace(precision, keep=ZOO[self.model].keep) if self.model in ZOO else precision,
            prefetch=Prefetch(ahead=self.ahead, limit=self.limit),
            accumulate=self.accumulate,
            reduction=self.reduction,
            loss_scale=1.0 if precision.param == "fp16" else None,
        )

    @property
    def moments(self) -> Moments:
        return OPTIMIZERS[self.optimizer.removesuffix(" foreach")]


@dataclass(frozen=True)
class Seen:
    """One rank: what the forms say before and after the first step, and what the engine books."""

    case: Case
    planned: dict[str, int]
    form: dict[str, int]
    form_padding: dict[str, int]
    held: dict[str, int]  # after the last step
    held_padding: dict[str, int]
    highest: dict[str, int]  # in the steps after the first
    highest_padding: dict[str, int]


class Watch:
    """Live bytes and padding by account, and the most that each account held since :meth:`restart`."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.padding: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        self.highest, self.highest_padding = Counter(self.held), Counter(self.padding)

    def __call__(self, event: Any) -> None:
        if isinstance(event, Booking):
            self.held[event.account] += event.nbytes
            self.padding[event.account] += event.padding
            self.highest[event.account] = max(self.highest[event.account], self.held[event.account])
            self.highest_padding[event.account] = max(self.highest_padding[event.account], self.padding[event.account])


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(DECODERS[name]) if name in DECODERS else ZOO[name].build()


def loss_of(case: Case, engine: Any, rank: int, step: int, micro: int, *, fake: bool) -> tuple[Tensor, Any]:
    if case.model in DECODERS:
        tokens = torch.zeros(2, 6, dtype=torch.long) if fake else torch.randint(47, (2, 6))
        return engine(tokens, tokens)
    if fake:
        return engine(torch.zeros(2, 6, dtype=torch.long)).float().logsumexp(-1).sum(), 12
    return ZOO[case.model].forward(engine, ZOO[case.model].batches(rank, step, micro))


def run_case(case: Case, *, fake: bool, forget_orders: bool = False, steps: int = 2) -> Seen:
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    import shardbook as sb

    rank = dist.get_rank() if dist.is_initialized() else 0
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model = build(case.model)
        engine = sb.Engine(model, MAKERS[case.optimizer](model.parameters()), case.config)
        planned = closed_form(engine.structure(), case.config, case.moments)
        watch = Watch()
        with engine.observe(watch):
            for step in range(steps):
                for micro in range(case.accumulate):
                    engine.backward(*loss_of(case, engine, rank, step, micro, fake=fake))
                assert engine.step().applied
                if step == 0:
                    watch.restart()
        ledger = sb.Ledger(engine)
        books = {account: nbytes for (account, tier), nbytes in ledger.balances().items() if tier == "device"}
        ledger.close()
        assert books == {account: nbytes for account, nbytes in watch.held.items() if nbytes}
        structure = engine.structure()
        if forget_orders:
            structure = replace(structure, orders=None)
        seen = Seen(
            case,
            dict(planned),
            dict(closed_form(structure, case.config, case.moments)),
            dict(padding(structure, case.config)),
            dict(watch.held),
            dict(watch.padding),
            dict(watch.highest),
            dict(watch.highest_padding),
        )
        engine.close()
    return seen


def run_cases(cases: Sequence[Case], fake: bool = False) -> list[Seen]:
    return [run_case(case, fake=fake) for case in cases]


def check(seen: Seen) -> None:
    case, form = seen.case, seen.form
    complete = case.model not in INCOMPLETE
    for account in PERSISTENT:
        booked = seen.held.get(account, 0)
        if complete or account != "MOMENT":
            assert form[account] == booked, (case, account)
        assert form[account] >= booked, (case, account)
        assert seen.planned[account] == form[account], (case, account)
        assert seen.form_padding[account] == seen.held_padding.get(account, 0), (case, account)
    assert form["GRAD"] == seen.highest.get("GRAD", 0), case
    assert seen.form_padding["GRAD"] == seen.highest_padding.get("GRAD", 0), case
    assert form["COMM"] == seen.highest.get("COMM", 0), case
    assert not any(nbytes for account, nbytes in seen.held.items() if account not in PERSISTENT), case
    for account in ("GATHERED", "GRAD_FULL"):
        booked = seen.highest.get(account, 0)
        assert form[account] >= booked, (case, account)
        if case.model in STRAIGHT and case.ahead and case.limit is None:
            assert form[account] == booked, (case, account)
            assert seen.planned[account] == booked, (case, account)


def allowed(row: dict[str, Any]) -> bool:
    return row.get("accumulate", 1) == 1 or PRECISIONS[row.get("precision", "fp32")].grad_dtype not in ("bf16", "fp16")


def chosen(models: Sequence[str], precisions: Sequence[str]) -> list[Case]:
    return [case for _, case in chosen_on((1,), models, precisions)]


@cache
def chosen_on(num_ranks: Sequence[int], models: Sequence[str], precisions: Sequence[str] = tuple(PRECISIONS)) -> list[tuple[int, Case]]:
    """Cases, each with the ranks that it is for."""
    fields = {
        "model": models, "stage": (0, 1, 2, 3), "precision": precisions, "optimizer": tuple(MAKERS), "accumulate": (1, 2),
        "ahead": (1, 0, 2), "reduction": ("auto", "native"), "num_ranks": num_ranks,
    }  # fmt: skip
    return [(row.pop("num_ranks"), Case(**row)) for row in pairwise(fields, allowed)]


# ---- against the engine ----------------------------------------------------------------------------------------------------


def in_full(num_ranks: int) -> Any:
    return pytest.param(num_ranks, marks=pytest.mark.full)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [in_full(1), 2, in_full(3), in_full(4)])
def test_every_stage_and_precision_of_a_decoder(num_ranks: int) -> None:
    precisions = [name for name in PRECISIONS if num_ranks <= 2 or name not in ("fp64 sums", "no master")]
    cases = [Case("llama", stage, precision) for stage in range(4) for precision in precisions]
    for of_rank in ranks.call(num_ranks, run_cases, cases):
        for seen in of_rank:
            check(seen)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, in_full(3), in_full(4)])
def test_models_of_several_kinds(num_ranks: int) -> None:
    """Tied and frozen parameters, fewer elements than 64 or than ranks, odd shapes, several types, units in units, missing gradients."""
    cases = chosen(KINDS, ("fp32", "bf16", "2+2+4+8", "pure-bf16"))
    for of_rank in ranks.call(num_ranks, run_cases, cases):
        for seen in of_rank:
            check(seen)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_models_of_every_kind(num_ranks: int) -> None:
    """Every pair of values of two fields, the number of ranks one of them, over the four together."""
    cases = [case for ranks_of_case, case in chosen_on((1, 2, 3, 4), (*STRAIGHT, *COMPLETE, *INCOMPLETE)) if ranks_of_case == num_ranks]
    for of_rank in ranks.call(num_ranks, run_cases, cases, seconds=300):
        for seen in of_rank:
            check(seen)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks, where", every(2, [64, 1024], [0.0, 0.5, 1.0]))
def test_any_number_of_ranks_on_fake_tensors(num_ranks: int, where: float) -> None:
    """The first rank, one in the middle and the last, whose shard may be all padding."""
    rank = round(where * (num_ranks - 1))
    cases = [Case(model, stage, precision) for stage, precision in FAKE_STAGES for model in ON_FAKE_TENSORS]
    for seen in ranks.fake_rank(num_ranks, run_cases, cases, True, rank=rank):
        check(seen)


def test_the_last_of_many_ranks_owns_padding_alone() -> None:
    facts = FlatFacts(numels=(100, 30))
    last = Structure.of_equal_units(facts, GroupFacts(num_ranks=64, rank=63))
    held, stated = closed_form(last, ZeroConfig(stage=3)), padding(last, ZeroConfig(stage=3))
    assert held["PARAM"] == stated["PARAM"] == 256
    assert held["MOMENT"] == 0
    first = closed_form(Structure.of_equal_units(facts, GroupFacts(num_ranks=64)), ZeroConfig(stage=3))
    assert first["MOMENT"] == 2 * 4 * 64 + 4


@pytest.mark.parametrize("limit", [1, 20_000, 37_000, 37_248, 50_000])
def test_a_limit_of_prefetch_bounds_what_is_gathered(limit: int) -> None:
    """A unit is 18.6 kB and two of them 37.2: between these the limit decides."""
    seen = run_case(Case("llama", 3, "bf16", ahead=2, limit=limit), fake=False)
    without = run_case(Case("llama", 3, "bf16", ahead=2), fake=False)
    assert seen.highest["GATHERED"] <= seen.form["GATHERED"] <= without.form["GATHERED"]
    assert seen.form["GATHERED"] <= max(limit, run_case(Case("llama", 3, "bf16", ahead=0), fake=False).form["GATHERED"])


@pytest.mark.parametrize("model", ["order_varies", "used_in_some_steps", *COMPLETE[:4]])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_without_a_known_order_the_forms_are_bounds(model: str, ahead: int) -> None:
    """Models that change their order run ahead in vain and hold gradients back; no order has to be known for the bound."""
    for stage in (1, 3):
        seen = run_case(Case(model, stage, "bf16", ahead=ahead), fake=False, forget_orders=True, steps=4)
        for account in ("GATHERED", "GRAD_FULL", "COMM"):
            assert seen.form[account] >= seen.highest.get(account, 0), (stage, account)


def test_orders_follow_what_the_steps_did() -> None:
    """A tied embedding is used first and last: before a step that is not known."""
    import shardbook as sb

    model = build("llama tied")
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters()), ZeroConfig(stage=3))
    names = [unit.name for unit in engine.structure().units]
    before = engine.structure().orders
    assert before == Orders(forward=(0, 1, 2, 3, 4), backward=(0, 4, 3, 2, 1), reduce=(4, 3, 2, 1, 0))
    tokens = torch.zeros(2, 6, dtype=torch.long)
    engine.backward(*engine(tokens, tokens))
    engine.step()
    after = engine.structure().orders
    assert after is not None
    assert [names[number] for number in after.forward] == ["root", "embedding", "blocks.0", "blocks.1", "blocks.2", "embedding"]
    assert [names[number] for number in after.backward][:3] == ["root", "embedding", "blocks.2"]
    assert after.reduce == (4, 3, 2, 1, 0)
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_thaw_are_followed(stage: int) -> None:
    import shardbook as sb

    model, config, watch = build("frozen"), ZeroConfig(stage=stage, precision=PRECISIONS["bf16"]), Watch()
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters()), config)
    totals: list[int] = []
    with engine.observe(watch):
        for step in range(2):
            if step:
                model.requires_grad_(True)
            engine.backward(*loss_of(Case("frozen", stage), engine, 0, step, 0, fake=False))
            engine.step()
            form = closed_form(engine.structure(), config)
            assert {account: form[account] for account in PERSISTENT} == {account: watch.held[account] for account in PERSISTENT}
            totals.append(form["MOMENT"])
    assert totals[0] < totals[1]
    engine.close()


# ---- the formulas themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 8, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_convention_2_2_4_8_is_the_zero_papers(stage: int, num_ranks: int) -> None:
    """16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N, where nothing is padding; only Adam's step numbers come on top."""
    psi = 2**20
    model = Structure.of_equal_units(FlatFacts(numels=(psi,), param="bf16"), GroupFacts(num_ranks=num_ranks))
    config = ZeroConfig(stage=stage, precision=Precision.preset("2+2+4+8"))
    form = closed_form(model, config, Moments(per_element=2))
    paper = [16 * psi, 4 * psi + 12 * psi // num_ranks, 2 * psi + 14 * psi // num_ranks, 16 * psi // num_ranks]
    assert sum(form[account] for account in STATED) == paper[stage]
    assert not any(padding(model, config).values())


@given(
    numels=st.lists(st.integers(0, 1000), max_size=8),
    num_ranks=st.integers(1, 70),
    header=st.sampled_from([0, 64]),
)
def test_the_arithmetic_is_the_engines(numels: list[int], num_ranks: int, header: int) -> None:
    layout = lay_out([(str(number), numel) for number, numel in enumerate(numels)], num_ranks, header)
    assert shard_numel(tuple(numels), num_ranks, header) == layout.shard_numel
    for rank in range(num_ranks):
        assert list(piece_numels(tuple(numels), *layout.bounds(rank))) == [span.numel for span in layout.spans(rank)]


@given(numels=st.lists(st.integers(0, 500), min_size=1, max_size=6), num_ranks=st.integers(1, 9))
def test_the_ranks_together_hold_every_element_once(numels: list[int], num_ranks: int) -> None:
    flat = FlatFacts(numels=tuple(numels))
    real = moments = 0
    for rank in range(num_ranks):
        structure = Structure.of_equal_units(flat, GroupFacts(num_ranks=num_ranks, rank=rank))
        real += closed_form(structure, ZeroConfig(stage=3))["PARAM"] - padding(structure, ZeroConfig(stage=3))["PARAM"]
        moments += closed_form(structure, ZeroConfig(stage=3), Moments(per_element=1))["MOMENT"]
    assert real == moments == 4 * sum(numels)


def test_it_is_instant_and_brings_no_torch() -> None:
    code = (
        "import sys, time\n"
        "from shardbook.config import ZeroConfig\n"
        "from shardbook.forecasting.closed_form import closed_form\n"
        "from shardbook.structure import FlatFacts, GroupFacts, Structure\n"
        "block = FlatFacts(numels=(16384 * 16384, 1024 * 16384, 1024 * 16384, 16384 * 16384, *[53248 * 16384] * 3, 16384, 16384))\n"
        "began = time.perf_counter()\n"
        "closed_form(Structure.of_equal_units(block, GroupFacts(num_ranks=16384, rank=16383), num_units=126), ZeroConfig(stage=3))\n"
        "print(time.perf_counter() - began, sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    seconds, modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split(" ", 1)
    assert modules.strip() == "[]"
    assert float(seconds) < 0.2


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FlatFacts(numels=(3, -1)), "FlatFacts.numels = -1"),
        (lambda: FlatFacts(numels=(3,), param="bf17"), 'the nearest is "bf16"'),
        (lambda: FlatFacts(numels=(3,), param="8-bit"), "write trainable=False"),
        (lambda: GroupFacts(num_ranks=0), "GroupFacts.num_ranks = 0"),
        (lambda: GroupFacts(num_ranks=2, rank=2), "0 to 1 with num_ranks=2"),
        (lambda: GroupFacts(num_ranks=2, transport="mpi"), "GroupFacts.transport = 'mpi'"),
        (lambda: Moments(per_element=-1), "Moments.per_element = -1"),
        (
            lambda: closed_form(
                Structure.of_equal_units(FlatFacts(numels=(3,)), GroupFacts(num_ranks=1)), ZeroConfig(precision=Precision(param="bf16"))
            ),
            "write kept=True",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_units_in_units_come_before_their_inner_ones_in_backward() -> None:
    units = [UnitFacts(name=str(number), around=around) for number, around in enumerate([(), (), (1,), (1,), (), (4,)])]
    assert Structure.in_order_of_registration(units, GroupFacts(num_ranks=1)).orders == Orders(
        forward=(0, 1, 2, 3, 4, 5), backward=(0, 4, 5, 1, 3, 2), reduce=()
    )
