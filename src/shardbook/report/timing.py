"""The page's sections about time."""

from collections.abc import Sequence

from shardbook.document import RunDocument, StepTime
from shardbook.report import charts, markup, words
from shardbook.report.colours import CAUSES, cause_colour
from shardbook.report.console import cause_words, change_cells
from shardbook.report.figures import Change, exposed_by_unit, exposed_of, longest_waiting_rank, waits
from shardbook.tables.sizes import duration, percent, size

_NUM_UNITS = 24
_NUM_RANKS = 16
_COMPUTE, _EXPOSED, _UNDER_WAY = "#c4c4c4", "#4a4a4a", "#888888"


def exposed(document: RunDocument) -> str:
    """What was waited for, by unit and cause."""
    rank = longest_waiting_rank(document)
    if rank is None:
        return ""
    found = waits(document)
    rows = [(wait.unit or "-", wait.kind, cause_words(wait), duration(wait.seconds), str(wait.rank), duration(wait.mean)) for wait in found]
    heads = ("unit", "what", "cause", "longest", "on rank", "mean of ranks")
    table = markup.table(heads, rows, "exposed time a step, longest first", numbers=(3, 4, 5))
    causes = [(cause, meaning) for cause, meaning in words.CAUSES.items() if any(wait.cause == cause for wait in found)]
    parts = [_by_unit(document, rank), table, markup.table(("cause", "means"), causes, "causes")]
    return markup.section("Exposed time by unit and cause", parts)


def step_time(document: RunDocument) -> str:
    """Step, communication and the floor beneath it, by rank."""
    if not document.times:
        return ""
    rows = [
        (f"rank {time.rank}", duration(time.seconds), duration(time.compute), duration(time.exposed), percent(time.exposed, time.seconds),
         duration(time.communication), *_floor_cells(time), size(time.sent_nbytes), str(time.num_steps))
        for time in document.times
    ]  # fmt: skip
    heads = ("", "wall", "compute", "exposed", "share", "communication", "floor", "bandwidth", "sent", "steps")
    meanings = markup.table(("time", "is"), list(words.TIMES.items()), "what each time is")
    table = markup.table(heads, rows, "time of a step, by rank", numbers=range(1, 10))
    return markup.section("Step time and its floor", [_times(document.times[:_NUM_RANKS]), table, meanings])


def changes(caption: str, rows: Sequence[Change], names: tuple[str, str], *, seconds: bool) -> str:
    """Figures of two runs and their difference."""
    cells = [(one.name, *change_cells(one, seconds=seconds)) for one in rows]
    return markup.table(("", *names, "difference"), cells, caption, numbers=(1, 2, 3))


def unit_changes(found: Sequence[Change], names: tuple[str, str]) -> str:
    """Exposed time of two runs by unit."""
    return changes("exposed time a step, by unit", found, names, seconds=True) if found else ""


def _by_unit(document: RunDocument, rank: int) -> str:
    shown = list(exposed_by_unit(document).items())[:_NUM_UNITS]
    segments: list[charts.Segment] = []
    for unit, _ in shown:
        seconds = dict.fromkeys(CAUSES, 0.0)
        for one in exposed_of(document, rank):
            if one.unit == unit:
                seconds[one.cause] = seconds.get(one.cause, 0.0) + one.seconds
        segments += charts.stack(unit or "-", [(cause, 1e3 * amount, cause_colour(cause)) for cause, amount in seconds.items()])
    causes = {one.cause for one in exposed_of(document, rank)}
    legend = markup.legend({cause: cause_colour(cause) for cause in (*CAUSES, *sorted(causes - set(CAUSES))) if cause in causes})
    unit, seconds = shown[0]
    description = f"Exposed time of rank {rank} by unit and cause; {unit or 'no unit'} waits longest, {duration(seconds)} a step."
    return markup.picture(charts.bars(segments, "milliseconds a step"), description, description, legend)


def _times(times: Sequence[StepTime]) -> str:
    segments: list[charts.Segment] = []
    marks: list[charts.Mark] = []
    for time in times:
        step, messages = f"rank {time.rank} step", f"rank {time.rank} messages"
        segments += charts.stack(step, [("compute", 1e3 * time.compute, _COMPUTE), ("exposed", 1e3 * time.exposed, _EXPOSED)])
        segments += charts.stack(messages, [("communication", 1e3 * time.communication, _UNDER_WAY)])
        if time.floor is not None and time.communication:
            marks.append(charts.Mark(row=messages, at=1e3 * time.floor))
    longest = max(times, key=lambda time: time.seconds)
    floor = "no floor, as no bandwidth was measured" if longest.floor is None else f"the floor is {duration(longest.floor)}"
    description = (
        f"Step time by rank: rank {longest.rank} takes {duration(longest.seconds)}, of which {duration(longest.exposed)} exposed; {floor}."
    )
    legend = markup.legend({"compute": _COMPUTE, "exposed": _EXPOSED, "communication under way": _UNDER_WAY})
    caption = description + (" The line across the messages is the floor." if marks else "")
    return markup.picture(charts.bars(segments, "milliseconds", marks), description, caption, legend)


def _floor_cells(time: StepTime) -> tuple[str, str]:
    floor = "not measured" if time.floor is None else duration(time.floor)
    return floor, "not measured" if time.bandwidth is None else f"{time.bandwidth / 1e9:,.2f} GB/s"
