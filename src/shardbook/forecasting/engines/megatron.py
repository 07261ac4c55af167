"""Megatron-LM's data parallelism, with and without its distributed optimizer: everything lies in buffers made once.

Parameters in 16 bits and gradients in fp32 are whole on every rank, always; weight gradients are added into their buffer by the
product that makes them (``gradient_accumulation_fusion``), so nothing waits and nothing is copied. Masters and moments are
partitioned with the distributed optimizer. Source: Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py and
optimizer/distrib_optimizer.py.
"""

from collections.abc import Mapping

from shardbook.accounts import Account
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.tape import Tape


class Megatron:
    """See the file's header. ``held``: account to bytes, gradients among them."""

    def __init__(self, tape: Tape, held: Mapping[str, int], *, steady: bool = True) -> None:
        self._tape, self._steady = tape, steady
        self._moments = held.get(Account.MOMENT, 0)
        tape.at("between", "")
        for account in (Account.PARAM, Account.GRAD, Account.MASTER, *((Account.MOMENT,) if steady else ())):
            tape.take(account, held.get(account, 0), account.lower())

    def enter_forward(self, unit: str) -> None:
        """All parameters are here."""

    def leave_forward(self, unit: str) -> None:
        """They stay."""

    def enter_backward(self, unit: str) -> None:
        """They are here."""

    def back_in_root(self) -> None:
        """They are here."""

    def land(self, weight: Weight, gradient: Value) -> None:
        """It is in its buffer already."""

    def end_backward(self) -> None:
        """Reduced in place."""

    def step(self) -> None:
        """One fused kernel; the new parameters are gathered in place."""
        if not self._steady:
            self._tape.take(Account.MOMENT, self._moments, "moments")
