"""A hash of a batch that is additive over rows: the same data gives the same sum however micro-batches and ranks cut it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardbook.recording.keys import column_keys, mixed

_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def batch_hashes(batch: Any) -> tuple[int, list[Tensor]]:
    """Number of rows, and the hash of each micro-batch (0-d int64, on its device).

    A list of tuples, mappings or lists is a list of micro-batches; anything else is one. What belongs to one row in all tensors of a
    micro-batch is hashed together, so that inputs paired with other targets are other data. None has no rows.
    """
    micro_batches = batch if isinstance(batch, list) and not any(isinstance(item, Tensor) for item in batch) else [batch]
    num_rows, hashes = 0, []
    for micro_batch in micro_batches:
        tensors = [tensor.detach() for tensor in _tensors(micro_batch)]
        if tensors:
            rows = _row_hashes(tensors)
            num_rows += rows.numel()
            hashes.append(rows.sum())
    return num_rows, hashes


def _row_hashes(tensors: list[Tensor]) -> Tensor:
    """One for each row that all tensors have; what has another length counts in every row."""
    num_rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
    total = torch.zeros(num_rows, dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        has_rows = tensor.dim() > 0 and tensor.shape[0] == num_rows
        rows = tensor.reshape(num_rows, -1) if has_rows else tensor.reshape(1, -1)
        total += mixed(_lane_sums(rows) + place).to(total.device)
    return mixed(total)


def _lane_sums(rows: Tensor) -> Tensor:
    if rows.is_complex():
        rows = torch.view_as_real(rows).reshape(rows.shape[0], -1)
    lanes = rows.contiguous().view(_LANES[rows.dtype.itemsize]).to(torch.int64)
    return (lanes * column_keys(lanes.shape[1], lanes.device)).sum(1)


def _tensors(value: Any) -> Iterator[Tensor]:
    """In the order of the containers; mappings by key."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):  # pyright: ignore[reportUnknownLambdaType]
            yield from _tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)
    elif isinstance(value, (int, float, bool)):
        yield torch.tensor(value)
