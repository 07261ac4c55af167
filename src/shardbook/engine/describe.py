"""The engine in words and numbers: what ``engine.describe()`` prints, and what ``engine.structure()`` returns."""

from collections.abc import Sequence

import torch

from shardbook.checks import short_dtype
from shardbook.config import Precision
from shardbook.engine.comm import Collectives
from shardbook.engine.context import Context
from shardbook.engine.flat import Flat
from shardbook.engine.passes import Passes
from shardbook.engine.unit import Unit
from shardbook.structure import FlatFacts, GroupFacts, Orders, Structure, UnitFacts


def text(context: Context, units: Sequence[Unit]) -> str:
    """One line for each unit and each piece that this rank owns, under a header with everything in force."""
    config, residency, transport = context.config, context.residency, context.transport
    state = {True: "full on every rank", False: f"1/{transport.num_ranks} on each rank"}
    total = sum(member.parameter.numel() for unit in units for _, _, member in unit.members)
    padding = sum(flat.layout.padding for unit in units for flat in unit.flats)
    order = "in rank order" if transport.ordered else "in the order of the backend"
    lines = [
        (
            f"stage {config.stage}, rank {transport.rank} of {transport.num_ranks} on {context.storage.device}; "
            f"{total:,} parameters in {len(units)} units, {padding:,} elements of padding"
        ),
        (
            f"between uses: parameters {state[residency.full_parameters]}; gradients {state[residency.full_gradients]}; "
            f"optimizer state {state[residency.full_optimizer]}"
        ),
        *_homes(context),
        f"precision: {config.precision.describe()}",
        f"reduction: {order}{' (auto)' if config.reduction == 'auto' else ''}; prefetch: {config.prefetch.ahead} ahead",
    ]
    for unit in units:
        sizes = (
            ", ".join(f"{_short(flat.types.param)} {flat.layout.numel:,}{'' if flat.trainable else ' frozen'}" for flat in unit.flats)
            or "no parameters of its own"
        )
        lines.append(f"  unit {unit.name}: {sizes}; gathered {unit.full_nbytes:,} bytes")
        for flat in unit.flats:
            for span in flat.layout.spans(transport.rank):
                member = flat.members[span.slot]
                part = (
                    "whole"
                    if span.numel == member.parameter.numel()
                    else f"elements {span.start:,} to {span.stop:,} of {member.parameter.numel():,}"
                )
                lines.append(f"    owns {member.name} {tuple(member.shape)}: {part}")
    return "\n".join(lines)


def _homes(context: Context) -> list[str]:
    """Which states rest outside of the device."""
    homes, away = context.homes, str(context.storage.away_tier)
    found: list[str] = []
    if homes.optimizer_away:
        place = "a disk" if homes.optimizer_on_disk else "the host"
        found.append(f"master and moments rest on {place}, reduced gradients on the host ({away})")
    if homes.params_away and not (homes.optimizer_away and not homes.optimizer_on_disk and not context.config.precision.keep_param_shard):
        found.append(f"parameter shards rest on the host ({away})")
    return [f"offload: {'; '.join(found)}"] if found else []


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def structure(context: Context, units: Sequence[Unit], passes: Passes, *, has_stepped: bool) -> Structure:
    """Units, group and orders as plain data. Orders are those of registration before the first step, then what all ranks saw."""
    transport = context.transport
    group = GroupFacts(
        num_ranks=transport.num_ranks,
        rank=transport.rank,
        transport="collectives" if isinstance(transport, Collectives) else "point-to-point",
        ordered=transport.ordered,
        header_numel=transport.header_numel,
    )
    facts = tuple(
        UnitFacts(
            name=unit.name,
            flats=tuple(_flat_facts(flat, context.config.precision) for flat in unit.flats),
            around=tuple(sorted(unit.ancestors - {0})),
        )
        for unit in units
    )
    if not has_stepped:
        return Structure.in_order_of_registration(facts, group)
    forward, backward = passes.forward_order.agreed, passes.backward_order.agreed
    orders = Orders(forward=forward, backward=backward, reduce=passes.reduce_order.agreed) if forward and backward else None
    return Structure(units=facts, group=group, orders=orders)


def _flat_facts(flat: Flat, precision: Precision) -> FlatFacts:
    param, reduce, grad = (_named(dtype) for dtype in (flat.types.param, flat.types.reduce, flat.types.grad))
    in_policy = (param, reduce, grad) == (precision.param, precision.reduce, precision.grad_dtype)
    return FlatFacts(
        numels=tuple(slot.numel for slot in flat.layout.slots),
        param=param,
        trainable=flat.trainable,
        kept=param != precision.param or (flat.trainable and not in_policy),
    )


def _named(dtype: torch.dtype) -> str:
    """shardbook's name of a type; of one that is only stored, its width."""
    return short_dtype(dtype) or f"{8 * dtype.itemsize}-bit"
