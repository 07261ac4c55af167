"""From what each rank saw to one document.

Ranks leave their parts in the process group's store, so that nobody waits in a collective for a rank that is gone.
"""

import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardbook.document import Counters, Curve, Moved, RankMemory, Reconciliation, RunDocument, Shortage, StepMemory, TierMemory
from shardbook.ledger.exposed import exposed, step_times
from shardbook.ledger.timeline import RankTimeline

_PATIENCE = timedelta(seconds=20)
_KEY = "shardbook/measurement/{number}/{rank}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank saw. ``reconciliation`` and ``curve`` are of the step with the highest peak."""

    rank: int
    engine: str
    mode: str
    allocator: str
    num_parameters: int
    seconds: float
    counters: Counters
    sampled: Mapping[str, int]
    reconciliation: Reconciliation | None
    curve: Curve | None
    steps: tuple[StepMemory, ...]
    timeline: RankTimeline | None
    sent_nbytes: int
    sent_nbytes_per_step: int
    shortage: Shortage | None
    notes: tuple[str, ...]
    tiers: tuple[TierMemory, ...] = ()
    moved: tuple[Moved, ...] = ()


def publish(part: Part, number: int) -> None:
    """Leave a part where the other ranks find it; nothing happens where there are none."""
    store = _store()
    if store is not None:
        try:
            store.set(_KEY.format(number=number, rank=part.rank), pickle.dumps(part))
        except (RuntimeError, NotImplementedError):
            return  # the store's host has gone: there is nobody to tell


def collect(own: Part, number: int) -> tuple[list[Part], list[str]]:
    """All ranks' parts by rank, and a note for each rank that left none."""
    store = _store()
    if store is None:
        return [own], []
    parts: list[Part] = []
    notes: list[str] = []
    patience = _PATIENCE
    for rank in range(dist.get_world_size()):
        if rank == own.rank:
            parts.append(own)
            continue
        try:
            key = _KEY.format(number=number, rank=rank)
            store.wait([key], patience)
            parts.append(pickle.loads(store.get(key)))
        except (RuntimeError, NotImplementedError):
            notes.append(f"rank {rank} told nothing of what it saw: it ended, or did not come to the end of its measurement")
            patience = timedelta(seconds=1)
    return parts, notes


def document_of(parts: Sequence[Part], notes: Sequence[str]) -> RunDocument:
    """One document of all ranks' parts."""
    reconciliations = tuple(part.reconciliation for part in parts if part.reconciliation is not None)
    highest = max(reconciliations, key=lambda found: found.allocated, default=None)
    lowest = min(reconciliations, key=lambda found: found.allocated, default=None)
    shown = {found.rank for found in (highest, lowest) if found is not None}
    timelines = [part.timeline for part in parts if part.timeline is not None]
    whole = len(timelines) == len(parts) and all(timeline.steps for timeline in timelines)
    first = parts[0]
    sampled = max((part.sampled for part in parts), key=lambda found: sum(found.values()))
    return RunDocument(
        peak=dict(highest.books) if highest is not None else dict(sampled),
        peak_phase=highest.phase if highest is not None else "",
        peak_allocated=_largest([part.counters.allocated for part in parts]),
        peak_reserved=_largest([part.counters.reserved for part in parts]),
        allocator=first.allocator,
        convention="",
        num_parameters=first.num_parameters,
        settings={},
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        data="",
        losses=(),
        validation_loss=None,
        num_tokens=0,
        seconds=max(part.seconds for part in parts),
        sent_nbytes=tuple(part.sent_nbytes for part in parts),
        sent_nbytes_per_step=max(part.sent_nbytes_per_step for part in parts),
        memory=tuple(_rank_memory(part) for part in parts),
        engine=first.engine,
        mode=first.mode,
        notes=tuple(_notes(parts, notes)),
        counters=tuple(part.counters for part in parts),
        reconciliations=reconciliations,
        steps=tuple(step for part in parts for step in part.steps),
        curves=tuple(part.curve for part in parts if part.curve is not None and part.rank in shown),
        times=step_times(timelines) if whole else (),
        exposed=exposed(timelines) if whole else (),
        shortage=next((part.shortage for part in parts if part.shortage is not None), None),
        tiers=tuple(tier for part in parts for tier in part.tiers),
        moved=tuple(moved for part in parts for moved in part.moved),
    )


def _notes(parts: Sequence[Part], notes: Sequence[str]) -> list[str]:
    """What several ranks say is said once."""
    told = [(note, part.rank) for part in parts for note in part.notes]
    same = {note for note, _ in told if sum(other == note for other, _ in told) == len(parts)}
    own = [f"rank {rank}: {note}" if len(parts) > 1 else note for note, rank in told if note not in same]
    return [*dict.fromkeys(note for note, _ in told if note in same), *own, *notes]


def _rank_memory(part: Part) -> RankMemory:
    counters = part.counters
    return RankMemory(
        rank=part.rank, peak_allocated=counters.allocated, peak_reserved=counters.reserved, peak_resident=counters.resident or 0
    )


def _largest(found: Sequence[int | None]) -> int | None:
    return max((nbytes for nbytes in found if nbytes is not None), default=None)


def _store() -> Any:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return dist.distributed_c10d._get_default_store()
