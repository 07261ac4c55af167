"""How what an engine holds is named, and how tensors are taken out of what it keeps them in."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account

Found = tuple[Account, str, str, Tensor]
"""Account, name, unit, and a tensor whose storage it is."""


class Tree:
    """A module and all below it, walked once: (path, module), (name, parameter) and (name, buffer), each object once."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.named_modules())
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.buffers: list[tuple[str, Tensor]] = []
        seen: set[int] = set()
        for path, inner in self.modules:
            for own, into in ((inner._parameters, self.parameters), (inner._buffers, self.buffers)):
                for name, tensor in own.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        into.append((f"{path}.{name}" if path else name, tensor))  # pyright: ignore[reportArgumentType]


def class_names(thing: Any) -> tuple[str, ...]:
    """Names of the class and those that it inherits from: how an engine is known without importing it."""
    return tuple(base.__name__ for base in type(thing).__mro__)


@lru_cache(maxsize=65536)
def unit_of(name: str) -> str:
    """The unit of a parameter, from its name: the repeated block that it is in, else its module, else the root.

    >>> unit_of("transformer.h.3.mlp.weight"), unit_of("tokens.weight"), unit_of("scale")
    ('transformer.h.3', 'tokens', 'root')
    """
    module = name.rpartition(".")[0]
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return module or "root"


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor; any other as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one is made of; any other alone."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield local(value)
    elif isinstance(value, Mapping) and depth < 4:
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 4:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item, depth + 1)


def attribute(thing: Any, *path: str) -> Any:
    """``thing.a.b.c``, or None where a version of the engine does not have it.

    >>> attribute(1j, "imag", "real"), attribute(1j, "phase", "real")
    (1.0, None)
    """
    for name in path:
        thing = getattr(thing, name, None)
        if thing is None:
            return None
    return thing
