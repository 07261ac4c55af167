"""FSDP2 and DDP: torch's own code, as a plain loop would use it, on fake tensors or on real ones.

Nothing of them is written again here. What stands in their way on fake tensors is taken out of it from outside: DTensor's finding out of
shapes is told apart from memory (`peers_shapes`), and DDP gets answers from a group that has nobody in it (`peers_answers`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from shardbook.config import Precision, ZeroConfig
from shardbook.engine.partition import partition
from shardbook.engine.policy import DTYPES
from shardbook.errors import ConfigError
from shardbook.simulation.peers_answers import AnsweringGroup, RealIndices
from shardbook.simulation.peers_pieces import FewPieces
from shardbook.simulation.trainers import Loss, OptimizerFactory, called

_STAGES = {"fsdp2": (2, 3), "ddp": (0,)}


class Fsdp2:
    """``fully_shard`` on each repeated block, or on what ``config.units`` names, then on the whole model.

    Stage 3 is FSDP2's default: blocks are freed after forward, and the root's parameters are kept. Stage 2 keeps all of them until backward
    (``reshard_after_forward=False``). Gradients are reduced after each micro-batch.

    Raises:
        ConfigError: a stage or a type that FSDP2 can't have.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory, config: ZeroConfig, loss: Loss) -> None:
        _check("fsdp2", config)
        from torch.distributed.fsdp import fully_shard

        self.model = _kept_in(DTYPES[config.precision.master_dtype], model)
        self._config, self._loss = config, loss
        self.assumptions = (_AT_ONCE, *_unscaled(config))
        how: dict[str, Any] = {
            "mesh": _mesh(),
            "reshard_after_forward": None if config.stage == 3 else False,
            "mp_policy": _policy(config.precision),
        }
        with FewPieces(dist.get_rank()):
            for module in (*_blocks(model, config), model):
                fully_shard(module, **how)
        self.optimizer = optimizer(model.parameters())

    def micro_batch(self, batch: Any, *, last: bool) -> None:
        output = called(self.model, batch)  # held until backward is over, as most loops do
        _objective(self._loss(output), self._config.accumulate).backward()

    def step(self) -> None:
        _step(self.model, self.optimizer, self._config)

    def settle(self) -> None:
        """A step leaves nothing under way."""

    def close(self) -> None:
        """All that there is goes with the model."""


class Ddp:
    """DDP with gradients that are views of its buckets; ``bucket_views=False``, torch's own default, keeps both.

    Where parameters are computed with in another type than they are kept in, forward runs under ``torch.autocast``. Gradients are
    reduced after a step's last micro-batch. A single rank has no buckets.

    Raises:
        ConfigError: a stage or a type that DDP can't have.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerFactory, config: ZeroConfig, loss: Loss, *, bucket_views: bool = True) -> None:
        _check("ddp", config)
        self._config, self._loss = config, loss
        self._ddp, self._is_fake = _wrapped(_kept_in(DTYPES[config.precision.master_dtype], model), bucket_views)
        self.model = model if self._ddp is None else self._ddp
        self.assumptions = (*(_ASSUMPTIONS if self._is_fake else ()), *_unscaled(config))
        self.optimizer = optimizer(model.parameters())

    def micro_batch(self, batch: Any, *, last: bool) -> None:
        with self._reducing(last):
            with _computing_in(self._config.precision):
                output = called(self.model, batch)
                loss = self._loss(output)
            _objective(loss, self._config.accumulate).backward()

    def step(self) -> None:
        _step(self.model, self.optimizer, self._config)

    def settle(self) -> None:
        """A step leaves nothing under way."""

    def close(self) -> None:
        """All that there is goes with the model."""

    def _reducing(self, last: bool) -> AbstractContextManager[Any]:
        if self._ddp is None:
            return nullcontext()
        if self._is_fake:
            with RealIndices():  # what forward would do in a moment: this is done once in a run
                self._ddp.reducer._rebuild_buckets()
        return nullcontext() if last else self._ddp.no_sync()


# ---- what a loop around them does ----------------------------------------------------------------------------------------------


def _objective(loss: tuple[Tensor, Any], accumulate: int) -> Tensor:
    """The mean of this rank's micro-batches, of which this is one."""
    loss_sum, weight = loss
    mean = loss_sum if weight is None else loss_sum / weight
    return mean / accumulate if accumulate > 1 else mean


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> None:
    if config.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _computing_in(precision: Precision) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", DTYPES[precision.param]) if precision.has_master else nullcontext()


# ---- how they are made -----------------------------------------------------------------------------------------------------------


def _kept_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    """``model.to(dtype)``, which refuses fake parameters."""
    changed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype is not dtype:
                if id(parameter) not in changed:
                    changed[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                module.register_parameter(name, changed[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype is not dtype:
                module.register_buffer(name, buffer.to(dtype), persistent=name not in module._non_persistent_buffers_set)
    return model


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    with unset_fake_temporarily():  # it reads the numbers of ranks from a tensor
        return init_device_mesh("cpu", (dist.get_world_size(),))


def _policy(precision: Precision) -> Any:
    """What isn't said is the type that parameters are kept in."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    param = DTYPES[precision.param] if precision.has_master else None
    reduce = DTYPES[precision.reduce] if precision.reduce != precision.param else None
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=precision.cast_inputs)


def _blocks(model: nn.Module, config: ZeroConfig) -> Iterator[nn.Module]:
    """Inner ones first. Where nobody names units, embeddings and heads are the root's, as in every example of FSDP2."""
    for part in reversed(partition(model, config.units)[1:]):
        for module in part.modules:
            if config.units is not None or any(True for _ in module.children()):
                yield module


def _wrapped(model: nn.Module, bucket_views: bool) -> tuple[Any, bool]:
    """DDP around a model, and whether it is on fake tensors. None: there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None, False
    is_fake = any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    # What init_sync would do needs values: the shapes of the other ranks' parameters.
    how: dict[str, Any] = {"process_group": AnsweringGroup.of_this_rank(), "init_sync": False} if is_fake else {}
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_views, **how)
    return wrapped, is_fake


_AT_ONCE = "a collective is over when it is asked for"
_ASSUMPTIONS = (
    _AT_ONCE,
    "all ranks have the same parameters from the start (init_sync=False), and gradients arrive on rank 0 in this rank's order",
    "an all-reduce takes no memory of its own, as with gloo",
)


def _check(engine: str, config: ZeroConfig) -> None:
    """Raises:
    ConfigError: what ``engine`` can't be told, with what it can.
    """
    precision, allowed = config.precision, _STAGES[engine]
    kept = precision.master_dtype
    if config.stage not in allowed:
        _refuse(f"stage = {config.stage}", f"{' or '.join(map(str, allowed))} with {engine}", "choose another engine or stage")
    if precision.grad_dtype != kept:
        _refuse(f"precision.grad = {precision.grad_dtype!r}", f"{kept!r}: {engine} keeps gradients as parameters", f"use grad={kept!r}")
    if engine == "ddp" and precision.reduce != kept:
        _refuse(f"precision.reduce = {precision.reduce!r}", f"{kept!r}: DDP adds gradients as they are kept", f"use reduce={kept!r}")
    if precision.keep_param_shard:
        _refuse("precision.keep_param_shard = True", f"False: {engine} keeps no copy in the type it computes in", "drop it")
    if config.recompute.policy != "none":
        remedy = "wrap its blocks in torch.utils.checkpoint where the model is built"
        _refuse(f"recompute.policy = {config.recompute.policy!r}", f"'none': {engine} recomputes nothing by itself", remedy)
    for name in ("optimizer", "params"):
        if (place := getattr(config.offload, name)) != "none":
            _refuse(f"offload.{name} = {place!r}", f"'none' with {engine}", "drop it, or simulate shardbook's own engine")
    if precision.keep:
        _refuse(f"precision.keep = {dict(precision.keep)!r}", f"no pattern: {engine} has one type for all", "drop it")


def _unscaled(config: ZeroConfig) -> tuple[str, ...]:
    return ("no scaler of losses: its few scalars are not counted, and no step is skipped",) if config.precision.param == "fp16" else ()


def _refuse(given: str, allowed: str, remedy: str) -> None:
    raise ConfigError(f"ZeroConfig.{given}: allowed is {allowed}; {remedy}")
