"""What else a person does around an engine: evaluating, several engines, frozen models, entry points, compiled blocks, state."""

import copy
import gc
import os
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.events import Booking, Mark, Traffic
from tests import ranks
from tests.equality import OPTIMIZERS, SEED, Trace, built, differences, make_scheduler, reported, same_bits
from tests.oracle import PlainRun, Types
from tests.zoo import ZOO, Block, Decoder, cross_entropy

pytestmark = pytest.mark.ranks


def this_rank() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def engine_of(model: nn.Module, optimizer: Any = "sgd", scheduler: Any = None, **options: Any) -> Any:
    import shardbook as sb

    if optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return sb.Engine(model, optimizer, sb.ZeroConfig(**options), scheduler=scheduler)


def train(engine: Any, rank: int, steps: range, entry: str = "plain") -> list[dict[str, Any]]:
    reports = []
    for step in steps:
        loss, weight = ZOO[entry].forward(engine, ZOO[entry].batches(rank, step, 0))
        engine.backward(loss, weight=weight)
        reports.append(reported(engine.step()))
    return reports


def final(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.full_parameters()}


def plain(
    num_ranks: int, num_steps: int, entry: str = "plain", optimizer: Any = None, model: nn.Module | None = None, **options: Any
) -> Trace:
    run = PlainRun(
        model or built(ZOO[entry], SEED),
        optimizer or (lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)),
        ZOO[entry].forward,
        num_ranks=num_ranks,
        reduce_each=True,
        **options,
    )
    steps = [vars(run.step([[ZOO[entry].batches(rank, step, 0)] for rank in range(num_ranks)])) for step in range(num_steps)]
    return Trace([dict(step.items()) for step in steps], run.full_parameters())


# ---- evaluation ----------------------------------------------------------------------------------------------------------


def evaluate(engine: Any, step: int) -> float:
    engine.model.eval()
    with torch.no_grad():
        loss, weight = ZOO["dropout"].forward(engine, ZOO["dropout"].batches(9, step, 0))
    engine.model.train()
    return float(loss / weight)


def with_evaluation(stage: int, who: str, mode: str) -> tuple[Trace, list[float]]:
    """Evaluates between steps, and between micro-batches, on all ranks or on one."""
    rank, num_ranks = this_rank()
    engine = engine_of(built(ZOO["dropout"], SEED), stage=stage, accumulate=2)
    mine = who == "all" or rank == num_ranks - 1
    losses: list[float] = []
    steps = []
    for step in range(3):
        for micro in range(2):
            loss, weight = ZOO["dropout"].forward(engine, ZOO["dropout"].batches(rank, step, micro))
            if mode == "between forward and backward" and mine:
                losses.append(evaluate(engine, step))
            engine.backward(loss, weight=weight)
            if mode == "between micro-batches" and mine:
                losses.append(evaluate(engine, step))
        steps.append(reported(engine.step()))
        if mode == "between steps" and mine:
            losses += [evaluate(engine, step), evaluate(engine, step)]
    return Trace(steps, final(engine)), losses


@pytest.mark.parametrize("mode", ["between steps", "between micro-batches", "between forward and backward"])
@pytest.mark.parametrize("who, stage", [("all", 0), ("all", 1), ("all", 2), ("all", 3), ("one", 0), ("one", 1), ("one", 2)])
def test_evaluation_changes_nothing_and_sees_the_new_values(who: str, stage: int, mode: str) -> None:
    results = ranks.call(2, with_evaluation, stage, who, mode)
    run = PlainRun(
        built(ZOO["dropout"], SEED),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9),
        ZOO["dropout"].forward,
        num_ranks=2,
        reduce_each=stage >= 2,
    )
    steps, losses = [], []
    for step in range(3):
        if mode != "between steps":
            losses += [evaluate_plain(run.model, step)] * 2
        steps.append(vars(run.step([[ZOO["dropout"].batches(rank, step, micro) for micro in range(2)] for rank in range(2)])))
        if mode == "between steps":
            losses += [evaluate_plain(run.model, step)] * 2
    expected = Trace(steps, run.full_parameters())
    for rank, (trace, seen) in enumerate(results):
        assert differences(Trace(trace.steps, trace.parameters), expected, rank=rank) == []
        if who == "all" or rank == 1:
            assert seen == losses


def evaluate_plain(model: nn.Module, step: int) -> float:
    model.eval()
    with torch.no_grad():
        loss, weight = ZOO["dropout"].forward(model, ZOO["dropout"].batches(9, step, 0))
    model.train()
    return float(loss / weight)


def inference(stage: int) -> tuple[list[float], bool]:
    """Under inference_mode, and a forward with gradients that is never followed by backward."""
    rank, _ = this_rank()
    engine = engine_of(built(ZOO["plain"], SEED), stage=stage)
    batch = ZOO["plain"].batches(3, 0, 0)
    seen = []
    for step in range(2):
        with torch.inference_mode():
            seen.append(float(ZOO["plain"].forward(engine, batch)[0]))
        seen.append(float(ZOO["plain"].forward(engine, batch)[0].detach()))
        train(engine, rank, range(step, step + 1))
    return seen, seen[0] == seen[1] and seen[2] == seen[3] and seen[0] != seen[2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inference_mode_and_a_forward_without_backward(stage: int) -> None:
    results = ranks.call(2, inference, stage)
    assert all(sound for _, sound in results)
    assert results[0][0] == results[1][0]


# ---- several engines -----------------------------------------------------------------------------------------------------


def two_engines(stages: tuple[int, int]) -> list[Trace]:
    """A pair trained in turns, as in distillation or an actor and a critic."""
    rank, _ = this_rank()
    entries = ("plain", "nested")
    engines = [engine_of(built(ZOO[entry], SEED), stage=stage) for entry, stage in zip(entries, stages, strict=True)]
    steps: list[list[dict[str, Any]]] = [[], []]
    for step in range(3):
        losses = [ZOO[entry].forward(engine, ZOO[entry].batches(rank, step, 0)) for entry, engine in zip(entries, engines, strict=True)]
        for engine, (loss, weight) in zip(engines, losses, strict=True):
            engine.backward(loss, weight=weight)
        for own, engine in zip(steps, engines, strict=True):
            own.append(reported(engine.step()))
    return [Trace(own, final(engine)) for own, engine in zip(steps, engines, strict=True)]


@pytest.mark.parametrize("stages", [(3, 3), (0, 3), (2, 1)])
def test_several_engines_in_one_process(stages: tuple[int, int]) -> None:
    first, second = ranks.call(2, two_engines, stages)[0]
    assert differences(first, plain(2, 3, "plain")) == []
    assert differences(second, plain(2, 3, "nested")) == []


def chained(stage: int) -> Trace:
    """One engine's output is the other's input: one backward through both."""
    rank, _ = this_rank()
    torch.manual_seed(SEED)
    first, second = Decoder(depth=1), nn.Sequential(nn.Linear(41, 24), nn.Tanh(), nn.Linear(24, 41))
    engines = [engine_of(first, stage=stage), engine_of(second, stage=stage)]
    steps = []
    for step in range(2):
        batch = ZOO["plain"].batches(rank, step, 0)
        loss = cross_entropy(engines[1](engines[0](batch.args[0])), batch) / batch.weight
        loss.backward()
        steps += [float(engine.step().grad_norm) for engine in engines]
    return Trace(
        [{"norms": tuple(steps)}], {f"{i}.{name}": value for i, engine in enumerate(engines) for name, value in final(engine).items()}
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_backward_through_two_engines(stage: int) -> None:
    result = ranks.call(2, chained, stage)[0]
    torch.manual_seed(SEED)
    both = nn.Sequential(Decoder(depth=1), nn.Sequential(nn.Linear(41, 24), nn.Tanh(), nn.Linear(24, 41)))
    run = PlainRun(
        both,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9),
        lambda model, batch: (cross_entropy(model(batch.args[0]), batch) / batch.weight, None),
        num_ranks=2,
    )
    for step in range(2):
        run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])
    expected = dict(run.full_parameters().items())
    assert differences(Trace([], result.parameters), Trace([], expected)) == []


def one_after_the_other(count: int, close: bool) -> tuple[int, int]:
    """Threads of this process after the first engine is gone, and after the last."""
    rank, _ = this_rank()
    threads = []
    for _ in range(count):
        engine = engine_of(built(ZOO["plain"], SEED), stage=3)
        train(engine, rank, range(1))
        if close:
            engine.close()
        del engine
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count())
    import time

    until = time.monotonic() + 5  # threads of gloo end by themselves, a little after the group
    while len(os.listdir("/proc/self/task")) > threads[0] and time.monotonic() < until:
        time.sleep(0.05)
    return threads[0], len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("close", [True, False])
def test_engines_one_after_the_other_leave_nothing_behind(close: bool) -> None:
    """Neither Python's threads nor gloo's."""
    for first, last in ranks.call(2, one_after_the_other, 6, close):
        assert last <= first


def last_step(stage: int, how: str, behind: float = 0.1) -> bool:
    """Rank 0 is done at once, the other ones are slower: it closes its engine, drops it, or its process ends."""
    import time

    rank, _ = this_rank()
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6)))
    engine: Any = engine_of(model, stage=stage)
    for step in range(2):
        engine.backward(engine(torch.randn(3, 64)).square().sum(), weight=3)
        if step == 1 and rank:
            engine.optimizer.register_step_post_hook(lambda *_: time.sleep(behind))  # between the exchange and the refresh
        engine.step()
    if rank == 0:
        if how == "closes":
            engine.close()
        elif how == "drops":
            del engine, model
            gc.collect()
        return True
    time.sleep(0.5)
    return all(bool(torch.isfinite(parameter.detach()).all()) for parameter in model.parameters()) if stage < 3 else True


@pytest.mark.parametrize("how", ["closes", "drops", "ends"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_may_end_right_after_its_last_step(stage: int, how: str) -> None:
    """What the others still need of it is sent before it goes: nobody is told that a rank was lost."""
    for ending in ranks.fresh_ranks(3, last_step, stage, how, leave=True):
        assert (ending.how, ending.value) == ("value", True), f"{ending.kind}: {ending.message}"


@pytest.mark.full
@pytest.mark.parametrize("how", ["closes", "ends"])
def test_a_rank_may_end_long_before_a_slow_one(how: str) -> None:
    """Slow is not wrong, at the end as well."""
    for ending in ranks.fresh_ranks(2, last_step, 1, how, behind=7.0, leave=True):
        assert (ending.how, ending.value) == ("value", True), f"{ending.kind}: {ending.message}"


def frozen_engine(stage: int, entry: str) -> tuple[dict[str, Any], dict[str, int]]:
    """No optimizer: a model that is only evaluated, sharded all the same."""
    rank, _ = this_rank()
    engine = engine_of(built(ZOO[entry], SEED).requires_grad_(False), None, stage=stage)
    held: defaultdict[str, int] = defaultdict(int)
    with engine.observe(
        lambda event: held.__setitem__(event.account, held[event.account] + event.nbytes) if isinstance(event, Booking) else None
    ):
        pass
    x = torch.randn(2, 6, 24, requires_grad=True)
    loss, _ = ZOO[entry].forward(engine, ZOO[entry].batches(rank, 0, 0))
    through = engine.model.get_submodule("blocks.0")(x).sum() if stage < 3 else None
    if through is not None:
        through.backward()
        assert x.grad is not None
    return {"loss": float(loss.detach())}, {account: nbytes for account, nbytes in held.items() if nbytes}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_engine_without_an_optimizer(stage: int) -> None:
    model = built(ZOO["plain"], SEED)
    numel = sum(parameter.numel() for parameter in model.parameters())
    for rank, (values, held) in enumerate(ranks.call(2, frozen_engine, stage, "plain")):
        assert values["loss"] == float(ZOO["plain"].forward(model, ZOO["plain"].batches(rank, 0, 0))[0].detach())
        assert set(held) <= {Account.PARAM}
        assert held.get(Account.PARAM, 0) <= numel * 4 * (0.6 if stage == 3 else 1.1)


def teacher_and_student(stage: int) -> Trace:
    """Distillation: gradients go through the frozen engine's inputs? No: its outputs are targets."""
    rank, _ = this_rank()
    teacher = engine_of(built(ZOO["nested"], SEED).requires_grad_(False), None, stage=stage)
    student = engine_of(built(ZOO["plain"], SEED), stage=stage)
    steps = []
    for step in range(2):
        batch = ZOO["plain"].batches(rank, step, 0)
        with torch.no_grad():
            target = teacher(batch.args[0]).softmax(-1)
        loss = -(student(batch.args[0]).log_softmax(-1) * target).sum()
        student.backward(loss, weight=12)
        steps.append(reported(student.step()))
    return Trace(steps, final(student))


@pytest.mark.parametrize("stage", [1, 3])
def test_distillation(stage: int) -> None:
    teacher = built(ZOO["nested"], SEED)

    def forward(model: Any, batch: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            target = teacher(batch.args[0]).softmax(-1)
        return -(model(batch.args[0]).log_softmax(-1) * target).sum(), 12

    run = PlainRun(
        built(ZOO["plain"], SEED), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9), forward, num_ranks=2
    )
    steps = [vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])) for step in range(2)]
    assert differences(ranks.call(2, teacher_and_student, stage)[0], Trace(steps, run.full_parameters())) == []


# ---- frozen later, thawed later ------------------------------------------------------------------------------------------


def toggled(stage: int) -> Trace:
    """A trained parameter is frozen for a step and trained again."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = engine_of(model, stage=stage)
    parameter = dict(model.named_parameters())["blocks.1.up.weight"]
    steps = []
    for step in range(3):
        parameter.requires_grad_(step != 1)
        steps += train(engine, rank, range(step, step + 1))
    return Trace(steps, final(engine))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_may_be_frozen_for_a_while(stage: int) -> None:
    model = built(ZOO["plain"], SEED)
    run = PlainRun(model, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9), ZOO["plain"].forward, num_ranks=2)
    steps = []
    for step in range(3):
        dict(model.named_parameters())["blocks.1.up.weight"].requires_grad_(step != 1)
        steps.append(vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])))
    assert differences(ranks.call(2, toggled, stage)[0], Trace(steps, run.full_parameters())) == []


# ---- other entry points, compiled blocks ---------------------------------------------------------------------------------


class TwoEntries(Decoder):
    """Encodes and decodes by two methods; forward is neither."""

    def encode(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks[:2]:
            x = block(x)
        return x

    def decode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.head(self.blocks[2](x)) * scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decode(self.encode(inputs))


def two_entries(stage: int) -> Trace:
    rank, _ = this_rank()
    torch.manual_seed(SEED)
    model = TwoEntries()
    engine = engine_of(model, stage=stage)
    engine.register_forward("encode")
    engine.register_forward("decode")
    steps = []
    for step in range(3):
        batch = ZOO["plain"].batches(rank, step, 0)
        loss = cross_entropy(model.decode(model.encode(batch.args[0]), scale=0.5), batch)
        engine.backward(loss, weight=batch.weight)
        steps.append(reported(engine.step()))
    return Trace(steps, final(engine))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_other_methods_gather_when_registered(stage: int) -> None:
    torch.manual_seed(SEED)
    run = PlainRun(
        TwoEntries(),
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9),
        lambda model, batch: (cross_entropy(model(batch.args[0]) * 0.5, batch), batch.weight),
        num_ranks=2,
    )
    steps = [vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])) for step in range(3)]
    assert differences(ranks.call(2, two_entries, stage)[0], Trace(steps, run.full_parameters())) == []


def compiled(stage: int, backend: str, how: str, precision: str) -> Trace:
    """Blocks, or the whole model, compiled before the engine is built."""
    import warnings

    import shardbook as sb

    warnings.simplefilter("default")  # the compiler warns of its own doings
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    if how == "in place":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=backend)
    elif how == "wrapped":
        for index in range(3):
            model.blocks[index] = torch.compile(model.blocks[index], backend=backend)  # type: ignore[index,operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision)))
    steps = train(engine, rank, range(3))
    return Trace(steps, {name.replace("_orig_mod.", ""): value for name, value in final(engine).items()})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks(stage: int, backend: str, how: str) -> None:
    """The eager backends run the same kernels, so not one bit differs."""
    result = ranks.call(2, compiled, stage, backend, how, "fp32", seconds=180)[0]
    assert differences(result, plain(2, 3)) == []


# ---- state, schedulers ---------------------------------------------------------------------------------------------------


def with_state(stage: int, optimizer: str) -> Trace:
    """An optimizer that has stepped before the engine takes it over."""
    rank, _ = this_rank()
    model = built(ZOO["strided"], SEED)
    made = OPTIMIZERS[optimizer](list(model.named_parameters()))
    early_steps(model, made)
    engine = engine_of(model, made, stage=stage)
    return Trace(train(engine, rank, range(3), "strided"), final(engine))


def early_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        ZOO["strided"].forward(model, ZOO["strided"].batches(7, step, 0))[0].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_state_goes_on(stage: int, optimizer: str) -> None:
    model = built(ZOO["strided"], SEED)

    def make(named: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[optimizer](named)
        early_steps(model, made)
        return made

    expected = plain(3, 3, "strided", make, model)  # on three ranks the cuts fall inside of parameters
    result = ranks.call(3, with_state, stage, optimizer)[0]
    assert differences(result, Trace(expected.steps, dict(expected.parameters.items()))) == []


def scheduled(kind: str, handed_over: bool) -> tuple[Trace, list[float]]:
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = SCHEDULERS[kind](optimizer)
    engine = engine_of(model, optimizer, scheduler if handed_over else None, stage=2)
    steps = []
    for step in range(4):
        steps += train(engine, rank, range(step, step + 1))
        if not handed_over:
            scheduler.step()
    return Trace(steps, final(engine)), [group["lr"] for group in engine.optimizer.param_groups]


SCHEDULERS: dict[str, Any] = {
    "lambda": make_scheduler,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_schedulers_step_once_per_applied_step(kind: str, handed_over: bool) -> None:
    run = PlainRun(
        built(ZOO["plain"], SEED),
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=0.01),
        ZOO["plain"].forward,
        num_ranks=2,
        make_scheduler=SCHEDULERS[kind],
    )
    steps = []
    for step in range(4):
        rates = tuple(float(group["lr"]) for group in run.optimizer.param_groups)
        steps.append(vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])) | {"learning_rates": rates})
    trace, rates_after = ranks.call(2, scheduled, kind, handed_over)[0]
    assert differences(trace, Trace(steps, run.full_parameters())) == []
    assert rates_after == [group["lr"] for group in run.optimizer.param_groups]


def changed_rate() -> Trace:
    """Settings of a group are changed by hand between steps, through the optimizer the person holds."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer, stage=3)
    steps = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        steps += train(engine, rank, range(step, step + 1))
    assert engine.optimizer is optimizer
    return Trace(steps, final(engine))


def test_groups_stay_the_persons_to_change() -> None:
    run = PlainRun(
        built(ZOO["plain"], SEED), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), ZOO["plain"].forward, num_ranks=2
    )
    steps = []
    for step in range(3):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        steps.append(vars(run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])))
    assert differences(ranks.call(2, changed_rate)[0], Trace(steps, run.full_parameters())) == []


# ---- errors in the middle ------------------------------------------------------------------------------------------------


def recovers(stage: int) -> tuple[str, Trace | None]:
    """All ranks raise in forward, then in backward; both are caught, and training goes on. An error of shardbook's, or the run."""
    from shardbook.errors import ShardbookError

    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = engine_of(model, stage=stage)
    steps = train(engine, rank, range(1))

    def fail(*_: Any) -> None:
        raise ArithmeticError("here")

    try:
        for kind in ("forward", "backward"):
            block = model.get_submodule("blocks.1")
            handle = block.register_forward_pre_hook(fail) if kind == "forward" else block.register_full_backward_hook(fail)
            try:
                loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, 8, 0))
                engine.backward(loss, weight=weight)
            except ArithmeticError:
                handle.remove()
            else:
                raise AssertionError(f"nothing was raised in {kind}")
        steps += train(engine, rank, range(1, 3))
    except ShardbookError as error:
        return str(error), None
    return "", Trace(steps, final(engine))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_an_error_that_was_caught(num_ranks: int, stage: int) -> None:
    """On one rank as if nothing had been. On several the ranks may have got to different places, so they may be told to end instead."""
    results = ranks.call(num_ranks, recovers, stage)
    if num_ranks > 1 and all(text for text, _ in results):
        assert all("ArithmeticError" in text for text, _ in results)
        return
    assert [text for text, _ in results] == [""] * num_ranks
    assert results[0][1] is not None
    assert differences(results[0][1], plain(num_ranks, 3)) == []


def stale_graph(stage: int) -> str:
    """A graph from before a step is used after it, as torch would not allow either."""
    rank, _ = this_rank()
    engine = engine_of(built(ZOO["plain"], SEED), stage=stage)
    old, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, 0, 0))
    train(engine, rank, range(1))
    try:
        engine.backward(old, weight=weight)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_through_values_of_before_the_step_raises(stage: int, num_ranks: int) -> None:
    for text in ranks.call(num_ranks, stale_graph, stage):
        assert "version" in text or "changed" in text or "modified" in text, text


# ---- describing, observing -----------------------------------------------------------------------------------------------


def described(stage: int, precision: str) -> str:
    import shardbook as sb

    model = built(ZOO["tied"], SEED)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision))
    return sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config).describe()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_describe_names_units_owners_and_the_convention(stage: int) -> None:
    texts = ranks.call(2, described, stage, "bf16")
    model = built(ZOO["tied"], SEED)
    for rank, text in enumerate(texts):
        assert f"stage {stage}" in text
        assert f"rank {rank} of 2" in text
        assert "bf16 parameters 2" in text
        assert "rank order" in text
        for unit in ("embedding", "blocks.0", "blocks.1", "blocks.2"):
            assert unit in text
    owned = [{name for name, _ in model.named_parameters() if f"owns {name} " in text} for text in texts]
    assert owned[0] | owned[1] == {name for name, _ in model.named_parameters()}


def observed(stage: int, precision: str, entry: str, accumulate: int) -> tuple[list[dict[str, int]], dict[str, int], list[str]]:
    """Balances after each of three steps, the smallest balance ever, and marks that were opened and not closed."""
    rank, _ = this_rank()
    import shardbook as sb

    model = built(ZOO[entry], SEED)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision), accumulate=accumulate)
    engine = sb.Engine(model, torch.optim.AdamW(trainable, lr=0.01), config)
    held: defaultdict[tuple[str, str], int] = defaultdict(int)
    lowest: defaultdict[str, int] = defaultdict(int)
    marks: list[str] = []

    def take(event: Any) -> None:
        if isinstance(event, Booking):
            held[event.account, event.unit] += event.nbytes
            lowest[event.account] = min(lowest[event.account], held[event.account, event.unit])
            assert abs(event.padding) <= abs(event.nbytes)
        elif isinstance(event, Mark):
            name = f"{event.name} {event.unit}"
            marks.append(name) if event.edge == "begin" else marks.remove(name)
        else:
            assert isinstance(event, Traffic)
            assert event.sent_nbytes >= 0

    after: list[dict[str, int]] = []
    with engine.observe(take):
        for step in range(3):
            for micro in range(accumulate):
                loss, weight = ZOO[entry].forward(engine, ZOO[entry].batches(rank, step, micro))
                engine.backward(loss, weight=weight)
            engine.step()
            totals: defaultdict[str, int] = defaultdict(int)
            for (account, _), nbytes in held.items():
                totals[account] += nbytes
            after.append({account: nbytes for account, nbytes in totals.items() if nbytes})
    return after, dict(lowest), marks


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision, accumulate", [("fp32", 1), ("bf16", 3)])
@pytest.mark.parametrize("entry", ["plain", "frozen", "checkpoint_part", "used_in_some_steps", "tied"])
def test_balances_return_to_what_persists_and_never_fall_below_zero(
    entry: str, stage: int, num_ranks: int, precision: str, accumulate: int
) -> None:
    for after, lowest, marks in ranks.call(num_ranks, observed, stage, precision, entry, accumulate):
        assert all(nbytes == 0 for nbytes in lowest.values())
        assert after[1] == after[2]
        assert set(after[1]) <= {Account.PARAM, Account.MASTER, Account.MOMENT}
        assert not marks


def persistent(stage: int, precision: str) -> tuple[dict[str, int], int]:
    _rank, _ = this_rank()
    import shardbook as sb

    model = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)) for _ in range(4)))
    preset = {"2+2+4+8": sb.Precision(param="bf16", grad="bf16", keep_param_shard=True)}.get(precision) or sb.Precision(param=precision)
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), sb.ZeroConfig(stage=stage, precision=preset))
    engine.backward(engine(torch.randn(3, 96)).float().sum())
    engine.step()
    held: defaultdict[str, int] = defaultdict(int)
    with engine.observe(
        lambda event: held.__setitem__(event.account, held[event.account] + event.nbytes) if isinstance(event, Booking) else None
    ):
        pass
    return {account: nbytes for account, nbytes in held.items() if nbytes}, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_persistent_bytes_are_the_ledger_of_zero(stage: int) -> None:
    """DESIGN section 2: between steps 2+2+4+8 holds 16Ψ less the 2Ψ of gradients, which live from reduction to step."""
    for num_ranks in (1, 2, 4):
        held, numel = ranks.call(num_ranks, persistent, stage, "2+2+4+8")[0]
        shard = numel / num_ranks
        state = numel if stage == 0 else shard
        params = numel if stage < 3 else shard
        assert held[Account.PARAM] == 2 * params
        assert held[Account.MASTER] == 4 * state
        assert held[Account.MOMENT] == pytest.approx(8 * state, abs=4 * 8 + 1)  # and the step counters, one number each
        assert set(held) == {Account.PARAM, Account.MASTER, Account.MOMENT}
        held, _ = ranks.call(num_ranks, persistent, stage, "bf16")[0]
        assert held.get(Account.PARAM, 0) == (0 if stage == 3 else 2 * params)


def gathered_at_once(ahead: int, limit: int | None) -> tuple[int, int, int]:
    """Most bytes gathered at one instant; of the root; of the largest unit."""
    rank, _ = this_rank()
    import shardbook as sb

    torch.manual_seed(SEED)
    model = Decoder(depth=8)
    config = sb.ZeroConfig(stage=3, prefetch=sb.Prefetch(ahead=ahead, limit=limit))
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    held = peak = 0

    def take(event: Any) -> None:
        nonlocal held, peak
        if isinstance(event, Booking) and event.account == Account.GATHERED:
            held += event.nbytes
            peak = max(peak, held)

    with engine.observe(take):
        train(engine, rank, range(3))
    block = sum(parameter.numel() for parameter in model.get_submodule("blocks.0").parameters()) * 4
    return peak, block, held


@pytest.mark.parametrize("ahead, units", [(0, 1), (1, 2), (2, 3)])
def test_no_more_units_are_gathered_than_asked_for(ahead: int, units: int) -> None:
    """The unit in use and ``ahead`` more; the one just left is freed before its successor's successor is fetched."""
    for peak, block, held in ranks.call(2, gathered_at_once, ahead, None):
        assert held == 0
        assert peak <= (units + 0.2) * block + block * 0.2


def test_a_limit_on_looking_ahead_is_kept() -> None:
    for peak, block, _ in ranks.call(2, gathered_at_once, 4, int(2.5 * 2080 * 4)):
        assert peak <= 2.6 * block


def copied(stage: int) -> bool:
    """A deep copy of the model inside ``gathered`` is a plain model with plain parameters."""
    rank, _ = this_rank()
    model = built(ZOO["plain"], SEED)
    engine = engine_of(model, stage=stage)
    train(engine, rank, range(1))
    with engine.gathered(model):
        clone = copy.deepcopy(model)
        same = all(same_bits(one.detach(), other.detach()) for one, other in zip(clone.parameters(), model.parameters(), strict=True))
    train(engine, rank, range(1, 2))
    return same and all(type(parameter) is nn.Parameter and bool(torch.isfinite(parameter).all()) for parameter in clone.parameters())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_copy_of_the_model(stage: int) -> None:
    assert ranks.call(2, copied, stage) == [True, True]


def on_a_mesh() -> Trace:
    """Over one axis of a mesh: two replicas of two ranks each train apart."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import shardbook as sb

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    model = built(ZOO["plain"], SEED)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sb.ZeroConfig(stage=3), mesh=mesh["data"])
    return Trace(train(engine, dist.get_rank() % 2, range(3)), final(engine))


def on_a_mesh_after_an_engine_that_died() -> Trace:
    """Its group is collected on some ranks, and on the others only when something asks for it."""
    import gc

    import torch.distributed as dist

    import shardbook as sb

    gc.disable()
    try:
        model = built(ZOO["plain"], SEED)
        cycle = [sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=2))]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle, model
        if dist.get_rank() % 2:
            gc.collect()
        dist.barrier()
        return on_a_mesh()
    finally:
        gc.enable()


def test_an_engine_that_died_does_not_part_the_ranks_of_an_axis() -> None:
    endings = ranks.fresh_ranks(4, on_a_mesh_after_an_engine_that_died)
    for first in (0, 2):
        assert differences(endings[first].value, plain(2, 3)) == []


def test_one_axis_of_a_mesh() -> None:
    """On ranks of its own: torch puts into a group's name how many groups a process has, and other tests may have left some."""
    endings = ranks.fresh_ranks(4, on_a_mesh)
    expected = plain(2, 3)
    for first in (0, 2):
        assert differences(endings[first].value, expected) == []


def native(stage: int) -> Trace:
    """The backend's own reduction: the order is its own, so values agree within rounding."""
    rank, _ = this_rank()
    engine = engine_of(built(ZOO["plain"], SEED), stage=stage, reduction="native")
    return Trace(train(engine, rank, range(2)), final(engine))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_native_reduction_agrees_within_rounding(stage: int) -> None:
    result, expected = ranks.call(3, native, stage)[0], plain(3, 2)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(result.parameters[name], value.detach(), rtol=1e-5, atol=1e-6)


def without_sync(stage: int) -> Trace:
    """Ranks that are seeded alike need not be sent their weights."""
    rank, _ = this_rank()
    engine = engine_of(built(ZOO["tied"], SEED), stage=stage, init_sync="none", reduction="ordered")
    return Trace(train(engine, rank, range(2), "tied"), final(engine))


@pytest.mark.parametrize("stage", [0, 3])
def test_no_initial_sync(stage: int) -> None:
    assert differences(ranks.call(3, without_sync, stage)[0], plain(3, 2, "tied")) == []


def two_axes() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    import shardbook as sb
    from shardbook.errors import ConfigError

    model = built(ZOO["plain"], SEED)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    try:
        sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(), mesh=mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_mesh_of_two_axes_is_refused() -> None:
    for text in ranks.call(2, two_axes):
        assert "mesh" in text
        assert "one axis" in text


def half_types(stage: int) -> Trace:
    """A model that is bf16 already, with fp32 masters."""
    rank, _ = this_rank()
    import shardbook as sb

    model = built(ZOO["plain"], SEED).bfloat16()
    engine = sb.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), sb.ZeroConfig(stage=stage, precision=sb.Precision(param="bf16"))
    )
    return Trace(train(engine, rank, range(3)), final(engine))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_is_bf16_already(stage: int) -> None:
    expected = plain(
        2,
        3,
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=0.01),
        model=built(ZOO["plain"], SEED).bfloat16(),
        types=Types(param="bf16"),
    )
    assert differences(ranks.call(2, half_types, stage)[0], expected) == []


def blocks_are_units() -> tuple[list[str], list[str]]:
    found = []
    for depth, block in ((3, Block), (1, Block)):
        torch.manual_seed(SEED)
        model = Decoder(block, depth=depth)
        text = engine_of(model, stage=3).describe()
        found.append([line.split()[1].rstrip(":") for line in text.splitlines() if line.strip().startswith("unit ")])
    return found[0], found[1]


def test_blocks_are_found() -> None:
    many, _ = ranks.call(1, blocks_are_units)[0]
    assert {"root", "embedding", "head", "blocks.0", "blocks.1", "blocks.2"} <= set(many)
