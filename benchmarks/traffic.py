"""Bytes sent per step and rank: by the closed form, by the engine's events, and by the kernel's count of this process's sockets.

    python -m benchmarks.traffic --ranks 2 4

The closed form in elements (ZeRO paper, section 7; Ψ parameters, k micro-batches, each × (N-1)/N): stages 0 and 1 2Ψ, stage 2
(k+1)Ψ, stage 3 3kΨ. In bytes: gradients travel in the type autograd made them in (fp32 once several were added locally), full
gradients of stage 0 come back in fp32, parameters travel in their own type.

The kernel counts what the TCP connections carried (``tcpi_bytes_sent`` less ``tcpi_bytes_retrans``; Linux). Between ranks that is
the payload of the events, and besides that gloo's header of each message, the exchange of the step, and one barrier; what went to
the store is counted apart. TCP's and IP's own headers are in neither.
"""

import argparse
import os
import socket
import stat
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import engines, models, ranks
from shardbook.events import Event, Traffic

CONFIG = models.GPTConfig(layers=4, width=256, heads=4, vocab=2048, sequence=64)
"""Sizes of which no part needs padding at N = 2 and 4, so that the closed form holds to the byte."""

SETTINGS: tuple[tuple[engines.Dtype, int], ...] = (("fp32", 1), ("fp32", 3), ("bf16", 1))
HEADER_NBYTES = 144
"""What gloo of torch 2.13 sends beside the payload of one message: notices of both sides, and a header."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One steady step of one rank."""

    num_ranks: int
    stage: int
    dtype: engines.Dtype
    micro_batches: int
    expected: dict[str, int]  # by kind
    events: dict[str, int]  # by kind, the step's exchange left out
    exchange: int
    messages: int
    sockets: int | None  # between ranks; None where the system doesn't tell
    store: int | None

    @property
    def headers(self) -> int | None:
        """What the sockets carried beside the closed form and the step's exchange."""
        return None if self.sockets is None else self.sockets - sum(self.expected.values()) - self.exchange

    @property
    def agrees(self) -> bool:
        """By events to the byte; by sockets but for a header on each message, those of the closing barrier (log2 N) included."""
        barrier = (self.num_ranks - 1).bit_length()
        return self.events == self.expected and (self.headers is None or 0 <= self.headers <= HEADER_NBYTES * (self.messages + barrier))


def expected(stage: int, dtype: engines.Dtype, micro_batches: int, num_ranks: int) -> dict[str, int]:
    """Bytes that one rank sends in a step, by kind."""
    share = CONFIG.num_parameters * (num_ranks - 1) // num_ranks
    param = {"fp32": 4, "bf16": 2}[dtype]
    added = 4 if micro_batches > 1 else param
    return {
        0: {"reduce": share * added, "return": share * 4},
        1: {"reduce": share * added, "refresh": share * param},
        2: {"reduce": micro_batches * share * param, "refresh": share * param},
        3: {"reduce": micro_batches * share * param, "gather": 2 * micro_batches * share * param},
    }[stage]


def sent_by_sockets() -> dict[int, tuple[bool, int]] | None:
    """Of each TCP connection of this process, by the number of its socket: whether it goes to the store, and the bytes it has sent."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return None
    found: dict[int, tuple[bool, int]] = {}
    store_port = int(os.environ[ranks.PORT_VARIABLE])
    for entry in folder.iterdir():
        try:
            status = entry.stat()
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    sent, again = struct.unpack_from("QQ", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200)
                    found[status.st_ino] = (connection.getpeername()[1] == store_port, sent - again)
        except OSError:
            continue  # the descriptor was the listing's own, or has gone
    return found


def _sent_between(before: dict[int, tuple[bool, int]] | None, after: dict[int, tuple[bool, int]] | None, *, to_store: bool) -> int | None:
    """Connections that have gone in between belonged to an earlier engine, and sent nothing in this step."""
    if before is None or after is None:
        return None
    return sum(sent - before.get(number, (to_store, 0))[1] for number, (is_store, sent) in after.items() if is_store == to_store)


def count_all() -> list[Sent]:
    """Every stage in every setting; every rank of a group calls it."""
    return [_count(stage, dtype, micro_batches) for dtype, micro_batches in SETTINGS for stage in range(4)]


def _count(stage: int, dtype: engines.Dtype, micro_batches: int) -> Sent:
    import shardbook as sb

    model = models.build(CONFIG)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=dtype), accumulate=micro_batches)  # pyright: ignore[reportArgumentType]
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), config)

    def step(number: int) -> None:
        for micro in range(micro_batches):
            inputs, targets = models.batch(CONFIG, 1, rank=dist.get_rank(), step=100 * number + micro)
            engine.backward(engine(inputs, targets))
        engine.step()
        if stage < 3:  # await the refresh, so that it counts in its own step
            with engine.gathered(model):
                pass

    for warm in range(2):
        step(warm)
    dist.barrier()
    seen: list[Event] = []
    before = sent_by_sockets()
    with engine.observe(seen.append):
        step(2)
    dist.barrier()
    after = sent_by_sockets()
    dist.barrier()  # no rank closes its end before all have counted
    by_kind: Counter[str] = Counter()
    traffic = [event for event in seen if isinstance(event, Traffic)]
    for event in traffic:
        by_kind[event.kind] += event.sent_nbytes
    engine.close()
    num_ranks = dist.get_world_size()
    return Sent(
        num_ranks=num_ranks,
        stage=stage,
        dtype=dtype,
        micro_batches=micro_batches,
        expected=expected(stage, dtype, micro_batches, num_ranks),
        exchange=by_kind.pop("step"),
        events={kind: nbytes for kind, nbytes in by_kind.items() if nbytes},
        messages=len(traffic) * (num_ranks - 1),
        sockets=_sent_between(before, after, to_store=False),
        store=_sent_between(before, after, to_store=True),
    )


def measure(num_ranks: int) -> list[list[Sent]]:
    """By rank."""
    return ranks.run(num_ranks, count_all)


def elements(sent: Sent) -> str:
    """The closed form in elements, for this stage and number of micro-batches."""
    k = sent.micro_batches
    return {0: "2Ψ", 1: "2Ψ", 2: f"{k + 1}Ψ", 3: f"{3 * k}Ψ"}[sent.stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    for num_ranks in parser.parse_args().ranks:
        for sent in (one for of_rank in measure(num_ranks) for one in of_rank):
            setting = f"N = {num_ranks} stage {sent.stage} {sent.dtype} k = {sent.micro_batches}"
            print(
                f"{setting}: {elements(sent)} × (N-1)/N = {sum(sent.expected.values()):,} bytes; by events {sum(sent.events.values()):,};",
                end=" ",
            )
            print(f"by sockets {sent.headers} more beside the exchange's {sent.exchange} in {sent.messages} messages,", end=" ")
            print(f"to the store {sent.store}: {'agrees' if sent.agrees else 'DIFFERS'}")


if __name__ == "__main__":
    main()
