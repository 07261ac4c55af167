"""Which bytes make which micro-batch: a pure function, so that any process can rebuild any rank's batch.

The bytes are cut into windows of ``sequence + 1`` that overlap by one, so that every byte is a target once. An epoch visits
each window once, in an order that depends on the seed and the epoch. The place of a sequence in that order depends on (step,
rank, micro-batch, row) in such a way that a step's sequences are the same however they are dealt out to ranks and
micro-batches.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardbook.models.decoder import IGNORED


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Micro-batches of ``micro_batch`` sequences of ``sequence`` tokens out of ``content``."""

    content: memoryview
    sequence: int
    micro_batch: int
    accumulate: int
    seed: int

    @property
    def num_windows(self) -> int:
        """Windows in one epoch."""
        return (len(self.content) - 1) // self.sequence

    def micro(self, step: int, rank: int, micro: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``[micro_batch, sequence]`` each, on the CPU."""
        first = ((step * num_ranks + rank) * self.accumulate + micro) * self.micro_batch
        return self._stack([self._shuffled(first + row) for row in range(self.micro_batch)])

    def in_order(self, rank: int, num_ranks: int, at_most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The windows once, in order, dealt out to ranks; every rank gets as many micro-batches, filled up with ignored targets."""
        per_round = self.micro_batch * num_ranks
        for start in range(0, min(math.ceil(self.num_windows / per_round), at_most) * per_round, per_round):
            first = start + rank * self.micro_batch
            inputs, targets = self._stack([(first + row) % self.num_windows for row in range(self.micro_batch)])
            targets[max(0, self.num_windows - first) :] = IGNORED
            yield inputs, targets

    def _shuffled(self, index: int) -> int:
        """The window at ``index``: an affine map of the place in the epoch, with a stride that meets every window once."""
        epoch, place = divmod(index, self.num_windows)
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=16).digest()
        third = self.num_windows // 3  # a stride of a few windows would read the text almost in order
        stride = third + int.from_bytes(digest[:8], "little") % (third + 1)
        offset = int.from_bytes(digest[8:], "little")
        while math.gcd(stride, self.num_windows) != 1:
            stride += 1
        return (offset + stride * place) % self.num_windows

    def _stack(self, windows: list[int]) -> tuple[Tensor, Tensor]:
        rows = [bytearray(self.content[window * self.sequence : (window + 1) * self.sequence + 1]) for window in windows]
        tokens = torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]).long()
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()  # contiguous() would share the memory of a single row
