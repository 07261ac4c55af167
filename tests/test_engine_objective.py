"""The objective as a contract: all losses over all weights, whatever the ranks and micro-batches; what is not finite is skipped by all."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import ranks
from tests.equality import OPTIMIZERS, SEED, Case, Trace, built, differences, engine_config, forward, make_scheduler, reported, same_bits
from tests.oracle import PlainRun, Types
from tests.zoo import ZOO, Batch, Block, Decoder, cross_entropy

pytestmark = pytest.mark.ranks


def this_rank() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_engine(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None, **options: Any) -> Any:
    import shardbook as sb

    return sb.Engine(model, optimizer, sb.ZeroConfig(**options), scheduler=scheduler)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def final(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_parameters()}


# ---- one objective, however it is cut ------------------------------------------------------------------------------------


def train_cut(num_micro: int, stage: int) -> Trace:
    """The same eight micro-batches a step, dealt to the ranks in order, ``num_micro`` to each."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=stage, accumulate=num_micro, clip_grad_norm=1.0)
    steps: list[dict[str, Any]] = []
    for step in range(3):
        for number in range(rank * num_micro, (rank + 1) * num_micro):
            loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(number, step, 0))
            engine.backward(loss, weight=weight)
        steps.append(reported(engine.step()))
    return Trace(steps, final(engine))


def test_ranks_and_micro_batches_are_one_objective() -> None:
    """Two ranks with one micro-batch add the same two gradients in the same order as one rank with two: not one bit differs."""
    alone = ranks.call(1, train_cut, 2, 3)[0]
    for stage in range(4):
        assert differences(ranks.call(2, train_cut, 1, stage)[0], alone) == []


def test_more_ranks_agree_within_rounding() -> None:
    """Eight micro-batches on 1, 2 and 4 ranks: the sums are bracketed differently, so the last bits may differ, and no more."""
    runs = [ranks.call(n, train_cut, 8 // n, 2)[0] for n in (1, 2, 4)]
    for run in runs[1:]:
        for one, other in zip(run.steps, runs[0].steps, strict=True):
            assert one["weight"] == other["weight"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert one["norm"] == pytest.approx(other["norm"], rel=1e-4)


def unequal_weights(kind: str) -> list[float]:
    """Every form in which a weight may be given."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=2)
    weight = {"int": 3 + rank, "float": 3.0 + rank, "tensor": torch.tensor(3 + rank), "float tensor": torch.tensor([3.0 + rank])}[kind]
    batch = ZOO["plain"].batches(rank, 0, 0)
    loss, _ = ZOO["plain"].forward(engine, batch)
    engine.backward(loss, weight=weight)
    report = engine.step()
    return [report.loss, report.weight, report.grad_norm]


@pytest.mark.parametrize("kind", ["float", "tensor", "float tensor"])
def test_a_weight_may_be_a_number_or_a_tensor(kind: str) -> None:
    results = ranks.call(2, unequal_weights, kind)
    assert results == ranks.call(2, unequal_weights, "int")
    assert results[0] == results[1]
    assert results[0][1] == 7.0


def plain_backward() -> tuple[list[Any], Trace]:
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=3, accumulate=2)
    reports = []
    for step in range(2):
        for micro in range(2):
            loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, micro))
            (loss / weight).backward()
        reports.append(engine.step())
    return [report.loss for report in reports], Trace([], final(engine))


def plain_of(
    entry: str = "plain", *, num_ranks: int, steps: list[list[list[Any]]], weighted: bool = True, each: bool = True, **options: Any
) -> Trace:
    """A plain run over given batches, SGD with step size 0.1."""
    run = PlainRun(
        built(ZOO[entry], SEED),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
        lambda model, batch: forward(Case(entry=entry, weighted=weighted), model, batch),
        num_ranks=num_ranks,
        reduce_each=each,
        **options,
    )
    outcomes = [vars(run.step(batches)) for batches in steps]
    return Trace(outcomes, {name: value.clone() for name, value in run.full_parameters().items()})


def test_backward_on_the_tensor_counts_one_and_reports_no_loss() -> None:
    results = ranks.call(2, plain_backward)
    batches = [[[ZOO["plain"].batches(rank, step, micro) for micro in range(2)] for rank in range(2)] for step in range(2)]
    expected = plain_of(num_ranks=2, steps=batches, weighted=False)
    assert results[0][0] == [None, None]
    assert differences(results[0][1], Trace([], expected.parameters)) == []


# ---- ragged ends and empty micro-batches ---------------------------------------------------------------------------------


def ragged(counts: list[int], empty_on: int | None) -> Trace:
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=3, accumulate=max(counts))
    steps = []
    for step, count in enumerate(counts):
        for micro in range(count):
            last = True if count < max(counts) and micro == count - 1 else None
            if rank == empty_on:
                engine.backward(None, last=last)
                continue
            loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, micro))
            engine.backward(loss, weight=weight, last=last)
        steps.append(reported(engine.step()))
    return Trace(steps, final(engine))


@pytest.mark.parametrize("empty_on", [None, 0, 1, 2])
def test_ragged_ends_and_a_rank_that_never_has_data(empty_on: int | None) -> None:
    counts = [3, 1, 2]
    results = ranks.call(3, ragged, counts, empty_on)
    batches = [
        [[None if rank == empty_on else ZOO["plain"].batches(rank, step, micro) for micro in range(count)] for rank in range(3)]
        for step, count in enumerate(counts)
    ]
    expected = plain_of(num_ranks=3, steps=batches)
    for rank, trace in enumerate(results):
        plain_steps = [{name: value for name, value in step.items() if name != "learning_rates"} for step in expected.steps]
        assert differences(trace, Trace(plain_steps, expected.parameters), rank=rank) == []


def all_empty() -> str:
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=3)
    rank, _ = this_rank()
    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, 0, 0))
    engine.backward(loss, weight=weight)
    engine.step()
    return refusal(lambda: (engine.backward(None), engine.step()))


def refusal(action: Callable[[], Any]) -> str:
    """The message of the error that shardbook raises; an empty text if it raises none."""
    import shardbook.errors

    try:
        action()
    except shardbook.errors.ShardbookError as error:
        return str(error)
    return ""


def zero_weight(stage: int) -> str:
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=stage)

    def step() -> None:
        loss, _ = ZOO["plain"].forward(engine, ZOO["plain"].batches(0, 0, 0))
        engine.backward(loss, weight=0)
        engine.step()

    return refusal(step)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_without_weight_is_refused(num_ranks: int, stage: int) -> None:
    for message in ranks.call(num_ranks, zero_weight, stage):
        assert "weight" in message
    for message in ranks.call(num_ranks, all_empty):
        assert "weight" in message


# ---- mixing --------------------------------------------------------------------------------------------------------------


def mixed(how: str) -> str:
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=2, accumulate=2)

    def step() -> None:
        for micro in range(2):
            loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, 0, micro))
            given = {"micro-batches": micro == 0, "ranks": rank == 0, "tensor": True}[how]
            if how == "tensor" and micro == 1:
                loss.backward()
            else:
                engine.backward(loss, weight=weight if given else None)
        engine.step()

    return refusal(step)


@pytest.mark.parametrize("how", ["micro-batches", "ranks", "tensor"])
def test_weights_on_some_and_not_on_others_are_refused_on_every_rank(how: str) -> None:
    for message in ranks.call(2, mixed, how):
        assert "weight" in message


# ---- what is not finite --------------------------------------------------------------------------------------------------


class Poisoned(Block):
    """Its spare parameter has a gradient that is not finite, when asked for; all values stay finite."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(70))

    def forward(self, x: Tensor, poison: bool = False) -> Tensor:
        x = super().forward(x) + self.spare.sum() * 1e-3
        return x + (self.spare * 0.0).sqrt().sum() if poison else x


class PoisonedDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__(Poisoned)

    def forward(self, inputs: Tensor, poison: bool = False) -> Tensor:
        x = self.embedding(inputs)
        for index, block in enumerate(self.blocks):
            x = block(x, poison and index == 1)
        return self.head(x)


def poison_run(kind: str, stage: int, num_steps: int = 4) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, Tensor], int]:
    """Rank 1 spoils step 1. What each step reported, parameters before that step and at the end, applied steps."""
    rank, num_ranks = this_rank()
    torch.manual_seed(SEED)
    model = PoisonedDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = make_scheduler(optimizer)
    engine = make_engine(model, optimizer, scheduler, stage=stage, clip_grad_norm=1.0)
    reports: list[dict[str, Any]] = []
    before: dict[str, Tensor] = {}
    for step in range(num_steps):
        spoiled = rank == num_ranks - 1 and step == 1
        if step == 1:
            before = final(engine)
        loss, weight = poison_forward(engine, ZOO["plain"].batches(rank, step, 0), spoiled, kind)
        engine.backward(loss, weight=weight)
        report = engine.step()
        reports.append(reported(report) | {"nonfinite": report.nonfinite})
        if step == 1:
            after = final(engine)
            assert all(same_bits(after[name], before[name]) for name in (before if rank == 0 else ())), "the step was applied in part"
    return reports, before, final(engine), engine.num_steps


def poison_forward(model: Callable[..., Any], batch: Batch, spoiled: bool, kind: str) -> tuple[Tensor, Any]:
    torch.manual_seed(batch.seed)
    loss = cross_entropy(model(batch.args[0], spoiled and kind == "gradient"), batch)
    if spoiled and kind == "loss":
        loss = loss * math.nan
    if spoiled and kind == "only the loss":
        loss = loss + math.inf
    return loss, batch.weight


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["loss", "only the loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_by_all_and_the_next_is_fine(kind: str, stage: int) -> None:
    results = ranks.call(2, poison_run, kind, stage)
    torch.manual_seed(SEED)
    run = PlainRun(
        PoisonedDecoder(),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=0.01),
        lambda model, item: poison_forward(model, item[0], item[1], kind),
        num_ranks=2,
        clip=1.0,
        make_scheduler=make_scheduler,
    )
    outcomes = []
    for step in range(4):
        outcomes.append(run.step([[(ZOO["plain"].batches(rank, step, 0), rank == 1 and step == 1)] for rank in range(2)]))
    assert [outcome.applied for outcome in outcomes] == [True, False, True, True]
    for reports, _, _, num_steps in results:
        assert [report["applied"] for report in reports] == [True, False, True, True]
        assert num_steps == 3
        for step in (0, 2, 3):
            assert reports[step]["nonfinite"] is None
            assert (reports[step]["loss"], reports[step]["norm"]) == (outcomes[step].loss, outcomes[step].norm)
        assert reports[1]["nonfinite"]
        if kind == "gradient":
            assert reports[1]["nonfinite"] == "blocks.1.spare"
        assert reports[1]["learning_rates"] == reports[2]["learning_rates"]  # the scheduler waits as well
    assert differences(Trace([], results[0][2]), Trace([], dict(run.full_parameters().items()))) == []


# ---- fp16 ----------------------------------------------------------------------------------------------------------------


def overflowing(stage: int, scale: Any) -> list[dict[str, Any]]:
    """fp16; the last rank's loss of step 1 is far too large."""
    rank, num_ranks = this_rank()
    import shardbook as sb

    model = built(ZOO["plain"], SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = make_engine(model, optimizer, stage=stage, precision=sb.Precision(param="fp16"), loss_scale=scale)
    reports = []
    for step in range(4):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, 0))
        engine.backward(
            loss * (1e7 if rank == num_ranks - 1 and step == 1 else 0.01), weight=weight
        )  # 65,536 of a whole loss is too much as well
        report = engine.step()
        reports.append(reported(report) | {"nonfinite": report.nonfinite, "scale": report.loss_scale})
    return reports


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_overflow_skips_all_ranks_halves_the_scale_and_goes_on(stage: int) -> None:
    names = {name for name, _ in built(ZOO["plain"], SEED).named_parameters()}
    for reports in ranks.call(3, overflowing, stage, "dynamic"):
        assert [report["applied"] for report in reports] == [True, False, True, True]
        assert reports[1]["nonfinite"] in names
        scales = [report["scale"] for report in reports]
        assert scales[0] == scales[1] == 2 * scales[2] == 2 * scales[3]
        assert math.log2(scales[0]).is_integer()


def test_a_fixed_scale_stays() -> None:
    for reports in ranks.call(2, overflowing, 2, 1024.0):
        assert [report["applied"] for report in reports] == [True, False, True, True]
        assert {report["scale"] for report in reports} == {1024.0}


def scale_run(scale: float) -> Trace:
    rank, _ = this_rank()
    case = Case(precision="fp16", optimizer="adamw_plain", stage=3)
    import dataclasses

    model = built(ZOO["plain"], SEED)
    optimizer = OPTIMIZERS[case.optimizer](list(model.named_parameters()))
    import shardbook as sb

    engine = sb.Engine(model, optimizer, dataclasses.replace(engine_config(case), loss_scale=scale))
    steps = []
    for step in range(3):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, 0))
        engine.backward(loss, weight=weight)
        steps.append(reported(engine.step()))
    return Trace(steps, final(engine))


@pytest.mark.parametrize("scale", [1.0, 4.0, 4096.0])
def test_a_scale_equals_the_plain_loop_with_it(scale: float) -> None:
    results = ranks.call(2, scale_run, scale)
    run = PlainRun(
        built(ZOO["plain"], SEED),
        OPTIMIZERS["adamw_plain"],
        ZOO["plain"].forward,
        num_ranks=2,
        types=Types(param="fp16"),
        clip=1.3,
        reduce_each=True,
        loss_scale=scale,
    )
    steps = [vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])) for step in range(3)]
    assert differences(results[0], Trace(steps, run.full_parameters())) == []


# ---- the report, the gradients -------------------------------------------------------------------------------------------


def count_reads(clip: float | None) -> tuple[int, int, bool]:
    """How often the host reads a tensor's value in forward and backward, and in the step; whether the report can be read later."""
    from torch.overrides import TorchFunctionMode

    reading = {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.cpu,
    }
    reading |= {torch.Tensor.numpy, torch.Tensor.nonzero, torch.nonzero, torch.equal, torch.allclose, torch.Tensor.__index__}

    class Count(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Count.count += func in reading
            return func(*args, **(kwargs or {}))

    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=3, clip_grad_norm=clip)
    counts: list[int] = []
    for step in range(2):
        batch = ZOO["plain"].batches(rank, step, 0)
        Count.count = 0
        with Count():
            loss, weight = ZOO["plain"].forward(engine, batch)
            engine.backward(loss, weight=weight)
        until_step = Count.count
        Count.count = 0
        with Count():
            report = engine.step()
        counts = [until_step, Count.count]
    return counts[0], counts[1], math.isfinite(report.loss) and math.isfinite(report.grad_norm)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_host_reads_nothing_before_the_step_and_once_in_it(num_ranks: int, clip: float | None) -> None:
    for before, within, finite in ranks.call(num_ranks, count_reads, clip):
        assert before == 0
        assert within <= 1
        assert finite


def report_later() -> list[tuple[float, float]]:
    """Reports of earlier steps read after later ones keep their own values."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model), stage=2)
    reports, at_once = [], []
    for step in range(3):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, 0))
        engine.backward(loss, weight=weight)
        reports.append(engine.step())
    for report in reports:
        at_once.append((report.loss, report.grad_norm))
    return at_once


def test_a_report_keeps_its_own_values() -> None:
    batches = [[[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)] for step in range(3)]
    expected = plain_of(num_ranks=2, steps=batches)
    for values in ranks.call(2, report_later):
        assert values == [(step["loss"], step["norm"]) for step in expected.steps]


def grads_run(stage: int, change: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = make_engine(model, sgd(model, lr=0.1 if change else 0.05), stage=stage)
    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, 0, 0))
    engine.backward(loss, weight=weight)
    with engine.grads() as gradients:
        seen = {name: gradient.clone() for name, gradient in gradients.items()}
        if change:
            for gradient in gradients.values():
                gradient.mul_(0.5)
    report = engine.step()
    return seen, final(engine), report.grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_read_and_changed_before_the_step(stage: int) -> None:
    """Halving all of them is halving the step size, exactly; together the pieces are the plain loop's sums."""
    changed, kept = ranks.call(2, grads_run, stage, True), ranks.call(2, grads_run, stage, False)
    assert differences(Trace([], changed[0][1]), Trace([], kept[0][1])) == []
    assert changed[0][2] == kept[0][2] / 2
    model = built(ZOO["plain"], SEED)
    totals: dict[str, Tensor] = {}
    for rank in range(2):
        ZOO["plain"].forward(model, ZOO["plain"].batches(rank, 0, 0))[0].backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            totals[name] = parameter.grad.clone() if rank == 0 else totals[name] + parameter.grad
        model.zero_grad(set_to_none=True)
    for name, total in totals.items():
        pieces = [seen[name].reshape(-1) for seen, _, _ in kept if name in seen]
        whole = pieces[0] if pieces[0].numel() == total.numel() else torch.cat(pieces)
        assert same_bits(whole, total.reshape(-1)), name
