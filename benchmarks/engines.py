"""The engines under comparison behind one signature: shardbook, FSDP2 and DDP, with the same weights and optimizer.

All minimise the mean of the ranks' mean losses with fused AdamW. In bf16 each computes in bf16 from fp32 weights in the way that
is its own: shardbook by ``Precision(param="bf16")``, FSDP2 by its mixed-precision policy (reduction in fp32), DDP by autocast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import GPTConfig, build

Dtype = Literal["fp32", "bf16"]
NAMES = ("shardbook-0", "shardbook-1", "shardbook-2", "shardbook-3", "fsdp2", "ddp")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One engine, ready to train. ``step`` returns this rank's loss; ``settle`` awaits what a step left under way."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], Tensor]
    settle: Callable[[], None] = lambda: None
    engine: Any = None


def make(name: str, dtype: Dtype, config: GPTConfig, device: str = "cpu", **options: Any) -> Contender:
    """Build the engine ``name`` on a fresh model; ``options`` go to :class:`shardbook.ZeroConfig`.

    Raises:
        ValueError: no engine of that name.
    """
    model = build(config).to(device)
    if name.startswith("shardbook-"):
        return _shardbook(name, model, dtype, options)
    if name == "fsdp2":
        return _fsdp2(model, dtype, device)
    if name == "ddp":
        return _ddp(model, dtype, device)
    raise ValueError(f"engine = {name!r}: allowed are {', '.join(NAMES)}")


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _shardbook(name: str, model: nn.Module, dtype: Dtype, options: dict[str, Any]) -> Contender:
    import shardbook as sb

    stage: Any = int(name.removeprefix("shardbook-"))
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=dtype), **options)
    optimizer = _adamw(model)
    engine = sb.Engine(model, optimizer, config)
    stays_full = config.stage < 3

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def settle() -> None:
        if stays_full:  # no rank asks another for anything here: this only awaits the refresh
            with engine.gathered(model):
                pass

    return Contender(name=name, model=model, optimizer=optimizer, step=step, settle=settle, engine=engine)


def _fsdp2(model: nn.Module, dtype: Dtype, device: str) -> Contender:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    return _usual("fsdp2", model, _adamw(model), model, nullcontext)


def _ddp(model: nn.Module, dtype: Dtype, device: str) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=dtype == "bf16")

    return _usual("ddp", model, _adamw(model), wrapped, context)


def _usual(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, wrapped: nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> Contender:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with context():
            loss = wrapped(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(name=name, model=model, optimizer=optimizer, step=step)
