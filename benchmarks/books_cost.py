"""What measuring costs: steps of a plain loop under each mode and under none, in turns, in one process with one thread.

    python -m benchmarks.books_cost [--rounds 3]

A round holds each way once, in an order that rotates; of each way the first steps warm up and the others count. The ratio is taken in
each round, the median and the quartiles are over the rounds. Processor time is this process's alone, so it says most on a busy machine.
Light mode looks at what models and optimizers hold in its first three steps only: these are told apart from those that follow.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models, ranks

Way = Literal["plain", "full", "light", "looks", "before", "never"]
MODELS = {"GPT, micro-batch 1": 7, "GPT, micro-batch 4": 4, "200 small layers": 20}
"""Name to rounds."""

COUNTED = 2
WARM: dict[Way, int] = {"plain": 1, "full": 1, "light": 3}
_LAYERS, _WIDTH = 200, 64


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Against the way it is held against: median of the rounds, and their quartiles."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one model.

    Args:
        name: of :data:`MODELS`.
        num_operators: of one step, as PyTorch's dispatcher counts them.
        seconds: wall time of a plain step, median.
        wall: way to ratio of wall times: ``full``; ``light``, and its first steps as ``looks``; ``before``, a model that was measured
            before, held against one that ``never`` was.
        processor: the same of processor times.
        opening: seconds to enter a full measurement.
        closing: seconds to leave it.
        document: seconds to make the document then.
        characters: of the document as JSON.
    """

    name: str
    num_operators: int
    seconds: float
    wall: dict[Way, Ratio]
    processor: dict[Way, Ratio]
    opening: float
    closing: float
    document: float
    characters: int

    @property
    def microseconds_per_operator(self) -> float:
        """That full mode adds."""
        return (self.wall["full"].median - 1) * self.seconds / self.num_operators * 1e6


class _Loop:
    """A model of its own, and a plain step of it."""

    def __init__(self, name: str) -> None:
        self._batch: Callable[[int], tuple[Tensor, ...]]
        if name.startswith("GPT"):
            config = models.GPTConfig()
            self.model: nn.Module = models.build(config)
            self._batch = lambda step: models.batch(config, int(name[-1]), rank=0, step=step)
        else:
            layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
            self.model = nn.Sequential(*layers)
            self._batch = lambda _: (torch.ones(32, _WIDTH),)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._number = 0

    def step(self) -> tuple[float, float]:
        """Seconds: wall, processor."""
        began, used = time.perf_counter(), time.process_time()
        self.model(*self._batch(self._number)).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._number += 1
        return time.perf_counter() - began, time.process_time() - used


class _Round:
    """Times of each way, and of opening, closing and the document."""

    def __init__(self) -> None:
        self.times: dict[Way, tuple[float, float]] = {}
        self.edges: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)

    def take(self, way: Way, loop: _Loop) -> None:
        import shardbook as sb

        began = time.perf_counter()
        run = sb.measure(loop.model, loop.optimizer, mode=way) if way in ("full", "light") else None
        with run or nullcontext():
            opened = time.perf_counter()
            warm = [loop.step() for _ in range(WARM.get(way, 0))]
            found = [loop.step() for _ in range(COUNTED)]
            done = time.perf_counter()
        closed = time.perf_counter()
        self._note(way, found)
        if way == "light":
            self._note("looks", warm)
        if run is not None and way == "full":
            document = run.document()
            made = time.perf_counter()
            self.edges = (opened - began, closed - done, made - closed, len(document.to_json()))

    def _note(self, way: Way, found: list[tuple[float, float]]) -> None:
        self.times[way] = (statistics.mean(wall for wall, _ in found), statistics.mean(used for _, used in found))

    def ratio(self, way: Way, other: Way, which: int) -> float:
        return self.times[way][which] / self.times[other][which]


class _Counting(TorchDispatchMode):
    """How many operators came by."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def cost(name: str, num_rounds: int) -> Cost:
    """In this process: the caller sees to one thread."""
    measured, never = _Loop(name), _Loop(name)
    for loop in (measured, never):
        loop.step()
    with _Counting() as counting:
        never.step()
    rounds = [_round(index, measured, never) for index in range(num_rounds)]
    opening, closing, document, characters = zip(*(one.edges for one in rounds), strict=True)
    return Cost(
        name=name,
        num_operators=counting.num,
        seconds=statistics.median(one.times["plain"][0] for one in rounds),
        wall=_ratios(rounds, 0),
        processor=_ratios(rounds, 1),
        opening=statistics.median(opening),
        closing=statistics.median(closing),
        document=statistics.median(document),
        characters=int(statistics.median(characters)),
    )


def _round(index: int, measured: _Loop, never: _Loop) -> _Round:
    """Each way once. By the time ``before`` has its turn, its model was measured in either mode; ``plain`` is that model too."""
    found = _Round()
    ways: list[Way] = ["plain", "full", "light"]
    for way in ways[index % 3 :] + ways[: index % 3]:
        found.take(way, measured)
    pair: list[tuple[Way, _Loop]] = [("before", measured), ("never", never)]
    for way, loop in reversed(pair) if index % 2 else pair:
        found.take(way, loop)
    return found


def _ratios(rounds: Sequence[_Round], which: int) -> dict[Way, Ratio]:
    pairs: tuple[tuple[Way, Way], ...] = (("full", "plain"), ("light", "plain"), ("looks", "plain"), ("before", "never"))
    found: dict[Way, Ratio] = {}
    for way, other in pairs:
        values = [one.ratio(way, other, which) for one in rounds]
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        found[way] = Ratio(median=median, lower=lower, upper=upper)
    return found


def edges(name: str) -> tuple[float, float, float, int]:
    """Seconds to open, close and document a full measurement of an engine, and the document's characters. Every rank calls it."""
    import shardbook as sb
    from benchmarks.books_case import NUM_STEPS, Case, build

    contender, batch = build(Case(engine=name))
    instants = [time.perf_counter()]
    with sb.measure(contender.model, contender.optimizer) as run:
        instants.append(time.perf_counter())
        for step in range(NUM_STEPS):
            contender.step(*batch(step))
        contender.settle()
        instants.append(time.perf_counter())
    instants.append(time.perf_counter())
    document = run.document()
    instants.append(time.perf_counter())
    opened, stepped, closed, made = (later - earlier for earlier, later in itertools.pairwise(instants))
    assert stepped > 0
    return opened, closed, made, len(document.to_json())


def measure(rounds: int | None = None) -> list[Cost]:
    """Each model in a process of its own."""
    return [ranks.run(1, cost, name, rounds or usual)[0] for name, usual in MODELS.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of each model")
    for found in measure(parser.parse_args().rounds):
        print(f"{found.name}: {found.num_operators} operators, {found.seconds * 1e3:.1f} ms a plain step")
        for way in found.wall:
            print(f"  {way}: wall {found.wall[way]}, processor {found.processor[way]}")
        print(f"  opening {found.opening:.3f} s, closing {found.closing:.3f} s, document {found.document:.3f} s")


if __name__ == "__main__":
    main()
