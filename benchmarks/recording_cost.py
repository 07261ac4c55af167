"""What recording costs: seconds of a recorded step as a ratio to a plain one, and bytes of a record.

    python -m benchmarks.recording_cost [small|medium|default] [rows] [steps]

A step has two micro-batches, each of half the rows. Two copies of one model are trained in one process, a step of each in turn, so that
whatever else the machine does falls on both. Time is the process's own. The first five steps, which are complete, are listed apart; of
later ones every sixteenth is, and the ratio over all of them is what a long run pays.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import shardbook as sb
from benchmarks.models import GPT, GPTConfig, build
from shardbook.recording.record import COMPLETE_EVERY, COMPLETE_FIRST

SIZES = {
    "small": GPTConfig(layers=4, width=128, heads=4, vocab=512, sequence=128),
    "medium": GPTConfig(layers=8, width=256, heads=8, vocab=2048, sequence=256),
    "default": GPTConfig(),
}
MICRO_BATCHES = 2


def main(size: str = "medium", rows: int = 4, steps: int = 40) -> float:
    """Prints the figures; returns the ratio of a long run."""
    torch.set_num_threads(1)
    config = SIZES[size]
    tokens = torch.randint(0, config.vocab, (rows, config.sequence + 1))
    models = [build(config) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    with tempfile.TemporaryDirectory() as folder, sb.record(models[1], optimizers[1], Path(folder) / "a") as recorder:
        times = [
            [timed(lambda: step(models[0], optimizers[0], tokens, None)), timed(lambda: step(models[1], optimizers[1], tokens, recorder))]
            for _ in range(steps)
        ]
        nbytes = sum(path.stat().st_size for path in (Path(folder) / "a").iterdir())
    return report(config, len(list(models[0].parameters())), times, nbytes)


def step(model: GPT, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, recorder: sb.Recorder | None) -> None:
    losses: list[torch.Tensor] = []
    for part in tokens.chunk(MICRO_BATCHES):
        losses.append(model(part[:, :-1], part[:, 1:]) / MICRO_BATCHES)
        losses[-1].backward()
    if recorder is not None:
        recorder.step(loss=losses, batch=[(part,) for part in tokens.chunk(MICRO_BATCHES)])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def report(config: GPTConfig, num_parameters: int, times: list[list[float]], nbytes: int) -> float:
    first, later = times[1:COMPLETE_FIRST], times[COMPLETE_FIRST:]  # the very first step makes optimizer state and plans
    numbered = list(enumerate(later, COMPLETE_FIRST + 1))
    complete = [pair for number, pair in numbered if number % COMPLETE_EVERY == 0]
    brief = [pair for number, pair in numbered if number % COMPLETE_EVERY]
    print(f"{config.num_parameters:,} elements in {num_parameters} parameters, {len(times)} steps")
    plain = median(pair[0] for pair in times[1:])
    print(f"plain step {plain * 1e3:.1f} ms")
    for name, pairs in (("first five", first), ("brief", brief), ("complete", complete)):
        ratios = [pair[1] / pair[0] for pair in pairs]
        extra = median(pair[1] - pair[0] for pair in pairs)
        each = extra / config.num_parameters * 1e9
        print(f"{name:12s} {median(ratios):.3f} of a plain step ({extra * 1e3:.1f} ms, {each:.2f} ns an element)")
    share = 1 / COMPLETE_EVERY
    mean = (1 - share) * median(b / a for a, b in brief) + share * median(b / a for a, b in complete)
    print(f"a long run   {mean:.3f} of a plain step")
    print(f"record {nbytes:,} bytes")
    return mean


if __name__ == "__main__":
    size, *numbers = sys.argv[1:] or ["medium"]
    main(size, *map(int, numbers))
