"""What the engine's own transport reaches here and now: the base of the floor below which exposed time can't fall.

The floor of a step is the bytes that a rank sends divided by this bandwidth: the time for which its link is busy whatever is
overlapped with what.
"""

import statistics
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

_CHANNEL = 0x1FFF
"""A number that no flat buffer of a model has: the highest that fits into a message's label."""


@dataclass(frozen=True, slots=True)
class _Channel:
    number: int
    name: str


class Gathers(Protocol):
    """The part of an engine's transport that is timed."""

    num_ranks: int
    header_numel: int

    def gather(self, full: Any, own: Any, channel: Any, kind: Any) -> Any: ...


def bandwidth(transport: Gathers, unit_nbytes: int, *, device: Any = "cpu", num_times: int = 7) -> float | None:
    """Bytes per second that one rank sends while all gather at once; ``None`` where there is one rank.

    All ranks call it, between steps, with the same arguments: ``num_times`` gathers after one that warms up, each begun by all together
    (a gather of almost nothing goes before it), the median counts.

    Args:
        transport: the engine's own.
        unit_nbytes: of one unit of the model when it is gathered: the length of message that a step has.
        device: where the engine keeps its parameters.
        num_times: how many are timed.
    """
    import torch

    if transport.num_ranks == 1:
        return None
    shard_nbytes = max(256 * (1 + transport.header_numel // 64), unit_nbytes // transport.num_ranks // 256 * 256)
    least = 256 * (1 + transport.header_numel // 64)
    seconds: list[float] = []
    for _ in range(num_times + 1):
        _gather(torch, transport, least, device)
        began = perf_counter()
        _gather(torch, transport, shard_nbytes, device)
        seconds.append(perf_counter() - began)
    return shard_nbytes * (transport.num_ranks - 1) / statistics.median(seconds[1:])


def _gather(torch: Any, transport: Gathers, shard_nbytes: int, device: Any) -> None:
    full = torch.zeros(shard_nbytes * transport.num_ranks, dtype=torch.uint8, device=device)
    transport.gather(full, full[:shard_nbytes].clone(), _Channel(_CHANNEL, "bandwidth"), "gather").wait()
    if full.device.type == "cuda":
        torch.cuda.synchronize(full.device)
