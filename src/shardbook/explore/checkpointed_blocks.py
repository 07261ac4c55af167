"""A plain loop over a stack of blocks, for ``shardbook measure``: with ``--recompute`` each block keeps its input only.

    shardbook measure checkpointed_blocks.py
    shardbook measure checkpointed_blocks.py --recompute
"""

import sys

import torch
from torch.utils.checkpoint import checkpoint

NUM_BLOCKS, WIDTH, BATCH, NUM_STEPS = 8, 128, 256, 3


def main() -> None:
    """A few steps."""
    torch.manual_seed(0)
    recompute = "--recompute" in sys.argv[1:]
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)
    )
    optimizer = torch.optim.AdamW(blocks.parameters(), fused=True)
    for _ in range(NUM_STEPS):
        x = torch.randn(BATCH, WIDTH)
        for block in blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if recompute else block(x))
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
