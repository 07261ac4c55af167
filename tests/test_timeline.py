"""Timelines and exposed time on made-up ranks, whose clocks are exact: what each cause is, and that nothing is counted twice.

The ranks of :func:`simulate` go through a step as the engine does at stage 3: gathers looked ahead, a wait, work; backward with one
reduction at a time; an exchange and the optimizer. A transfer begins when the last rank has posted and takes a set time.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardbook.events import Booking, Event, Mark, Traffic
from shardbook.ledger import timeline as timeline_module
from shardbook.ledger.chrome import write_trace
from shardbook.ledger.clocks import offset_of
from shardbook.ledger.exposed import Piece, common_steps, exposed, pieces, step_times
from shardbook.ledger.timeline import RankTimeline, Timeline

DEPTH, STEPS = 6, 4
TRANSFER, OPTIMIZER = 0.002, 0.003
UNITS = [f"blocks.{index}" for index in range(DEPTH)]

Work = Callable[[int, int, str, str], float]
"""(rank, step, phase, unit) to seconds."""
Messages = Callable[[int, str, str], float]
"""(rank, kind, unit) to seconds."""


def nothing(*_: Any) -> float:
    return 0.0


class Sim:
    """One rank on its way: it tells its timeline what an engine would."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now = rank, 100.0
        self.timeline = Timeline(rank=rank, clock=self)
        self.counts: defaultdict[tuple[str, str], int] = defaultdict(int)

    def stamp(self, event: Event) -> float:
        return self.now

    def seconds(self, stamp: float) -> float:
        return stamp

    def mark(self, name: str, unit: str, edge: str) -> None:
        self.timeline(Mark(name=name, unit=unit, edge=edge, seconds=self.now))  # type: ignore[arg-type]

    def post(self, kind: str, unit: str) -> tuple[str, str, int]:
        key = (kind, unit, self.counts[kind, unit])
        self.counts[kind, unit] += 1
        self.timeline(Traffic(kind=kind, unit=unit or "the step", sequence=key[2], sent_nbytes=1000, phase=""))  # type: ignore[arg-type]
        return key


def simulate(
    num_ranks: int,
    work: Work,
    *,
    ahead: int = 1,
    held: tuple[str, ...] = (),
    late: Messages = nothing,
    transfer: Callable[[str, str], float] = lambda kind, unit: TRANSFER if kind != "step" else 1e-4,
) -> list[RankTimeline]:
    """``late``: how long a rank stands before it posts; ``held``: units that the limit keeps from being looked ahead to."""
    sims = [Sim(rank) for rank in range(num_ranks)]
    posted: defaultdict[Any, dict[int, float]] = defaultdict(dict)

    def issue(sim: Sim, kind: str, unit: str) -> Any:
        sim.mark(kind, unit, "begin")
        sim.now += late(sim.rank, kind, unit)
        key = sim.post(kind, unit)
        posted[key][sim.rank] = sim.now
        sim.mark(kind, unit, "end")
        return key

    def wait(sim: Sim, key: Any) -> Iterator[None]:
        sim.mark(f"{key[0]}.wait", key[1], "begin")
        while len(posted[key]) < num_ranks:
            yield
        sim.now = max(sim.now, max(posted[key].values()) + transfer(*key[:2]))
        sim.mark(f"{key[0]}.wait", key[1], "end")

    def enter(sim: Sim, order: list[str], index: int, gathers: dict[str, Any]) -> Iterator[None]:
        if order[index] not in gathers:
            gathers[order[index]] = issue(sim, "gather", order[index])
        for unit in order[index + 1 : index + 1 + ahead]:
            if unit in held:
                sim.mark("held", unit, "begin")
                sim.mark("held", unit, "end")
            elif unit not in gathers:
                gathers[unit] = issue(sim, "gather", unit)
        yield from wait(sim, gathers.pop(order[index]))

    def exchange(sim: Sim) -> Iterator[None]:
        sim.mark("exchange", "", "begin")
        sim.now += late(sim.rank, "step", "")
        key = sim.post("step", "")
        posted[key][sim.rank] = sim.now
        while len(posted[key]) < num_ranks:
            yield
        sim.now = max(sim.now, max(posted[key].values()) + transfer("step", ""))
        sim.mark("exchange", "", "end")

    def life(sim: Sim) -> Iterator[None]:
        for step in range(STEPS):
            gathers: dict[str, Any] = {}
            for index, unit in enumerate(UNITS):
                yield from enter(sim, UNITS, index, gathers)
                sim.mark("forward", unit, "begin")
                sim.now += work(sim.rank, step, "forward", unit)
                sim.mark("forward", unit, "end")
            sim.mark("backward pass", "", "begin")
            reducing = None
            for index, unit in enumerate(UNITS[::-1]):
                yield from enter(sim, UNITS[::-1], index, gathers)
                sim.mark("backward", unit, "begin")
                sim.now += work(sim.rank, step, "backward", unit)
                sim.mark("backward", unit, "end")
                if reducing is not None:
                    yield from wait(sim, reducing)
                reducing = issue(sim, "reduce", unit)
            yield from wait(sim, reducing)
            sim.mark("backward pass", "", "end")
            sim.mark("step", "", "begin")
            yield from exchange(sim)
            sim.now += work(sim.rank, step, "step", "") or OPTIMIZER
            sim.mark("step", "", "end")

    lives = [life(sim) for sim in sims]
    while lives:
        lives = [one for one in lives if next(one, "over") is None]
    return [sim.timeline.record() for sim in sims]


def even(seconds: float, more: Callable[[int, str, str], float] = nothing) -> Work:
    return lambda rank, step, phase, unit: 0.0 if phase == "step" else seconds + more(rank, phase, unit)


def total(timelines: list[RankTimeline], rank: int, unit: str, cause: str, culprit: int | None = None, kind: str | None = None) -> float:
    return sum(
        entry.seconds
        for entry in exposed(timelines)
        if (entry.rank, entry.unit, entry.cause, entry.culprit) == (rank, unit, cause, culprit) and kind in (None, entry.kind)
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seconds", [0.0005, 0.005, 0.04])
@pytest.mark.parametrize("delay", [0.03, 0.2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("unit", ["blocks.0", "blocks.3", "blocks.5"])
def test_a_rank_that_is_late_is_named_with_the_unit_it_was_late_in(num_ranks, seconds, delay, phase, unit):
    found = simulate(num_ranks, even(seconds, lambda *of: delay if of == (1, phase, unit) else 0.0))
    for rank in {*range(num_ranks)} - {1}:
        assert total(found, rank, unit, "straggler rank", 1) == pytest.approx(delay, rel=0.05)
    assert not [entry for entry in exposed(found) if entry.rank == 1 and entry.cause == "straggler rank" and entry.seconds > 1e-4]
    assert {entry.culprit for entry in exposed(found) if entry.cause == "straggler rank"} == {1}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seconds", [0.0005, 0.04])
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_messages_that_one_rank_sends_late(num_ranks, seconds, kind):
    times = 2 if kind == "gather" else 1  # in forward and in backward
    found = simulate(num_ranks, even(seconds), late=lambda *of: 0.05 if of == (1, kind, "blocks.2") else 0.0)
    for rank in {*range(num_ranks)} - {1}:
        assert total(found, rank, "blocks.2", "straggler rank", 1, kind) == pytest.approx(0.05 * times, rel=0.05)
    assert total(found, 1, "blocks.2", "bandwidth", None, kind) == pytest.approx(0.05 * times, rel=0.05)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seconds", [0.0005, 0.02])
def test_a_transfer_that_takes_longer_on_all_ranks_is_bandwidth_less_what_work_hides(num_ranks, seconds):
    found = simulate(num_ranks, even(seconds), transfer=lambda kind, unit: 0.05 if (kind, unit) == ("gather", "blocks.2") else 1e-4)
    for rank in range(num_ranks):
        assert total(found, rank, "blocks.2", "bandwidth", None, "gather") == pytest.approx(2 * (0.05 - seconds), rel=0.05)


@pytest.mark.parametrize("seconds, hidden", [(0.001, 0.001), (0.04, 0.01)])
def test_a_gather_that_is_issued_at_its_wait_could_have_hidden_behind_the_work_before(seconds, hidden):
    found = simulate(2, even(seconds), ahead=0, transfer=lambda kind, unit: 0.01)
    for unit in UNITS[1:-1]:
        assert total(found, 0, unit, "issued late", None, "gather") == pytest.approx(2 * hidden)
        assert total(found, 0, unit, "bandwidth", None, "gather") == pytest.approx(2 * (0.01 - hidden))
    assert total(found, 0, UNITS[0], "issued late") == pytest.approx(hidden)  # in backward: forward begins with it


def test_a_gather_that_the_limit_held_back_waits_for_a_buffer():
    found = simulate(2, even(0.04), held=("blocks.2",), transfer=lambda kind, unit: 0.01)
    assert total(found, 0, "blocks.2", "waiting for a buffer", None, "gather") == pytest.approx(0.02)
    assert {entry.unit for entry in exposed(found) if entry.cause in ("waiting for a buffer", "issued late")} == {"blocks.2"}


def test_a_peer_at_its_normal_work_is_a_producer():
    found = simulate(2, even(0.01, lambda rank, phase, unit: 0.0003 * rank))
    waited = sum(entry.seconds for entry in exposed(found) if entry.cause == "waiting for the producer")
    assert waited == pytest.approx(0.0003 * 2 * DEPTH, rel=0.05)
    assert not [entry for entry in exposed(found) if entry.cause == "straggler rank"]


def test_two_late_ranks_are_each_named_and_no_delay_counts_twice():
    more = {(1, "forward", "blocks.1"): 0.05, (2, "backward", "blocks.4"): 0.08, (3, "forward", "blocks.4"): 0.03}
    found = simulate(4, even(0.002, lambda *of: more.get(of, 0.0)))
    for rank in range(4):
        for (culprit, _, unit), seconds in more.items():
            if culprit != rank:
                assert total(found, rank, unit, "straggler rank", culprit) == pytest.approx(seconds, rel=0.06)


def test_what_happens_outside_of_the_engine_is_a_straggler_too():
    """A slow batch: before the first forward of a step, nobody's unit."""
    found = simulate(2, lambda rank, step, phase, unit: 0.001 if phase != "step" else 0.04 * rank + 0.001)
    late = [entry for entry in exposed(found) if entry.rank == 0 and entry.cause == "straggler rank"]
    assert sum(entry.seconds for entry in late) == pytest.approx(0.04 * (STEPS - 1) / STEPS, rel=0.05)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_causes_add_up_to_the_union_of_the_standing(ahead):
    found = simulate(4, even(0.004, lambda rank, phase, unit: 0.001 * rank * (unit == "blocks.1")), ahead=ahead)
    for time in step_times(found, bandwidth=1e6):
        assert sum(entry.seconds for entry in exposed(found) if entry.rank == time.rank) == pytest.approx(time.exposed)
        assert time.compute + time.exposed == pytest.approx(time.seconds)
        assert time.exposed <= time.communication <= time.seconds
        assert time.num_steps == STEPS
        assert time.sent_nbytes == 1000 * (3 * DEPTH + 1)
        assert time.floor == pytest.approx(time.sent_nbytes / 1e6)


def test_a_record_may_come_from_another_clock():
    found = simulate(2, even(0.002, lambda *of: 0.05 if of == (1, "forward", "blocks.2") else 0.0))
    moved = [found[0], found[1].shifted(-40.0).shifted(40.0)]
    assert [(e.rank, e.unit, e.cause, e.kind, pytest.approx(e.seconds)) for e in exposed(found)] == [
        (e.rank, e.unit, e.cause, e.kind, e.seconds) for e in exposed(moved)
    ]
    assert offset_of([(0.0, 5.5, 1.0), (2.0, 7.3, 2.2)]) == pytest.approx(5.2)


# ---- the observer -----------------------------------------------------------------------------------------------------------


def feed(timeline: Timeline, *marks: tuple[str, str, str, float]) -> None:
    for name, unit, edge, seconds in marks:
        timeline(Mark(name=name, unit=unit, edge=edge, seconds=seconds))  # type: ignore[arg-type]


def step_marks(begin: float) -> list[tuple[str, str, str, float]]:
    forward = [("forward", "root", "begin", begin), ("forward", "root", "end", begin + 1)]
    return [*forward, ("step", "", "begin", begin + 2), ("step", "", "end", begin + 3)]


def test_the_last_steps_are_kept_and_no_more():
    timeline = Timeline(num_steps=3)
    for number in range(50):
        feed(timeline, *step_marks(10.0 * number))
    timeline(Booking(account="PARAM", tier="DEVICE", unit="root", nbytes=1, phase=""))  # type: ignore[arg-type]
    found = timeline.record()
    assert [(step.number, step.begin, step.end) for step in found.steps] == [(47, 463, 473), (48, 473, 483), (49, 483, 493)]
    assert sum(len(events) for events in timeline._closed) + len(timeline._open) <= 4 * 4


def test_a_loop_that_never_steps_does_not_fill_memory(monkeypatch):
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 100)
    timeline = Timeline()
    for number in range(1000):
        feed(timeline, *step_marks(10.0 * number)[:2])
    assert len(timeline._open) <= 100
    feed(timeline, *step_marks(20_000.0))
    assert timeline.record().steps == ()
    feed(timeline, *step_marks(20_010.0))
    assert [step.end for step in timeline.record().steps] == [20_013.0]


def test_an_exception_inside_a_step_leaves_the_others_readable():
    timeline = Timeline()
    feed(timeline, *step_marks(0.0))
    feed(
        timeline,
        ("forward", "root", "begin", 10),
        ("gather", "a", "begin", 11),
        ("gather", "a", "end", 12),
        ("gather.wait", "a", "begin", 13),
    )
    feed(timeline, ("abandoned", "", "begin", 14), ("abandoned", "", "end", 14), ("forward", "root", "end", 14.5))
    feed(timeline, *step_marks(15.0))
    feed(timeline, *step_marks(20.0))
    found = timeline.record()
    assert [step.is_whole for step in found.steps] == [True, False, True]
    assert common_steps([found]) == [0, 2]
    assert [span.begin for span in found.spans if span.phase == "forward"] == [0.0, 15.0, 20.0]
    assert step_times([found])[0].num_steps == 2


def test_work_is_named_by_its_unit():
    timeline = Timeline()
    feed(
        timeline,
        ("forward", "root", "begin", 0), ("forward", "a", "begin", 1), ("forward", "a", "end", 3), ("forward", "root", "end", 4),
        ("backward pass", "", "begin", 5), ("backward", "root", "begin", 6), ("backward", "a", "begin", 7), ("forward", "a", "begin", 8),
        ("forward", "a", "end", 9), ("backward", "a", "end", 10), ("backward pass", "", "end", 12),
        ("step", "", "begin", 13), ("step", "", "end", 14),
    )  # fmt: skip
    assert [(s.phase, s.unit, s.begin, s.end) for s in timeline.record().segments] == [
        ("forward", "root", 0, 1), ("forward", "a", 1, 3), ("forward", "root", 3, 4), ("outside", "", 4, 5), ("backward", "root", 5, 6),
        ("backward", "root", 6, 7), ("backward", "a", 7, 8), ("forward", "a", 8, 9), ("backward", "a", 9, 10), ("backward", "a", 10, 12),
        ("outside", "", 12, 13), ("step", "", 13, 14),
    ]  # fmt: skip


def test_no_steps_no_figures():
    for none in ([], [Timeline().record()]):
        assert exposed(none) == ()
        assert step_times(none) == ()
        assert pieces(none) == []
    with pytest.raises(ValueError, match="num_steps is 0"):
        Timeline(num_steps=0)


# ---- the trace --------------------------------------------------------------------------------------------------------------


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one thread any two events lie apart or one inside the other."""
    by_thread: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_thread[event["pid"], event["tid"]].append(event)
    for found in by_thread.values():
        open_ends: list[float] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 2e-3:  # microseconds are rounded to thousandths
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)


def test_the_trace_is_read_back(tmp_path: Path):
    found = simulate(2, even(0.001), ahead=3)
    write_trace(tmp_path / "deep" / "trace.json", found)
    everything = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    complete = [event for event in everything if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    check_nesting(complete)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in everything if e["name"] == "thread_name"}
    assert {"compute", "gather", "gather (2)", "reduce", "exchange", "waits"} <= set(names.values())
    assert [e["args"]["name"] for e in everything if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    for rank in range(2):
        gathers = [e for e in complete if e["pid"] == rank and names[rank, e["tid"]].startswith("gather")]
        assert sorted(e["args"]["unit"] for e in gathers) == sorted(UNITS * 2 * STEPS)
        assert all(e["args"]["sent_nbytes"] == 1000 and e["name"] == f"gather {e['args']['unit']}" for e in gathers)
        forwards = [
            e["name"] for e in complete if e["pid"] == rank and names[rank, e["tid"]] == "compute" and e["name"].startswith("forward")
        ]
        assert forwards == [f"forward {unit}" for unit in UNITS] * STEPS


def of(found: list[Piece], **wanted: Any) -> list[Piece]:
    return [piece for piece in found if all(getattr(piece, name) == value for name, value in wanted.items())]


def test_pieces_tell_the_step():
    found = simulate(2, lambda rank, step, phase, unit: 0.001 + 0.05 * ((rank, step, phase, unit) == (1, 2, "forward", "blocks.2")))
    late = of(pieces(found), rank=0, cause="straggler rank", culprit=1, unit="blocks.2")
    assert {piece.step for piece in late} == {2}
