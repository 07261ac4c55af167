"""Step times of engines against each other, paired: all live in the same processes and take turns, one step each. DeepSpeed can't:
each of its engines has processes and a table of its own.

    python -m benchmarks.step_time --ranks 2 --micro-batch 1 --dtypes fp32 --engines shardbook-3 fsdp2 ddp

Before any time counts, the engines train on the same batches from the same weights and their losses are compared. A round is one
step of each engine, in an order that rotates; a step's time is that of its slowest rank, between two barriers, with what the step
left under way (a refresh) awaited. On the side, each round notes how much other processes kept the cores busy: rounds with more
than ``--foreign`` of it are left out, for all engines alike.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import engines, models, ranks

WARM_STEPS = 3
MIN_ROUNDS = 5
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}
"""Of a loss near 8, after :data:`WARM_STEPS` steps: engines add gradients in different orders and, in bf16, cast at different points."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Seconds by engine, and the share of the machine's cores that was busy with other things."""

    seconds: dict[str, float]
    foreign: float
    lasted: float  # seconds, the same on all ranks


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one setting."""

    names: tuple[str, ...]
    rounds: tuple[Round, ...]
    losses: dict[str, float]  # of the last step that was compared

    def quiet(self, foreign: float) -> list[Round]:
        """Rounds in which other processes took at most this share; if there are fewer than five, the five quietest."""
        ordered = sorted(self.rounds, key=lambda found: found.foreign)
        kept = [found for found in ordered if found.foreign <= foreign]
        return kept if len(kept) >= MIN_ROUNDS else ordered[:MIN_ROUNDS]

    def median(self, name: str, foreign: float) -> float:
        """Seconds."""
        return statistics.median(found.seconds[name] for found in self.quiet(foreign))

    def ratio(self, name: str, to: str, foreign: float) -> tuple[float, float, float]:
        """Of the two engines' times in a round: median and quartiles over the rounds."""
        ratios = [found.seconds[name] / found.seconds[to] for found in self.quiet(foreign)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


def compare(names: Sequence[str], dtype: engines.Dtype, micro_batch: int, num_rounds: int, budget_seconds: float) -> Times:
    """Every rank of a group calls it; the answer is the same on all. Rounds end early when they have taken ``budget_seconds``."""
    config, rank = models.GPTConfig(), dist.get_rank()
    contenders = {name: engines.make(name, dtype, config) for name in names}
    losses = {name: _train(contender, config, micro_batch, rank) for name, contender in contenders.items()}
    check_losses(losses, dtype)
    rounds: list[Round] = []
    for number in range(num_rounds):
        if len(rounds) > MIN_ROUNDS and sum(found.lasted for found in rounds) > budget_seconds:
            break
        inputs, targets = models.batch(config, micro_batch, rank=rank, step=WARM_STEPS + number)
        seconds: dict[str, float] = {}
        before = usage()
        for name in rotated(list(contenders), number):
            contender = contenders[name]
            dist.barrier()
            began = time.perf_counter()
            contender.step(inputs, targets)
            contender.settle()
            seconds[name] = time.perf_counter() - began
        dist.barrier()
        rounds.append(slowest_of(seconds, *(now - then for now, then in zip(usage(), before, strict=True))))
    return Times(names=tuple(names), rounds=tuple(rounds), losses={name: found[-1] for name, found in losses.items()})


def _train(contender: engines.Contender, config: models.GPTConfig, micro_batch: int, rank: int) -> list[float]:
    """Mean loss over the ranks in each of the first steps."""
    losses: list[float] = []
    for step in range(WARM_STEPS):
        loss = contender.step(*models.batch(config, micro_batch, rank=rank, step=step)).double()
        contender.settle()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    return losses


def check_losses(losses: dict[str, list[float]], dtype: engines.Dtype) -> None:
    """Raises ``RuntimeError`` where an engine's losses are not those of the first."""
    first = next(iter(losses))
    for name, found in losses.items():
        apart = max(abs(one - other) for one, other in zip(found, losses[first], strict=True))
        if not apart <= TOLERANCE[dtype]:
            raise RuntimeError(
                f"losses of {name} and {first} are {apart:.2e} apart in the first {WARM_STEPS} steps: {found} and {losses[first]}; "
                f"times would compare different training"
            )


def rotated(names: list[str], by: int) -> list[str]:
    """So that each goes first in its turn."""
    shift = by % len(names)
    return names[shift:] + names[:shift]


def slowest_of(seconds: dict[str, float], busy: float, own: float, wall: float) -> Round:
    """The slowest rank's times, and what the machine was busy with beside the ranks, as a share of its cores."""
    names = sorted(seconds)
    slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    used = torch.tensor([own, busy / dist.get_world_size(), wall / dist.get_world_size()], dtype=torch.float64)
    dist.all_reduce(used)
    by_ranks, by_all, lasted = used.tolist()
    return Round(seconds=dict(zip(names, slowest.tolist(), strict=True)), foreign=share(by_all - by_ranks, lasted), lasted=lasted)


def share(busy: float, lasted: float) -> float:
    """Seconds of cores as a share of all that there are."""
    return max(0.0, busy) / (lasted * (os.cpu_count() or 1))


def usage() -> tuple[float, float, float]:
    """Seconds so far: all cores busy (0 where the system doesn't tell), this process on a core, the clock."""
    status = Path("/proc/stat")
    busy = 0.0
    if status.exists():
        fields = [int(value) for value in status.read_text().splitlines()[0].split()[1:9]]
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting for disks
    return busy, time.process_time(), time.perf_counter()


def measure(
    names: Sequence[str], dtype: engines.Dtype, *, num_ranks: int, micro_batch: int, num_rounds: int, budget_seconds: float = 600.0
) -> Times:
    """In processes of its own."""
    return ranks.run(num_ranks, compare, tuple(names), dtype, micro_batch, num_rounds, budget_seconds, seconds=budget_seconds + 600)[0]


def table(times: Times, foreign: float) -> str:
    """One line per engine: milliseconds, and ratios to each other engine that is a peer."""
    peers = [name for name in times.names if not name.startswith("shardbook")]
    lines = [f"  {'engine':17} {'ms':>8}  {'loss':>10}  " + "  ".join(f"{f'to {peer}':>22}" for peer in peers)]
    for name in times.names:
        ratios = ["{:.3f} ({:.3f} to {:.3f})".format(*times.ratio(name, peer, foreign)) for peer in peers]
        row = [f"  {name:17} {times.median(name, foreign) * 1e3:8.1f}  {times.losses[name]:10.6f}", *(f"{ratio:>22}" for ratio in ratios)]
        lines.append("  ".join(row))
    kept = times.quiet(foreign)
    busiest = max(found.foreign for found in kept)
    lines.append(f"  {len(kept)} of {len(times.rounds)} rounds; other processes took at most {busiest:.0%} of the cores in them")
    lines.append("  ratios: median (quartiles) of the ratio in a round")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["shardbook-3", "fsdp2", "ddp"], choices=engines.NAMES)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--foreign", type=float, default=0.03, help="share of the cores others may take in a round that counts")
    options = parser.parse_args()
    missing = {name: why for name in options.engines if (why := engines.not_run(name)) is not None}
    for name, why in missing.items():
        print(f"{name}: {why}")
    runnable = [name for name in options.engines if name not in missing]
    for num_ranks in options.ranks:
        for dtype in options.dtypes:
            for micro_batch in options.micro_batch:
                print(f"{num_ranks} ranks, {dtype}, micro-batch {micro_batch}", flush=True)
                for names in engines.share_processes(runnable):
                    times = measure(names, dtype, num_ranks=num_ranks, micro_batch=micro_batch, num_rounds=options.rounds)
                    print(table(times, options.foreign), flush=True)


if __name__ == "__main__":
    main()
