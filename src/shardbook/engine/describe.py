"""The engine in words and numbers: what ``engine.describe()`` prints."""

from collections.abc import Sequence

import torch

from shardbook.engine.context import Context
from shardbook.engine.unit import Unit


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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
