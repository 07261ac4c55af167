"""Timelines of all ranks as a Chrome trace: JSON that Perfetto and chrome://tracing open.

One process per rank. Its threads: compute (steps, forwards and backwards, nested), gather, reduce, refresh, return and exchange (each
collective from issue to completion; where several of a kind are under way at once, further lanes of the same name), and waits. Times
are microseconds since the first event of any rank.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardbook.document import write_atomically
from shardbook.ledger.timeline import Collective, RankTimeline, Span

LANES = {"compute": 0, "gather": 100, "reduce": 200, "refresh": 300, "return": 400, "step": 500, "waits": 600}
"""First thread number of each; a kind's further lanes follow it."""

_NAMES = {"step": "exchange"}


def write_trace(path: Path, timelines: Sequence[RankTimeline]) -> None:
    """Writes the trace, whole or not at all; makes the folder if need be."""
    write_atomically(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events(timelines)}, allow_nan=False) + "\n")


def events(timelines: Sequence[RankTimeline]) -> list[dict[str, Any]]:
    """The trace's events: names of processes and threads first, then complete events, outer ones before those inside."""
    starts = [item.begin for timeline in timelines for item in (*timeline.spans, *timeline.steps)]
    starts += [collective.issue_begin for timeline in timelines for collective in timeline.collectives]
    zero = min(starts, default=0.0)
    return [event for timeline in timelines for event in _of_rank(timeline, zero)]


def _of_rank(timeline: RankTimeline, zero: float) -> Iterator[dict[str, Any]]:
    yield _meta(timeline.rank, 0, "process_name", f"rank {timeline.rank}")
    made = [*_compute(timeline, zero), *_collectives(timeline, zero), *_waits(timeline, zero)]
    for thread in sorted({event["tid"] for event in made}):
        yield _meta(timeline.rank, thread, "thread_name", _lane_name(thread))
        yield {"ph": "M", "pid": timeline.rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
    yield from sorted(made, key=lambda event: (event["tid"], event["ts"], -event["dur"]))


def _compute(timeline: RankTimeline, zero: float) -> Iterator[dict[str, Any]]:
    steps = [Span(phase="training step", unit=str(step.number), begin=step.begin, end=step.end) for step in timeline.steps]
    around: list[float] = []  # ends of the spans that are open
    for span in sorted((*steps, *timeline.spans), key=lambda span: (span.begin, -span.end)):
        while around and around[-1] <= span.begin:
            around.pop()
        end = min(span.end, around[-1]) if around else span.end  # a forward that an exception cut short may stick out
        around.append(end)
        yield _complete(timeline.rank, LANES["compute"], f"{span.phase} {span.unit}".strip(), (span.begin, end), zero, unit=span.unit)


def _collectives(timeline: RankTimeline, zero: float) -> Iterator[dict[str, Any]]:
    busy: dict[str, list[float]] = {}  # by kind: until when each lane is taken
    for collective in sorted(timeline.collectives, key=lambda one: one.issue_begin):
        end = max(collective.issue_end, collective.wait_end or 0.0)
        lanes = busy.setdefault(collective.kind, [])
        lane = next((number for number, until in enumerate(lanes) if until <= collective.issue_begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        thread = LANES[collective.kind] + lane
        yield _complete(timeline.rank, thread, _title(collective), (collective.issue_begin, end), zero, **_details(collective))


def _waits(timeline: RankTimeline, zero: float) -> Iterator[dict[str, Any]]:
    for collective in timeline.collectives:
        if collective.wait_begin is not None and collective.wait_end is not None:
            interval = (collective.wait_begin, collective.wait_end)
            yield _complete(timeline.rank, LANES["waits"], f"wait for {_title(collective)}", interval, zero, **_details(collective))


def _title(collective: Collective) -> str:
    return f"{_NAMES.get(collective.kind, collective.kind)} {collective.unit}".strip()


def _details(collective: Collective) -> dict[str, Any]:
    return {
        "unit": collective.unit,
        "kind": collective.kind,
        "sequence": collective.sequence,
        "sent_nbytes": collective.sent_nbytes,
        "held_by_limit": collective.held is not None,
    }


def _complete(rank: int, thread: int, name: str, interval: tuple[float, float], zero: float, **details: Any) -> dict[str, Any]:
    begin, end = (round((seconds - zero) * 1e6, 3) for seconds in interval)
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": begin, "dur": round(end - begin, 3), "args": details}


def _meta(rank: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _lane_name(thread: int) -> str:
    name, first = max(((name, first) for name, first in LANES.items() if first <= thread), key=lambda lane: lane[1])
    return _NAMES.get(name, name) + (f" ({thread - first + 1})" if thread > first else "")
