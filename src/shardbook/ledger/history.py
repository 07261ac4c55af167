"""How long one rank has been at what since all ranks were last together: the base on which two ranks' ways are compared.

Ranks are together when the exchange of a step ends. From there each goes through the same units in the same order; the n-th stretch of
one unit's forward is the same work on every rank.
"""

from bisect import bisect_right
from collections.abc import Mapping

from shardbook.ledger.timeline import RankTimeline

Key = tuple[str, str, int]
"""What (a phase, or ``messages of`` a kind), of which unit, and the how-manieth of these."""


class History:
    """Of one rank. ``transfers``: of each wait, by the collective's key and the wait's begin, the seconds that are the rank's own."""

    def __init__(self, timeline: RankTimeline, transfers: Mapping[tuple[Key, float], float]) -> None:
        exchanges = [(c.wait_end, c.sequence) for c in timeline.collectives if c.kind == "step" and c.wait_end is not None]
        self._together = [end for end, _ in exchanges]
        self._numbers = [number for _, number in exchanges]
        self._segments = timeline.segments
        self._segment_begins = [segment.begin for segment in timeline.segments]
        self._busy: list[tuple[float, float, Key, float]] = [*self._work_items(), *_message_items(timeline, transfers)]
        self._busy.sort(key=lambda item: item[0])
        self._begins = [begin for begin, *_ in self._busy]

    def epoch(self, seconds: float) -> int:
        """Number of the last exchange that had ended then; -1 before the first."""
        index = bisect_right(self._together, seconds)
        return self._numbers[index - 1] if index else -1

    def until(self, seconds: float) -> dict[Key, float]:
        """Seconds spent at each thing from the last exchange to this moment."""
        index = bisect_right(self._together, seconds - 1e-9)
        begin = self._together[index - 1] if index else float("-inf")
        spent: dict[Key, float] = {}
        for position in range(bisect_right(self._begins, begin - 1e-9), len(self._busy)):
            first, last, key, amount = self._busy[position]
            if first >= seconds:
                break
            share = amount if last <= seconds else amount * (seconds - first) / (last - first)
            spent[key] = spent.get(key, 0.0) + share
        return spent

    def work(self, begin: float, end: float, phase: str | None = None) -> float:
        """Seconds between two moments in which the main thread stood in no collective; of one phase, where it is given."""
        total = 0.0
        for position in range(max(0, bisect_right(self._segment_begins, begin) - 1), len(self._segments)):
            segment = self._segments[position]
            if segment.begin >= end:
                break
            if phase is None or segment.phase == phase:
                total += max(0.0, min(segment.end, end) - max(segment.begin, begin))
        return total

    def phase_after(self, seconds: float) -> str:
        """Of the work that follows."""
        position = bisect_right(self._segment_begins, seconds - 1e-9)
        while position < len(self._segments) and self._segments[position].phase not in ("forward", "backward"):
            position += 1
        return self._segments[position].phase if position < len(self._segments) else ""

    def _work_items(self) -> list[tuple[float, float, Key, float]]:
        """Segments by stretch: the n-th uninterrupted one of a phase of a unit since the ranks were together."""
        items: list[tuple[float, float, Key, float]] = []
        counts: dict[tuple[str, str], int] = {}
        current: tuple[str, str] | None = None
        epoch = -2
        for segment in self._segments:
            if self.epoch(segment.begin) != epoch:
                epoch, current, counts = self.epoch(segment.begin), None, {}
            label = (segment.phase, segment.unit)
            if label != current:
                current = label
                counts[label] = counts.get(label, 0) + 1
            items.append((segment.begin, segment.end, (*label, counts[label]), segment.end - segment.begin))
        return items


def _message_items(timeline: RankTimeline, transfers: Mapping[tuple[Key, float], float]) -> list[tuple[float, float, Key, float]]:
    """What a rank stands in its own collectives through no fault of a peer's."""
    items: list[tuple[float, float, Key, float]] = []
    for c in timeline.collectives:
        key: Key = (f"messages of {c.kind}", c.unit, c.sequence)
        if c.issue_end > c.issue_begin:
            items.append((c.issue_begin, c.issue_end, key, c.issue_end - c.issue_begin))
        if c.wait_begin is not None and c.wait_end is not None and c.wait_end > c.wait_begin:
            items.append((c.wait_begin, c.wait_end, key, transfers.get((c.key, c.wait_begin), 0.0)))
    return items
