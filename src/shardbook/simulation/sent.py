"""Bytes that one rank sends in a collective of torch's, as the algorithms that move least do: a share of (N-1)/N of each buffer.

An all-reduce is a reduce-scatter and an all-gather. Source: ZeRO paper, section 7; NCCL's rings and a direct exchange both send that much.
"""

from collections.abc import Sequence
from typing import Any

from shardbook.ledger.watcher import tensors_among

_WHOLE: dict[str, tuple[int, int]] = {
    "_allgather_base_": (0, 1),
    "allgather_": (0, 1),
    "_reduce_scatter_base_": (1, 1),
    "reduce_scatter_": (1, 1),
    "alltoall_base_": (1, 1),
    "allreduce_": (0, 2),
}
"""Operator to (which argument is the whole buffer, how often its share is sent)."""


def sent_nbytes(operator: Any, arguments: Sequence[Any], ranks: int) -> int:
    """Of one operator as a mode sees it; 0 for what sends nothing, or is not known."""
    name: str = operator.__name__.partition(".")[0]
    known = _WHOLE.get(name)
    if known is None:
        return 0
    argument, times = known
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors_among(arguments[argument]))
    return times * whole * (ranks - 1) // ranks
