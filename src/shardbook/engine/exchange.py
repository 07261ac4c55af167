"""The one exchange of a step: what each rank knows of its micro-batches, packed, sent, and added up in rank order.

Layout of a rank's float64 vector: loss, sum of squares of the gradients in its shards, mismatch flag, weight, number of the first
non-finite parameter | micro-batches, of them with and without a weight, of them of unknown loss | digests of orders | one bit per
parameter (has a gradient), 32 to a word. The first part may live on the device; the rest is known on the host.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardbook.errors import DivergenceError, UsageError

_BITS = 32
_NUM_FIXED = 9  # entries before the digests


@dataclass(slots=True)
class Tally:
    """What this rank has gathered since the last step, before the exchange."""

    loss: float | Tensor = 0.0
    weight: float | Tensor = 0.0
    num_micro_batches: int = 0
    num_weighted: int = 0
    num_unweighted: int = 0
    num_unknown: int = 0  # backward was called on the tensor: the loss never passed through the engine

    def add(self, loss: Tensor | None, weight: float | Tensor | None, *, empty: bool) -> None:
        """One micro-batch. Nothing is read from the device here."""
        self.num_micro_batches += 1
        if empty:
            return
        if loss is None:
            self.num_unknown += 1
        else:
            self.loss = self.loss + loss.detach().double()
        if weight is None:
            self.weight = self.weight + 1.0
            self.num_unweighted += 1
        else:
            self.weight = self.weight + (weight.detach().double() if isinstance(weight, Tensor) else float(weight))
            self.num_weighted += 1


@dataclass(frozen=True, slots=True)
class Totals:
    """The step as all ranks see it."""

    loss: float | None
    weight: float
    raw_norm: float  # of the summed (and loss-scaled) gradients, rounded to fp32; not finite where a gradient is not
    first_nonfinite: int | None
    has_gradient: tuple[bool, ...]
    mismatch: bool
    digests_agree: tuple[bool, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.raw_norm) and (self.loss is None or math.isfinite(self.loss))


def pack(
    tally: Tally, squares: Tensor, mismatch: Tensor | None, numbers: Sequence[int], digests: Sequence[int], has_gradient: Sequence[bool]
) -> Tensor:
    """This rank's vector. ``squares``: float64, one per own piece, of the parameters with these ``numbers``."""
    device = squares.device
    words = [
        float(sum(1 << bit for bit, flag in enumerate(has_gradient[begin : begin + _BITS]) if flag))
        for begin in range(0, len(has_gradient), _BITS)
    ]
    counts = (tally.num_micro_batches, tally.num_weighted, tally.num_unweighted, tally.num_unknown)
    host = [*map(float, counts), *map(float, digests), *words]

    def scalar(value: float | Tensor) -> Tensor:
        return (
            value.reshape(()).to(device=device, dtype=torch.float64)
            if isinstance(value, Tensor)
            else torch.full((), float(value), dtype=torch.float64, device=device)
        )

    if numbers:
        order = torch.tensor(numbers, dtype=torch.float64, device=device)
        first = torch.where(torch.isfinite(squares), math.inf, order).min()
    else:
        first = scalar(math.inf)
    parts = [scalar(tally.loss), squares.sum(), scalar(0.0 if mismatch is None else mismatch), scalar(tally.weight), first]
    return torch.cat([torch.stack(parts), torch.tensor(host, dtype=torch.float64, device=device)])


def add_up(rows: Sequence[Sequence[float]], num_parameters: int, num_digests: int) -> Totals:
    """Totals of all ranks' vectors.

    Raises:
        DivergenceError: the ranks did different numbers of micro-batches.
        UsageError: weights given for some micro-batches only; a total weight that is not positive.
    """
    micro_batches = [int(row[5]) for row in rows]
    if len(set(micro_batches)) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(micro_batches))
        raise DivergenceError(
            f"the ranks did different numbers of micro-batches in this step ({each}); call engine.backward(None) for an empty one"
        )
    weighted, unweighted, unknown = (sum(int(row[index]) for row in rows) for index in (6, 7, 8))
    weight = loss = squares = 0.0
    for row in rows:  # one rank after the other, as the promise says (sum() may do otherwise)
        loss, squares, weight = loss + row[0], squares + row[1], weight + row[3]
    words = len(rows[0]) - _NUM_FIXED - num_digests
    merged = [0] * words
    for row in rows:
        for index in range(words):
            merged[index] |= int(row[_NUM_FIXED + num_digests + index])
    first = min(row[4] for row in rows)
    return Totals(
        loss=None if unknown or not weight else loss / weight,
        weight=_checked_weight(weight, weighted, unweighted),
        raw_norm=to_fp32(math.sqrt(squares) if squares >= 0 else squares),
        first_nonfinite=None if math.isinf(first) else int(first),
        has_gradient=tuple(bool(merged[index // _BITS] >> index % _BITS & 1) for index in range(num_parameters)),
        mismatch=any(row[2] for row in rows),
        digests_agree=tuple(len({row[_NUM_FIXED + index] for row in rows}) == 1 for index in range(num_digests)),
    )


def assumed(tally: Tally, has_gradient: Sequence[bool], num_ranks: int, num_digests: int) -> Totals:
    """Totals where tensors have no values: every rank as this one, everything finite, norm 1, loss and weights 1 each."""
    weight = float(tally.num_micro_batches * num_ranks)
    return Totals(1.0, weight, 1.0, None, tuple(has_gradient), mismatch=False, digests_agree=(True,) * num_digests)


def _checked_weight(weight: float, weighted: int, unweighted: int) -> float:
    if weighted and unweighted:
        raise UsageError(
            f"engine.backward: {weighted} micro-batches of this step (all ranks together) were given a weight and {unweighted} were not; "
            f"give weight= to all of them or to none"
        )
    if not math.isfinite(weight) or weight <= 0:
        raise UsageError(
            f"engine.step: the total weight of this step is {weight}; it must be positive, as the objective is the sum of losses over "
            f"the sum of weights. The step was not applied; give backward(None) to ranks without data, and skip a step that has none"
        )
    return weight


def to_fp32(value: float) -> float:
    """Rounded to fp32 (infinite beyond its range), without a tensor: nothing here reads from a device."""
    return ctypes.c_float(value).value
