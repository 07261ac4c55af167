"""Operators that say what their tensors are for: collectives, and the copies around the gathers of FSDP2."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardbook.accounts import Account

_COLLECTIVES = ("c10d.", "_c10d_functional.")


def accounts_of_arguments(name: str, args: Sequence[Any], kwargs: Any) -> Iterator[tuple[Tensor, Account]]:
    """(tensor, account) of the arguments that an operator explains; ``name`` as in ``aten.add.Tensor``."""
    if name.startswith(_COLLECTIVES):
        yield from ((tensor, Account.COMM) for tensor in _tensors(args))
    elif name.startswith("fsdp.split_with_sizes_copy"):
        yield from ((tensor, Account.GATHERED) for tensor in _tensors((kwargs or {}).get("out", ())))
    elif name.startswith("fsdp.chunk_cat"):
        yield from ((tensor, Account.GRAD_FULL) for tensor in _tensors(args[:1]))
        yield from ((tensor, Account.COMM) for tensor in _tensors((kwargs or {}).get("out", ())))
    elif name.startswith("fsdp.all_gather_copy_in"):
        yield from ((tensor, Account.COMM) for tensor in _tensors(args[1:2]))


def accounts_of_outputs(name: str) -> Account | None:
    """The account of what an operator makes, where the operator says it."""
    return Account.COMM if name.startswith((*_COLLECTIVES, "fsdp.")) else None


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(value)
