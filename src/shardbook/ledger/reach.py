"""What an object reaches: for tensors that hang on a model without being its parameters or buffers."""

import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardbook.ledger.places import Hook

_MOST_OBJECTS = 500_000
_NOT_INTO = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType, Hook, str, bytes, int, float)
"""Ways that lead everywhere, ours, and what leads nowhere."""


def reached(roots: Sequence[Any]) -> Iterator[Tensor | torch.UntypedStorage]:
    """Every tensor and storage that can be reached from ``roots``, each once; a function leads to what it encloses, not to its module."""
    waiting: list[Any] = list(roots)
    seen = {id(item) for item in waiting}
    while waiting and len(seen) < _MOST_OBJECTS:
        found = waiting.pop()
        if isinstance(found, (Tensor, torch.UntypedStorage)):
            yield found
        for item in _next(found):
            if id(item) not in seen and not isinstance(item, _NOT_INTO):
                seen.add(id(item))
                waiting.append(item)


def _next(found: Any) -> Sequence[Any]:
    if isinstance(found, types.FunctionType):
        return [*(found.__closure__ or ()), *(found.__defaults__ or ())]
    if isinstance(found, Tensor):
        return [vars(found)] if hasattr(found, "__dict__") else []
    return gc.get_referents(found)
