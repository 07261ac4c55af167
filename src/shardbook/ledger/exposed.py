"""Where the waiting comes from: pure functions on the timelines of all ranks.

Exposed is the time in which a rank's main thread stands in a collective, at its start or in its wait. These never overlap on one
thread, so their sum is the union. Each wait is cut into two parts, then each part is given a cause.

**Late peers.** Were all peers in time, the transfer would have begun when this rank issued its own part, and some of it would have
been hidden by the work between issue and wait. What the wait lasts beyond that is the peers' doing: the last one to post is asked
why. Since the ranks were last together (the exchange of a step), both have gone the same way up to this collective; whatever took
the peer longer than it took this rank is a *lag*:

* a lag in work of one unit (forward, backward, step, outside), or in its own messages of one collective, that is more than a
  millisecond and more than 5% of this rank's time for the same is a ``straggler rank``: culprit is the peer, the unit is the one in
  which it lost the time, and of a lag in messages the kind is that collective's;
* a wait of the peer's that was laid at another rank's door is passed on, so that a chain ends at the rank that began it;
* no lag is charged to one rank twice. It may come in parts: prefetch lets a rank run ahead of a slow one, and it then waits for the
  rest at a later collective, if only at the exchange;
* what no lag explains is ``waiting for the producer``: the peer did its normal work, and its part was not ready yet.

**The transfer.** The rest, after all have posted. If the gather was issued only at its wait, the part that work of the same pass could
have hidden since the gather before is ``issued late``, or ``waiting for a buffer`` if ``Prefetch.limit`` had held it back; what is left
is ``bandwidth``, as is the time that the main thread needs to start a collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardbook.document import Exposed, StepTime
from shardbook.ledger.history import History, Key
from shardbook.ledger.timeline import Collective, RankTimeline, Step

LATE, BANDWIDTH, PRODUCER, BUFFER, STRAGGLER = (
    "issued late",
    "bandwidth",
    "waiting for the producer",
    "waiting for a buffer",
    "straggler rank",
)

_NEGLIGIBLE_SECONDS = 50e-6
_LEAST_LAG_SECONDS = 1e-3
_LEAST_LAG_SHARE = 0.05
_SPREAD = 0.25
"""What is left of a wait after its lags, up to this share of them, is the spread of the same work and goes with the largest."""

_AT_ITS_WAIT_SECONDS = 100e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one rank's standing in one step: see :class:`~shardbook.document.Exposed` for the fields."""

    step: int
    rank: int
    unit: str
    kind: str
    cause: str
    culprit: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Root:
    """Where time was lost first: by which rank, in what, in which step."""

    step: int
    culprit: int
    key: Key


@dataclass(frozen=True, slots=True)
class _Wait:
    rank: int
    collective: Collective
    begin: float
    end: float
    peer: int | None  # the last to post
    late: float  # seconds that are the peers' doing

    @property
    def transfer(self) -> float:
        return self.end - self.begin - self.late


def exposed(timelines: Sequence[RankTimeline]) -> tuple[Exposed, ...]:
    """Waiting by rank, unit, kind, cause and culprit, in seconds, mean per step; longest first within a rank.

    Args:
        timelines: of all ranks, on one clock. Only whole steps that all of them have are looked at.
    """
    num_steps = len(common_steps(timelines))
    sums: dict[tuple[int, str, str, str, int | None], float] = {}
    for piece in pieces(timelines):
        key = (piece.rank, piece.unit, piece.kind, piece.cause, piece.culprit)
        sums[key] = sums.get(key, 0.0) + piece.seconds
    found = [
        Exposed(rank=rank, unit=unit, kind=kind, cause=cause, culprit=culprit, seconds=seconds / num_steps)
        for (rank, unit, kind, cause, culprit), seconds in sums.items()
    ]
    return tuple(sorted(found, key=lambda entry: (entry.rank, -entry.seconds)))


def step_times(timelines: Sequence[RankTimeline], bandwidth: float | None = None) -> tuple[StepTime, ...]:
    """Where each rank's wall time went, mean per step.

    Args:
        timelines: as for :func:`exposed`.
        bandwidth: bytes per second and rank that the transport reaches (see `bandwidth`); ``None``: no floor is given.
    """
    numbers = common_steps(timelines)
    return tuple(_step_time(timeline, numbers, bandwidth) for timeline in timelines) if numbers else ()


def _step_time(timeline: RankTimeline, numbers: Sequence[int], bandwidth: float | None) -> StepTime:
    steps = [step for step in timeline.steps if step.number in numbers]
    standing = [interval for collective in timeline.collectives for interval in standings(collective)]
    under_way = [(c.issue_begin, max(c.issue_end, c.wait_end or 0.0)) for c in timeline.collectives]
    seconds = sum(step.end - step.begin for step in steps)
    waited = sum(union(standing, step) for step in steps)
    sent = sum(c.sent_nbytes for c in timeline.collectives if any(step.begin <= c.issue_begin < step.end for step in steps))
    per_step = sent // len(steps)
    return StepTime(
        rank=timeline.rank,
        num_steps=len(steps),
        seconds=seconds / len(steps),
        compute=(seconds - waited) / len(steps),
        exposed=waited / len(steps),
        communication=sum(union(under_way, step) for step in steps) / len(steps),
        floor=per_step / bandwidth if bandwidth else None,
        bandwidth=bandwidth,
        sent_nbytes=per_step,
    )


def standings(collective: Collective) -> list[tuple[float, float]]:
    """When the main thread stood in it: while starting it, and while waiting for it."""
    found = [(collective.issue_begin, collective.issue_end)]
    if collective.wait_begin is not None and collective.wait_end is not None:
        found.append((collective.wait_begin, collective.wait_end))
    return found


def union(intervals: Sequence[tuple[float, float]], step: Step) -> float:
    """Seconds of the step that lie in at least one interval."""
    total, reached = 0.0, step.begin
    for begin, end in sorted(intervals):
        begin, end = max(begin, reached), min(end, step.end)
        if end > begin:
            total, reached = total + end - begin, end
    return total


def common_steps(timelines: Sequence[RankTimeline]) -> list[int]:
    """Numbers of the steps that every rank has whole.

    A step that waits for something issued before its timeline began is left out, unless there is no other.
    """
    if not timelines:
        return []
    whole = set.intersection(*({step.number for step in timeline.steps if step.is_whole} for timeline in timelines))
    begun_late = {step.number for timeline in timelines for step in timeline.steps if _waits_for_unknown(timeline, step)}
    return sorted(whole - begun_late or whole)


def _waits_for_unknown(timeline: RankTimeline, step: Step) -> bool:
    return any(c.began_before and step.begin <= c.issue_begin < step.end for c in timeline.collectives)


def pieces(timelines: Sequence[RankTimeline]) -> list[Piece]:
    """Every rank's standing in the common steps, cut up by cause; what :func:`exposed` adds up."""
    return list(_Attribution(timelines).pieces())


class _Attribution:
    """Goes through the waits of all ranks in the order in which they ended, so that a chain's first wait is known before its last."""

    def __init__(self, timelines: Sequence[RankTimeline]) -> None:
        self._timelines = {timeline.rank: timeline for timeline in timelines}
        self._numbers = set(common_steps(timelines))
        self._by_key = {timeline.rank: {c.key: c for c in timeline.collectives if c.sequence >= 0} for timeline in timelines}
        self._waits = sorted((wait for timeline in timelines for wait in self._cut(timeline)), key=lambda wait: wait.end)
        self._histories = {
            timeline.rank: History(timeline, {(w.collective.key, w.begin): w.transfer for w in self._waits if w.rank == timeline.rank})
            for timeline in timelines
        }
        self._charged: dict[int, dict[_Root, float]] = {timeline.rank: {} for timeline in timelines}

    def pieces(self) -> Iterator[Piece]:
        for timeline in self._timelines.values():
            for collective in timeline.collectives:
                step = self._step_at(timeline.rank, collective.issue_end)
                if step is not None and collective.issue_end > collective.issue_begin:
                    yield _piece(step, timeline.rank, collective, BANDWIDTH, collective.issue_end - collective.issue_begin)
        for wait in self._waits:
            step = self._step_at(wait.rank, wait.end)
            for piece in (*self._late(wait, step), *self._transfer(wait, step)):
                if step is not None and piece.seconds > 0:
                    yield piece

    def _step_at(self, rank: int, seconds: float) -> int | None:
        """The step that is looked at and has this moment; the exchange's last moment is inside its step."""
        for step in self._timelines[rank].steps:
            if step.begin < seconds <= step.end:
                return step.number if step.number in self._numbers else None
        return None

    # ---- late peers -----------------------------------------------------------------------------------------------------

    def _cut(self, timeline: RankTimeline) -> Iterator[_Wait]:
        """Each wait of one rank, and how much of it is the peers' doing."""
        for own in timeline.collectives:
            if own.wait_begin is None or own.wait_end is None:
                continue
            peers = [(other[own.key].posted, rank) for rank, other in self._by_key.items() if rank != timeline.rank and own.key in other]
            last, peer = max(peers, default=(own.posted, None))
            waited = own.wait_end - own.wait_begin
            transfer = own.wait_end - min(max(last, own.posted), own.wait_end)
            in_time = min(waited, max(0.0, own.posted + transfer - own.wait_begin))
            late = waited - in_time if peer is not None and last > own.posted else 0.0
            yield _Wait(timeline.rank, own, own.wait_begin, own.wait_end, peer, late)

    def _late(self, wait: _Wait, step: int | None) -> list[Piece]:
        if wait.late <= 0 or wait.peer is None:
            return []
        epoch, charged, left = self._histories[wait.rank].epoch(wait.begin), self._charged[wait.rank], wait.late
        shares: dict[_Root, float] = {}
        if left > _NEGLIGIBLE_SECONDS:
            lags = self._lags(wait, epoch)
            for root, lag in sorted(lags.items(), key=lambda entry: -entry[1]):
                unpaid = lag - charged.get(root, 0.0)
                if unpaid > 0 and left > 0:
                    shares[root] = min(unpaid, left)
                    left -= shares[root]
        if shares and left <= _SPREAD * sum(shares.values()):
            largest = max(shares, key=lambda root: shares[root])
            shares[largest], left = shares[largest] + left, 0.0
        for root, seconds in shares.items():
            charged[root] = charged.get(root, 0.0) + seconds
        step = -1 if step is None else step
        found = [self._straggler(step, wait, root, seconds) for root, seconds in shares.items()]
        return [*found, _piece(step, wait.rank, wait.collective, PRODUCER, left)]

    def _lags(self, wait: _Wait, epoch: int) -> dict[_Root, float]:
        """What the last peer lost since the ranks were together and this rank did not, by where it was lost first; in seconds."""
        assert wait.peer is not None
        theirs = self._histories[wait.peer].until(self._by_key[wait.peer][wait.collective.key].posted)
        ours = self._histories[wait.rank].until(wait.collective.posted)
        lags: dict[_Root, float] = {}
        for key, seconds in theirs.items():
            lag = seconds - ours.get(key, 0.0)
            if lag > max(_LEAST_LAG_SECONDS, _LEAST_LAG_SHARE * ours.get(key, 0.0)):
                lags[_Root(epoch, wait.peer, key)] = lag
        for root, seconds in self._charged[wait.peer].items():
            if root.step == epoch and root.culprit != wait.rank:
                lags[root] = max(lags.get(root, 0.0), seconds)
        return lags

    @staticmethod
    def _straggler(step: int, wait: _Wait, root: _Root, seconds: float) -> Piece:
        what, unit, _ = root.key
        in_messages = what not in ("forward", "backward", "step", "outside")
        kind = what.removeprefix("messages of ") if in_messages else wait.collective.kind
        return Piece(
            step=step, rank=wait.rank, unit=unit or wait.collective.unit, kind=kind, cause=STRAGGLER, culprit=root.culprit, seconds=seconds
        )

    # ---- the transfer ---------------------------------------------------------------------------------------------------

    def _transfer(self, wait: _Wait, step: int | None) -> list[Piece]:
        own, step = wait.collective, -1 if step is None else step
        hideable = min(wait.transfer, self._hideable(wait)) if own.kind == "gather" else 0.0
        return [
            _piece(step, wait.rank, own, LATE if own.held is None else BUFFER, hideable),
            _piece(step, wait.rank, own, BANDWIDTH, wait.transfer - hideable),
        ]

    def _hideable(self, wait: _Wait) -> float:
        """Seconds of work that a gather issued at its wait could have run behind: that of the same pass since the gather before."""
        history, own = self._histories[wait.rank], wait.collective
        if history.work(own.issue_end, wait.begin) > _AT_ITS_WAIT_SECONDS:
            return 0.0
        before = max(
            (
                c.wait_end
                for c in self._timelines[wait.rank].collectives
                if c.kind == "gather" and c.wait_end and c.wait_end <= own.issue_begin
            ),
            default=wait.begin,
        )
        phase = history.phase_after(wait.end)
        return history.work(before if own.held is None else min(before, own.held), own.issue_begin, phase)


def _piece(step: int, rank: int, collective: Collective, cause: str, seconds: float) -> Piece:
    return Piece(step=step, rank=rank, unit=collective.unit, kind=collective.kind, cause=cause, culprit=None, seconds=seconds)
