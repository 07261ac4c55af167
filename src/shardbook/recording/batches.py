"""Hashes of what a model is given, additive over rows: the same data gives the same sum however micro-batches and ranks cut it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardbook.recording.keys import column_keys, mixed

_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BLOCK_NUMEL = 1 << 22  # as many elements are made integers at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Facts:
    """What is kept of one tensor. Numbers are 0-d tensors on its device until they are written.

    Args:
        hash: Σ over rows of a hash of the row.
        numel: elements.
        valid: elements of an integer tensor that are not negative, where negative ones stand for "no target"; None for other types.
        dtype: its type, without torch's name before it.
    """

    hash: Tensor
    numel: int
    valid: Tensor | None
    dtype: str

    def row(self) -> list[Any]:
        """As it is written."""
        return [self.hash, self.numel, self.valid, self.dtype]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank was given in a step.

    Args:
        num_rows: of all micro-batches together.
        hashes: one for each micro-batch. What belongs to one row in all its tensors is hashed together, so that inputs paired with
            other targets are other data.
        given: the tensors of each micro-batch one by one.
    """

    num_rows: int
    hashes: list[Tensor]
    given: list[list[Facts]]


def batch_of(batch: Any) -> Batch:
    """Hash a batch. A list of tuples, mappings or lists is a list of micro-batches; anything else is one. None has no rows.

    >>> inputs, targets = torch.arange(6).view(2, 3), torch.tensor([1, -100])
    >>> found = batch_of((inputs, targets))
    >>> found.num_rows, [(facts.numel, facts.valid.item()) for facts in found.given[0]]
    (2, [(6, 6), (2, 1)])
    """
    micro_batches = batch if isinstance(batch, list) and not any(isinstance(item, Tensor) for item in batch) else [batch]
    found = Batch(0, [], [])
    num_rows = 0
    for micro_batch in micro_batches:
        values = [value.detach() if isinstance(value, Tensor) else torch.tensor(value) for value in leaves(micro_batch)]
        if values:
            sums = [_row_sums(value) for value in values]
            rows = _rows_together(values, sums)
            num_rows += rows.numel()
            found.hashes.append(rows.sum())
            whole = [isinstance(value, Tensor) for value in leaves(micro_batch)]
            found.given.append([_facts(value, own) for value, own, is_tensor in zip(values, sums, whole, strict=True) if is_tensor])
    return Batch(num_rows, found.hashes, found.given)


def facts_of(tensor: Tensor) -> Facts:
    """Of one tensor."""
    tensor = tensor.detach()
    return _facts(tensor, _row_sums(tensor))


def num_rows_of(tensors: list[Tensor]) -> int:
    """Rows of the first tensor that has any; 1 where all are numbers."""
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)


def _facts(tensor: Tensor, sums: Tensor) -> Facts:
    counts = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    return Facts(mixed(sums).sum(), tensor.numel(), (tensor >= 0).sum() if counts else None, str(tensor.dtype).removeprefix("torch."))


def _rows_together(tensors: list[Tensor], sums: list[Tensor]) -> Tensor:
    """One for each row that all tensors have; what has another length counts in every row."""
    num_rows = num_rows_of(tensors)
    total = torch.zeros(num_rows, dtype=torch.int64, device=tensors[0].device)
    for place, (tensor, own) in enumerate(zip(tensors, sums, strict=True)):
        if tensor.dim() == 0 or tensor.shape[0] != num_rows:
            own = _row_sums(tensor.reshape(1, -1))
        total += mixed(own + place).to(total.device)
    return mixed(total)


def _row_sums(tensor: Tensor) -> Tensor:
    """Σ lane · column key of each row, a tensor without dimensions being one row."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    rows = tensor.reshape(num_rows, tensor.numel() // max(1, num_rows))
    at_once = max(1, _BLOCK_NUMEL // max(1, rows.shape[1]))
    return torch.cat([_lane_sums(block) for block in rows.split(at_once)]) if rows.shape[0] > at_once else _lane_sums(rows)


def _lane_sums(rows: Tensor) -> Tensor:
    lanes = rows.contiguous().view(_LANES[rows.dtype.itemsize]).to(torch.int64)
    keys = column_keys(lanes.shape[1], lanes.device)
    return torch.mv(lanes, keys) if lanes.device.type == "cpu" else (lanes * keys).sum(1)  # no integer matrices on CUDA


def leaves(value: Any) -> Iterator[Tensor | float]:
    """Tensors and numbers in the order of the containers; mappings by key."""
    if isinstance(value, (Tensor, int, float)):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):  # pyright: ignore[reportUnknownLambdaType]
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(item)
