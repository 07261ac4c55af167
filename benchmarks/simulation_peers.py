"""FSDP2 and DDP: real steps on two ranks beside their simulation, and FSDP2's first step beside FSDP2's own tracker.

    compare()        cases by engine, types, micro-batch and accumulation, measured and simulated
    cold_start()     a small Llama, and one of 7B: what the first step takes, by whom

The real loop is a plain one, written here; the simulation runs the same engines through ``sb.simulate``. A real run is measured from
before the model is built, as DDP's first buckets are in no Python object and could not be found later.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardbook as sb
from benchmarks import engines, fsdp2_tracker, models, ranks
from benchmarks.engines import Dtype
from benchmarks.fsdp2_tracker import Setting, Tracked
from shardbook.document import Reconciliation

NUM_RANKS, NUM_STEPS = 2, 3
SHAPE = models.GPTConfig(layers=4, width=256, heads=4, vocab=8192, sequence=128)
MESH_NBYTES = 4 * NUM_RANKS
"""DeviceMesh's table of ranks, which is a real tensor in a simulation too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: an engine of ``benchmarks.engines``, and how it trains."""

    engine: str
    dtype: Dtype = "fp32"
    micro_batch: int = 4
    accumulate: int = 1

    @property
    def config(self) -> sb.ZeroConfig:
        stage: Any = {"ddp": 0, "fsdp2-keep": 2, "fsdp2": 3}[self.engine]
        return sb.ZeroConfig(stage=stage, precision=sb.Precision(param=self.dtype), accumulate=self.accumulate)


CASES = (
    Case(engine="fsdp2"),
    Case(engine="fsdp2", dtype="bf16"),
    Case(engine="fsdp2", dtype="bf16", accumulate=2),
    Case(engine="fsdp2-keep"),
    Case(engine="fsdp2-keep", dtype="bf16"),
    Case(engine="ddp"),
    Case(engine="ddp", dtype="bf16"),
    Case(engine="ddp", micro_batch=2, accumulate=2),
)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Bytes at the peak of the first step alone, and of three steps: measured, simulated."""

    case: Case
    first: tuple[int, int]
    measured: Reconciliation
    simulated: sb.Forecast

    @property
    def told(self) -> tuple[int, dict[str, int]]:
        """The simulation's peak of all steps, and its accounts."""
        one = self.simulated
        assert one.simulated is not None
        if one.simulated.first_peak > one.peak_allocated:
            return one.simulated.first_peak, dict(one.simulated.first_accounts)
        return one.peak_allocated, dict(one.accounts)

    @property
    def difference(self) -> int:
        return self.told[0] - self.measured.allocated

    @property
    def error(self) -> float:
        return self.difference / self.measured.allocated

    @property
    def accounts(self) -> dict[str, int]:
        """Account to bytes of difference, of those that differ."""
        books, told = self.measured.books, self.told[1]
        found = {name: told.get(name, 0) - books.get(name, 0) for name in sorted({*books, *told})}
        return {name: nbytes for name, nbytes in found.items() if nbytes}


def compare(cases: Sequence[Case] = CASES) -> list[Beside]:
    """Rank 0 of each."""
    measured: list[tuple[Reconciliation, Reconciliation]] = ranks.run(NUM_RANKS, _measure_all, cases)[0]
    return [
        _beside(case, first.allocated, every, simulate(case)) for case, (first, every) in zip(cases, measured, strict=True)
    ]  # fmt: skip


def _beside(case: Case, first: int, measured: Reconciliation, simulated: sb.Forecast) -> Beside:
    assert simulated.simulated is not None
    return Beside(case=case, first=(first, simulated.simulated.first_peak), measured=measured, simulated=simulated)


def simulate(case: Case, **how: Any) -> sb.Forecast:
    """Rank 0."""
    return sb.simulate(
        lambda: models.build(SHAPE),
        lambda: _tokens(case),
        case.config,
        ranks=NUM_RANKS,
        engine=case.engine.removesuffix("-keep"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        **how,
    )


def _measure_all(cases: Sequence[Case]) -> list[tuple[Reconciliation, Reconciliation]]:
    return [(_measure(case, 1), _measure(case, NUM_STEPS)) for case in cases]


def _measure(case: Case, num_steps: int) -> Reconciliation:
    gc.collect()
    with sb.measure() as run:
        contender = engines.make(case.engine, case.dtype, SHAPE)
        for _ in range(num_steps):
            _take_step(case, contender)
    return next(one for one in run.document().reconciliations if one.rank == dist.get_rank())


def _take_step(case: Case, contender: engines.Contender) -> None:
    for number in range(case.accumulate):
        inputs, targets = _tokens(case)
        with _reducing(case, contender, last=number == case.accumulate - 1):
            with torch.autocast("cpu", torch.bfloat16) if case.engine == "ddp" and case.dtype == "bf16" else nullcontext():
                loss = contender.model(inputs, targets)
            (loss / case.accumulate if case.accumulate > 1 else loss).backward()
        del inputs, targets, loss
    contender.optimizer.step()
    contender.optimizer.zero_grad(set_to_none=True)


def _reducing(case: Case, contender: engines.Contender, *, last: bool) -> AbstractContextManager[Any]:
    model: Any = contender.model
    return model.no_sync() if case.engine == "ddp" and not last else nullcontext()


def _tokens(case: Case) -> tuple[Tensor, Tensor]:
    shape = case.micro_batch, SHAPE.sequence
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


# ---- from a cold start ------------------------------------------------------------------------------------------------------

LOGITS = Setting(ranks=2, layers=2, hidden=128, heads=4, kv_heads=4, ffn=352, vocab=8192, sequence=512)
PARAMETERS = Setting(ranks=4, layers=4, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=4096, sequence=16)
"""What is largest in either. Where it is parameters, peaks are in reductions, and a thread of gloo gives a copy back some time later: of
:data:`TRIES` runs the lowest is what the engine needs."""

SEVEN_BILLION = Setting()
TRIES = 3


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Peaks of a Llama under FSDP2 in bytes: (first step, second step) by each witness; ``measured`` where it was run for real.

    ``stepping`` is the most that the optimizer holds in the first step, simulated.
    """

    setting: Setting
    tracked: tuple[int, int]
    simulated: tuple[int, int]
    stepping: int
    measured: tuple[int, int] | None


def cold_start() -> list[ColdStart]:
    """The small ones on real ranks too."""
    return [_cold_start(LOGITS, _measured(LOGITS)), _cold_start(PARAMETERS, _measured(PARAMETERS)), _cold_start(SEVEN_BILLION, None)]


def _measured(setting: Setting) -> tuple[int, int]:
    tries: list[tuple[int, int]] = ranks.run(setting.ranks, _measure_llamas, setting)[0]
    return min(first for first, _ in tries), min(second for _, second in tries)


def _cold_start(setting: Setting, measured: tuple[int, int] | None) -> ColdStart:
    tracked: Tracked = fsdp2_tracker.in_its_own_process(setting)
    answered = simulate_llama(setting)
    told = answered.simulated
    assert told is not None
    return ColdStart(
        setting=setting,
        tracked=(tracked.first_nbytes, tracked.nbytes),
        simulated=(told.first_peak, told.later_peak),
        stepping=next(one.nbytes for one in answered.phases if one.first and one.phase == "step"),
        measured=measured,
    )


def simulate_llama(setting: Setting) -> sb.Forecast:
    """What the tracker tracks."""
    made: list[Tensor] = []

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        tokens, (cos, sin) = fsdp2_tracker.batch(setting)
        made[:] = [tokens]
        return tokens, cos, sin

    def loss(logits: Tensor) -> tuple[Tensor, None]:
        made.append(logits)  # as the loop does
        return F.cross_entropy(logits.float().flatten(0, 1), made[0].flatten()), None

    return sb.simulate(
        lambda: fsdp2_tracker.Llama(setting),
        batch,
        sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16")),
        ranks=setting.ranks,
        engine="fsdp2",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        loss=loss,
    )


def _measure_llamas(setting: Setting) -> list[tuple[int, int]]:
    return [_measure_llama(setting) for _ in range(TRIES)]


def _measure_llama(setting: Setting) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    model, optimizer = fsdp2_tracker.sharded(setting, init_device_mesh("cpu", (setting.ranks,)))
    tokens, tables = fsdp2_tracker.batch(setting)
    found = [_peak_of(model, optimizer, lambda: fsdp2_tracker.take_step(model, optimizer, tokens, tables)) for _ in range(2)]
    return found[0], found[1]


def _peak_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> int:
    gc.collect()
    with sb.measure(model, optimizer) as run:
        step()
    return next(one.allocated for one in run.document().reconciliations if one.rank == dist.get_rank())
