"""Out of memory, answered: what was wanted where, what was held, and the cheapest things to turn.

What a lever frees is computed from the accounts that were live, by the rule of what it would partition, drop or halve; each says so
in ``cost``. Levers are in the order of their cost in time, and one that would free nothing is left out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    held = {account: situation.live.get(account, 0) for account in Account}
    if situation.phase == "step":
        yield Lever(name="optimizer with fused=True", nbytes=held[Account.WORKSPACE], cost="none; its temporaries go")
    if situation.engine.startswith("deepspeed"):
        yield Lever(
            name="smaller reduce_bucket_size and allgather_bucket_size", nbytes=held[Account.COMM] * 9 // 10, cost="more, smaller messages"
        )
    yield from _sharding(situation, held)
    passing = held[Account.ACTIVATION] + (held[Account.WORKSPACE] if situation.phase != "step" else 0)
    yield Lever(name="half the micro-batch, twice as many", nbytes=passing // 2, cost="smaller kernels; the step computes the same sum")
    num_units = max(1, situation.num_units)
    yield Lever(
        name="recompute each unit in backward (torch.utils.checkpoint)",
        nbytes=held[Account.ACTIVATION] * (num_units - 1) // num_units,
        cost="about a third more compute; one unit's activations and the inputs of all stay",
    )
    if (_stage(situation.engine) or 3) >= 1 and (situation.num_ranks > 1 or situation.engine == "fsdp2"):
        state = held[Account.MASTER] + held[Account.MOMENT] + (held[Account.PARAM] if _stage(situation.engine) in (3, None) else 0)
        yield Lever(name="twice as many ranks", nbytes=state // 2, cost="twice as many devices; each holds half the shards")


def _sharding(situation: Situation, held: Mapping[Account, int]) -> Iterator[Lever]:
    """Stages that partition more than the one in force does."""
    stage, ranks = _stage(situation.engine), situation.num_ranks
    if situation.engine == "fsdp2":
        yield Lever(
            name="reshard_after_forward=True", nbytes=held[Account.GATHERED] // 2, cost="each unit is gathered once more in backward"
        )
    if stage is None or ranks == 1:
        return
    gone = ranks - 1
    state = (held[Account.MASTER] + held[Account.MOMENT]) * gone // ranks
    grads = (held[Account.GRAD] + held[Account.GRAD_FULL]) * gone // ranks
    if stage < 1:
        yield Lever(name="ZeRO stage 1", nbytes=state, cost="none: the same bytes are sent")
    if stage < 2:
        yield Lever(name="ZeRO stage 2", nbytes=grads + (state if stage < 1 else 0), cost="none with one micro-batch a step")
    if stage < 3:
        nbytes = held[Account.PARAM] * gone // ranks + (grads if stage < 2 else 0) + (state if stage < 1 else 0)
        yield Lever(name="ZeRO stage 3", nbytes=nbytes, cost="parameters are gathered in forward and backward: 1.5 times the bytes sent")


def _stage(engine: str) -> int | None:
    """What is partitioned already; FSDP2 partitions everything, a single plain loop nothing that a stage would help."""
    if engine in ("ddp", "plain"):
        return 0
    last = engine[-1:]
    return int(last) if last.isdigit() and engine != "fsdp2" else None
