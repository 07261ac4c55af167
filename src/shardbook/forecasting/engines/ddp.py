"""DDP, and training in a single process: everything whole on every rank.

DDP's buckets are made once, as large as all gradients together, and stay between steps. A gradient that is a view of its bucket is
copied there as it lands, and autograd's own is freed; without views it stays beside the bucket until the step. A single process has
no buckets: what autograd made is the gradient. How gradients are dealt out to buckets changes when they travel, not what is held.
Source: torch/csrc/distributed/c10d/reducer.cpp and torch/csrc/autograd/functions/accumulate_grad.h of torch 2.13.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardbook.accounts import Account
from shardbook.forecasting.engines.optimizers import step_temporaries
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one rank holds.

    Args:
        held: account to bytes, gradients among them.
        in_buckets: there is more than one rank.
        views: gradients are views of the buckets.
        kernel: of torch's optimizer.
        stepped: bytes of each parameter that the optimizer steps on.
    """

    held: Mapping[str, int]
    in_buckets: bool
    views: bool = True
    kernel: str = "fused"
    stepped: Sequence[int] = field(default_factory=tuple)


class Ddp:
    """See the file's header."""

    def __init__(self, tape: Tape, replica: Replica, *, steady: bool = True) -> None:
        self._tape, self._replica, self._steady = tape, replica, steady
        self._values: dict[str, Value] = {}
        held = replica.held
        tape.at("between", "")
        for account in (Account.PARAM, Account.MASTER, *((Account.MOMENT,) if steady else ())):
            tape.take(account, held.get(account, 0), account.lower())
        if replica.in_buckets:
            account = Account.GRAD if replica.views else Account.COMM
            tape.take(account, held.get(Account.GRAD, 0), "buckets")

    def enter_forward(self, unit: str) -> None:
        """All parameters are here."""

    def leave_forward(self, unit: str) -> None:
        """They stay."""

    def enter_backward(self, unit: str) -> None:
        """They are here."""

    def back_in_root(self) -> None:
        """They are here."""

    def land(self, weight: Weight, gradient: Value) -> None:
        """It is copied into its bucket, or stays; from the second micro-batch on it is added to what is there."""
        gradient.memory.entry.account = Account.GRAD
        if not (self._replica.in_buckets and self._replica.views):
            self._values.setdefault(weight.name, gradient)

    def end_backward(self) -> None:
        """Reduced in place."""

    def step(self) -> None:
        """The optimizer steps on whole parameters, and gradients outside of buckets go."""
        if not self._steady:
            self._tape.take(Account.MOMENT, self._replica.held.get(Account.MOMENT, 0), "moments")
        nbytes = step_temporaries(self._replica.kernel, self._replica.stepped)
        self._tape.give(self._tape.take(Account.WORKSPACE, nbytes, f"temporaries of a {self._replica.kernel} optimizer"))
        self._values = {}
