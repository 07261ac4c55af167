"""One simulated run: a group, tensors without values, an engine, and two steps under the ledger."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardbook.forecasting.result import Replayed
from shardbook.simulation.asked import Asked
from shardbook.simulation.assumptions import unpacked
from shardbook.simulation.caching import replayed
from shardbook.simulation.cuda_workspaces import held, workspaces_on
from shardbook.simulation.given import building, check_batch, check_model, check_optimizer
from shardbook.simulation.group import fake_group
from shardbook.simulation.memory import FakeMemory
from shardbook.simulation.observe import Observed, observe
from shardbook.simulation.peers import Ddp, Fsdp2
from shardbook.simulation.peers_shapes import ShapesOnly
from shardbook.simulation.refusals import explained
from shardbook.simulation.trainers import Loss, OptimizerFactory, Own, Trainer
from shardbook.simulation.workspaces import Workspaces, on_cpu, with_staging


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What a person gives: how things are made."""

    build_model: Callable[[], nn.Module]
    build_batch: Callable[[], Any]
    optimizer: OptimizerFactory
    loss: Loss


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of a model before an engine takes it."""

    name: str
    num_parameters: int
    num_trainable: int
    largest_tensor: tuple[str, int] | None

    @classmethod
    def of(cls, module: nn.Module) -> "Model":
        """Shared parameters count once."""
        numels = {name: parameter.numel() for name, parameter in module.named_parameters()}
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        largest = max(numels, key=lambda name: numels[name], default=None)
        return cls(
            name=type(module).__name__,
            num_parameters=sum(numels.values()),
            num_trainable=trained,
            largest_tensor=None if largest is None else (largest, numels[largest]),
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of it.

    Args:
        model: as it was built.
        optimizer: as conventions call it.
        first, later: the first step, and the second.
        assumptions: sentences.
        sent: bytes that a step sends.
        moved: link to bytes that a step moves between tiers.
        seconds: that the run took.
        replayed: the caching allocator's part; None on a CPU.
        blocks: how many of the model's repeated blocks ran, where not all of them did.
    """

    model: Model
    optimizer: str
    first: Observed
    later: Observed
    assumptions: tuple[str, ...]
    sent: int
    moved: Mapping[str, int]
    seconds: float
    replayed: Replayed | None = None
    blocks: int | None = None


def built(given: Functions) -> nn.Module:
    """The model alone, without values."""
    mode = FakeTensorMode()
    with mode, explained("build_model()"), building():
        return check_model(given.build_model(), mode)


def run(asked: Asked, given: Functions, *, finely: bool = False) -> Run:
    """Take two steps; ``finely``: heights of each unit and operator."""
    began = time.perf_counter()
    gc.freeze()  # what an earlier run has left is not looked through again
    with _stage(asked) as (mode, memory):
        with explained("build_model()"), building():
            model = check_model(given.build_model(), mode)
        known = Model.of(model)
        with _trainer(asked, given, model, memory) as trainer, explained("the model"), unpacked() as assumed:
            how: Mapping[str, Any] = {"accumulate": asked.config.accumulate, "finely": finely}
            batch = _checked_batch(given.build_batch, mode)
            first = observe(trainer, batch, memory, **how)
            sender = trainer if isinstance(trainer, Own) else memory
            before = sender.sent, _moved(trainer)
            later = observe(trainer, batch, memory, **how)
            optimizer, sent, moved = _name_of(trainer.optimizer), sender.sent - before[0], _moved(trainer) - before[1]
            assumptions = (*trainer.assumptions, *assumed)
        del model, trainer
    return Run(
        model=known,
        optimizer=optimizer,
        first=first,
        later=later,
        assumptions=assumptions,
        sent=sent,
        moved=dict(moved),
        seconds=time.perf_counter() - began,
        replayed=_replayed(asked, memory),
    )


@contextmanager
def _stage(asked: Asked) -> Generator[tuple[FakeTensorMode, FakeMemory]]:
    mode = FakeTensorMode()
    with fake_group(asked.ranks, asked.rank, alone_needs_one=asked.engine != "shardbook"):
        if asked.engine == "fsdp2":
            with ShapesOnly() as shapes, mode, FakeMemory(mode, _workspaces(asked), lambda: shapes.is_on) as memory:
                yield mode, memory
        else:
            with mode, FakeMemory(mode, _workspaces(asked)) as memory:
                yield mode, memory


def _workspaces(asked: Asked) -> Workspaces:
    if asked.device is None:
        return with_staging if asked.engine == "fsdp2" else on_cpu
    return workspaces_on(asked.device.name)


def _replayed(asked: Asked, memory: FakeMemory) -> Replayed | None:
    if asked.device is None:
        return None
    return replayed(memory.trace, held(asked.device.name), asked.settings, asked.allocator)


@contextmanager
def _trainer(asked: Asked, given: Functions, model: nn.Module, memory: FakeMemory) -> Generator[Trainer]:
    """Who takes the steps. If they fail, that is what is told, not that it can't be closed in the middle of one."""
    optimizer = _checked_optimizer(given.optimizer, model)
    if asked.engine == "shardbook":
        trainer = Own(model, optimizer, asked.config, given.loss, memory.book)
    else:
        trainer = (Fsdp2 if asked.engine == "fsdp2" else Ddp)(model, optimizer, asked.config, given.loss)
    try:
        yield trainer
    except BaseException:
        with suppress(Exception):
            trainer.close()
        raise
    trainer.close()


def _moved(trainer: Trainer) -> Counter[str]:
    """Bytes between tiers so far, by link; only shardbook's own engine tells of them."""
    return Counter(trainer.moved) if isinstance(trainer, Own) else Counter()


def _name_of(optimizer: Any) -> str:
    """As conventions call it: "adamw" for what conventions don't know, as most have two moments."""
    if type(optimizer).__name__ == "SGD":
        return "sgd-momentum" if any(group.get("momentum") for group in optimizer.param_groups) else "sgd"
    return "adamw"


def _checked_optimizer(optimizer: OptimizerFactory, model: nn.Module) -> OptimizerFactory:
    """A person's function, and a look at what it gives."""

    def made(parameters: Any) -> Any:
        with explained("optimizer(...)"):
            found = optimizer(parameters)
        check_optimizer(found, model)
        return found

    return made


def _checked_batch(build_batch: Callable[[], Any], mode: FakeTensorMode) -> Callable[[], Any]:
    def made() -> Any:
        with explained("build_batch()"):
            batch = build_batch()
        check_batch(batch, mode)
        return batch

    return made
