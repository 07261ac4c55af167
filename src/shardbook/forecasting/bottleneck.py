"""The moving bottleneck: which account is largest, the cheapest thing to turn that shrinks it, and which is largest then.

>>> from shardbook.forecasting.conventions import PRESETS
>>> GIB = 2**30
>>> def largest(state, activations):
...     accounts = {**split_state(state, PRESETS["2+2+4+8"], stage=0, ranks=64), "ACTIVATION": activations}
...     return dominant(accounts)
>>> largest(60 * GIB, 20 * GIB), largest(10 * GIB, 20 * GIB)
('MOMENT', 'ACTIVATION')
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardbook import levers
from shardbook.accounts import Account
from shardbook.checks import Check
from shardbook.forecasting.conventions import ACCOUNTS, Convention
from shardbook.forecasting.result import StepForward
from shardbook.levers import Effect

LEAST_SHARE = 20
"""A lever that frees less than one part in so many of an account is not worth turning for it."""

ON = ("recompute", "chunked-loss", "fused", "offload", "small-buckets", "no-reshard")
"""What may be on already; ``no-reshard``: FSDP keeps units gathered from forward to backward."""

STAGED = ("shardbook", "deepspeed", "convention")
"""Engines that have stages to choose from."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is held at the peak, and what could still be turned.

    Args:
        accounts: account to bytes at the peak.
        convention: which accounts are partitioned at which stage.
        engine, stage, ranks: who trains, what is partitioned, over how many ranks.
        phase: the phase that owns the peak.
        on: what is on already, of :data:`ON`.
        micro_batch: samples in one; None where it is not known, and then it can't be halved.
        num_units: units of the model (blocks); 0 where they are not known, and then recomputation says nothing.
        unit_nbytes: bytes of the largest unit, gathered.
        ahead: units gathered ahead of the one in use.
        loss: account to bytes of the loss end (logits and what follows them) in ``accounts``.

    Raises:
        ConfigError: a stage, a number of ranks or a name in ``on`` that is none.
    """

    accounts: Mapping[str, int]
    convention: Convention
    engine: str = "convention"
    stage: int = 0
    ranks: int = 1
    phase: str = ""
    on: Collection[str] = ()
    micro_batch: int | None = None
    num_units: int = 0
    unit_nbytes: int = 0
    ahead: int = 0
    loss: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        check = Check(self)
        check.stage("stage")
        check.integer("ranks", least=1, remedy="1 is a single process")
        if unknown := sorted(set(self.on) - set(ON)):
            check.add("on", unknown[0], ", ".join(ON), "drop it")
        check.done()

    @property
    def partitioned(self) -> tuple[Account, ...]:
        """The accounts of which a rank holds 1/N."""
        return tuple(account for account in ACCOUNTS if self.convention.term(account).is_partitioned(self.stage))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A lever and the situation once it is turned."""

    effect: Effect
    after: Situation


def split_state(nbytes: int, convention: Convention, stage: int, ranks: int) -> dict[str, int]:
    """Splits a person's own figure for the training state on one rank as the convention splits it; parts add up to ``nbytes``.

    >>> from shardbook.forecasting.conventions import PRESETS
    >>> split_state(1600, PRESETS["2+2+4+8"], stage=0, ranks=1)
    {'PARAM': 200, 'GRAD': 200, 'MASTER': 400, 'MOMENT': 800}
    """
    widths = {str(account): convention.nbytes_per_parameter(account, stage, ranks) for account in ACCOUNTS}
    whole = sum(widths.values())
    if not whole:
        return {Account.PARAM.value: nbytes}
    parts = {account: int(nbytes * width / whole) for account, width in widths.items() if width}
    parts[dominant(parts)] += nbytes - sum(parts.values())
    return parts


def dominant(accounts: Mapping[str, int]) -> str:
    """The account of most bytes, the first of equals; "" where nothing is held."""
    return max(accounts, key=lambda account: accounts[account], default="")


def next_turn(situation: Situation) -> Turn | None:
    """The cheapest lever that frees a part worth having of the largest account; None: nothing is left to turn for it."""
    account = dominant(situation.accounts)
    held = situation.accounts.get(account, 0)
    return next((turn for turn in turns(situation) if turn.effect.freed.get(account, 0) * LEAST_SHARE > held), None)


def step_forward(situation: Situation) -> StepForward | None:
    """:func:`next_turn` as a forecast shows it: what to turn, what it frees of the largest account, and what is held after it."""
    turn = next_turn(situation)
    if turn is None:
        return None
    account = dominant(situation.accounts)
    return StepForward(lever=turn.effect.name, account=account, freed=turn.effect.freed[account], accounts_after=dict(turn.after.accounts))


def path(situation: Situation, *, most: int = 8) -> Iterator[StepForward]:
    """One step forward after another, at most ``most``, each from where the one before led."""
    for _ in range(most):
        turn, step = next_turn(situation), step_forward(situation)
        if turn is None or step is None:
            return
        yield step
        situation = turn.after


def turns(situation: Situation) -> Iterator[Turn]:
    """Everything that would free something, in the order of its cost."""
    return (turn for turn in _all_turns(situation) if any(nbytes > 0 for nbytes in turn.effect.freed.values()))


def _all_turns(situation: Situation) -> Iterator[Turn]:
    yield from _free_of_charge(situation)
    yield from _stages(situation)
    yield from _activations(situation)
    yield from _dear(situation)


def _free_of_charge(situation: Situation) -> Iterator[Turn]:
    """What costs next to no time."""
    held, on = situation.accounts, situation.on
    if situation.phase == "step" and "fused" not in on:
        yield _turn(situation, levers.fused_optimizer(held), on="fused")
    if situation.loss and "chunked-loss" not in on:
        yield _turn(situation, _chunked_loss(situation), on="chunked-loss", loss={})
    if situation.engine == "deepspeed" and "small-buckets" not in on:
        yield _turn(situation, levers.smaller_buckets(held), on="small-buckets")
    if situation.engine.startswith("fsdp") and "no-reshard" in on:
        turn = _turn(situation, levers.reshard(held))
        yield replace(turn, after=replace(turn.after, on=[name for name in on if name != "no-reshard"]))
    if situation.ahead and held.get(Account.GATHERED, 0):
        yield _turn(situation, _less_ahead(situation), ahead=0)


def _stages(situation: Situation) -> Iterator[Turn]:
    """Each stage above this one, as far as the convention partitions more there."""
    if situation.engine not in STAGED or situation.ranks == 1:
        return
    for stage in range(situation.stage + 1, 4):
        freed = {str(account): _partitioned(situation, account, stage) for account in ACCOUNTS}
        if situation.stage < 2 <= stage:  # what waits to be reduced no longer waits for the whole backward
            freed[Account.GRAD_FULL] = situation.accounts.get(Account.GRAD_FULL, 0) * (situation.ranks - 1) // situation.ranks
        if stage == 3:
            freed[Account.GATHERED] = -situation.unit_nbytes * (1 + situation.ahead)
        yield _turn(situation, Effect(name=f"ZeRO stage {stage}", freed=_without_zeros(freed), cost=levers.STAGE_COSTS[stage]), stage=stage)


def _partitioned(situation: Situation, account: Account, stage: int) -> int:
    """Bytes of an account that another stage frees."""
    now, then = (situation.convention.nbytes_per_parameter(account, at, situation.ranks) for at in (situation.stage, stage))
    return int(situation.accounts.get(account, 0) * (1 - then / now)) if then < now else 0


def _activations(situation: Situation) -> Iterator[Turn]:
    held, on = situation.accounts, situation.on
    if situation.num_units > 1 and "recompute" not in on:
        blocks = {Account.ACTIVATION.value: held.get(Account.ACTIVATION, 0) - situation.loss.get(Account.ACTIVATION, 0)}
        yield _turn(situation, levers.recompute_units(blocks, situation.num_units), on="recompute")
    if situation.micro_batch is not None and situation.micro_batch > 1:
        loss = {account: nbytes // 2 for account, nbytes in situation.loss.items()}
        effect = levers.half_micro_batch(held, in_step=situation.phase == "step")
        yield _turn(situation, effect, micro_batch=situation.micro_batch // 2, loss=loss)


def _dear(situation: Situation) -> Iterator[Turn]:
    """More devices, or a slow link."""
    held = situation.accounts
    if situation.partitioned:
        yield _turn(situation, levers.double_ranks(held, situation.partitioned), ranks=2 * situation.ranks)
    if situation.engine in STAGED and "offload" not in situation.on:
        freed = _without_zeros({account: held.get(account, 0) for account in (Account.MASTER, Account.MOMENT)})
        cost = "the optimizer steps on the host, and gradients and parameters cross the link each step"
        yield _turn(situation, Effect(name="optimizer state on the host", freed=freed, cost=cost), on="offload")


def _chunked_loss(situation: Situation, chunks: int = 8) -> Effect:
    freed = {account: nbytes - nbytes // chunks for account, nbytes in situation.loss.items()}
    return Effect(
        name="loss in chunks of the sequence",
        freed=freed,
        cost="next to none: logits are computed a chunk at a time, and again in backward",
    )


def _less_ahead(situation: Situation) -> Effect:
    nbytes = min(situation.accounts.get(Account.GATHERED, 0), situation.ahead * situation.unit_nbytes)
    return Effect(name="no prefetch", freed={Account.GATHERED.value: nbytes}, cost="gathers are waited for instead of overlapped")


def _turn(situation: Situation, effect: Effect, on: str = "", **changed: object) -> Turn:
    accounts = {account: nbytes - effect.freed.get(account, 0) for account, nbytes in situation.accounts.items()}
    accounts |= {account: -nbytes for account, nbytes in effect.freed.items() if account not in accounts and nbytes < 0}
    fields = {"accounts": accounts, "on": (*situation.on, on) if on else situation.on, **changed}
    return Turn(effect=effect, after=replace(situation, **fields))  # pyright: ignore[reportArgumentType]


def _without_zeros(freed: Mapping[str, int]) -> dict[str, int]:
    return {str(account): nbytes for account, nbytes in freed.items() if nbytes}
