"""Ranks that part ways: in ten seconds every rank ends with an error that names both ranks and what each was in; a slow one is left alone.

Each test has ranks of its own. ``engine.watch`` says after how long a wait is published and reported; the long version, with
the engine's own figures, is marked ``full``.
"""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ranks
from tests.equality import SEED, built
from tests.oracle import PlainRun
from tests.ranks import Ending
from tests.sampled import every
from tests.zoo import ZOO, Decoder

pytestmark = pytest.mark.ranks

LIMIT = 10.0  # seconds from the cause to the last rank's end
STEPS_BEFORE = 2


class Leaving(Decoder):
    """A decoder that can leave one block out, raise, die or sleep in one."""

    def forward(self, inputs: Tensor, what: str = "", where: int = 1) -> Tensor:
        x = self.embedding(inputs)
        for index, block in enumerate(self.blocks):
            if index == where:
                if what == "skip":
                    continue
                if what == "raise":
                    raise ArithmeticError("a mistake of the user's")
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "exit":
                    os._exit(3)
                if what.startswith("sleep"):
                    time.sleep(float(what.split()[1]))
            x = block(x)
        return self.head(x)


def make(stage: int, **options: Any) -> Any:
    import shardbook as sb

    torch.manual_seed(SEED)
    model = Leaving()
    return sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=stage, **options))


def micro(engine: Any, rank: int, step: int, number: int = 0, what: str = "") -> None:
    batch = ZOO["plain"].batches(rank, step, number)
    logits = engine(batch.args[0], what=what)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum")
    engine.backward(loss, weight=batch.weight)


def part_ways(stage: int, what: str, culprit: int, accumulate: int = 1, ahead: int = 1) -> tuple[float, str]:
    """Two good steps; then the culprit does ``what``. How long after that this rank ended, and with which error."""
    import torch.distributed as dist

    import shardbook as sb

    rank = dist.get_rank()
    engine = make(stage, accumulate=accumulate, prefetch=sb.Prefetch(ahead=ahead))
    for step in range(STEPS_BEFORE):
        for number in range(accumulate):
            micro(engine, rank, step, number)
        engine.step()
    dist.barrier()
    began = time.monotonic()
    try:
        for number in range(accumulate):
            if rank == culprit and what == "fewer":
                if number == accumulate - 1:
                    break
                last = number == accumulate - 2
                batch = ZOO["plain"].batches(rank, 9, number)
                loss, weight = ZOO["plain"].forward(engine, batch)
                engine.backward(loss, weight=weight, last=True if last else None)
            else:
                micro(engine, rank, 9, number, what if rank == culprit else "")
        engine.step()
    except Exception as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, ""


def all_named(endings: list[Ending], culprit: int, names: str, *, kinds: str = "DivergenceError|RankLostError") -> None:
    """Every rank but the culprit ended in time, with an error that names itself, the culprit and a unit."""
    for ending in endings:
        if ending.rank == culprit:
            continue
        assert ending.how == "value", f"rank {ending.rank} {ending.how}: {ending.text}"
        seconds, text = ending.value
        assert seconds < LIMIT
        assert re.match(kinds, text), text
        assert re.search(rf"\brank {culprit}\b", text), text
        assert re.search(names, text), text
    named = {int(number) for ending in endings if ending.rank != culprit for number in re.findall(r"\brank (\d)\b", ending.value[1])}
    assert len(named) >= 2, "only one rank is named"


@pytest.mark.parametrize("num_ranks, culprit", every(3, [2, 3], [0, 1]))
def test_a_block_that_one_rank_skips_at_stage_3(num_ranks: int, culprit: int) -> None:
    endings = ranks.fresh_ranks(num_ranks, part_ways, 3, "skip", culprit, ahead=0, seconds=30)
    assert [ending.how for ending in endings] == ["value"] * num_ranks
    assert endings[culprit].value[0] < LIMIT
    assert endings[culprit].value[1].startswith("DivergenceError"), endings[culprit].value[1]
    all_named(endings, culprit, r"blocks\.1", kinds="DivergenceError")


def skipped(stage: int, culprit: int, step_of_skip: int) -> tuple[str, dict[str, Tensor]]:
    """One rank leaves a block out in one step. The error, if there is one; else the parameters after three steps."""
    import torch.distributed as dist

    rank = dist.get_rank()
    engine = make(stage)
    try:
        for step in range(3):
            micro(engine, rank, step, what="skip" if rank == culprit and step == step_of_skip else "")
            assert engine.step().applied
        return "", {name: value.clone() for name, value in engine.full_parameters()}
    except Exception as error:
        return f"{type(error).__name__}: {error}", {}


@pytest.mark.parametrize("stage, culprit", every(3, [0, 1, 2, 3], [0, 1]))
def test_a_block_that_one_rank_skips_counts_as_zero_or_is_named(stage: int, culprit: int) -> None:
    """Below stage 3 it always counts as zero. At stage 3 the rank may have served the others by looking ahead; else it is named."""
    for step_of_skip in (0, 1):
        endings = ranks.fresh_ranks(2, skipped, stage, culprit, step_of_skip, seconds=30)
        errors = [ending.value[0] for ending in endings]
        if stage == 3 and all(errors):
            assert all(error.startswith("DivergenceError") for error in errors)
            continue
        assert errors == ["", ""]
        torch.manual_seed(SEED)
        run = PlainRun(Leaving(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), forward_of_leaving, num_ranks=2)
        for step in range(3):
            run.step(
                [[(ZOO["plain"].batches(rank, step, 0), "skip" if (rank, step) == (culprit, step_of_skip) else "")] for rank in range(2)]
            )
        assert all(torch.equal(value, run.full_parameters()[name]) for name, value in endings[0].value[1].items())


def forward_of_leaving(model: Any, item: Any) -> tuple[Tensor, Any]:
    batch, what = item
    logits = model(batch.args[0], what=what)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, batch.weight


@pytest.mark.parametrize("culprit, stage", every(2, [0, 1], [0, 2, 3]))
def test_one_micro_batch_fewer(stage: int, culprit: int) -> None:
    for ending in ranks.fresh_ranks(2, part_ways, stage, "fewer", culprit, 3, seconds=30):
        assert ending.how == "value"
        seconds, text = ending.value
        assert seconds < LIMIT
        assert text.startswith("DivergenceError"), text
        assert "rank 0" in text
        assert "rank 1" in text
        assert "micro-batch" in text


@pytest.mark.parametrize("num_ranks, culprit, stage", every(3, [2, 3], [0, 1], [0, 3]))
def test_a_rank_that_raises_in_forward(num_ranks: int, stage: int, culprit: int) -> None:
    endings = ranks.fresh_ranks(num_ranks, part_ways, stage, "raise", culprit, seconds=30)
    assert endings[culprit].value[1] == "ArithmeticError: a mistake of the user's"
    all_named(endings, culprit, r"ArithmeticError(.|\n)*a mistake of the user's", kinds="RankLostError")


@pytest.mark.parametrize("num_ranks, culprit, stage, what", every(3, [2, 3], [0, 1], [1, 3], ["kill", "exit"]))
def test_a_rank_that_is_killed(num_ranks: int, stage: int, culprit: int, what: str) -> None:
    """Also rank 0, in whose process the store lives."""
    endings = ranks.fresh_ranks(num_ranks, part_ways, stage, what, culprit, seconds=30)
    assert endings[culprit].how == "lost"
    all_named(endings, culprit, r"(gather|reduce|step|refresh|return) of|blocks|embedding|head|root", kinds="RankLostError")


def diverge_and_go_on() -> list[str]:
    """After an error the engine says that it cannot be used any more, instead of hanging."""
    import torch.distributed as dist

    seen = [part_ways(3, "skip", 1)[1]]
    rank = dist.get_rank()
    engine = make(3)
    try:
        micro(engine, rank, 0, what="skip" if rank else "")
        engine.step()
    except Exception as error:
        seen.append(type(error).__name__)
    try:
        micro(engine, rank, 1)
        engine.step()
    except Exception as error:
        seen.append(type(error).__name__)
    return seen


def test_after_an_error_the_engine_hangs_nobody() -> None:
    for ending in ranks.fresh_ranks(2, diverge_and_go_on, seconds=60):
        assert ending.how == "value", ending.text
        assert ending.value[1] == "DivergenceError"
        assert len(ending.value) == 3, "a step after the error was taken as if nothing had happened"


# ---- slow is not wrong ---------------------------------------------------------------------------------------------------


def slow(seconds: float, report_after: float | None, culprit: int) -> tuple[list[str], float, dict[str, Tensor]]:
    """The culprit sleeps in the forward of step 1. What was logged, how long it took, the parameters after three steps."""
    import torch.distributed as dist

    from shardbook.engine import watch

    if report_after is not None:
        watch.REPORT_AFTER_SECONDS = report_after
        watch.BEAT_SECONDS = min(watch.BEAT_SECONDS, report_after / 4)
        watch.PUBLISH_AFTER_SECONDS = min(watch.PUBLISH_AFTER_SECONDS, report_after / 4)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("shardbook").addHandler(Keep())
    rank = dist.get_rank()
    engine = make(3)
    began = time.monotonic()
    for step in range(3):
        micro(engine, rank, step, what=f"sleep {seconds}" if rank == culprit and step == 1 else "")
        assert engine.step().applied
    return lines, time.monotonic() - began, {name: value.clone() for name, value in engine.full_parameters()}


def check_slow(endings: list[Ending], seconds: float, culprit: int) -> None:
    for ending in endings:
        assert ending.how == "value", f"{ending.kind}: {ending.message}\n{ending.text}"
        assert ending.value[1] >= seconds
    waiting = endings[1 - culprit].value[0]
    assert any(f"rank {culprit}" in line and "waited" in line for line in waiting), waiting
    torch.manual_seed(SEED)
    run = PlainRun(Leaving(), lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), ZOO["plain"].forward, num_ranks=2)
    for step in range(3):
        run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])
    assert all(torch.equal(value, run.full_parameters()[name]) for name, value in endings[0].value[2].items())


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_slow_rank_is_reported_and_the_step_completes(culprit: int) -> None:
    check_slow(ranks.fresh_ranks(2, slow, 1.8, 0.6, culprit, seconds=30), 1.8, culprit)


def different_models() -> str:
    """Ranks that build different models differ before the first collective of the engine does harm."""
    import torch.distributed as dist

    import shardbook as sb

    torch.manual_seed(SEED)
    model = Decoder(depth=3 + dist.get_rank())
    try:
        engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3))
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(0, 0, 0))
        engine.backward(loss, weight=weight)
        engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_different_models() -> None:
    for ending in ranks.fresh_ranks(2, different_models, seconds=30):
        assert ending.how == "value", ending.text
        assert ending.value
        assert ending.seconds < LIMIT


def initial_check(same: bool) -> str:
    import torch.distributed as dist

    import shardbook as sb

    model = built(ZOO["plain"], SEED)
    if not same and dist.get_rank() == 1:
        with torch.no_grad():
            model.get_submodule("blocks.1.up").weight[3, 4] += 1e-3  # type: ignore[operator]
    try:
        sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3, init_sync="check"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_initial_weights_that_differ_are_named_where_asked() -> None:
    assert [ending.value for ending in ranks.fresh_ranks(2, initial_check, True, seconds=30)] == ["", ""]
    for ending in ranks.fresh_ranks(2, initial_check, False, seconds=30):
        assert ending.how == "value"
        assert "blocks.1.up.weight" in ending.value


@pytest.fixture(scope="module")
def asleep() -> Iterator[list[ranks.Worker]]:
    """Two ranks, of which the second sleeps for ninety seconds: while the other tests of this file run."""
    workers = ranks.server().fork(2, "gloo")
    for worker in workers:
        worker.send(slow, (90.0, None, 1), {})
    yield workers
    ranks.stop(workers)


@pytest.fixture(scope="module", autouse=True)
def falls_asleep_first(request: pytest.FixtureRequest) -> None:
    if any(item.name == test_a_rank_that_sleeps_for_ninety_seconds.__name__ for item in request.session.items):
        request.getfixturevalue("asleep")


@pytest.mark.full
def test_a_rank_that_sleeps_for_ninety_seconds(asleep: list[ranks.Worker]) -> None:
    """With the engine's own figures. The last one in this file, so that it has slept enough."""
    check_slow(ranks.collect(asleep, 120, after_error=False), 90.0, 1)
