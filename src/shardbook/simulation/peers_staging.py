"""What gloo takes while FSDP2's collectives run on a CPU; NCCL takes nothing of the kind.

Gloo gathers into a copy of the output, and reduces in a copy of the input: seen on torch 2.13 with 2 ranks, to the byte. Its work
thread lets go of a copy some time after the work is done, which no simulation can know: a real run's peak may have one copy more
where a gather follows a reduction at once.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_COPIED = {"_allgather_base_.default": (0, 0), "_reduce_scatter_base_.default": (1, 12)}
"""Operator to (position of the argument that is copied, bytes of scalars beside the copy)."""


def staged(operator: Any, arguments: Sequence[Any]) -> int:
    """Bytes that gloo takes inside of one operator."""
    known = _COPIED.get(operator.__name__)
    if known is None:
        return 0
    place, scalars = known
    tensor: Tensor = arguments[place]
    return tensor.numel() * tensor.element_size() + scalars
