"""Which layout an engine has, and the parameters of its model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardbook.errors import ConfigError
from shardbook.ledger import peers, peers_deepspeed, peers_shardbook
from shardbook.recording.fragments import Described, Layout, describe
from shardbook.recording.layout_deepspeed import PartitionLayout, ShardLayout
from shardbook.recording.layout_shardbook import ShardbookLayout
from shardbook.recording.layout_torch import TorchLayout


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is recorded of a run.

    Args:
        engine: ``"plain"``, ``"ddp"``, ``"fsdp2"``, ``"deepspeed k"`` or ``"shardbook stage k"``.
        called: what is called in a forward: the module, or what torch.compile made of it, inside of which nothing can be seen.
        stepper: torch's optimizer, whose step is watched.
        steps_in_parts: the optimizer's step is called several times in a step, once per group.
        sums: gradients are sums over ranks and micro-batches, which the step divides by the total weight.
        divisor: this rank's part of what the engine's step will divide the gradients by (the sum over ranks is the whole); None where
            the engine doesn't say.
        divided_by: while the optimizer steps, what the engine has divided them by.
    """

    engine: str
    module: nn.Module
    called: nn.Module
    stepper: Any
    layout: Layout
    parameters: list[Described]
    steps_in_parts: bool = False
    sums: bool = False
    divisor: Callable[[], Any] = lambda: None
    divided_by: Callable[[], Any] = lambda: None


def recorded(model: Any, optimizer: Any, rank: int) -> Recorded:
    """Find out what trains ``model``.

    Raises:
        ConfigError: no module, no optimizer, or an engine whose layout can't be read.
    """
    _check_kinds(model, optimizer)
    engine = peers.engine_of(model, optimizer)
    module = peers.module_of(model)
    passes = peers_shardbook.passes_of(model) or peers_shardbook.passes_of(module)
    optimizer = peers.optimizer_of(model, optimizer)
    if optimizer is None and passes is not None:
        optimizer = getattr(model, "optimizer", None)  # the engine's own
    if optimizer is None:
        raise ConfigError("record: optimizer is None; pass the optimizer that updates the model, as built or as the engine gave it back")
    parameters, called = describe(module), _called(model, module)
    if passes is not None:
        layout = ShardbookLayout(passes, optimizer)
        return Recorded(
            engine=engine, module=module, called=called, stepper=optimizer, layout=layout, parameters=parameters, sums=True,
            divisor=layout.divisor,
            divided_by=layout.divided_by,
        )  # fmt: skip
    if peers_deepspeed.is_zero(optimizer):
        third = engine == "deepspeed 3"
        layout = ShardLayout(module, optimizer, rank) if third else PartitionLayout(module, optimizer)
        return Recorded(
            engine=engine, module=module, called=called, stepper=optimizer.optimizer, layout=layout, parameters=parameters,
            steps_in_parts=True,
        )  # fmt: skip
    if not hasattr(optimizer, "register_step_pre_hook"):  # DeepSpeed's own around 16-bit parameters, without ZeRO: masters are inside
        optimizer = getattr(optimizer, "optimizer", None)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError("record: optimizer has no register_step_pre_hook; pass one of torch.optim's kind, or what an engine gave back")
    layout = TorchLayout(module, optimizer)
    return Recorded(engine=engine, module=module, called=called, stepper=optimizer, layout=layout, parameters=parameters)


def _check_kinds(model: Any, optimizer: Any) -> None:
    if not hasattr(model, "named_parameters") and not hasattr(model, "model"):
        raise ConfigError(f"record: model is {_kind(model)}; pass the module, or what wraps it, and then its optimizer")
    if optimizer is not None and (
        isinstance(optimizer, type) or not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "optimizer"))
    ):
        raise ConfigError(f"record: optimizer is {_kind(optimizer)}; pass the optimizer that updates the model, as built")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _called(model: Any, module: nn.Module) -> nn.Module:
    layer = model
    while isinstance(layer, nn.Module) and layer is not module:
        if type(layer).__name__ == "OptimizedModule":
            return layer
        layer = getattr(layer, "module", None)
    return module
