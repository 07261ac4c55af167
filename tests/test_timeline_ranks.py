"""Timelines of real ranks: a delay put into one rank's work or into one unit's messages is found again, with its length and its cause.

The machine has other work as well, and a delay is one of many things that make a rank wait. So a length is the median over steps, and
a run in which it is more than 5% off is repeated, twice at most.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardbook.ledger.bandwidth import bandwidth
from shardbook.ledger.chrome import write_trace
from shardbook.ledger.exposed import common_steps, exposed, pieces, step_times
from shardbook.ledger.timeline import RankTimeline, Timeline
from tests import delays, ranks
from tests.pairwise import pairwise
from tests.test_timeline import check_nesting

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

DELAY = 0.08
UNIT = 2
ATTEMPTS = 3  # on a shared machine ranks also wait for what other processes do; a quiet one needs one attempt
WORKS = (0.001, 0.03)


def length(timelines: list[RankTimeline], rank: int, cause: str, culprit: int | None, kinds: set[str]) -> float:
    """Seconds per step of the unit with the delay, median over steps."""
    by_step = dict.fromkeys(common_steps(timelines), 0.0)
    for piece in pieces(timelines):
        if (piece.rank, piece.unit, piece.cause, piece.culprit) == (rank, f"blocks.{UNIT}", cause, culprit) and piece.kind in kinds:
            by_step[piece.step] += piece.seconds
    return statistics.median(by_step.values())


def check(run: Callable[[], list[RankTimeline]], rank: int, cause: str, culprit: int | None, kinds: set[str], expected: float) -> None:
    found: list[float] = []
    for _ in range(ATTEMPTS):
        timelines = run()
        found.append(length(timelines, rank, cause, culprit, kinds))
        largest = max((entry for entry in exposed(timelines) if entry.rank == rank), key=lambda entry: entry.seconds)
        named = (largest.unit, largest.cause, largest.culprit) == (f"blocks.{UNIT}", cause, culprit)
        if named and abs(found[-1] / expected - 1) <= 0.05:
            return
    pytest.fail(f"{[f'{1e3 * one:.1f}' for one in found]} ms of {1e3 * expected:.1f} for rank {rank}, {cause}, culprit {culprit}")


def every_pair(**fields: Sequence[Any]) -> pytest.MarkDecorator:
    """Rows with every pair of values. ``make evidence-books`` takes its delays, at stage 3, with every number of ranks and every work."""
    return pytest.mark.parametrize(tuple(fields), [tuple(row[name] for name in fields) for row in pairwise(fields)])


@every_pair(group=((2, 0), (2, 3), (4, 1), (4, 3)), work=WORKS, where=("forward", "backward"))
@pytest.mark.full
def test_a_late_rank(group: tuple[int, int], work: float, where: str) -> None:
    num_ranks, stage = group
    culprit = num_ranks - 1
    kinds = {"gather", "reduce", "return", "step"}
    check(
        lambda: ranks.call(num_ranks, delays.in_rank, stage, work, culprit, where, UNIT, DELAY)[0],
        0,
        "straggler rank",
        culprit,
        kinds,
        DELAY,
    )


@every_pair(num_ranks=(2, 4), work=WORKS, message=(("gather", 3, 2), ("reduce", 3, 1), ("refresh", 2, 1)))
@pytest.mark.full
def test_late_messages_of_one_rank(num_ranks: int, work: float, message: tuple[str, int, int]) -> None:
    kind, stage, times = message
    check(
        lambda: ranks.call(num_ranks, delays.in_messages, stage, work, (1,), kind, UNIT, DELAY, "late")[0],
        0, "straggler rank", 1, {kind}, times * DELAY,
    )  # fmt: skip


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.full
def test_slow_messages_of_all_ranks(num_ranks: int, work: float) -> None:
    """Sent while the main thread stands, so that no work hides them."""
    everybody = tuple(range(num_ranks))
    check(
        lambda: ranks.call(num_ranks, delays.in_messages, 3, work, everybody, "gather", UNIT, DELAY, "late")[0],
        0, "bandwidth", None, {"gather"}, 2 * DELAY,
    )  # fmt: skip


def test_a_gather_that_nobody_looked_ahead_to_was_issued_late() -> None:
    import shardbook as sb

    def run() -> list[RankTimeline]:
        return ranks.call(2, delays.in_messages, 3, 0.05, (0, 1), "gather", UNIT, DELAY / 2, "arrive", prefetch=sb.Prefetch(ahead=0))[0]

    check(run, 0, "issued late", None, {"gather"}, DELAY)


@pytest.mark.full
def test_a_gather_that_the_limit_held_back_waited_for_a_buffer() -> None:
    import shardbook as sb

    def run() -> list[RankTimeline]:
        return ranks.call(
            2, delays.in_messages, 3, 0.05, (0, 1), "gather", UNIT, DELAY / 2, "arrive", prefetch=sb.Prefetch(ahead=1, limit=1)
        )[0]

    check(run, 0, "waiting for a buffer", None, {"gather"}, DELAY)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_collective_is_there_on_all_ranks_and_in_the_trace(stage: int, tmp_path: Path) -> None:
    found = ranks.call(2, delays.train, stage, 0.0)[0]
    assert [timeline.rank for timeline in found] == [0, 1]
    numbers = common_steps(found)
    assert len(numbers) == delays.NUM_STEPS - 1
    blocks = [f"blocks.{index}" for index in range(delays.DEPTH)]
    kinds = {0: {"reduce": 1, "return": 1}, 1: {"reduce": 1, "refresh": 1}, 2: {"reduce": 1, "refresh": 1}, 3: {"gather": 2, "reduce": 1}}
    for timeline in found:
        for number, begin, end in [(step.number, step.begin, step.end) for step in timeline.steps if step.number in numbers]:
            issued = [(c.kind, c.unit) for c in timeline.collectives if begin <= c.issue_begin < end]
            expected = [(kind, unit) for kind, times in kinds[stage].items() for unit in blocks for _ in range(times)]
            assert sorted(issued) == sorted([*expected, ("step", "")]), number
        names = {(span.phase, span.unit) for span in timeline.spans}
        assert {(phase, unit) for phase in ("forward", "backward") for unit in blocks} <= names
    keys = [{c.key for c in timeline.collectives if c.sequence >= 0} for timeline in found]
    assert keys[0] == keys[1]
    for entry in step_times(found):
        assert sum(one.seconds for one in exposed(found) if one.rank == entry.rank) == pytest.approx(entry.exposed, abs=1e-6)
    write_trace(tmp_path / "trace.json", found)
    complete = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in complete)
    check_nesting(complete)
    for rank, timeline in enumerate(found):
        gathers = [
            e["args"]["unit"]
            for e in complete
            if e["pid"] == rank and e["args"].get("kind") == "gather" and not e["name"].startswith("wait")
        ]
        assert sorted(gathers) == sorted(c.unit for c in timeline.collectives if c.kind == "gather")


def empty_and_failed(rank: int | None = None) -> tuple[list[bool], list[str]]:
    """Steps with a rank without data and recomputation, an exception in the middle, and an evaluation."""
    import torch.distributed as dist

    import shardbook as sb

    torch.manual_seed(3)
    model = delays.Chain(0.0)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3, accumulate=2))
    timeline = Timeline(rank=dist.get_rank())
    batch = torch.ones(2, delays.WIDTH)
    with engine.observe(timeline):
        for step in range(3):
            for micro in range(2):
                without = micro == 1 and step > 0 and dist.get_rank() == 1
                engine.backward(None if without else engine(batch).square().sum(), weight=None if without else 2)
            engine.step()
            with torch.no_grad():
                engine(batch)
    record = timeline.record()
    engine.close()
    return [step.is_whole for step in record.steps], [f"{c.kind} {c.unit} {c.sequence}" for c in record.collectives]


def test_ranks_without_data_take_part() -> None:
    (whole, one), (_, other) = ranks.call(2, empty_and_failed)
    assert whole == [True] * 3
    assert sorted(one) == sorted(other)


def speed() -> tuple[float, float]:
    import shardbook as sb

    model = delays.Chain(0.0)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3))
    small = bandwidth(engine._transport, 1 << 20) or 0.0
    original = engine._transport.gather

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return original(*arguments)

    engine._transport.gather = slow  # type: ignore[method-assign]
    slowed = bandwidth(engine._transport, 1 << 20, num_times=3) or 0.0
    engine.close()
    return small, slowed


def test_bandwidth_is_bytes_sent_by_time() -> None:
    for quick, slowed in ranks.call(4, speed):
        assert slowed == pytest.approx(0.75 * (1 << 20) / 0.1, rel=0.3)  # three of four shards of a MiB, in a tenth of a second
        assert quick > slowed
    assert bandwidth(type("Alone", (), {"num_ranks": 1, "header_numel": 0})(), 1000) is None


def clock_offset() -> tuple[float, float]:
    """As if each rank were a host of its own, and rank 1's clock ten seconds behind."""
    import torch.distributed as dist

    from shardbook.ledger import clocks

    own, behind = clocks._host, 10.0 if dist.get_rank() == 1 else 0.0
    same = clocks.offset()
    clocks._host = lambda: f"host {dist.get_rank()}"  # type: ignore[assignment]
    clocks.perf_counter = lambda: time.perf_counter() - behind  # type: ignore[assignment]
    try:
        return same, clocks.offset()
    finally:
        clocks._host, clocks.perf_counter = own, time.perf_counter  # type: ignore[assignment]


def test_clocks_of_several_hosts_are_compared_and_those_of_one_are_not() -> None:
    found = ranks.call(3, clock_offset)
    assert [same for same, _ in found] == [0.0] * 3
    assert [apart for _, apart in found] == pytest.approx([0.0, 10.0, 0.0], abs=0.02)
