"""Reads an engine's marks in order: which unit's work each moment was, and which wait belongs to which collective.

Two machines run side by side. One follows the passes: forwards nest (a root around its blocks), backwards follow each other, and time
inside a backward pass that is nobody's counts for the unit that backward comes to next. The other follows collectives from issue to
wait. While the main thread stands in either end of a collective, no segment of work grows.
"""

from typing import Any

from shardbook.events import Event, Mark, Traffic

_ISSUES = {"gather": "gather", "serve": "gather", "reduce": "reduce", "refresh": "refresh", "return": "return", "exchange": "step"}
_WAITS = {
    "gather.wait": ("gather", "refresh"),
    "serve.wait": ("serve",),
    "reduce.wait": ("reduce",),
    "refresh.wait": ("refresh", "gather"),
    "return.wait": ("return",),
}


class Reader:
    """``segments`` and ``spans`` are (phase, unit, begin, end), ``steps`` (number, begin, end, is whole), ``collectives`` tables."""

    def __init__(self, first_number: int = 0) -> None:
        self.segments: list[tuple[str, str, float, float]] = []
        self.spans: list[tuple[str, str, float, float]] = []
        self.steps: list[tuple[int, float, float, bool]] = []
        self.collectives: list[dict[str, Any]] = []
        self._number = first_number
        self._step_begin: float | None = None
        self._is_whole = True
        self._last = 0.0  # until where segments are known
        self._forwards: list[tuple[str, float]] = []
        self._backward: tuple[str, float] | None = None
        self._pass_begin: float | None = None
        self._gap_from = 0  # first segment of the backward pass that is nobody's yet
        self._step_mark: float | None = None
        self._issuing: dict[str, Any] | None = None
        self._waiting: dict[str, Any] | None = None
        self._issued: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by mark and unit, not waited for yet
        self._held: dict[str, float] = {}

    def take(self, event: Event, seconds: float) -> None:
        """The next event, which happened at ``seconds``."""
        if self._step_begin is None:
            self._step_begin = self._last = seconds
        if isinstance(event, Traffic):
            self._take_traffic(event, seconds)
        elif isinstance(event, Mark):
            self._work_until(seconds)
            if event.name in _ISSUES:
                self._issue(event, seconds)
            elif event.name in _WAITS:
                self._wait(event, seconds)
            else:
                self._follow(event, seconds)

    # ---- passes -------------------------------------------------------------------------------------------------------

    def _work_until(self, seconds: float) -> None:
        """Book the time since the last mark as work, unless the main thread stood in a collective."""
        if self._issuing is None and self._waiting is None and seconds > self._last:
            self.segments.append((*self._label(), self._last, seconds))
        self._last = seconds

    def _label(self) -> tuple[str, str]:
        if self._forwards:
            return "forward", self._forwards[-1][0]
        if self._backward is not None:
            return "backward", self._backward[0]
        if self._pass_begin is not None:
            return "gap", ""
        return ("step" if self._step_mark is not None else "outside"), ""

    def _follow(self, event: Mark, seconds: float) -> None:
        begins = event.edge == "begin"
        match event.name:
            case "forward":
                self._forward(event.unit, seconds, begins=begins)
            case "backward":
                self._backward_of(event.unit, seconds, begins=begins)
            case "backward pass":
                self._backward_pass(seconds, begins=begins)
            case "step":
                self._step(seconds, begins=begins)
            case "held" if begins:
                self._held.setdefault(event.unit, seconds)
            case "abandoned" if begins:
                self._abandon()
            case _:
                pass

    def _forward(self, unit: str, seconds: float, *, begins: bool) -> None:
        if begins:
            self._forwards.append((unit, seconds))
        elif unit in [open_one for open_one, _ in self._forwards]:
            while self._forwards:
                found, begin = self._forwards.pop()
                self.spans.append(("forward", found, begin, seconds))
                if found == unit:
                    break

    def _backward_of(self, unit: str, seconds: float, *, begins: bool) -> None:
        if self._backward is not None:
            found, begin = self._backward
            self.spans.append(("backward", found, begin, seconds))
            self._backward, self._gap_from = None, len(self.segments)
        if begins:
            self._name_gap(unit)
            self._backward = (unit, seconds)

    def _backward_pass(self, seconds: float, *, begins: bool) -> None:
        if begins:
            self._pass_begin, self._gap_from = seconds, len(self.segments)
        elif self._pass_begin is not None:
            last = next((unit for phase, unit, *_ in reversed(self.segments) if phase == "backward"), "")
            self._name_gap(last)  # nobody comes after it
            self._pass_begin = None

    def _name_gap(self, unit: str) -> None:
        for index in range(self._gap_from, len(self.segments)):
            phase, _, begin, end = self.segments[index]
            if phase == "gap":
                self.segments[index] = ("backward", unit, begin, end)

    def _step(self, seconds: float, *, begins: bool) -> None:
        if begins:
            self._step_mark = seconds
            return
        if self._step_mark is not None:
            self.spans.append(("step", "", self._step_mark, seconds))
        assert self._step_begin is not None
        self.steps.append((self._number, self._step_begin, seconds, self._is_whole))
        self._number += 1
        self._step_begin, self._step_mark, self._is_whole = seconds, None, True

    def _abandon(self) -> None:
        """An exception has ended what was under way: its marks will get no end."""
        self._is_whole = False
        self._name_gap("")
        self._forwards, self._backward, self._pass_begin, self._step_mark = [], None, None, None
        self._issuing = self._waiting = None
        self._issued.clear()

    # ---- collectives ----------------------------------------------------------------------------------------------------

    def _take_traffic(self, event: Traffic, seconds: float) -> None:
        if self._issuing is not None and _belongs(event, self._issuing):
            self._issuing["posted"] = seconds
            _add_traffic(event, self._issuing)
            if event.kind == "step":
                self._number = event.sequence  # the same on all ranks, whenever each began to look
        else:  # a transport that posts from another thread: the main thread's part was over before
            late = next((one for one in reversed(self.collectives) if one["sequence"] < 0 and _belongs(event, one)), None)
            if late is not None:
                _add_traffic(event, late)

    def _issue(self, event: Mark, seconds: float) -> None:
        if event.edge == "begin":
            kind = _ISSUES[event.name]
            held = self._held.pop(event.unit, None) if kind == "gather" else None
            self._issuing = {
                "kind": kind, "unit": event.unit, "sequence": -1, "issue_begin": seconds, "posted": seconds, "issue_end": seconds,
                "wait_begin": None, "wait_end": None, "sent_nbytes": 0, "held": held,
            }  # fmt: skip
        elif self._issuing is not None:
            made, self._issuing = self._issuing, None
            if made["sequence"] < 0:  # nothing was told of messages: it was posted by now
                made["posted"] = seconds
            made["issue_end"] = seconds
            if event.name == "exchange":  # one call that issues and waits
                made |= {"issue_end": made["posted"], "wait_begin": made["posted"], "wait_end": seconds}
            else:
                waiting = self._issued.setdefault((event.name, event.unit), [])
                if event.name != "serve":  # an older one that nobody has waited for was given up
                    waiting.clear()
                waiting.append(made)
            self.collectives.append(made)

    def _wait(self, event: Mark, seconds: float) -> None:
        if event.edge == "begin":
            names = _WAITS[event.name]
            queues = [queue for name in names if (queue := self._issued.get((name, event.unit)))]
            if queues:
                self._waiting = queues[0].pop(0)
            else:
                self._waiting = {
                    "kind": _ISSUES[names[0]], "unit": event.unit, "sequence": -1, "issue_begin": seconds, "posted": seconds,
                    "issue_end": seconds, "sent_nbytes": 0,
                }  # fmt: skip
                self.collectives.append(self._waiting)
            self._waiting |= {"wait_begin": seconds, "wait_end": None}
        elif self._waiting is not None:
            self._waiting["wait_end"] = seconds
            self._waiting = None


def _belongs(event: Traffic, made: dict[str, Any]) -> bool:
    """Whether these messages are of that collective; the flat buffer of frozen parameters has a name of its own."""
    return event.kind == made["kind"] and (event.kind == "step" or event.unit in (made["unit"], f"{made['unit']} (frozen)"))


def _add_traffic(event: Traffic, made: dict[str, Any]) -> None:
    if made["sequence"] < 0:
        made["sequence"] = event.sequence
    made["sent_nbytes"] += event.sent_nbytes
