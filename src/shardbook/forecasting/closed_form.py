r"""shardbook's own accounts on one rank, in bytes, by formula. No torch, no allocation, no simulation.

Letters, for one flat buffer: N ranks; n elements of a parameter; s elements of a shard and L = N·s of the whole buffer, padding
included (:func:`~shardbook.forecasting.buffers.shard_numel`); p, g, m, w bytes of an element of the parameters, of the reduced
gradients, of the master (0: there is none) and of the unreduced gradients. Σ runs over flat buffers.

    between steps            PARAM, MASTER, MOMENT      equal to what the engine books
    reduction to step        GRAD                       equal
    highest within a step    GATHERED, GRAD_FULL, COMM  never below what the engine books; each says when it is equal

Each is of one tier, the device where none is said; what rests elsewhere is offloaded (docs/tiers.md), and :func:`elsewhere` has it.

What is partitioned is the ZeRO paper's (Rajbhandari et al. 2020, section 5: optimizer state from stage 1 on, gradients from 2,
parameters at 3); alignment, padding and types are shardbook's own (docs/accounts.md). A GPT's block of 12·h² elements and its
biases and norms, on the last of 8 ranks:

>>> from shardbook.config import Precision
>>> from shardbook.structure import FlatFacts, GroupFacts
>>> block = FlatFacts(numels=(1728, 72, 576, 24, 2304, 96, 2304, 24), param="bf16")
>>> model = Structure.of_equal_units(block, GroupFacts(num_ranks=8, rank=7))
>>> config = ZeroConfig(stage=3, precision=Precision.preset("2+2+4+8"))
>>> closed_form(model, config)  # doctest: +NORMALIZE_WHITESPACE
{'PARAM': 1920, 'MASTER': 3840, 'MOMENT': 4296, 'GRAD': 1920, 'GATHERED': 15360, 'GRAD_FULL': 15360, 'COMM': 13440}
>>> padding(model, config)
{'PARAM': 848, 'MASTER': 1696, 'MOMENT': 0, 'GRAD': 848}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardbook.accounts import Account, Tier
from shardbook.checks import Check
from shardbook.config import ZeroConfig
from shardbook.forecasting import disk
from shardbook.forecasting.buffers import FlatForm, adds_locally, flat_form
from shardbook.forecasting.homes import homes, keeps_shard
from shardbook.structure import Orders, Structure, UnitFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What an optimizer keeps of each piece.

    Args:
        per_element: tensors with one value for each element, in the type of what is stepped on.
        per_piece_nbytes: bytes beside them; torch's Adam counts steps in one fp32 number.
        quantised_nbytes: bytes of an element whatever the type of what is stepped on: two for bitsandbytes' 8-bit Adam.

    Raises:
        ConfigError: either is negative or no integer.
    """

    per_element: int
    per_piece_nbytes: int = 0
    quantised_nbytes: int = 0

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("per_element", least=0, remedy="0 keeps none")
        check.integer("per_piece_nbytes", least=0, remedy="0 keeps nothing beside the moments")
        check.integer("quantised_nbytes", least=0, remedy="0 keeps none")
        check.done()


OPTIMIZERS: Mapping[str, Moments] = {
    "adamw": Moments(per_element=2, per_piece_nbytes=4),  # exp_avg, exp_avg_sq; step
    "adamw-8bit": Moments(per_element=0, quantised_nbytes=2),  # bitsandbytes: state1, state2; scales of blocks of 256 left out
    "sgd-momentum": Moments(per_element=1),  # momentum_buffer
    "sgd": Moments(per_element=0),
}
"""What `state` holds after a step. Source: torch/optim/adam.py and sgd.py of torch 2.13; Dettmers et al. 2022, arXiv:2110.02861."""


class Amount(NamedTuple):
    """Bytes of one account on this rank, and how many of them are padding: they carry no element of a parameter."""

    nbytes: int
    padding: int


def closed_form(structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"]) -> Mapping[str, int]:
    """Bytes on this rank by account, for the accounts in the file's header, each by the function of its name.

    ``MOMENT`` and ``GRAD`` are 0 before the first step and between reductions; the last three are their highest within a step.

    Raises:
        ConfigError: a flat buffer that contradicts the precision.
    """
    held = _persistent(structure, config, moments)
    return {
        **{account: amount.nbytes for account, amount in held.items()},
        Account.GATHERED.value: gathered(structure, config),
        Account.GRAD_FULL.value: grad_full(structure, config),
        Account.COMM.value: comm(structure, config),
    }


def elsewhere(structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"]) -> Mapping[str, Mapping[str, int]]:
    """Tier to account to bytes on this rank outside of the device: ``host`` (pinned or not) and ``disk``, accounts that hold something.

    ``GRAD`` and ``WORKSPACE`` are their highest within a step; a disk's slots are there between steps as well (:func:`workspace`).

    >>> from shardbook.config import Offload
    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4))
    >>> elsewhere(model, ZeroConfig(stage=2, offload=Offload(optimizer="host")))
    {'host': {'MASTER': 1024, 'MOMENT': 2052, 'GRAD': 1024, 'WORKSPACE': 2097160}}
    """
    found: dict[str, Mapping[str, int]] = {}
    for tier in (Tier.HOST, Tier.DISK):
        held = {account: amount.nbytes for account, amount in _persistent(structure, config, moments, tier).items()}
        held[Account.WORKSPACE.value] = workspace(structure, config, moments) if tier is Tier.HOST else 0
        if any(held.values()):
            found[tier.value] = {account: nbytes for account, nbytes in held.items() if nbytes}
    return found


def between(structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"]) -> Mapping[str, Mapping[str, int]]:
    """Tier to account to bytes between steps, from the second step on; accounts that hold something."""
    found: dict[str, dict[str, int]] = {}
    for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        held = {account: amount.nbytes for account, amount in _persistent(structure, config, moments, tier).items()}
        held[Account.GRAD.value] = 0
        held[Account.WORKSPACE.value] = slots(structure, config, moments) if tier is Tier.HOST else 0
        if any(held.values()):
            found[tier.value] = {account: nbytes for account, nbytes in held.items() if nbytes}
    return found


def padding(structure: Structure, config: ZeroConfig) -> Mapping[str, int]:
    """The bytes of the persistent accounts and of GRAD that are padding; a shard that ends a buffer may be all padding."""
    return {account: amount.padding for account, amount in _persistent(structure, config, OPTIMIZERS["sgd"]).items()}


def _persistent(structure: Structure, config: ZeroConfig, moments: Moments, tier: Tier = Tier.DEVICE) -> dict[str, Amount]:
    return {
        Account.PARAM.value: param(structure, config, tier),
        Account.MASTER.value: master(structure, config, tier),
        Account.MOMENT.value: moment(structure, config, moments, tier),
        Account.GRAD.value: grad(structure, config, tier),
    }


# ---- between steps ---------------------------------------------------------------------------------------------------------


def param(structure: Structure, config: ZeroConfig, tier: Tier = Tier.DEVICE) -> Amount:
    """PARAM: Σ L·p bytes at stages 0 to 2; at stage 3 Σ s·p over the buffers without a master, or over all with ``keep_param_shard``.

    At stage 3 a buffer with a master rests in it, and is cast at each gather. Offloaded, a shard lies on the host; a master on a disk
    is no source of gathers, so that all buffers have a shard, and parameters that are offloaded alone rest on the host beside their master.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4))
    >>> param(model, ZeroConfig(stage=2))
    Amount(nbytes=4096, padding=96)
    >>> param(model, ZeroConfig(stage=3))
    Amount(nbytes=1024, padding=0)
    """
    forms = _forms(structure, config)
    if config.stage < 3:
        return _added(_full(form, form.param_nbytes) for form in forms) if tier is Tier.DEVICE else Amount(0, 0)
    if tier is not homes(config).param:
        return Amount(0, 0)
    return _added(_shard(form, form.param_nbytes) for form in forms if keeps_shard(form, config))


def master(structure: Structure, config: ZeroConfig, tier: Tier = Tier.DEVICE) -> Amount:
    """MASTER: Σ L·m bytes at stage 0, Σ s·m from stage 1 on, over the trained buffers whose type is narrower than ``Precision.master``.

    An offloaded optimizer steps on a copy of its own of every trained buffer, in the type of the parameters where there is no other.

    >>> from shardbook.config import Precision
    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,), param="bf16"), GroupFacts(num_ranks=4))
    >>> master(model, ZeroConfig(stage=1, precision=Precision.preset("bf16")))
    Amount(nbytes=1024, padding=0)
    """
    if tier is not homes(config).master:
        return Amount(0, 0)
    size = _shard if config.stage else _full
    return _added(size(form, form.master_nbytes) for form in _forms(structure, config))


def moment(
    structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"], tier: Tier = Tier.DEVICE
) -> Amount:  # fmt: skip
    """MOMENT: Σ over pieces of k·e·(m or p) + c bytes, for k moments of the e elements of a piece and c bytes beside them.

    On a disk whole shards have room, padding too, and pieces are cut where chunks end; what is kept once for a piece stays on the host.

    Pieces are whole parameters at stage 0 and the parts of parameters in this rank's shards from stage 1 on; padding has no moments,
    so a rank whose shard ends in padding holds less. A parameter that has never had a gradient has no moments either, and is counted
    here all the same.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4, rank=3))
    >>> moment(model, ZeroConfig(stage=1))  # 232 elements: 2 · 4 · 232 + 4
    Amount(nbytes=1860, padding=0)
    """
    where = homes(config).moment
    if where is Tier.DISK and tier is not Tier.DEVICE:
        if tier is Tier.HOST:
            return Amount(_plan(structure, config, moments).num_pieces * moments.per_piece_nbytes, 0)
        trained = [form for form in _forms(structure, config) if form.trainable]
        return _added(_shard(form, moments.per_element * form.stepped_nbytes + moments.quantised_nbytes) for form in trained)
    if tier is not where:
        return Amount(0, 0)
    nbytes = sum(
        (moments.per_element * form.stepped_nbytes + moments.quantised_nbytes) * numel + moments.per_piece_nbytes
        for form in _forms(structure, config)
        for numel in form.pieces
    )
    return Amount(nbytes, 0)


def grad(structure: Structure, config: ZeroConfig, tier: Tier = Tier.DEVICE) -> Amount:
    """GRAD, from the last reduction to the step: Σ L·g bytes at stages 0 and 1, Σ s·g at 2 and 3, over the trained buffers.

    Where the optimizer is offloaded, Σ s·g on the host, and on the device the one buffer that is on its way there: its largest s·g.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4))
    >>> grad(model, ZeroConfig(stage=1))
    Amount(nbytes=4096, padding=96)
    """
    size = _full if config.stage < 2 else _shard
    if homes(config).grad is Tier.HOST:
        shards = [_shard(form, form.grad_nbytes) for form in _forms(structure, config)]
        if tier is Tier.DEVICE:
            return Amount(max((one.nbytes for one in shards), default=0), max((one.padding for one in shards), default=0))
        return _added(shards) if tier is Tier.HOST else Amount(0, 0)
    return _added(size(form, form.grad_nbytes) for form in _forms(structure, config)) if tier is Tier.DEVICE else Amount(0, 0)


def slots(structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"]) -> int:
    """Host memory that a disk's chunks come through, and what stands for a piece that is away: one element of each type of master."""
    if homes(config).master is not Tier.DISK:
        return 0
    widths = {form.stepped_nbytes for form in _forms(structure, config) if form.trainable and form.shard_numel}
    return _plan(structure, config, moments).nbytes + sum(widths)


def workspace(structure: Structure, config: ZeroConfig, moments: Moments = OPTIMIZERS["adamw"]) -> int:
    """WORKSPACE on the host at its highest: slots, and where the optimizer steps there, the larger of the norm's squares and of the
    gradients in the type of what is stepped on, a buffer (or a chunk) at a time. Temporaries of an optimizer that is not fused come on top.
    """
    if homes(config).steps is not Tier.HOST:
        return 0
    longest = _plan(structure, config, moments).longest if homes(config).master is Tier.DISK else None
    casts = [
        (form.shard_numel if longest is None else min(longest, form.shard_numel)) * form.stepped_nbytes
        for form in _forms(structure, config)
        if form.trainable and form.stepped_nbytes != form.grad_nbytes
    ]
    return slots(structure, config, moments) + max([squares_nbytes(Tier.HOST), *casts])


BLOCK_NUMEL = 1 << 18
"""Elements of the fp64 scratch in which squares are added up at the step."""


def squares_nbytes(tier: Tier) -> int:
    """Of that scratch, and on the host of one block's sum, before it joins those on the device."""
    return 8 * BLOCK_NUMEL + 8 * (tier is Tier.HOST)


def _plan(structure: Structure, config: ZeroConfig, moments: Moments) -> disk.Plan:
    return disk.plan(structure, config, moments.per_element, moments.quantised_nbytes)


# ---- within a step ---------------------------------------------------------------------------------------------------------


def gathered(structure: Structure, config: ZeroConfig) -> int:
    """GATHERED at its highest: 0 at stages 0 to 2; at stage 3 Σ L·p bytes over the units that are here at once.

    These are the root, the units around the one in use, it, and ``Prefetch.ahead`` after it; in backward, where a unit is left only
    when the next one is entered, at least two. The orders say which units follow each other, and the largest such set counts. Looking
    ahead never goes beyond ``Prefetch.limit``. Where no order is known, the largest units of all are taken instead.

    Equal to what the engine books where each step follows the orders, the order of backward is that of forward reversed, ``ahead`` is
    at least 1 and there is no ``limit``. Outside of it: building, ``engine.gathered``, and graphs no hook can see into, which keep
    their unit to the end of backward. Source: rule 4 of the engine, the root and at most two units.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4), num_units=3)
    >>> gathered(model, ZeroConfig(stage=3))  # two of the three units
    8192
    """
    if config.stage < 3:
        return 0
    sizes = [sum(form.full_numel * form.param_nbytes for form in _unit_forms(structure, config, unit)) for unit in structure.units]
    ahead, limit = config.prefetch.ahead, config.prefetch.limit
    highest = _here_at_once(structure, sizes, ahead)
    if limit is None or not ahead:
        return highest
    return max(_here_at_once(structure, sizes, 0), min(limit, highest))


def grad_full(structure: Structure, config: ZeroConfig) -> int:
    """GRAD_FULL at its highest: Σ L·w bytes over the trained buffers of the units whose unreduced gradients are here at once.

    A reduction is under way while the next unit's gradients land, so these are two units that follow each other in the order of
    reduction, and the root and the units around others, which are reduced last. Where a rank adds several micro-batches itself
    (stages 0 and 1 with ``accumulate``), or no order is known, these are all units.

    Equal to what the engine books where all gradients arrive, in the order of reduction, and those of the root before the largest
    pair's. Source: the ZeRO paper, section 5.2: gradients are reduced as they become final.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4), num_units=3)
    >>> grad_full(model, ZeroConfig(stage=2))
    8192
    """
    sizes = [_unreduced_nbytes(structure, config, unit) for unit in structure.units]
    if structure.orders is None or adds_locally(config):
        return sum(sizes)
    last = {0}.union(*(unit.around for unit in structure.units))
    order = [number for number in structure.orders.reduce if number not in last]
    pairs = [sizes[one] + sizes[other] for one, other in pairwise(order)] or [sizes[number] for number in order]
    return sum(sizes[number] for number in last) + max(pairs, default=0)


def comm(structure: Structure, config: ZeroConfig) -> int:
    """COMM at its highest: the receive buffer of the largest unit's reduction, r·Σ s·w bytes over its trained buffers.

    r shards arrive at once: N - 1 by messages between two ranks, N by an all-to-all, 1 by a reduce-scatter of the backend, 0 on one
    rank alone (:attr:`~shardbook.structure.GroupFacts.receive_shards`). One reduction at a time is under way.

    Equal to what the engine books where every rank has data; a rank without (``engine.backward(None)``) has a buffer for the gathers
    that it serves as well.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4), num_units=3)
    >>> comm(model, ZeroConfig(stage=2))
    3072
    """
    shards = structure.group.receive_shards
    return max(
        (shards * sum(form.shard_numel * form.wire_nbytes for form in _unit_forms(structure, config, unit)) for unit in structure.units),
        default=0,
    )


def _here_at_once(structure: Structure, sizes: Sequence[int], ahead: int) -> int:
    """The most bytes of units that are gathered at once, looking ``ahead`` units ahead of the one in use."""
    units, orders = structure.units, structure.orders
    if orders is None:
        last = {0}.union(*(unit.around for unit in units))
        others = sorted((nbytes for number, nbytes in enumerate(sizes) if number not in last), reverse=True)
        # off an order, the unit before and those fetched in vain are still here when another one is entered
        return sum(sizes[number] for number in last) + sum(others[: ahead + 2])
    sets = [*_here_in_forward(units, orders, ahead), *_here_in_backward(units, orders, ahead)]
    return max(sum(sizes[number] for number in here) for here in sets)


def _here_in_forward(units: Sequence[UnitFacts], orders: Orders, ahead: int) -> Iterable[set[int]]:
    """The units that are here as each unit of the order is entered: it, those around it, and those ahead."""
    for position, number in enumerate(orders.forward):
        yield {0, number, *units[number].around, *_next(orders.forward, position, ahead)}


def _here_in_backward(units: Sequence[UnitFacts], orders: Orders, ahead: int) -> Iterable[set[int]]:
    """The same in backward: a unit stays until one that neither holds it nor lies in it is entered."""
    in_use: set[int] = {0}
    fetched: set[int] = set()
    for position, number in enumerate(orders.backward):
        yield in_use | fetched | {number, *units[number].around}
        in_use = {number, *units[number].around, *(other for other in in_use if _are_related(units, number, other))}
        fetched = set(_next(orders.backward, position, ahead))
        yield in_use | fetched


def _next(order: Sequence[int], position: int, ahead: int) -> Sequence[int]:
    """The next different units of the order, at most ``ahead``."""
    following = dict.fromkeys(number for number in order[position + 1 :] if number != order[position])
    return tuple(following)[:ahead]


def _are_related(units: Sequence[UnitFacts], one: int, other: int) -> bool:
    """Whether one unit lies inside the other, or they are the same; everything lies in the root."""
    return 0 in (one, other) or one == other or one in units[other].around or other in units[one].around


def _unreduced_nbytes(structure: Structure, config: ZeroConfig, unit: UnitFacts) -> int:
    return sum(form.full_numel * form.wire_nbytes for form in _unit_forms(structure, config, unit))


def _unit_forms(structure: Structure, config: ZeroConfig, unit: UnitFacts) -> list[FlatForm]:
    return [flat_form(flat, config, structure.group) for flat in unit.flats]


def _forms(structure: Structure, config: ZeroConfig) -> list[FlatForm]:
    return [form for unit in structure.units for form in _unit_forms(structure, config, unit)]


def _full(form: FlatForm, nbytes: int) -> Amount:
    """A buffer of all shards with elements of so many bytes."""
    return Amount(form.full_numel * nbytes, (form.full_numel - form.real_numel) * nbytes)


def _shard(form: FlatForm, nbytes: int) -> Amount:
    """This rank's shard alone."""
    return Amount(form.shard_numel * nbytes, (form.shard_numel - form.own_numel) * nbytes)


def _added(amounts: Iterable[Amount]) -> Amount:
    listed = list(amounts)
    return Amount(sum(amount.nbytes for amount in listed), sum(amount.padding for amount in listed))
