"""Bytes sent per step and rank: by the engine's events equal to the closed form, and by a count outside the engine.

The model has no padding for 2 to 4 ranks, so the closed form of DESIGN section 8 holds to the byte: elements times (N-1)/N,
2Ψ at stages 0 and 1, (k+1)Ψ at stage 2, 3kΨ at stage 3. The count outside is the kernel's: how many bytes the TCP connections
of this process have sent. It also holds gloo's 48-byte headers (a message has three: to announce, to ask, to carry), the step's
exchange and what the store was told.
"""

import os
import socket
import stat
import struct
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardbook.events import Traffic
from tests import ranks
from tests.equality import SEED, built
from tests.zoo import ZOO

pytestmark = pytest.mark.ranks

WIDTH, DEPTH = 96, 3


class Aligned(nn.Module):
    """Every unit is a multiple of 64 * 12 elements, so nothing is padded on 2, 3 or 4 ranks."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aligned.Inner() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NUMEL = DEPTH * 4 * WIDTH * WIDTH


def sent_by_the_kernel() -> dict[int, int]:
    """Bytes that each of this process's TCP connections has sent, retransmissions excluded, by the socket's inode."""
    sent_by: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))  # first of all: an engine of an earlier test may be closing its connections meanwhile
            status = os.fstat(copy)
            if not stat.S_ISSOCK(status.st_mode):
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent and _retrans, Linux 4.19
                    sent_by[status.st_ino] = sent - again
        except OSError:
            continue
    return sent_by


def grown(before: dict[int, int], after: dict[int, int]) -> int:
    """Bytes sent in between; connections of engines that have ended meanwhile are left out, and so is what one of them had sent whose
    number a new one has."""
    return sum(total - earlier if total >= (earlier := before.get(inode, 0)) else total for inode, total in after.items())


def run(stage: int, accumulate: int, precision: str, num_steps: int = 4) -> tuple[list[dict[str, int]], list[int], list[int]]:
    """Per step: bytes by kind as the events say, bytes as the kernel says, messages. Between barriers: refreshes count in their step."""
    import torch.distributed as dist

    import shardbook as sb

    torch.manual_seed(SEED)
    model = Aligned()
    config = sb.ZeroConfig(stage=stage, accumulate=accumulate, precision=sb.Precision(param=precision))
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    rank = dist.get_rank()
    by_events: list[dict[str, int]] = []
    by_kernel: list[int] = []
    messages: list[int] = []
    for step in range(num_steps):
        events: list[Any] = []
        before = sent_by_the_kernel()
        with engine.observe(events.append):
            for micro in range(accumulate):
                made = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
                loss = engine(torch.randn(4, WIDTH, generator=made)).float().square().mean()
                engine.backward(loss)
            engine.step()
            if stage < 3:
                with engine.gathered(model):
                    pass
        dist.barrier()
        by_kernel.append(grown(before, sent_by_the_kernel()))
        dist.barrier()  # no rank's engine ends, and closes what connects it, while another rank still counts
        counts: Counter[str] = Counter()
        for event in events:
            if isinstance(event, Traffic):
                counts[event.kind] += event.sent_nbytes
        by_events.append(dict(counts))
        messages.append(sum(isinstance(event, Traffic) for event in events) * (dist.get_world_size() - 1))
    return by_events, by_kernel, messages


def closed_form(stage: int, micro: int, precision: str, num_ranks: int) -> dict[str, int]:
    """Bytes by kind. Gradients travel in the type autograd made them in, fp32 once several were added; the way back carries fp32."""
    share = NUMEL // num_ranks * (num_ranks - 1)
    param = {"fp32": 4, "bf16": 2}[precision]
    added = 4 if micro > 1 else param
    return {
        0: {"reduce": share * added, "return": share * 4},
        1: {"reduce": share * added, "refresh": share * param},
        2: {"reduce": micro * share * param, "refresh": share * param},
        3: {"reduce": micro * share * param, "gather": 2 * micro * share * param},
    }[stage]


def elements(stage: int, micro: int) -> int:
    """DESIGN section 8, in elements of which (N-1)/N are sent."""
    return {0: 2 * NUMEL, 1: 2 * NUMEL, 2: (micro + 1) * NUMEL, 3: 3 * micro * NUMEL}[stage]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_sent_are_the_closed_form(stage: int, num_ranks: int, micro: int, precision: str) -> None:
    expected = closed_form(stage, micro, precision, num_ranks)
    if precision == "fp32":
        assert sum(expected.values()) == elements(stage, micro) // num_ranks * (num_ranks - 1) * 4
    for by_events, by_kernel, messages in ranks.call(num_ranks, run, stage, micro, precision):
        for step in range(1, len(by_events)):  # from the second step on every unit's state is the same each time
            counted = dict(by_events[step])
            exchange = counted.pop("step")
            assert counted == expected
            assert 0 < exchange <= 1024 * (num_ranks - 1)
            if sys.platform == "linux":
                told = by_kernel[step] - sum(expected.values()) - exchange - 3 * 48 * messages[step]
                assert 0 <= told <= 512 * messages[step] + 4096, f"{told} bytes beside payload and headers in {messages[step]} messages"


def nothing_at_one_rank(stage: int) -> list[Any]:
    import shardbook as sb

    model = built(ZOO["plain"], SEED)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=stage))
    events: list[Any] = []
    with engine.observe(events.append):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(0, 0, 0))
        engine.backward(loss, weight=weight)
        engine.step()
    return [event.sent_nbytes for event in events if isinstance(event, Traffic)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_sends_nothing(stage: int) -> None:
    assert sum(ranks.call(1, nothing_at_one_rank, stage)[0]) == 0


def evaluation_traffic(stage: int) -> int:
    """Bytes sent while a rank evaluates, after everything of the last step has arrived."""
    import torch.distributed as dist

    import shardbook as sb

    model = built(ZOO["plain"], SEED)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=stage))
    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(dist.get_rank(), 0, 0))
    engine.backward(loss, weight=weight)
    engine.step()
    events: list[Any] = []
    with engine.observe(events.append), torch.no_grad():
        ZOO["plain"].forward(engine, ZOO["plain"].batches(0, 0, 0))
    return sum(event.sent_nbytes for event in events if isinstance(event, Traffic))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_evaluation_sends_nothing_below_stage_3(stage: int) -> None:
    assert ranks.call(2, evaluation_traffic, stage) == [0, 0]
