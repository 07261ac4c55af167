"""What recomputation and offload were said to cost, beside what they cost: every way of a few plans, timed and measured here.

    python -m benchmarks.tiers_advice --rounds 3            all, with a calibration made now
    python -m benchmarks.tiers_advice --machine FILE --plans wide

Each way runs in processes of its own, two ranks of one thread; the ways take turns, round by round, and a cost is the median over the
rounds of its step beside that of the plan with neither in the same round. What is held at the peak is measured apart, by the allocator.
Advice is right where the way that it names fits as measured, and no way that fits as measured is faster by more than the bound.
"""

import argparse
import gc
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
from shardbook.cli.calibration import calibrate
from shardbook.facts.machine import Machine, read_machine
from shardbook.forecasting.advice import CLOSE, PLAIN, configs_of
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder

SHARE = 0.25
"""A predicted cost is right within so much of the measured one, or within :data:`CLOSE` of the step."""
RANKS, WARM_STEPS, MIN_STEPS = 2, 3, 5
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
    """One way of a plan: seconds of a step in each round, bytes at the peak, and what was forecast."""

    seconds: tuple[float, ...]
    busy: tuple[float, ...]  # seconds that a rank had of its core, in each round
    peak: int
    said: sb.Forecast


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


def times(plan: Plan, config: sb.ZeroConfig, budget_seconds: float) -> tuple[list[float], list[float]]:
    """Run by each rank: seconds of each step, of the clock and of this rank's core."""
    _, _, engine = _engine(plan, config)
    tokens = _tokens(plan)
    for _ in range(WARM_STEPS):
        _step(engine, tokens)
    number = torch.ones(1)
    clock: list[float] = []
    busy: list[float] = []
    while number.item():
        began, had = time.perf_counter(), time.process_time()
        _step(engine, tokens)
        clock.append(time.perf_counter() - began)
        busy.append(time.process_time() - had)
        number.fill_(float(len(clock) < MIN_STEPS or sum(clock) < budget_seconds))
        dist.broadcast(number, 0)
    engine.close()
    return clock, busy


def peak(plan: Plan, config: sb.ZeroConfig) -> int:
    """Run by each rank: most bytes of live tensors of the device, by the allocator."""
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


def run(plan: Plan, machine: Machine, folder: Path, *, rounds: int, budget_seconds: float) -> Mapping[str, Timed]:
    """Every way, timed in turn."""
    ways = ways_of(plan, folder)
    clock: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            by_rank = ranks.run(RANKS, times, plan, ways[name], budget_seconds)
            clock[name].append(statistics.median(map(max, zip(*(seconds for seconds, _ in by_rank), strict=True))))
            busy[name].append(statistics.median(map(max, zip(*(seconds for _, seconds in by_rank), strict=True))))
    return {
        name: Timed(
            seconds=tuple(clock[name]),
            busy=tuple(busy[name]),
            peak=max(ranks.run(RANKS, peak, plan, config)),
            said=forecast(plan, config, machine),
        )
        for name, config in ways.items()
    }


def forecast(plan: Plan, config: sb.ZeroConfig, machine: Machine, budget: int | None = None) -> sb.Forecast:
    """What is said of one way beforehand."""
    with torch.device("meta"):
        model = Decoder(plan.model)
    return sb.forecast(
        model, config, ranks=RANKS, micro_batch=plan.micro_batch, sequence=plan.sequence, machine=machine, budget=budget
    )  # fmt: skip


def costs(name: str, found: Mapping[str, Timed], *, busy: bool = False) -> list[Cost]:
    """Of every way but the plainest. ``busy``: by what ranks had of their cores, where other processes are about."""
    plain = found[PLAIN]
    return [
        Cost(plan=name, way=way, measured=_beside(one, plain, busy=busy), predicted=_predicted(one, plain))
        for way, one in found.items()
        if way != PLAIN
    ]


def _beside(one: Timed, plain: Timed, *, busy: bool = False) -> float:
    """Median over the rounds."""
    pairs = zip(one.busy, plain.busy, strict=True) if busy else zip(one.seconds, plain.seconds, strict=True)
    return statistics.median(mine / other - 1 for mine, other in pairs)


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
        best = min((way for way in found if found[way].peak <= budget), key=lambda way: _beside(found[way], found[PLAIN]), default=None)
        right = told.recommended == best
        if best is not None and told.recommended is not None and not right:
            chosen = found[told.recommended]
            right = chosen.peak <= budget and _beside(chosen, found[PLAIN]) - _beside(found[best], found[PLAIN]) <= CLOSE
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


def compare(
    names: Sequence[str], machine: Machine, folder: Path, *, rounds: int, budget_seconds: float, busy: bool = False
) -> Iterator[Found]:  # fmt: skip
    """Plan by plan; what is under way is told on stderr."""
    for name in names:
        plan = PLANS[name]
        ways = run(plan, machine, folder, rounds=rounds, budget_seconds=budget_seconds)
        yield Found(
            plan=name, ways=ways, costs=costs(name, ways, busy=busy), advised=list(advices(name, plan, ways, machine, folder))
        )  # fmt: skip


def lines(found: Found, *, busy: bool = False) -> Iterator[str]:
    """What is printed of a plan."""
    plain = found.plain
    took = statistics.median(plain.busy if busy else plain.seconds)
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps, in each run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk of offload")
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--busy", action="store_true", help="by what ranks had of their cores: for machines where others work")
    options = parser.parse_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        machine = read_machine(options.machine) if options.machine else calibrate(ranks=None, output=folder / "it.json", path=folder)
        budget = {"rounds": options.rounds, "budget_seconds": options.seconds, "busy": options.busy}
        for found in compare(options.plans, machine, folder, **budget):
            print("\n".join(lines(found, busy=options.busy)), flush=True)
            wrong += sum(not one.is_right for one in (*found.costs, *found.advised))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
