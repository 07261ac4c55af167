"""Measured steps of shardbook beside their forecasts: a grid of shapes, stages, types, batches and numbers of ranks.

    points()             the grid
    compare(points)      by point: what the allocator and the books said, and what was forecast
    python -m benchmarks.forecast_grid --only llama --items 12      some of it, with the largest items of what misses

A run takes one step unseen, so that orders are agreed and the optimizer's state exists, then two that are measured. All points of a
number of ranks share processes. The forecast is told what a person tells it: the module, on the meta device, the configuration, the
batch, and which optimizer steps.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardbook as sb
from benchmarks import ranks
from benchmarks.forecast_shapes import SHAPES, SMALL_SHAPES
from shardbook.document import Item
from shardbook.events import Event, Traffic
from shardbook.forecasting.result import PhasePeak

MIB = 2**20
PEAK_BOUND = 0.03
ACCOUNT_BOUND, ACCOUNT_FLOOR = 0.03, MIB
NUM_MEASURED = 2
NUM_ITEMS = 40

RECOMPUTES = {
    "none": sb.Recompute(),
    "full": sb.Recompute(policy="full"),
    "every 2": sb.Recompute(policy="full", every=2),
    "selective": sb.Recompute(policy="selective"),
    "offload": sb.Recompute(policy="full", offload=True),
}
Kernel = Literal["fused", "foreach", "for-loop"]
Optimizer = Literal["adamw", "sgd", "sgd-momentum"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run: a name of ``benchmarks.forecast_shapes``, how it is trained, and on how many ranks."""

    shape: str
    stage: int
    precision: str = "fp32"
    micro_batch: int = 2
    sequence: int = 128
    accumulate: int = 1
    ranks: int = 2
    clip: bool = False
    optimizer: Optimizer = "adamw"
    kernel: Kernel = "fused"
    optimizer_on: Literal["none", "host", "disk"] = "none"
    params_on: Literal["none", "host"] = "none"
    recompute: str = "none"
    """``full``, ``selective``, ``every 2``, or ``offload``: full, and inputs rest on the host."""
    folder: str = ""
    """Of an optimizer on a disk; empty: the temporary one."""

    @property
    def config(self) -> sb.ZeroConfig:
        path = Path(self.folder or tempfile.gettempdir()) if self.optimizer_on == "disk" else None
        return sb.ZeroConfig(
            offload=sb.Offload(optimizer=self.optimizer_on, params=self.params_on, path=path),
            recompute=RECOMPUTES[self.recompute],
            stage=self.stage,  # pyright: ignore[reportArgumentType]
            precision=sb.Precision.preset(self.precision),
            accumulate=self.accumulate,
            clip_grad_norm=1.0 if self.clip else None,
            loss_scale=1.0 if self.precision == "fp16" else None,  # a dynamic one skips the first steps, and moments with them
        )

    @property
    def choices(self) -> sb.Choices:
        return sb.Choices(optimizer=self.optimizer, kernel=self.kernel)

    def __str__(self) -> str:
        batch = f"{self.accumulate} × {self.micro_batch} × {self.sequence}"
        stepped = f"{self.kernel} {self.optimizer}" + (", clipped" if self.clip else "")
        away = [f"{what} on {where}" for what, where in (("optimizer", self.optimizer_on), ("params", self.params_on)) if where != "none"]
        away += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join([f"{self.shape}, stage {self.stage}, {self.precision}, {batch}, {self.ranks} ranks, {stepped}", *away])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank when its allocator held most. ``phases``: the highest instant of each phase of that step; ``sent``: bytes in a step,
    without the few by which ranks agree on it. ``between``: tier to account to bytes between steps; ``host``: account to bytes of the
    host's memory when that held most; ``moved``: link to bytes in a step; ``overstated``: bytes of the books without memory at the peak."""

    allocated: int
    books: Mapping[str, int]
    phase: str
    unit: str
    operator: str
    items: tuple[Item, ...]
    rank: int = 0
    phases: tuple[PhasePeak, ...] = ()
    sent: int = 0
    between: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    host: Mapping[str, int] = field(default_factory=dict[str, int])
    moved: Mapping[str, int] = field(default_factory=dict[str, int])
    overstated: int = 0


@dataclass(frozen=True, kw_only=True)
class FromTheStart:
    """A rank in its first step, in which optimizers make their state, and in the steps after it."""

    first: Measured
    later: Measured


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A point's two witnesses. Errors are signed: positive where the forecast is above the measurement."""

    point: Point
    measured: Measured
    forecast: sb.Forecast

    @property
    def peak_error(self) -> float:
        return self.forecast.peak_allocated / self.measured.allocated - 1

    @property
    def accounts(self) -> list[str]:
        """Those that either has."""
        return sorted({name for held in (self.measured.books, self.forecast.accounts) for name, nbytes in held.items() if nbytes})

    def difference(self, account: str) -> int:
        """Bytes by which the forecast is above the books."""
        return self.forecast.accounts.get(account, 0) - self.measured.books.get(account, 0)

    def misses(self) -> list[str]:
        """What is further off than is promised."""
        missed = ["peak"] if abs(self.peak_error) > PEAK_BOUND else []
        for account in self.accounts:
            bound = max(ACCOUNT_FLOOR, ACCOUNT_BOUND * self.measured.books.get(account, 0))
            if abs(self.difference(account)) > bound:
                missed.append(account)
        return missed


# ---- the models -------------------------------------------------------------------------------------------------------------


def build(point: Point, *, meta: bool = False) -> nn.Module:
    """The model of a point, drawn from one seed on every rank, or without values."""
    make, _ = (SHAPES | SMALL_SHAPES)[point.shape]
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(0)
        return make(point.sequence)


def vocabulary(point: Point) -> int:
    """Of a point's model."""
    _, vocab = (SHAPES | SMALL_SHAPES)[point.shape]
    return vocab


# ---- the grid ---------------------------------------------------------------------------------------------------------------


def points() -> list[Point]:
    """Every stage in fp32 and bf16 on 1 to 4 ranks, shapes and batches taking turns; then what a turn leaves out."""
    return list(dict.fromkeys([*_turns(), *_more()]))


def _turns() -> Iterator[Point]:
    shapes = (
        "gpt",
        "decoder",
        "transformers llama",
        "decoder tied",
        "gpt vocabulary",
        "decoder odd",
        "transformers gpt2",
        "decoder 12 layers",
    )
    batches = ((1, 256, 1), (4, 128, 1), (2, 200, 2), (8, 64, 1), (2, 512, 1), (1, 128, 4), (4, 256, 1))
    kernels: tuple[Kernel, ...] = ("fused", "foreach", "for-loop")
    number = 0
    for num_ranks in (1, 2, 3, 4):
        for stage in (0, 1, 2, 3):
            for precision in ("fp32", "bf16"):
                micro_batch, sequence, accumulate = batches[number % len(batches)]
                yield Point(
                    shape=shapes[(3 * number + num_ranks) % len(shapes)], stage=stage, precision=precision, micro_batch=micro_batch,
                    sequence=sequence, accumulate=accumulate, ranks=num_ranks, kernel=kernels[number % 3], clip=number % 4 == 1,
                )  # fmt: skip
                number += 1


def _more() -> Iterator[Point]:
    """Other conventions and optimizers, clipping, accumulation, and every shape at stage 3."""
    for stage, shape in enumerate(("decoder", "gpt", "transformers llama", "decoder 1 layer")):
        yield Point(shape=shape, stage=stage, precision="pure-bf16", micro_batch=4, ranks=2)
        yield Point(shape=shape, stage=stage, precision="2+2+4+8", micro_batch=4, ranks=1 + stage % 2)
        yield Point(shape=shape, stage=stage, optimizer="sgd", kernel="foreach", ranks=3)
        yield Point(shape=shape, stage=stage, optimizer="sgd-momentum", precision="bf16", kernel="for-loop", ranks=1)
        yield Point(shape=shape, stage=3 - stage, accumulate=4, clip=True, kernel="foreach", precision="bf16", micro_batch=1, ranks=2)
    yield Point(shape="decoder 1 layer", stage=3, precision="fp16", sequence=64, ranks=2)
    yield Point(shape="transformers llama", stage=0, precision="fp16", sequence=64, ranks=1)
    for number, shape in enumerate(SHAPES):
        yield Point(shape=shape, stage=3, precision=("fp32", "bf16")[number % 2], micro_batch=4, sequence=256, ranks=2)
        if number % 2:
            yield Point(shape=shape, stage=number % 3, micro_batch=8, sequence=64, ranks=1)
    yield Point(shape="decoder vocabulary", stage=2, precision="bf16", accumulate=2, ranks=4)
    yield Point(shape="gpt wide", stage=3, precision="pure-bf16", ranks=4, kernel="foreach")


# ---- measuring --------------------------------------------------------------------------------------------------------------


def compare(chosen: Sequence[Point]) -> list[Compared]:
    """Every point measured, and forecast."""
    measured: dict[Point, Measured] = {}
    for num_ranks in sorted({point.ranks for point in chosen}):
        together = [point for point in chosen if point.ranks == num_ranks]
        by_rank = ranks.run(num_ranks, measure_all, together, seconds=900.0)
        for point, *found in zip(together, *by_rank, strict=True):
            measured[point] = max(found, key=lambda one: one.allocated)
    return [compare_with(point, measured[point]) for point in chosen]


def compare_with(point: Point, measured: Measured) -> Compared:
    """A measurement beside the forecast of its point."""
    return Compared(point=point, measured=measured, forecast=forecast(point))


def forecast(point: Point) -> sb.Forecast:
    """What shardbook says of a point beforehand."""
    module = build(point, meta=True)
    return sb.forecast(
        module, point.config, ranks=point.ranks, micro_batch=point.micro_batch, sequence=point.sequence, choices=point.choices
    )  # fmt: skip


def measure_all(chosen: Sequence[Point]) -> list[Measured]:
    """Every rank of a group calls it."""
    found: list[Measured] = []
    for point in chosen:
        found.append(measure(point))
        gc.collect()
    return found


def measure(point: Point) -> Measured:
    """This rank's highest instant in the steps after the first."""
    training = _Training(point)
    training.take(1)
    found = training.measured(NUM_MEASURED)
    training.engine.close()
    return found


def measure_all_from_the_start(chosen: Sequence[Point]) -> list[FromTheStart]:
    """Every rank of a group calls it."""
    found: list[FromTheStart] = []
    for point in chosen:
        training = _Training(point)
        found.append(FromTheStart(first=training.measured(1), later=training.measured(NUM_MEASURED)))
        training.engine.close()
        del training
        gc.collect()
    return found


class _Training:
    """A point's engine, and the number of its next step."""

    def __init__(self, point: Point) -> None:
        self._point, self._next = point, 0
        self._model = build(point)
        self._optimizer = optimizer_of(point, self._model.parameters())
        self.engine = sb.Engine(self._model, self._optimizer, point.config)
        self._sent = 0

    def take(self, num_steps: int) -> None:
        """Steps that nobody looks at."""
        for _ in range(num_steps):
            self._step()
        self._settle()

    def measured(self, num_steps: int) -> Measured:
        """The highest of some steps."""
        gc.collect()
        self._sent = 0
        with self.engine.observe(self._hear), sb.measure(self._model, self._optimizer) as run:
            for _ in range(num_steps):
                self._step()
        heights = run.heights()
        self._settle()
        document = run.document()
        mine = next(one for one in document.reconciliations if one.rank == _rank())
        ledger = sb.Ledger(self.engine)
        between = {memory: held for memory in ("device", "host", "disk") if (held := ledger.held(memory))}
        ledger.close()
        return Measured(
            allocated=mine.allocated,
            books=dict(mine.books),
            phase=mine.phase,
            unit=mine.unit,
            operator=mine.operator,
            items=mine.items[:NUM_ITEMS],
            rank=mine.rank,
            phases=tuple(PhasePeak(phase=one.phase, where=one.unit, accounts=dict(one.books)) for one in heights),
            sent=self._sent // num_steps,
            between=between,
            host=next((one.accounts for one in document.tiers if (one.rank, one.tier) == (_rank(), "host")), {}),
            moved={one.link: one.nbytes // num_steps for one in document.moved if one.rank == _rank()},
            overstated=mine.overstated,
        )

    def _step(self) -> None:
        for number in range(self._point.accumulate):
            inputs, targets = _batch(self._point, self._next * self._point.accumulate + number)
            out = self.engine(inputs, targets)
            if isinstance(out, tuple):
                self.engine.backward(out[0], weight=int(out[1]))
            else:
                self.engine.backward(out)
            del inputs, targets, out
        self.engine.step()
        self._next += 1

    def _hear(self, event: Event) -> None:
        if isinstance(event, Traffic) and event.kind != "step":
            self._sent += event.sent_nbytes

    def _settle(self) -> None:
        """Awaits the refresh of stages 1 and 2."""
        if self._point.stage < 3:
            with self.engine.gathered():
                pass


def optimizer_of(point: Point, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a point."""
    how: dict[str, Any] = {"fused": point.kernel == "fused", "foreach": point.kernel == "foreach", "lr": 1e-4}
    if point.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **how)
    return torch.optim.SGD(parameters, momentum=0.9 if point.optimizer == "sgd-momentum" else 0.0, **how)


def _batch(point: Point, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * number + _rank())
    tokens = torch.randint(vocabulary(point), (2, point.micro_batch, point.sequence), generator=generator)
    return tokens[0].clone(), tokens[1].clone()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- by hand ----------------------------------------------------------------------------------------------------------------


def lines(one: Compared, num_items: int = 0) -> Iterator[str]:
    """A point for people who look for a difference."""
    where, told = (
        f"{one.measured.phase} {one.measured.unit} {one.measured.operator}",
        f"{one.forecast.peak_phase} {one.forecast.peak_where}",
    )
    yield f"{one.point}: {one.peak_error:+.3%}, {one.measured.allocated:,} in {where}; forecast in {told}; misses {one.misses()}"
    for account in one.accounts:
        yield f"    {account:12} {one.measured.books.get(account, 0):>13,} {one.difference(account):>+13,}"
    for item in one.measured.items[:num_items]:
        yield f"        {item.account} {item.nbytes:,} {item.name} {item.unit} {item.shape} {item.dtype} {item.phase}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose description contains this")
    parser.add_argument("--items", type=int, default=0, help="largest items of what misses")
    parser.add_argument("--all", action="store_true", help="also what does not miss")
    options = parser.parse_args()
    began = time.monotonic()
    compared = compare([point for point in points() if options.only in str(point)])
    for one in compared:
        if one.misses() or options.all:
            print("\n".join(lines(one, options.items)))
    print(f"{len(compared)} points, {sum(bool(one.misses()) for one in compared)} miss, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
