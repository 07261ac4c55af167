"""The measured steps of ``benchmarks.forecast_grid`` beside both witnesses: the closed form and the simulation.

    compare(points)      every point measured once, forecast, and simulated as the ranks that :func:`ranks_of` names
    python -m benchmarks.simulation_grid --only llama     some of it, with all differences

A simulated rank is held against the same rank of the real run: the first step, in which optimizers make their state, by itself, and the
steps after it. What is compared is the peak, its phase, unit and operator, every account then, and the highest instant of each phase.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import shardbook as sb
from benchmarks import forecast_grid, ranks
from benchmarks.forecast_grid import Compared, FromTheStart, Measured, Point
from shardbook.forecasting.result import PhasePeak

Steps = Literal["first", "later"]
ODD_RANKS = 3
"""On so many ranks shards are of different lengths: every rank is simulated."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A rank in its first step or in later ones: measured, and simulated. Differences are signed: above zero the simulation is higher."""

    point: Point
    rank: int
    steps: Steps
    measured: Measured
    simulated: Measured

    @property
    def difference(self) -> int:
        """Bytes between the peaks."""
        return self.simulated.allocated - self.measured.allocated

    @property
    def error(self) -> float:
        return self.difference / self.measured.allocated

    @property
    def accounts(self) -> dict[str, int]:
        """Account to bytes of difference at the peak, of those that either has."""
        return _differences(self.simulated.books, self.measured.books)

    @property
    def is_equal(self) -> bool:
        """Peak and every account, to the byte."""
        return not self.difference and not any(self.accounts.values())

    @property
    def place(self) -> tuple[str, str, str]:
        """(phase, unit, operator) of the measured peak."""
        return self.measured.phase, self.measured.unit, self.measured.operator

    @property
    def is_same_place(self) -> bool:
        """Phase and unit of the peak."""
        return (self.simulated.phase, self.simulated.unit) == (self.measured.phase, self.measured.unit)

    @property
    def is_same_operator(self) -> bool:
        """Where the measured peak is inside an operator; between two of them a simulation, which takes no time, may name either."""
        return self.simulated.operator == self.measured.operator

    @property
    def phases(self) -> dict[str, int]:
        """Phase to bytes of difference between its highest instants; a phase that one of them lacks counts whole."""
        return _differences(_heights(self.simulated.phases), _heights(self.measured.phases))


@dataclass(frozen=True, kw_only=True)
class Witnessed:
    """A point: the closed form beside the rank that held most, and the simulated ranks beside themselves."""

    closed_form: Compared
    pairs: tuple[Pair, ...]
    sent: tuple[int, int]
    """Bytes in a step of rank 0: measured, simulated."""

    @property
    def highest(self) -> Pair:
        """The rank that held most, in the steps after the first."""
        return max((pair for pair in self.pairs if pair.steps == "later"), key=lambda pair: pair.measured.allocated)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All points, and how many seconds measuring and simulating took."""

    points: tuple[Witnessed, ...]
    measuring: float
    simulating: float
    one_simulation: tuple[float, float]
    """Median and longest, in seconds."""

    def pairs(self, steps: Steps) -> list[Pair]:
        return [pair for one in self.points for pair in one.pairs if pair.steps == steps]


def _differences(simulated: Any, measured: Any) -> dict[str, int]:
    names = [name for name in sorted({*simulated, *measured}) if simulated.get(name, 0) or measured.get(name, 0)]
    return {name: simulated.get(name, 0) - measured.get(name, 0) for name in names}


def _heights(phases: Sequence[PhasePeak]) -> dict[str, int]:
    return {one.phase: one.nbytes for one in phases}


# ---- both witnesses ---------------------------------------------------------------------------------------------------------


def compare(chosen: Sequence[Point]) -> Grid:
    """Measured on as many ranks as a point has, then simulated in as many processes as there are cores."""
    began = time.monotonic()
    measured = measure(chosen)
    then = time.monotonic()
    wanted = [(point, rank) for point in chosen for rank in ranks_of(point, measured[point])]
    found = dict(zip(wanted, simulated_all(wanted), strict=True))
    witnessed = [_witnessed(point, measured[point], {rank: found[point, rank] for of, rank in wanted if of == point}) for point in chosen]
    seconds = sorted(one.simulated.seconds for one in found.values() if one.simulated is not None)
    return Grid(
        points=tuple(witnessed),
        measuring=then - began,
        simulating=time.monotonic() - then,
        one_simulation=(seconds[len(seconds) // 2], seconds[-1]),
    )


def measure(chosen: Sequence[Point]) -> dict[Point, list[FromTheStart]]:
    """By rank. All points of a number of ranks share processes."""
    measured: dict[Point, list[FromTheStart]] = {}
    for num_ranks in sorted({point.ranks for point in chosen}):
        together = [point for point in chosen if point.ranks == num_ranks]
        by_rank = ranks.run(num_ranks, forecast_grid.measure_all_from_the_start, together, seconds=900.0)
        measured |= {point: list(found) for point, *found in zip(together, *by_rank, strict=True)}
    return measured


def ranks_of(point: Point, measured: Sequence[FromTheStart]) -> list[int]:
    """Rank 0, the rank that held most, and every rank where shards differ."""
    if point.ranks == ODD_RANKS:
        return list(range(point.ranks))
    return sorted({0, max(range(point.ranks), key=lambda rank: measured[rank].later.allocated)})


def _witnessed(point: Point, measured: Sequence[FromTheStart], simulated: dict[int, sb.Forecast]) -> Witnessed:
    highest = max((one.later for one in measured), key=lambda one: one.allocated)
    pairs = [pair for rank, told in simulated.items() for pair in pairs_of(point, measured[rank], told)]
    sent = measured[0].later.sent, simulated[0].sent
    return Witnessed(closed_form=forecast_grid.compare_with(point, highest), pairs=tuple(pairs), sent=sent)


def pairs_of(point: Point, measured: FromTheStart, told: sb.Forecast) -> tuple[Pair, Pair]:
    """A rank's first step, and those after it."""
    rank = measured.later.rank
    first = Pair(point=point, rank=rank, steps="first", measured=measured.first, simulated=_first(told))
    return first, Pair(point=point, rank=rank, steps="later", measured=measured.later, simulated=_later(told))


def _later(told: sb.Forecast) -> Measured:
    assert told.simulated is not None
    return Measured(
        allocated=told.peak_allocated,
        books=told.accounts,
        phase=told.peak_phase,
        unit=told.peak_where,
        operator=told.simulated.operator,
        items=told.simulated.items,
        rank=told.simulated.rank,
        phases=tuple(one for one in told.phases if not one.first),
        sent=told.sent,
    )


def _first(told: sb.Forecast) -> Measured:
    """Of the first step a forecast keeps the place, but not the operator."""
    assert told.simulated is not None
    phases = tuple(one for one in told.phases if one.first)
    highest = max(phases, key=lambda one: one.nbytes)
    return Measured(
        allocated=told.simulated.first_peak,
        books=told.simulated.first_accounts,
        phase=highest.phase,
        unit=highest.where,
        operator="",
        items=(),
        rank=told.simulated.rank,
        phases=phases,
        sent=told.sent,
    )


# ---- simulating -------------------------------------------------------------------------------------------------------------


def simulate(point: Point, rank: int = 0, **how: Any) -> sb.Forecast:
    """One rank of a point, as a person would ask for it."""
    return sb.simulate(
        lambda: forecast_grid.build(point),
        lambda: _batch(point),
        point.config,
        ranks=point.ranks,
        optimizer=lambda parameters: forecast_grid.optimizer_of(point, parameters),
        loss=partial(_loss, point),
        rank=rank,
        **how,
    )


def simulated_all(wanted: Sequence[tuple[Point, int]]) -> list[sb.Forecast]:
    """Each in a process that has no group, as many at a time as there are cores."""
    workers = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
    with workers as pool:
        return list(pool.map(simulate, *zip(*wanted, strict=True)))


def _begin() -> None:
    torch.set_num_threads(1)


def _batch(point: Point) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(forecast_grid.vocabulary(point), (2, point.micro_batch, point.sequence))
    return tokens[0].clone(), tokens[1].clone()


def _loss(point: Point, output: Any) -> tuple[Tensor, int | None]:
    """What the measured loop reads from a tensor is said here as a number."""
    return (output[0], point.micro_batch * point.sequence) if isinstance(output, tuple) else (output, None)


# ---- by hand ----------------------------------------------------------------------------------------------------------------


def lines(pair: Pair) -> Iterator[str]:
    """A rank for people who look for a difference."""
    yield f"{pair.point}, rank {pair.rank}, {pair.steps}: {pair.difference:+,} of {pair.measured.allocated:,}"
    yield f"    in {pair.place}; simulated in {pair.simulated.phase, pair.simulated.unit, pair.simulated.operator}"
    yield f"    accounts {_others(pair.accounts)}; phases {_others(pair.phases)}"


def _others(differences: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes:+,}" for name, nbytes in differences.items() if nbytes) or "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose description contains this")
    options = parser.parse_args()
    grid = compare([point for point in forecast_grid.points() if options.only in str(point)])
    pairs = [*grid.pairs("first"), *grid.pairs("later")]
    for pair in pairs:
        if not pair.is_equal or any(pair.phases.values()):
            print("\n".join(lines(pair)))
    equal = sum(pair.is_equal for pair in pairs)
    print(f"{len(grid.points)} points, {equal} of {len(pairs)} equal; {grid.measuring:.0f} s measured, {grid.simulating:.0f} s simulated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
