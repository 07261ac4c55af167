"""Persistent accounts of one rank: shardbook's own by its closed form, other engines' by their convention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardbook.accounts import Account, Tier
from shardbook.forecasting.closed_form import OPTIMIZERS, Moments, between, closed_form, elsewhere
from shardbook.forecasting.conventions import PRESETS, Convention, Holding
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.forecasting.homes import homes
from shardbook.forecasting.moved import moved
from shardbook.forecasting.placement import Placement, divided_facts, is_routed, place
from shardbook.forecasting.question import Question
from shardbook.structure import GroupFacts

NATIVE_ABOVE = 64
"""Ranks up to which ``reduction="auto"`` adds in rank order."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a rank holds whatever happens within a step. ``between_steps``: bytes on the device without what lives to the step only.

    ``host``: account to bytes at the highest, as far as it is known without a walk; ``between``: tier to account to bytes between steps.
    """

    convention: Convention
    holdings: tuple[Holding, ...]
    between_steps: int
    placement: Placement | None = None
    host: Mapping[str, int] = field(default_factory=dict[str, int])
    between: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    moved: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def accounts(self) -> dict[str, int]:
        """Account to bytes on the device, gradients included."""
        return {holding.account: holding.here for holding in self.holdings if holding.here}


def state_of(question: Question) -> State:
    """The persistent accounts."""
    convention = question.convention or convention_of(question)
    facts = question.facts
    numel, trained = -(-facts.num_parameters // question.tensor), -(-facts.num_trainable // question.tensor)
    if question.expert > 1 or question.tensor > 1:
        numel, trained = _local_numels(question)
    holdings = _holdings(question, convention, (numel, trained))
    between_steps = sum(one.here for one in _holdings(question, convention, (numel, trained), between_steps=True))
    placement = _placement(question) if facts.units else None
    state = State(convention=convention, holdings=holdings, between_steps=between_steps, placement=placement)
    if question.engine == "shardbook" and question.convention is None and placement is not None:
        return _exact(question, state, placement)
    if question.engine == "shardbook":
        return _offloaded_by_shardbook(question, state, trained)
    return _offloaded(question, state)


def _exact(question: Question, state: State, placement: Placement) -> State:
    """shardbook's own, tier by tier, with its padding."""
    structure, config, moments = placement.structure, question.config, moments_of(question)
    exact = closed_form(structure, config, moments)
    held = between(structure, config, moments)
    return replace(
        state,
        holdings=tuple(replace(one, here=exact[one.account]) for one in state.holdings),
        between_steps=sum(held.get("device", {}).values()),
        host=elsewhere(structure, config, moments).get("host", {}),
        between=held,
        moved=moved(structure, config, moments.per_element, moments.quantised_nbytes),
    )


def _holdings(question: Question, convention: Convention, numels: tuple[int, int], *, between_steps: bool = False) -> tuple[Holding, ...]:
    """Of all and of trained elements. Experts that are shared out lie on so many times fewer data-parallel devices than the rest does."""
    stage, shards = question.config.stage, question.shards
    experts = _expert_numels(question) if question.expert > 1 else (0, 0)
    rest = convention.holdings(numels[0] - experts[0], numels[1] - experts[1], stage, shards, between_steps=between_steps)
    if not experts[0]:
        return rest
    routed = convention.holdings(*experts, stage, shards // question.expert, between_steps=between_steps)
    return tuple(replace(one, total=one.total + more.total, here=one.here + more.here) for one, more in zip(rest, routed, strict=True))


def convention_of(question: Question) -> Convention:
    """The engine's own for the types that are asked for."""
    precision, optimizer = question.config.precision, question.choices.optimizer
    if question.engine == "shardbook":
        return Convention.of_precision(precision, optimizer)
    if question.engine == "deepspeed":
        return knobs_of(question).convention().with_optimizer(optimizer)
    narrow, pure = precision.param != "fp32", not precision.has_master
    if question.engine == "fsdp2":
        name = "fsdp2-fp32" if not narrow else "fsdp2-pure-bf16" if pure else "fsdp2-bf16"
    elif question.engine == "ddp":
        name = "ddp-fp32" if not narrow else "ddp-pure-bf16" if pure else "ddp-amp"
    else:
        name = "megatron-bf16-distributed" if question.config.stage else "megatron-bf16"
    return PRESETS[name].with_optimizer(optimizer)


def knobs_of(question: Question) -> Knobs:
    """DeepSpeed's settings: those given, or its defaults for the stage and type that are asked for."""
    if question.knobs is not None:
        return question.knobs
    dtype = question.config.precision.param
    return Knobs(stage=question.config.stage, dtype=dtype, grad_accum_dtype=dtype, communication_dtype=dtype)  # pyright: ignore[reportArgumentType]


def moments_of(question: Question) -> Moments:
    """What the optimizer keeps of each piece."""
    return OPTIMIZERS[question.choices.optimizer]


def group_of(question: Question) -> GroupFacts:
    """How the ranks send: between pairs on gloo, by NCCL's collectives on a device; in rank order to 64 ranks."""
    reduction = question.config.reduction
    ordered = reduction == "ordered" or (reduction == "auto" and question.shards <= NATIVE_ABOVE)
    transport = "point-to-point" if question.device is None and ordered else "collectives"
    return GroupFacts(num_ranks=question.shards, transport=transport, ordered=ordered)


def _placement(question: Question) -> Placement:
    return place(question.facts, question.config.precision, group_of(question), tensor=question.tensor, expert=question.expert)


def _local_numels(question: Question) -> tuple[int, int]:
    """Elements of all and of trained parameters that one tensor- and expert-parallel device has to do with."""
    if not question.facts.units:
        return -(-question.facts.num_parameters // question.tensor), -(-question.facts.num_trainable // question.tensor)
    flats = [flat for unit in _placement(question).structure.units for flat in unit.flats]
    return sum(sum(flat.numels) for flat in flats), sum(sum(flat.numels) for flat in flats if flat.trainable)


def _expert_numels(question: Question) -> tuple[int, int]:
    """The same of routed experts alone."""
    held = divided_facts(question.facts, question.tensor, question.expert)
    routed = [parameter for parameter in held.parameters() if is_routed(parameter.name)]
    return sum(each.numel for each in routed), sum(each.numel for each in routed if each.trainable)


def away(question: Question) -> frozenset[Account]:
    """Accounts that lie on the host or a disk between uses, by the configuration."""
    offload = question.config.offload
    optimizer = {Account.MASTER, Account.MOMENT} if offload.optimizer != "none" else set[Account]()
    return frozenset(optimizer | ({Account.PARAM} if offload.params != "none" else set()))


def _offloaded(question: Question, state: State) -> State:
    """What lives on the host is no device memory; what lives on a disk is neither."""
    gone = away(question)
    if not gone:
        return state
    on_disk = {Account.MASTER, Account.MOMENT} if question.config.offload.optimizer == "disk" else set[Account]()
    host = {one.account: one.here for one in state.holdings if one.account in gone - on_disk}
    disk = {one.account: one.here for one in state.holdings if one.account in on_disk}
    holdings = tuple(replace(one, here=0) if one.account in gone else one for one in state.holdings)
    left = state.between_steps - sum(one.here for one in state.holdings if one.account in gone)
    return replace(state, holdings=holdings, host=host, between_steps=left, between={"host": host, "disk": disk})


def _offloaded_by_shardbook(question: Question, state: State, trained: int) -> State:
    """Under a bare convention, or for a number of parameters: what docs/tiers.md says of whole shards, without padding and staging."""
    config, where = question.config, homes(question.config)
    if where.are_device:
        return state
    here = {one.account: one.here for one in state.holdings}
    shard, convention = -(-trained // question.shards), state.convention
    lies: dict[Tier, dict[str, int]] = {Tier.DEVICE: {}, Tier.HOST: {}, Tier.DISK: {}}
    if where.steps is Tier.HOST:
        width = convention.term(Account.MASTER).nbytes or convention.term(Account.PARAM).nbytes
        lies[where.master][Account.MASTER] = math.ceil(shard * width)
        lies[where.moment][Account.MOMENT] = here[Account.MOMENT]
        lies[Tier.HOST][Account.GRAD] = math.ceil(shard * convention.term(Account.GRAD).nbytes)
    else:
        lies[Tier.DEVICE] |= {account: here[account] for account in (Account.MASTER, Account.MOMENT, Account.GRAD)}
    is_source = where.master is Tier.HOST and not config.precision.keep_param_shard  # of gathers, where nothing else rests
    param = here[Account.PARAM]
    if config.stage == 3:
        frozen = question.facts.num_parameters - question.facts.num_trainable
        numel = frozen if is_source else question.facts.num_parameters
        param = math.ceil(-(-numel // question.tensor // question.shards) * convention.term(Account.PARAM).nbytes)
    lies[where.param if config.stage == 3 else Tier.DEVICE][Account.PARAM] = param
    between = {tier: {name: nbytes for name, nbytes in held.items() if nbytes and name != Account.GRAD} for tier, held in lies.items()}
    return replace(
        state,
        holdings=tuple(replace(one, here=lies[Tier.DEVICE].get(one.account, 0)) for one in state.holdings),
        between_steps=sum(between[Tier.DEVICE].values()),
        host={name: nbytes for name, nbytes in lies[Tier.HOST].items() if nbytes},
        between={str(tier): held for tier, held in between.items() if held},
    )
