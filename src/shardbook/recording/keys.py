"""The fixed pseudo-random numbers that fingerprints are made with: functions of an index alone, the same on every rank and machine.

A fingerprint treats a tensor as rows of :data:`ROW_NUMEL` elements, counted from the start of its parameter. Each row has a key and
a sign, each column a key and :data:`NUM_PROJECTIONS` signs; an element's own are the products. That keeps the tables small enough
for a cache, and lets whole rows be worked on as matrices.
"""

from functools import cache

import torch
from torch import Tensor

SCHEME = 1
"""Goes up when a number below, or how they are used, changes: fingerprints of different schemes can't be compared."""

ROW_NUMEL = 256
NUM_PROJECTIONS = 8

_ROW_KEYS, _ROW_SIGNS, _COLUMN_KEYS, _COLUMN_SIGNS = (1 << 60, 2 << 60, 3 << 60, 4 << 60)


def signed(number: int) -> int:
    """A 64-bit pattern as torch's int64 holds it.

    >>> signed(2**64 - 1)
    -1
    """
    return (number & (2**64 - 1)) - (2**64 if number & 2**63 else 0)


def mixed(numbers: Tensor) -> Tensor:
    """A well-mixed 64-bit pattern for each int64: splitmix64 (Steele, Lea and Flood 2014), all arithmetic mod 2^64.

    >>> mixed(torch.tensor([0])).item() == signed(0xE220A8397B1DCDAF)  # the generator's first output from seed 0
    True
    """
    z = numbers * signed(0x9E3779B97F4A7C15) + signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def row_keys(rows: Tensor) -> Tensor:
    """Odd, so that no difference is multiplied away."""
    return mixed(rows + _ROW_KEYS) | 1


def row_signs(rows: Tensor) -> Tensor:
    """±1 in float64."""
    return (mixed(rows + _ROW_SIGNS) & 1).double() * 2 - 1


def column_keys(num_lanes: int, device: torch.device) -> Tensor:
    """Odd; one for each lane of a row."""
    return _column_keys(1 << max(8, (num_lanes - 1).bit_length()), device)[:num_lanes]


@cache
def _column_keys(num_lanes: int, device: torch.device) -> Tensor:
    """For powers of two, so that rows of many lengths need few of them."""
    return mixed(torch.arange(num_lanes, device=device) + _COLUMN_KEYS) | 1


@cache
def column_signs(device: torch.device) -> Tensor:
    """±1 in float64, (ROW_NUMEL, NUM_PROJECTIONS)."""
    bits = mixed(torch.arange(ROW_NUMEL, device=device) + _COLUMN_SIGNS)
    return ((bits[:, None] >> torch.arange(NUM_PROJECTIONS, device=device)) & 1).double() * 2 - 1
