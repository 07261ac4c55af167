"""The same engine on fake tensors over a fake group of any size: a large model in seconds, and the balances of a real run."""

import resource
import sys
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook.events import Booking, Traffic
from tests import ranks
from tests.zoo import ZOO, Decoder

pytestmark = pytest.mark.ranks


class Layer(nn.Module):
    """A transformer block with the matrices of a 7B model."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Large(nn.Module):
    def __init__(self, width: int = 4096, hidden: int = 11008, depth: int = 32, heads: int = 32, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def init(module: nn.Module) -> None:
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()


def seven_billion(stage: int) -> tuple[float, float, int, dict[str, int]]:
    """Builds and steps once: seconds, GiB resident that this took, parameters, persistent bytes by account."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    import shardbook as sb

    began, base = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = Large()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with FakeTensorMode():
        engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param="bf16")), init=init)
        inputs = torch.zeros(1, 512, dtype=torch.long)
        loss = engine(inputs).float().flatten(0, 1).logsumexp(-1).sum()
        engine.backward(loss, weight=512)
        report = engine.step()
        assert report.applied
    seconds = time.monotonic() - began
    unit_scale = 2**20 if sys.platform == "linux" else 2**30
    assert dist.get_world_size() == 1024
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / unit_scale, numel, balances(engine)


def balances(engine: Any) -> dict[str, int]:
    """What the engine's accounts hold now."""
    held: defaultdict[str, int] = defaultdict(int)

    def add(event: Any) -> None:
        if isinstance(event, Booking):
            held[event.account] += event.nbytes

    with engine.observe(add):
        pass
    return {account: nbytes for account, nbytes in held.items() if nbytes}


def test_seven_billion_parameters_on_1024_ranks_in_seconds() -> None:
    seconds, gib, numel, held = ranks.fake_rank(1024, seven_billion, 3)
    assert 6.5e9 < numel < 7e9
    assert seconds < 10
    assert gib < 1
    assert held["MASTER"] == pytest.approx(4 * numel / 1024, rel=0.001)
    assert held["MOMENT"] == pytest.approx(8 * numel / 1024, rel=0.001)
    assert sum(held.values()) == pytest.approx(12 * numel / 1024, rel=0.001)


# ---- the balances of a real run ------------------------------------------------------------------------------------------


def recorded_steps(stage: int, precision: str, accumulate: int, entry: str, fake: bool) -> tuple[list[Any], dict[str, int], dict[str, int]]:
    """Every booking of two steps in order, the balances after them, and the bytes sent by kind."""
    import contextlib

    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    import shardbook as sb

    with FakeTensorMode() if fake else contextlib.nullcontext():
        torch.manual_seed(0)
        model = ZOO[entry].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision), accumulate=accumulate, clip_grad_norm=1.0)
        engine = sb.Engine(model, optimizer, config)
        events: list[Any] = []
        rank = dist.get_rank() if dist.is_initialized() else 0
        with engine.observe(events.append):
            for step in range(2):
                for micro in range(accumulate):
                    inputs = torch.zeros(2, 6, dtype=torch.long) if fake else ZOO[entry].batches(rank, step, micro).args[0]
                    engine.backward(engine(inputs).float().logsumexp(-1).sum(), weight=12)
                engine.step()
        with torch.no_grad(), engine.gathered(model) if stage < 3 else contextlib.nullcontext():
            pass  # what the last step has sent around is here
    sent: defaultdict[str, int] = defaultdict(int)
    for event in events:
        if isinstance(event, Traffic):
            sent[event.kind] += event.sent_nbytes
    bookings = [(event.account, event.unit, event.nbytes, event.phase, event.padding) for event in events if isinstance(event, Booking)]
    return bookings, balances(engine), dict(sent)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision, accumulate", [("fp32", 1), ("bf16", 1), ("bf16", 3)])
def test_balances_are_those_of_a_real_run(stage: int, num_ranks: int, precision: str, accumulate: int) -> None:
    """Not just at the end: every booking of every phase, in the same order."""
    real = ranks.call(num_ranks, recorded_steps, stage, precision, accumulate, "plain", False)
    for rank in range(num_ranks):
        fake = ranks.fake_rank(num_ranks, recorded_steps, stage, precision, accumulate, "plain", True, rank=rank)
        bookings, held, sent = real[rank]
        assert fake[1] == held
        assert {kind: nbytes for kind, nbytes in fake[2].items() if kind != "step"} == {
            kind: nbytes for kind, nbytes in sent.items() if kind != "step"
        }
        without_comm = [[entry for entry in one if entry[0] != "COMM"] for one in (fake[0], bookings)]
        assert without_comm[0] == without_comm[1]  # COMM alone depends on the transport


def fake_zoo(entry: str, stage: int) -> int:
    """Any model of the zoo that asks for no values runs on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    import shardbook as sb

    with FakeTensorMode():
        model = ZOO[entry].build()
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = sb.Engine(model, torch.optim.AdamW(trainable, lr=1e-3), sb.ZeroConfig(stage=stage))
        inputs = torch.zeros(2, 6, dtype=torch.long)
        for _ in range(2):
            engine.backward(engine(inputs).float().logsumexp(-1).sum(), weight=12)
            engine.step()
    return len(balances(engine))


@pytest.mark.parametrize(
    "entry", ["tied", "frozen", "block_twice", "nested", "odd_shapes", "strided", "checkpoint_block", "dropout", "adapters", "torch_layers"]
)
def test_models_of_the_zoo_run_on_fake_tensors(entry: str) -> None:
    for stage in (1, 3):
        assert ranks.fake_rank(16, fake_zoo, entry, stage) >= 2


def test_the_small_model_is_the_zoos() -> None:
    assert isinstance(ZOO["plain"].build(), Decoder)
