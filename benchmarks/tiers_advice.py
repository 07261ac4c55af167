"""What recomputation and offload were said to cost, beside what they cost: every way of a few plans, timed and measured here.

    python -m benchmarks.tiers_advice                       all, with a calibration made now
    python -m benchmarks.tiers_advice --machine FILE --plans wide

All ways of a plan are engines of the same two ranks, of one thread each. They take turns of a few steps, each between two turns of the
plan with neither, and a cost is the median over some rounds of a way's step beside those before and after it. What each holds at its
peak was measured before, by the allocator, while there was no other.
Advice is right where the way that it names fits as measured, and no way that fits as measured is faster by more than the bound.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import shardbook as sb
from benchmarks import ranks
from benchmarks.step_time import rotated
from shardbook.cli.calibration import calibrate
from shardbook.facts.machine import Machine, read_machine
from shardbook.forecasting.advice import CLOSE, PLAIN, configs_of
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder

SHARE = 0.25
"""A predicted cost is right within so much of the measured one, or within :data:`CLOSE` of the step."""
RANKS = 2
ROUNDS, STEPS = 4, 2
ROUND_SECONDS = 120.0
"""Ways whose steps are short have more rounds, until so much has passed."""
ROOM = 1.01
"""Budgets are so much above what a way was forecast to hold."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model, a batch, and the configuration with neither recomputation nor offload."""

    model: DecoderConfig
    micro_batch: int
    sequence: int
    config: sb.ZeroConfig


WIDE = DecoderConfig(layers=4, width=512, heads=8, kv_heads=8, ffn=1408, vocab=4096)
NARROW = DecoderConfig(layers=8, width=192, heads=6, kv_heads=2, ffn=512, vocab=1024)
PLANS: Mapping[str, Plan] = {
    "wide, stage 3": Plan(model=WIDE, micro_batch=2, sequence=256, config=sb.ZeroConfig(stage=3)),
    "wide, stage 1, 2 micro-batches": Plan(model=WIDE, micro_batch=1, sequence=256, config=sb.ZeroConfig(stage=1, accumulate=2)),
    "wide, stage 2, bf16": Plan(
        model=WIDE, micro_batch=2, sequence=256, config=sb.ZeroConfig(stage=2, precision=sb.Precision.preset("bf16"))
    ),
    "narrow and long, stage 2": Plan(model=NARROW, micro_batch=2, sequence=512, config=sb.ZeroConfig(stage=2)),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One way of a plan: seconds of a step in each round, and of the plan with neither beside it; bytes at the peak; the forecast."""

    seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]
    peak: int
    said: sb.Forecast

    @property
    def cost(self) -> float:
        """Share of the plan's step that the way adds to it: the median over the rounds."""
        return statistics.median(mine / other - 1 for mine, other in zip(self.seconds, self.plain_seconds, strict=True))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A way beside the plan with neither: shares of the latter's step."""

    plan: str
    way: str
    measured: float
    predicted: float

    @property
    def is_right(self) -> bool:
        """Within the bound of either kind."""
        return abs(self.predicted - self.measured) <= max(CLOSE, SHARE * abs(self.measured))


@dataclass(frozen=True, kw_only=True)
class Advised:
    """One question: a budget, the way that was asked about, and the one that was advised; ``fastest`` is None where none fits."""

    plan: str
    budget: int
    asked: str
    recommended: str | None
    fastest: str | None
    is_right: bool


# ---- one run -----------------------------------------------------------------------------------------------------------------


def _engine(plan: Plan, config: sb.ZeroConfig) -> tuple[Decoder, torch.optim.Optimizer, sb.Engine]:
    torch.set_num_threads(1)
    model = Decoder(plan.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, sb.Engine(model, optimizer, config)


def _step(engine: sb.Engine, tokens: torch.Tensor) -> None:
    for _ in range(engine.config.accumulate):
        loss, weight = engine(tokens, tokens)
        engine.backward(loss, weight=weight)
    engine.step()


def _tokens(plan: Plan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(plan.model.vocab, (plan.micro_batch, plan.sequence), generator=generator)


Turn = tuple[float, ...]
"""Seconds of its steps on one rank."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One way on one rank: its turn of each round, the two turns of the plan with neither around it, and bytes at the peak."""

    turns: tuple[Turn, ...]
    around: tuple[Turn, ...]
    peak: int


def every(plan: Plan, ways: Mapping[str, sb.ZeroConfig], rounds: int) -> Mapping[str, Ran]:
    """Run by each rank: all ways, in turns."""
    peaks = {name: peak(plan, config) for name, config in ways.items()}
    engines = {name: _engine(plan, config)[2] for name, config in ways.items()}
    tokens = _tokens(plan)
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    around: dict[str, list[Turn]] = {name: [] for name in ways}
    before = _turn(engines[PLAIN], tokens)
    until = time.monotonic() + ROUND_SECONDS
    for number in itertools.count():
        if number > rounds and not _agreed(going_on=time.monotonic() < until):
            break
        for name in rotated(list(ways), number):
            turns[name].append(before if name == PLAIN else _turn(engines[name], tokens))
            after = _turn(engines[PLAIN], tokens)
            around[name].append(before + after)
            before = after
    for engine in engines.values():
        engine.close()
    return {name: Ran(turns=tuple(turns[name][1:]), around=tuple(around[name][1:]), peak=peaks[name]) for name in ways}


def _agreed(*, going_on: bool) -> bool:
    """As rank 0 says."""
    said = torch.tensor(float(going_on))
    dist.broadcast(said, 0)
    return bool(said)


def _turn(engine: sb.Engine, tokens: torch.Tensor) -> Turn:
    """Some steps, as they are after another step; what the last leaves under way ends with the turn."""
    seconds: list[float] = []
    for _ in range(1 + STEPS):
        dist.barrier()
        began = time.perf_counter()
        _step(engine, tokens)
        seconds.append(time.perf_counter() - began)
    if engine._context.disk is not None:
        engine._context.disk.settle()
    return tuple(seconds[1:])


def peak(plan: Plan, config: sb.ZeroConfig) -> int:
    """Most bytes of live tensors of the device, by the allocator."""
    model, optimizer, engine = _engine(plan, config)
    tokens = _tokens(plan)
    _step(engine, tokens)
    gc.collect()
    with sb.measure(model, optimizer) as run:
        for _ in range(2):
            _step(engine, tokens)
    found = next(one.allocated for one in run.document().reconciliations if one.rank == dist.get_rank())
    engine.close()
    return found


# ---- all ways of a plan --------------------------------------------------------------------------------------------------------


def ways_of(plan: Plan, folder: Path) -> Mapping[str, sb.ZeroConfig]:
    """By their names in advice, with a folder that is there."""
    return {name: _below(config, folder) for name, config in configs_of(plan.config).items()}


def _below(config: sb.ZeroConfig, folder: Path) -> sb.ZeroConfig:
    return replace(config, offload=replace(config.offload, path=folder)) if config.offload.path else config


def run(plan: Plan, machine: Machine, folder: Path, *, rounds: int = ROUNDS) -> Mapping[str, Timed]:
    """Every way, measured."""
    ways = ways_of(plan, folder)
    by_rank: list[Mapping[str, Ran]] = ranks.run(RANKS, every, plan, ways, rounds)
    return {
        name: Timed(
            seconds=_slowest([ran[name].turns for ran in by_rank]),
            plain_seconds=_slowest([ran[name].around for ran in by_rank]),
            peak=max(ran[name].peak for ran in by_rank),
            said=forecast(plan, config, machine),
        )
        for name, config in ways.items()
    }


def _slowest(by_rank: Sequence[Sequence[Turn]]) -> tuple[float, ...]:
    """By round: the median of its steps, each as long as on its slowest rank."""
    return tuple(statistics.median(map(max, zip(*rounds, strict=True))) for rounds in zip(*by_rank, strict=True))


def forecast(plan: Plan, config: sb.ZeroConfig, machine: Machine, budget: int | None = None) -> sb.Forecast:
    """What is said of one way beforehand."""
    with torch.device("meta"):
        model = Decoder(plan.model)
    return sb.forecast(
        model, config, ranks=RANKS, micro_batch=plan.micro_batch, sequence=plan.sequence, machine=machine, budget=budget
    )  # fmt: skip


def costs(name: str, found: Mapping[str, Timed]) -> list[Cost]:
    """Of every way but the plainest."""
    return [
        Cost(plan=name, way=way, measured=one.cost, predicted=_predicted(one, found[PLAIN])) for way, one in found.items() if way != PLAIN
    ]


def _predicted(one: Timed, plain: Timed) -> float:
    return _seconds(one.said) / _seconds(plain.said) - 1


def _seconds(said: sb.Forecast) -> float:
    assert said.step_seconds is not None
    return said.step_seconds


def advices(name: str, plan: Plan, found: Mapping[str, Timed], machine: Machine, folder: Path) -> Iterator[Advised]:
    """Budgets at which one way after the other just fits, and one below all; with much room, each kind of offload is asked about."""
    ways = ways_of(plan, folder)
    limits = sorted({int(ROOM * one.said.peak_allocated) for one in found.values()})
    questions = [(limit, PLAIN) for limit in (limits[0] // 2, *limits)]
    questions += [(2 * limits[-1], way) for way in ways if way != PLAIN and ", " not in way]
    for budget, asked in questions:
        told = forecast(plan, ways[asked], machine, budget).advice
        assert told is not None
        best = min((way for way in found if found[way].peak <= budget), key=lambda way: found[way].cost, default=None)
        right = told.recommended == best
        if best is not None and told.recommended is not None and not right:
            chosen = found[told.recommended]
            right = chosen.peak <= budget and chosen.cost - found[best].cost <= CLOSE
        yield Advised(plan=name, budget=budget, asked=asked, recommended=told.recommended, fastest=best, is_right=right)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan: all of its ways, what they cost, and what was advised."""

    plan: str
    ways: Mapping[str, Timed]
    costs: Sequence[Cost]
    advised: Sequence[Advised]

    @property
    def plain(self) -> Timed:
        return self.ways[PLAIN]


def compare(names: Sequence[str], machine: Machine, folder: Path, *, rounds: int = ROUNDS) -> Iterator[Found]:
    """Plan by plan."""
    for name in names:
        plan = PLANS[name]
        ways = run(plan, machine, folder, rounds=rounds)
        yield Found(
            plan=name, ways=ways, costs=costs(name, ways), advised=list(advices(name, plan, ways, machine, folder))
        )  # fmt: skip


def lines(found: Found) -> Iterator[str]:
    """What is printed of a plan."""
    plain = found.plain
    took = statistics.median(plain.seconds)
    yield f"{found.plan}: {took * 1e3:.0f} ms, predicted {_seconds(plain.said) * 1e3:.0f}"
    for cost in found.costs:
        off = found.ways[cost.way].peak / found.ways[cost.way].said.peak_allocated - 1
        costs_so_much = f"measured {cost.measured:+7.1%}  predicted {cost.predicted:+7.1%}   peak {off:+.2%} of the forecast"
        yield f"  {_mark(cost)} {cost.way:52} {costs_so_much}"
    for one in found.advised:
        advised = f"advised {one.recommended}; fastest that fits: {one.fastest}"
        yield f"  {_mark(one)} {one.budget / 1e6:8.1f} MB, asked {one.asked}: {advised}"


def _mark(one: Cost | Advised) -> str:
    return "ok   " if one.is_right else "WRONG"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables; the exit code is 1 where anything in them is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at the least")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk of offload")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    options = parser.parse_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        machine = read_machine(options.machine) if options.machine else calibrate(ranks=None, output=folder / "it.json", path=folder)
        for found in compare(options.plans, machine, folder, rounds=options.rounds):
            print("\n".join(lines(found)), flush=True)
            wrong += sum(not one.is_right for one in (*found.costs, *found.advised))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
