"""The two additions whose order is a promise: gradients over ranks, and the squares of the norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardbook.engine.storage import is_memory_known

CHUNK_NUMEL = 1 << 17
"""Elements added at a time, so that a chunk of every part stays in cache."""

BLOCK_NUMEL = 1 << 18
"""Elements of a parameter whose squares are added before the blocks are: fixed, whatever part of it a rank owns."""

NOTHING = -0.0
"""What a missing gradient adds: x + (-0.0) is x for every x, where x + 0.0 turns -0.0 into 0.0."""


def add_in_order(out: Tensor, parts: Sequence[Tensor], scratch: Tensor | None, *, add_to_out: bool) -> None:
    """``out (+)= parts[0] + parts[1] + ...``, added from left to right in the type of the sum, one rounding an addition.

    All are flat and equally long. With ``scratch`` (at least a chunk, in the type of the sum) ``out`` may have another type, share
    memory with any of the parts, and be added to; without, the sum is formed in ``out`` itself.
    """
    if not is_memory_known(out):
        return  # no values: thousands of chunks would add up nothing
    for begin in range(0, out.numel(), CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, out.numel())
        total = out[begin:end] if scratch is None else scratch[: end - begin]
        if len(parts) > 1 and parts[0].dtype == total.dtype:
            torch.add(parts[0][begin:end], parts[1][begin:end], out=total)
            rest = parts[2:]
        else:
            total.copy_(parts[0][begin:end])
            rest = parts[1:]
        for part in rest:
            total.add_(part[begin:end])
        if add_to_out:
            out[begin:end].add_(total)
        elif scratch is not None:
            out[begin:end].copy_(total)


def sum_of_squares(piece: Tensor, start: int, scratch: Tensor) -> Tensor:
    """Sum of squares in float64 of a flat piece that begins at element ``start`` of its parameter; 0-d, on the piece's device.

    ``scratch`` is float64 and at least :data:`BLOCK_NUMEL` long. Not finite exactly where an element is not finite: squares of
    fp32 values cannot overflow float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=piece.device)
    begin = 0 if is_memory_known(piece) else max(0, piece.numel() - 1)  # without values one block stands for all
    while begin < piece.numel():
        end = min(piece.numel(), begin + BLOCK_NUMEL - (start + begin) % BLOCK_NUMEL)
        block = scratch[: end - begin]
        block.copy_(piece[begin:end])
        total += torch.dot(block, block)
        begin = end
    return total
