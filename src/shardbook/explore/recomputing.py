"""Checkpointing is another ledger: the small decoder, trained and measured with and without recomputation.

    python -m shardbook.explore.recomputing --recompute none
    python -m shardbook.explore.recomputing --recompute full --out run.json

ZeRO shards parameters, gradients and optimizer state. Activations are in none of its stages: what shrinks them is to compute them
again. Here each block runs in ``torch.utils.checkpoint`` or not, on one rank at stage 0, so that nothing else changes.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook.document import RunDocument, write_atomically
from shardbook.explore.small import DECODER, NUM_STEPS, Small
from shardbook.models.decoder import Decoder
from shardbook.tables.sizes import exact_size, place
from shardbook.train.recipe import Sourced, build_recipe


class Recomputed(nn.Module):
    """A block of which only the input is kept: backward runs its forward again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def train(policy: str) -> RunDocument:
    """A few steps with fixed tokens; ``policy`` is ``"none"`` or ``"full"``."""
    model = Decoder(DECODER)
    if policy == "full":
        model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    small = Small()
    tokens = torch.arange(small.micro_batch * (small.sequence + 1)).view(small.micro_batch, -1) % DECODER.vocab
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=0))
    with sb.measure(model, optimizer) as run:
        for _ in range(NUM_STEPS):
            loss_sum, num_tokens = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss_sum, weight=num_tokens)
            engine.step()
            del loss_sum, num_tokens
    return replace(run.document(), settings=_settings(small, policy))


def _settings(small: Small, policy: str) -> Mapping[str, Mapping[str, Any]]:
    """What the run was set to, as ``shardbook train`` would write it, so that a forecast of it can be made."""
    values = {"zero.stage": 0, "zero.recompute.policy": policy, "run.ranks": 1, "run.steps": NUM_STEPS}
    values |= {"batch.micro_batch": small.micro_batch, "batch.sequence": small.sequence}
    return build_recipe({}, {name: Sourced(value=value, origin="this script") for name, value in values.items()}).dump()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--out", type=Path, default=None, help="file for the run's document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    document = train(options.recompute)
    found = document.reconciliations[0]
    lines = [f"recompute {options.recompute}: peak {exact_size(found.allocated)} in {place(found.phase, found.unit)}"]
    lines += [f"  {account:<12}{nbytes:>14,} bytes" for account, nbytes in found.books.items() if nbytes]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.out is not None:
        write_atomically(options.out, document.to_json())


if __name__ == "__main__":
    main()
