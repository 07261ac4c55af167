"""FSDP2 cuts each parameter into a piece for each rank, to look at two of them: the first, and this rank's.

On thousands of ranks, making views that nobody looks at would take most of a simulation. While :class:`FewPieces` is open, the first piece
stands in the place of those.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ENOUGH = 4
"""Ranks for which nothing is saved."""


class FewPieces(TorchFunctionMode):
    """See the file's header. ``rank``: whose piece is looked at."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._nothing: dict[torch.dtype, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.chunk and args[1] > _ENOUGH:
            return self._cut(*args, **kwargs)
        if func is Tensor.new_empty and args[1:] == (0,) and not kwargs:  # a rank beyond the last piece
            if args[0].dtype not in self._nothing:
                self._nothing[args[0].dtype] = func(*args)
            return self._nothing[args[0].dtype]
        return func(*args, **kwargs)

    def _cut(self, tensor: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
        whole = tensor.shape[dim]
        length = max(1, -(-whole // chunks))
        pieces = [tensor.narrow(dim, 0, min(length, whole))] * max(1, -(-whole // length))
        if self._rank < len(pieces):
            begin = self._rank * length
            pieces[self._rank] = tensor.narrow(dim, begin, min(length, whole - begin))
        return pieces
