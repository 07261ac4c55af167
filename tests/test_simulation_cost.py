"""What a simulation costs: the same on any number of ranks. ``make evidence-simulation`` has the seconds."""

import pytest
import torch

import shardbook as sb
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.simulation.memory import FakeMemory

SIZES = DecoderConfig(vocab=256, layers=3, width=64, heads=4, kv_heads=2, ffn=176)


def num_operators(monkeypatch, num_ranks):
    """How many operators a simulation runs."""
    ran = []
    dispatch = FakeMemory.__torch_dispatch__

    def counting(self, func, types, args=(), kwargs=None):
        ran.append(func)
        return dispatch(self, func, types, args, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(FakeMemory, "__torch_dispatch__", counting)
        found = sb.simulate(
            lambda: Decoder(SIZES),
            lambda: (torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)),
            sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16")),
            ranks=num_ranks,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        )
    assert found.ranks == num_ranks
    return len(ran)


@pytest.mark.full
def test_the_cost_does_not_grow_with_the_number_of_ranks(monkeypatch):
    """Operators are what costs: 64 ranks and fewer exchange point by point, more of them in one collective."""
    few, *more = [num_operators(monkeypatch, num_ranks) for num_ranks in (2, 8, 64, 1024, 16_384)]
    assert few > 100
    assert max(more) <= few  # shorter pieces have fewer blocks
    assert more[-1] == more[-2]
