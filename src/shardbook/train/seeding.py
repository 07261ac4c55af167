"""Random numbers that follow from the place in the run alone, so that another loop, or the same one after a restart, draws the same."""

import hashlib
from collections.abc import Callable
from functools import partial

import torch

Seeding = Callable[[int, int], None]
"""Called with rank and micro-batch before a forward."""


def seed_forward(seed: int, step: int, rank: int, micro: int) -> None:
    """Seed torch's generators, of all devices, for one forward: whatever it draws, dropout's masks above all, follows from these numbers.

    Args:
        seed: the run's.
        step: from 1.
        rank: which rank's micro-batch it is, whoever computes it.
        micro: the micro-batch's number within the step.
    """
    digest = hashlib.blake2b(f"{seed} {step} {rank} {micro}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def seeding(seed: int, step: int) -> Seeding:
    """:func:`seed_forward` of one step."""
    return partial(seed_forward, seed, step)


def unseeded(rank: int, micro: int) -> None:
    """Leaves the generators alone: for models that draw nothing."""
