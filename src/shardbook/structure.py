"""What an engine is made of, as plain data: units, flat buffers, the group of ranks, and the orders in which units are used.

A live engine fills these records in (``engine.structure()``), and so can anyone who has only numbers. Closed forms read them.
Nothing here imports torch.

>>> structure = Structure.of_equal_units(FlatFacts(numels=(100, 10)), GroupFacts(num_ranks=4, rank=3), num_units=2)
>>> structure.orders.backward
(0, 2, 1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from shardbook.checks import DTYPE_NBYTES, Check, listed, nearest

ELEMENT_NBYTES = {**DTYPE_NBYTES, "8-bit": 1, "16-bit": 2, "32-bit": 4, "64-bit": 8}
"""Bytes of one element. The last four stand for types that are stored and never trained: integers, fp8, bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFacts:
    """One flat buffer: the parameters of a unit that share their types and are all trained or all frozen.

    Args:
        numels: elements of each parameter, in the order in which they lie in the buffer.
        param: their type in forward and backward, a key of :data:`ELEMENT_NBYTES`.
        trainable: whether they have gradients.
        kept: whether they stay out of the policy, because ``Precision.keep`` names them or the model has them in another type
            than its main one.

    Raises:
        ConfigError: a negative number of elements; an unknown type; a trained type that has no gradients.
    """

    numels: tuple[int, ...]
    param: str = "fp32"
    trainable: bool = True
    kept: bool = False

    def __post_init__(self) -> None:
        check = Check(self)
        if wrong := [numel for numel in self.numels if numel < 0]:
            check.add("numels", wrong[0], "a number of elements from 0 up in each place", "count the elements of each parameter")
        if self.param not in ELEMENT_NBYTES:
            check.add("param", self.param, listed(ELEMENT_NBYTES), nearest(self.param, ELEMENT_NBYTES))
        elif self.trainable and self.param not in DTYPE_NBYTES:
            check.add("param", self.param, f"{listed(DTYPE_NBYTES)} where parameters are trained", "write trainable=False")
        check.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One unit. ``around``: numbers of the units that it lies in, outermost first, without the root."""

    name: str
    flats: tuple[FlatFacts, ...] = ()
    around: tuple[int, ...] = ()

    @property
    def is_trainable(self) -> bool:
        return any(flat.trainable for flat in self.flats)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The ranks, this one of them, and how they send.

    Args:
        num_ranks: N.
        rank: this rank, from 0.
        transport: ``"point-to-point"`` (gloo) receives the others' parts only; ``"collectives"`` (NCCL, and every backend that adds in
            its own order) receives as its collective does.
        ordered: whether gradients are added in rank order; they then travel in the type autograd made them in.
        header_numel: elements at the end of each buffer that carry a label of the transport.

    Raises:
        ConfigError: a rank outside the group, a number below its least, an unknown transport.
    """

    num_ranks: int
    rank: int = 0
    transport: Literal["point-to-point", "collectives"] = "point-to-point"
    ordered: bool = True
    header_numel: int = 0

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("num_ranks", least=1, remedy="1 is a single process")
        check.integer("rank", least=0, remedy="ranks count from 0")
        check.integer("header_numel", least=0, remedy="0 where messages carry their label as a tag")
        check.choice("transport", ("point-to-point", "collectives"))
        check.done()
        if self.rank >= self.num_ranks:
            check.add("rank", self.rank, f"0 to {self.num_ranks - 1} with num_ranks={self.num_ranks}", "ranks count from 0")
        check.done()

    @property
    def receive_shards(self) -> int:
        """Shards that lie in the receive buffer of one reduction."""
        if self.num_ranks == 1:
            return 0
        if self.transport == "point-to-point":
            return self.num_ranks - 1
        return self.num_ranks if self.ordered else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Numbers of units in the order in which a step enters them in forward and in backward, and reduces their gradients."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduce: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """An engine as plain data. ``units[0]`` is the root; ``orders`` is None where no order is known to repeat."""

    units: tuple[UnitFacts, ...]
    group: GroupFacts
    orders: Orders | None = None

    @classmethod
    def in_order_of_registration(cls, units: Sequence[UnitFacts], group: GroupFacts) -> Self:
        """Units that are used one after the other as they are registered, and backwards in backward: what holds before a step is seen."""
        backward = tuple(_from_the_last(units))
        reduced = [number for number in reversed(range(len(units))) if units[number].is_trainable]
        orders = Orders(forward=tuple(range(len(units))), backward=backward, reduce=tuple(reduced))
        return cls(units=tuple(units), group=group, orders=orders)

    @classmethod
    def of_equal_units(cls, flat: FlatFacts, group: GroupFacts, *, num_units: int = 1) -> Self:
        """``num_units`` units of the same parameters, under a root that has none of its own."""
        blocks = [UnitFacts(name=f"blocks.{number}", flats=(flat,)) for number in range(num_units)]
        return cls.in_order_of_registration([UnitFacts(name="root"), *blocks], group)


def _from_the_last(units: Sequence[UnitFacts]) -> Iterator[int]:
    """Every unit before the units in it, and the last registered first."""

    def visit(number: int) -> Iterator[int]:
        yield number
        for child in reversed(inside[number]):
            yield from visit(child)

    inside: list[list[int]] = [[] for _ in units]
    for number, unit in enumerate(units[1:], start=1):
        inside[unit.around[-1] if unit.around else 0].append(number)
    return visit(0)
