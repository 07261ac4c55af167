"""What can be turned when memory is short, and what each thing frees of what is held: the same rules before a run and after it failed.

Each rule takes the bytes that are held, by account, and gives an :class:`Effect`. None of them knows whether the bytes were forecast or
booked.

>>> half_micro_batch({"ACTIVATION": 100, "PARAM": 7}).freed
{'ACTIVATION': 50}
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardbook.accounts import Account

Held = Mapping[str, int]
"""Account to bytes."""

DOUBLE_RANKS = "twice as many ranks"
FUSED = "optimizer with fused=True"
HALF_MICRO_BATCH = "half the micro-batch, twice as many"
RECOMPUTE = "recompute each unit in backward (torch.utils.checkpoint)"
RESHARD = "reshard_after_forward=True"
SMALLER_BUCKETS = "smaller reduce_bucket_size and allgather_bucket_size"

STAGE_COSTS: Mapping[int, str] = MappingProxyType(
    {
        1: "none: the same bytes are sent",
        2: "none with one micro-batch a step",
        3: "parameters are gathered in forward and backward: 1.5 times the bytes sent",
    }
)
"""What each stage costs against the one before."""

STAGE_ACCOUNTS: Mapping[int, tuple[Account, ...]] = MappingProxyType(
    {1: (Account.MASTER, Account.MOMENT), 2: (Account.GRAD, Account.GRAD_FULL), 3: (Account.PARAM,)}
)
"""What each stage partitions that the one before does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One thing to turn: what it frees of each account, in bytes (below 0: what it adds), and what it costs, in words."""

    name: str
    freed: Mapping[str, int]
    cost: str

    @property
    def nbytes(self) -> int:
        """Freed in all."""
        return sum(self.freed.values())


def _of(held: Held, accounts: Iterable[Account], numerator: int, denominator: int) -> dict[str, int]:
    """A fraction of what is held in some accounts; those with nothing are left out."""
    return {str(account): nbytes * numerator // denominator for account in accounts if (nbytes := held.get(account, 0))}


def fused_optimizer(held: Held) -> Effect:
    """In the optimizer's step WORKSPACE is its temporaries, and a fused one has none."""
    return Effect(name=FUSED, freed=_of(held, (Account.WORKSPACE,), 1, 1), cost="none; its temporaries go")


def smaller_buckets(held: Held) -> Effect:
    """Buckets a tenth as large."""
    return Effect(name=SMALLER_BUCKETS, freed=_of(held, (Account.COMM,), 9, 10), cost="more, smaller messages")


def reshard(held: Held) -> Effect:
    """Units that are kept gathered from forward to backward are let go; about half are there at the peak."""
    return Effect(name=RESHARD, freed=_of(held, (Account.GATHERED,), 1, 2), cost="each unit is gathered once more in backward")


def next_stages(held: Held, stage: int, ranks: int, last: int = 3) -> Iterable[Effect]:
    """Each stage above the one in force: what it partitions stays as 1/N."""
    accounts: list[Account] = []
    for above in range(stage + 1, last + 1):
        accounts += STAGE_ACCOUNTS[above]
        yield Effect(name=f"ZeRO stage {above}", freed=_of(held, accounts, ranks - 1, ranks), cost=STAGE_COSTS[above])


def half_micro_batch(held: Held, *, in_step: bool = False) -> Effect:
    """Half of what lives from forward to backward; in the optimizer's step WORKSPACE has nothing to do with the batch."""
    accounts = (Account.ACTIVATION,) if in_step else (Account.ACTIVATION, Account.WORKSPACE)
    return Effect(name=HALF_MICRO_BATCH, freed=_of(held, accounts, 1, 2), cost="smaller kernels; the step computes the same sum")


def recompute_units(held: Held, num_units: int) -> Effect:
    """One unit's activations stay of ``num_units`` alike."""
    units = max(1, num_units)
    return Effect(
        name=RECOMPUTE,
        freed=_of(held, (Account.ACTIVATION,), units - 1, units),
        cost="about a third more compute; one unit's activations and the inputs of all stay",
    )


def double_ranks(held: Held, partitioned: Iterable[Account]) -> Effect:
    """Half of each account that is partitioned."""
    return Effect(name=DOUBLE_RANKS, freed=_of(held, partitioned, 1, 2), cost="twice as many devices; each holds half the shards")
