"""The bottleneck that moves: a long sequence in bf16 on two ranks, measured for real at stage 0, at stage 3, and with recomputation.

    python -m benchmarks.tiers_bottleneck           runs it, and prints the table of docs/tiers.md

At stage 0 the optimizer's state is the largest account. Partitioning it makes what the blocks save for backward the largest; recomputing
them leaves the loss: logits, their log-probabilities and their gradient. What the formulas said beforehand stands beside.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import ranks
from benchmarks.forecast_grid import Measured, Point, forecast, measure_all, vocabulary

MIB = 2**20
STATE = ("PARAM", "MASTER", "MOMENT", "GRAD")
PASSING = ("ACTIVATION", "WORKSPACE")
POINTS = {
    "stage 0": Point(shape="decoder long", stage=0, precision="bf16", micro_batch=1, sequence=384),
    "stage 3": Point(shape="decoder long", stage=3, precision="bf16", micro_batch=1, sequence=384),
    "stage 3, recomputation": Point(shape="decoder long", stage=3, precision="bf16", micro_batch=1, sequence=384, recompute="full"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run: bytes at the measured peak of the rank that holds most, and the forecast's peak.

    ``loss``: what is saved or under way in storages as wide as the vocabulary; ``blocks``: the rest of what is saved or under way, nearly
    all of it in blocks.
    """

    name: str
    measured: Measured
    forecast: int
    blocks: int
    loss: int

    @property
    def state(self) -> int:
        return sum(self.measured.books.get(account, 0) for account in STATE)

    @property
    def largest(self) -> str:
        """The account that holds most."""
        return max(self.measured.books, key=lambda account: self.measured.books[account])

    @property
    def place(self) -> str:
        return f"{self.measured.phase} of {self.measured.unit}"


def compare() -> list[Row]:
    """Measured on two ranks of gloo."""
    chosen = list(POINTS.values())
    by_rank = ranks.run(2, measure_all, chosen, seconds=600.0)
    highest = [max(found, key=lambda one: one.allocated) for found in zip(*by_rank, strict=True)]
    return [_row(name, point, found) for (name, point), found in zip(POINTS.items(), highest, strict=True)]


def _row(name: str, point: Point, found: Measured) -> Row:
    beside = sum(found.books.get(account, 0) for account in PASSING)
    loss = sum(item.nbytes for item in found.items if item.account in PASSING and vocabulary(point) in item.shape)
    return Row(name=name, measured=found, forecast=forecast(point).peak_allocated, blocks=beside - loss, loss=loss)


def moves(rows: Sequence[Row]) -> bool:
    """Whether the largest account is state, then what blocks saved, then the loss's, each at a lower peak than the one before."""
    first, partitioned, recomputed = rows
    falls = first.measured.allocated > partitioned.measured.allocated > recomputed.measured.allocated
    accounts = [row.largest for row in rows] == ["MOMENT", "ACTIVATION", "WORKSPACE"]
    return falls and accounts and recomputed.blocks < partitioned.blocks / 4 < recomputed.loss


def table(rows: Sequence[Row]) -> str:
    """In Markdown, MiB."""
    lines = [
        "| | peak, MiB | forecast | largest account | state | blocks | loss end | peak in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = (row.measured.allocated, row.forecast, row.measured.books[row.largest], row.state, row.blocks, row.loss)
        peak, told, most, state, blocks, loss = (f"{nbytes / MIB:.1f}" for nbytes in found)
        lines.append(f"| {row.name} | {peak} | {told} | {row.largest} {most} | {state} | {blocks} | {loss} | {row.place} |")
    return "\n".join(lines)


def main() -> int:
    rows = compare()
    print(table(rows))
    print("the bottleneck moves: state, then blocks, then the loss" if moves(rows) else "the bottleneck does not move as promised")
    return 0 if moves(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
