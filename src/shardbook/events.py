"""What the engine tells its observers: plain records, made only while somebody listens.

An observer is any callable that takes one event. A :class:`Booking` moves bytes in or out of an account, a :class:`Traffic`
is one collective's bytes as this rank sends them, a :class:`Transfer` bytes between two tiers of this rank, a :class:`Mark` opens or
closes a phase of one unit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardbook.accounts import Account, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """``nbytes`` (negative when they are given back) in one account; ``padding`` of them carry no element of a parameter.

    ``address`` is where the storage lies, by which books and allocator are held against each other; of a tensor without values, a number
    that no other storage has while it lives.
    """

    account: Account
    tier: Tier
    unit: str
    nbytes: int
    phase: str
    padding: int = 0
    address: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One collective: what this rank sent to all others together, headers not included. ``sequence`` counts this kind on this unit."""

    kind: Literal["gather", "reduce", "refresh", "return", "step", "init"]
    unit: str
    sequence: int
    sent_nbytes: int
    phase: str


LinkName = Literal["host to device", "device to host", "disk to host", "host to disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """``nbytes`` move from one tier of this rank to another."""

    link: LinkName
    unit: str
    nbytes: int
    phase: str


MarkName = Literal[
    "forward", "backward", "backward pass", "step", "abandoned", "held", "exchange",
    "gather", "gather.wait", "serve", "serve.wait", "reduce", "reduce.wait", "refresh", "refresh.wait", "return", "return.wait",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase of one unit begins or ends on the engine's main thread.

    ``gather``, ``reduce``, ``refresh`` and ``return`` start a collective, their ``.wait`` waits for it; ``exchange`` does both for the
    step's one vector. ``serve`` starts a gather that a rank without data takes part in. ``backward`` is a unit's part of a ``backward
    pass``, ``step`` the optimizer's side of a step. ``held`` (no length) tells that a gather was not started ahead because of
    ``Prefetch.limit``, ``abandoned`` (no length) that an exception ended what was under way: its marks get no end.

    Args:
        name: of the phase.
        unit: whose; empty where it is nobody's.
        edge: whether it begins or ends.
        seconds: by ``time.perf_counter()``.
    """

    name: MarkName
    unit: str
    edge: Literal["begin", "end"]
    seconds: float


Event = Booking | Traffic | Transfer | Mark
Observer = Callable[[Event], None]
