"""What waiting costs: exposed share against micro-batch size, and step time, exposed time and peak against how far gathers look ahead.

    python -m benchmarks.sweeps            both sweeps, 2 ranks, the GPT of 29.5 million parameters
    python -m benchmarks.sweeps --quick    a smaller GPT, in about a minute
    python -m benchmarks.sweeps --cost     what the timeline itself costs: steps with and without it in turns

Settings of the prefetch sweep take turns, one step each, in the same processes: what else the machine does falls on all alike. Every
figure is the median over steps of the slowest rank; the peak is the engine's own books at their highest.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import models, ranks
from shardbook.document import StepTime
from shardbook.ledger.bandwidth import bandwidth
from shardbook.ledger.exposed import step_times
from shardbook.ledger.ledger import Ledger
from shardbook.ledger.timeline import Timeline

MICRO_BATCHES = (1, 2, 4, 8)
AHEAD = (0, 1, 2, 3, 4)
QUICK = models.GPTConfig(layers=6, width=192, heads=4, vocab=512, sequence=64)
WARM_STEPS = 3
MIB = 2**20
GAIN = 0.02
"""Looking one unit further ahead pays if it takes at least this share off the step time."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one setting: seconds (medians over steps, slowest rank), bytes sent per step, bytes per second, and the books' peak in bytes."""

    name: str
    seconds: float
    exposed: float
    sent_nbytes: int
    bandwidth: float
    peak_nbytes: int

    @property
    def share(self) -> float:
        return self.exposed / self.seconds


class _Run:
    """One engine, and what was seen of its steps."""

    def __init__(self, config: models.GPTConfig, ahead: int) -> None:
        import shardbook as sb

        model = models.build(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=3, prefetch=sb.Prefetch(ahead=ahead)))
        self._config, self._number = config, 0
        self._times: list[StepTime] = []
        self._peak_nbytes = 0
        for _ in range(WARM_STEPS):
            self.plain_step(1)

    def plain_step(self, micro_batch: int) -> None:
        inputs, targets = models.batch(self._config, micro_batch, rank=dist.get_rank(), step=self._number)
        self.engine.backward(self.engine(inputs, targets))
        self.engine.step()
        self._number += 1

    def step(self, micro_batch: int) -> None:
        """One that counts. Its observers are its own, so that no time in which another engine had its turn is taken for this one's."""
        ledger, timeline = Ledger(), Timeline(num_steps=1)
        with self.engine.observe(ledger), self.engine.observe(timeline):
            self.plain_step(micro_batch)
        self._times += step_times([timeline.record()])
        self._peak_nbytes = max(self._peak_nbytes, sum(ledger.peak.values()))

    def figures(self, name: str) -> Figures:
        """All ranks call it."""
        unit_nbytes = sum(parameter.numel() for parameter in self.engine.model.get_submodule("blocks.0").parameters()) * 4
        reached = bandwidth(self.engine._transport, unit_nbytes, num_times=15) or 0.0
        seconds, exposed = (statistics.median(getattr(one, field) for one in self._times) for field in ("seconds", "exposed"))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (seconds, exposed, self._times[-1].sent_nbytes, reached, self._peak_nbytes))
        seconds, exposed, sent_nbytes, reached, _ = max(found)
        peak_nbytes = max(one[-1] for one in found)
        return Figures(name=name, seconds=seconds, exposed=exposed, sent_nbytes=sent_nbytes, bandwidth=reached, peak_nbytes=peak_nbytes)


def micro_batches(config: models.GPTConfig, num_steps: int) -> list[Figures]:
    """Every rank of a group calls it."""
    found: list[Figures] = []
    for micro_batch in MICRO_BATCHES:
        run = _Run(config, 1)
        for _ in range(num_steps):
            dist.barrier()
            run.step(micro_batch)
        found.append(run.figures(str(micro_batch)))
        run.engine.close()
    return found


def look_ahead(config: models.GPTConfig, num_steps: int, micro_batch: int) -> list[Figures]:
    """Every rank of a group calls it."""
    runs = {ahead: _Run(config, ahead) for ahead in AHEAD}
    for number in range(num_steps):
        order = AHEAD[number % len(AHEAD) :] + AHEAD[: number % len(AHEAD)]
        for ahead in order:
            dist.barrier()
            runs[ahead].step(micro_batch)
    found = [run.figures(str(ahead)) for ahead, run in runs.items()]
    for run in runs.values():
        run.engine.close()
    return found


def cost(config: models.GPTConfig, num_pairs: int) -> tuple[float, float]:
    """Step time with the timeline by step time without: median over pairs of neighbours, and the seconds without.

    Every rank of a group calls it.
    """
    run, ratios, without = _Run(config, 1), list[float](), list[float]()
    timeline = Timeline(rank=dist.get_rank())
    for pair in range(num_pairs):
        seconds: dict[bool, float] = {}
        for watched in (True, False) if pair % 2 else (False, True):
            with run.engine.observe(timeline) if watched else nullcontext():
                dist.barrier()
                began = time.perf_counter()
                run.plain_step(1)
                seconds[watched] = time.perf_counter() - began
        ratios.append(seconds[True] / seconds[False])
        without.append(seconds[False])
    run.engine.close()
    return statistics.median(ratios), statistics.median(without)


def enough(figures: Sequence[Figures]) -> Figures:
    """The setting from which looking further ahead buys nothing: no later one takes at least :data:`GAIN` off its step time."""
    return next(one for index, one in enumerate(figures) if all(later.seconds > one.seconds * (1 - GAIN) for later in figures[index + 1 :]))


def micro_batch_rows(figures: Sequence[Figures], reached: float) -> list[str]:
    """A Markdown table; the floor at ``reached`` bytes per second."""
    head = ["| micro-batch | step, ms | exposed, ms | exposed share | floor, ms |", "|---|---|---|---|---|"]
    return head + [
        f"| {one.name} | {one.seconds * 1e3:.1f} | {one.exposed * 1e3:.1f} | {one.share:.1%} | {one.sent_nbytes / reached * 1e3:.1f} |"
        for one in figures
    ]


def look_ahead_rows(figures: Sequence[Figures], reached: float) -> list[str]:
    """A Markdown table, and the sentence that names the point."""
    head = ["| ahead | step, ms | exposed, ms | floor, ms | peak of the books, MiB |", "|---|---|---|---|---|"]
    rows = [
        f"| {one.name} | {one.seconds * 1e3:.1f} | {one.exposed * 1e3:.1f} | {one.sent_nbytes / reached * 1e3:.1f} "
        f"| {one.peak_nbytes / MIB:.1f} |"
        for one in figures
    ]
    point = enough(figures)
    later = figures[figures.index(point) + 1 :]
    said = f"Beyond `ahead={point.name}` ({point.seconds * 1e3:.1f} ms) looking further buys nothing"
    if not later:
        said = f"Looking further ahead still paid at `ahead={point.name}` ({point.seconds * 1e3:.1f} ms), the furthest that was tried"
    else:
        best = min(later, key=lambda one: one.seconds)
        said += f": the best after it, `ahead={best.name}`, takes {best.seconds * 1e3:.1f} ms, and a gain counts from {GAIN:.0%}"
    return [*head, *rows, "", f"{said}."]


def rows(*, quick: bool = False, num_ranks: int = 2, num_steps: int = 0) -> list[str]:
    """Both sweeps as Markdown."""
    config, num_steps = (QUICK, num_steps or 8) if quick else (models.GPTConfig(), num_steps or 8)
    shares = ranks.run(num_ranks, micro_batches, config, num_steps)[0]
    ahead = ranks.run(num_ranks, look_ahead, config, num_steps, 1)[0]
    reached = statistics.median(one.bandwidth for one in (*shares, *ahead))
    setting = (
        f"GPT of {config.num_parameters:,} parameters, stage 3, fp32, {num_ranks} ranks; medians of {num_steps} steps, slowest rank. "
        f"Floor: bytes sent, at the {reached / 1e9:.2f} GB/s that the transport reached with messages of one block (median of all runs)."
    )
    tables = [*micro_batch_rows(shares, reached), "", "Prefetch, micro-batch 1:", "", *look_ahead_rows(ahead, reached)]
    return [setting, "", *tables]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="steps that count, for each setting")
    parser.add_argument("--cost", action="store_true", help="only what the timeline costs")
    options = parser.parse_args()
    if options.cost:
        ratio, seconds = ranks.run(options.ranks, cost, QUICK if options.quick else models.GPTConfig(), options.steps or 60)[0]
        print(f"step with the timeline by step without: {ratio:.4f} (median of neighbours; a step takes {seconds * 1e3:.1f} ms)")
        return
    print("\n".join(rows(quick=options.quick, num_ranks=options.ranks, num_steps=options.steps)))


if __name__ == "__main__":
    main()
