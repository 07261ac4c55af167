"""Out of memory, answered: what was wanted where, what was held, and the cheapest things to turn.

What a lever frees is computed from the accounts that were live, by the rule of what it would partition, drop or halve; each says so
in ``cost``. Levers are in the order of their cost in time, and one that would free nothing is left out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardbook import levers
from shardbook.accounts import Account
from shardbook.document import Lever, Shortage

NUM_LEVERS = 3
_ASKED = re.compile(r"you tried to allocate (\d+) bytes|Tried to allocate ([\d.]+) (KiB|MiB|GiB|bytes)")
_SCALE = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Where memory ran short: ``engine`` as in :func:`shardbook.ledger.peers.engine_of`; ``num_units`` are those of the model."""

    engine: str
    num_ranks: int
    num_units: int
    rank: int
    step: int
    phase: str
    unit: str
    account: Account
    asked: int
    budget: int | None
    live: Mapping[str, int]


def shortage_of(situation: Situation) -> Shortage:
    """What a person is told."""
    return Shortage(
        rank=situation.rank,
        step=situation.step,
        phase=situation.phase,
        unit=situation.unit,
        account=str(situation.account),
        asked=situation.asked,
        budget=situation.budget,
        live=dict(situation.live),
        levers=tuple(lever for lever in _levers(situation) if lever.nbytes > 0)[:NUM_LEVERS],
    )


def asked_nbytes(message: str) -> int:
    """Bytes that an allocator's message says were asked for; 0 where it says nothing.

    >>> asked_nbytes("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12")
    4096
    >>> asked_nbytes("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10 GiB")
    2147483648
    """
    found = _ASKED.search(message)
    if found is None:
        return 0
    return int(found[1]) if found[1] else int(float(found[2]) * _SCALE[found[3]])


def _levers(situation: Situation) -> Iterator[Lever]:
    for effect in _effects(situation):
        yield Lever(name=effect.name, nbytes=effect.nbytes, cost=effect.cost)


def _effects(situation: Situation) -> Iterator[levers.Effect]:
    held, in_step = situation.live, situation.phase == "step"
    if in_step:
        yield levers.fused_optimizer(held)
    if situation.engine.startswith("deepspeed"):
        yield levers.smaller_buckets(held)
    stage = _stage(situation.engine)
    if situation.engine == "fsdp2":
        yield levers.reshard(held)
    if stage is not None and situation.num_ranks > 1:
        yield from levers.next_stages(held, stage, situation.num_ranks)
    yield levers.half_micro_batch(held, in_step=in_step)
    yield levers.recompute_units(held, situation.num_units)
    if (stage or 3) >= 1 and (situation.num_ranks > 1 or situation.engine == "fsdp2"):
        shards = [Account.MASTER, Account.MOMENT, *([Account.PARAM] if stage in (3, None) else [])]
        yield levers.double_ranks(held, shards)


def _stage(engine: str) -> int | None:
    """What is partitioned already; FSDP2 partitions everything, a single plain loop nothing that a stage would help."""
    if engine in ("ddp", "plain"):
        return 0
    last = engine[-1:]
    return int(last) if last.isdigit() and engine != "fsdp2" else None
