"""Trains a random right configuration: in a plain loop, under shardbook, DDP or FSDP2; then all is judged.

    outcome = run(draw(17), folder)              both recorded, the plain loop five times more

A plain loop goes over the micro-batches of all ranks in one process, adds their gradients in fp32 and scales them once, as
`docs/how-it-works.md` has it; under autocast where DDP computes so. Loops of DDP and FSDP2 are those that people write: the loss is
divided before backward, and torch clips.
"""

import contextlib
import math
import random
import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardbook as sb
from benchmarks.verify_cases import IGNORED, STEPS, Batch, Case, batch, build, forward, optimizer_of, scheduler_of
from shardbook.verifying.callables import RERUNS, baseline_reruns
from shardbook.verifying.judge import judge
from shardbook.verifying.spread import distances
from shardbook.verifying.verdict import Verdict
from tests import ranks

# ---- the plain loop ---------------------------------------------------------------------------------------------------------


def plain(case: Case, path: Path) -> None:
    """All ranks' micro-batches in one process."""
    model = build(case)
    named = list(model.named_parameters())
    has_masters = case.dtype == "bf16" and case.engine != "ddp"
    masters = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for _, p in named] if has_masters else [p for _, p in named]
    if has_masters:
        model.bfloat16()
    optimizer = optimizer_of(case, [(name, master) for (name, _), master in zip(named, masters, strict=True)], case.kernel)
    scheduler = scheduler_of(case, optimizer)
    with sb.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            total, loss, weight = gradients(case, model, step)
            scale = _single(_clip_factor(case, total, weight) / weight)
            for master, gradient in zip(masters, total, strict=True):
                master.grad = None if gradient is None else gradient / weight
            recorder.step(loss=loss, weight=weight, batch=_given(case, range(case.num_ranks), step))
            for master, gradient in zip(masters, total, strict=True):
                master.grad = None if gradient is None else gradient * scale
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters if has_masters else (), strict=has_masters):
                    parameter.copy_(master)


Gradients = Sequence[Tensor | None]


def gradients(case: Case, model: nn.Module, step: int) -> tuple[Gradients, float, float]:
    """(sums of gradients in fp32, sum of losses, sum of weights). Stages 2 and 3 add ranks before micro-batches."""
    each = case.engine == "shardbook" and case.stage >= 2
    ranks_, micro = range(case.num_ranks), range(case.accumulate)
    losses, weights = [0.0] * case.num_ranks, [0.0] * case.num_ranks
    total: Gradients | None = None
    for outer in micro if each else ranks_:
        inner_sum: Gradients | None = None
        for inner in ranks_ if each else micro:
            place = (inner, outer) if each else (outer, inner)
            one = batch(case, place[0], step, place[1])
            if one is None:
                continue
            with _autocast(case):
                loss, weight = forward(case, _cast(case, model), one, (step, *place))
            loss.backward()
            losses[place[0]] += loss.item()
            weights[place[0]] += weight
            inner_sum = _add(inner_sum, [None if p.grad is None else p.grad.float() for p in model.parameters()])
            model.zero_grad()
        total = total if inner_sum is None else _add(total, inner_sum)
    assert total is not None
    return total, _left_to_right(losses), _left_to_right(weights)


def _cast(case: Case, model: nn.Module) -> Callable[..., Tensor]:
    is_cast = case.dtype == "bf16" and case.engine != "ddp"
    return lambda inputs: model(inputs.bfloat16() if is_cast and inputs.is_floating_point() else inputs)


def _autocast(case: Case) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bf16" and case.engine == "ddp")


def _add(left: Gradients | None, right: Gradients) -> Gradients:
    if left is None:
        return right
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def _clip_factor(case: Case, total: Gradients, weight: float) -> float:
    norm = _single(math.sqrt(_left_to_right(float(g.double().square().sum()) for g in total if g is not None))) / weight
    return 1.0 if case.clip is None else min(1.0, case.clip / (norm + 1e-6))


def _left_to_right(values: Iterable[float]) -> float:
    total = 0.0
    for value in values:
        total = total + value
    return total


def _single(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _given(case: Case, of_ranks: Iterable[int], step: int) -> list[Batch]:
    found = [batch(case, rank, step, micro) for rank in of_ranks for micro in range(case.accumulate)]
    return [one for one in found if one is not None]


# ---- candidates -------------------------------------------------------------------------------------------------------------


def shardbook(case: Case, path: str) -> None:
    """A job: this rank's part under the engine."""
    model = build(case)
    optimizer = optimizer_of(case, model.named_parameters(), case.kernel)
    settings = sb.ZeroConfig(
        stage=case.stage,  # pyright: ignore[reportArgumentType]
        accumulate=case.accumulate,
        clip_grad_norm=case.clip,
        precision=sb.Precision(param=case.dtype),  # pyright: ignore[reportArgumentType]
    )
    engine = sb.Engine(model, optimizer, settings)
    scheduler, rank = scheduler_of(case, optimizer), dist.get_rank() if dist.is_initialized() else 0
    with sb.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            losses, weights = 0.0, 0.0
            for micro in range(case.accumulate):
                one = batch(case, rank, step, micro)
                loss, weight = forward(case, engine, one, (step, rank, micro)) if one is not None else (None, 0.0)
                engine.backward(loss, **({"weight": weight} if loss is not None else {}))
                losses, weights = losses + (0.0 if loss is None else loss.item()), weights + weight
            recorder.step(loss=losses, weight=weights, batch=_given(case, [rank], step))
            engine.step()
            scheduler.step()
    engine.close()


def of_torch(case: Case, path: str) -> None:
    """A job: this rank's part under DDP or FSDP2."""
    model = _wrapped(case, build(case))
    kernel = random.Random(case.number).choice(("foreach", "single") if case.optimizer == "sgd" else ("foreach", "single", "fused"))
    optimizer = optimizer_of(case, model.named_parameters(), kernel)
    scheduler, rank = scheduler_of(case, optimizer), dist.get_rank()
    with sb.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            given = _given(case, [rank], step)
            total = _total(case, given)
            losses, weights = 0.0, 0.0
            for micro, one in enumerate(given):
                with _syncing(case, model, last=micro == len(given) - 1):
                    with _autocast(case):
                        loss, weight = forward(case, model, one, (step, rank, micro))
                    (loss * case.num_ranks / total).backward()
                losses, weights = losses + loss.item(), weights + weight
            recorder.step(loss=losses, weight=weights, batch=given)
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def _wrapped(case: Case, model: nn.Module) -> Any:
    if case.engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.dtype == "bf16" else None
    options = {} if policy is None else {"mp_policy": policy}
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _total(case: Case, given: Sequence[Batch]) -> float:
    """What the objective is a sum over, on all ranks."""
    if case.objective == "mean":
        return float(case.num_ranks * case.accumulate)
    total = torch.tensor(sum(float((targets != IGNORED).sum()) for _, targets in given), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


@contextlib.contextmanager
def _syncing(case: Case, model: Any, *, last: bool) -> Generator[None]:
    """Gradients are reduced in the last micro-batch only, or in each."""
    if case.engine == "fsdp2":
        model.set_requires_gradient_sync(last or not case.sync_last)
    with model.no_sync() if case.engine == "ddp" and case.sync_last and not last else nullcontext():
        yield


# ---- both, judged -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the verdict of a case was. ``ratios``: of each gradient of the first step that isn't the plain loop's, how far it is from it,
    squared, over the mean square of how far the plain loop's reruns are."""

    case: Case
    verdict: Verdict
    ratios: tuple[float, ...]


def baseline(case: Case, folder: str) -> tuple[str, ...]:
    """A job: notes on the plain loop and its reruns, recorded into ``folder``."""
    return baseline_reruns(lambda path: plain(case, path), Path(folder)).notes


def run(case: Case, folder: Path) -> Outcome:
    """Record and judge. ``folder`` exists."""
    path = folder / "candidate"
    ranks.call(case.num_ranks, shardbook if case.engine == "shardbook" else of_torch, case, str(path))
    (notes,) = ranks.call(1, baseline, case, str(folder))
    candidate, plain_loop = sb.Record.open(path), sb.Record.open(folder / "plain")
    reruns = [sb.Record.open(folder / name) for name, _ in RERUNS]
    verdict = judge(candidate, plain_loop, steps=STEPS, reruns=reruns, notes=notes)
    mine, theirs = (distances(plain_loop, of, 1).get((1, "gradient"), {}) for of in ([candidate], reruns))
    means = {name: sum(one * one for one in each) / len(each) for name, each in theirs.items()}
    ratios = tuple(each[0] ** 2 / means[name] for name, each in mine.items() if each[0] and means.get(name))
    return Outcome(case=case, verdict=verdict, ratios=ratios)
