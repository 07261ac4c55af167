"""The engines under comparison behind one signature, with the same weights and optimizer: shardbook, FSDP2, DDP and DeepSpeed.

All minimise the mean of the ranks' mean losses with fused AdamW. In bf16 each computes in bf16 from fp32 weights in the way that
is its own: shardbook by ``Precision(param="bf16")``, FSDP2 by its mixed-precision policy (reduction in fp32), DDP by autocast,
DeepSpeed by its ``bf16`` section (fp32 masters of the rounded weights, gradients reduced and kept in bf16).

DeepSpeed comes with ``make peers`` and is imported only when it is asked for. Its stage 3 replaces ``torch.nn.functional.linear``
for the whole process, so it must have processes of its own: :func:`share_processes` says which engines may take turns in one.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import GPTConfig, build

Dtype = Literal["fp32", "bf16"]
_DEEPSPEED = tuple(f"deepspeed-{stage}{buckets}" for stage in (1, 2, 3) for buckets in ("", "-small"))
NAMES = ("shardbook-0", "shardbook-1", "shardbook-2", "shardbook-3", "fsdp2", "fsdp2-keep", "ddp", *_DEEPSPEED)

SMALL_BUCKET_NUMEL = 2**22
"""``-small``: DeepSpeed's buckets of 5·10^8 elements and more are meant for a GPU; these hold a block of the default model."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One engine, ready to train. ``step`` returns this rank's loss; ``settle`` awaits what a step left under way.

    ``model`` and ``optimizer`` are what a person holds: the wrapper where the engine has one.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], Tensor]
    settle: Callable[[], None] = lambda: None
    engine: Any = None


def make(name: str, dtype: Dtype, config: GPTConfig, device: str = "cpu", **options: Any) -> Contender:
    """Build the engine ``name`` on a fresh model.

    ``options`` go to :class:`shardbook.ZeroConfig`, to DeepSpeed's ``zero_optimization`` section, or to DDP.

    Raises:
        ValueError: no engine of that name.
        ModuleNotFoundError: the engine is not installed; :func:`not_run` tells beforehand.
    """
    if name not in NAMES:
        raise ValueError(f"engine = {name!r}: allowed are {', '.join(NAMES)}")
    model = build(config).to(device)
    if name.startswith("shardbook-"):
        return _shardbook(name, model, dtype, options)
    if name.startswith("deepspeed-"):
        return _deepspeed(name, model, dtype, options)
    if name == "ddp":
        return _ddp(model, dtype, device, options)
    return _fsdp2(name, model, dtype, device)


def not_run(name: str) -> str | None:
    """Why an engine can't be run here, or None if it can.

    >>> not_run("ddp") is None
    True
    """
    if name.startswith("deepspeed-") and importlib.util.find_spec("deepspeed") is None:
        return "not run: DeepSpeed is not installed here (make peers makes an environment that has it)"
    return None


def share_processes(names: Sequence[str]) -> list[list[str]]:
    """The names in groups that may live in the same processes: each DeepSpeed engine alone, all others together.

    >>> share_processes(["ddp", "deepspeed-3", "fsdp2"])
    [['ddp', 'fsdp2'], ['deepspeed-3']]
    """
    together = [name for name in names if not name.startswith("deepspeed-")]
    alone = [[name] for name in names if name.startswith("deepspeed-")]
    return [together, *alone] if together else alone


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


def _fsdp2(name: str, model: nn.Module, dtype: Dtype, device: str) -> Contender:
    """``fsdp2-keep`` leaves the parameters gathered from forward to backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.split(":")[0], (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
    reshard = name == "fsdp2"
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return _usual(name, model, _adamw(model), nullcontext)


def _ddp(model: nn.Module, dtype: Dtype, device: str, options: dict[str, Any]) -> Contender:
    wrapped = nn.parallel.DistributedDataParallel(model, **{"gradient_as_bucket_view": True, **options})

    def context() -> AbstractContextManager[Any]:
        return torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=dtype == "bf16")

    return _usual("ddp", wrapped, _adamw(model), context)


def _usual(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, context: Callable[[], AbstractContextManager[Any]]) -> Contender:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with context():
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contender(name=name, model=model, optimizer=optimizer, step=step)


def _deepspeed(name: str, model: nn.Module, dtype: Dtype, options: dict[str, Any]) -> Contender:
    deepspeed = import_deepspeed(next(model.parameters()).device.type)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=deepspeed_config(name, dtype, options))
    return stepped(name, engine, optimizer)


def stepped(name: str, engine: Any, optimizer: torch.optim.Optimizer) -> Contender:
    """An engine of DeepSpeed's that is built."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Contender(name=name, model=engine, optimizer=optimizer, step=step)


def deepspeed_config(name: str, dtype: Dtype, options: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's own defaults, without clipping; with ``-small`` its buckets are :data:`SMALL_BUCKET_NUMEL`."""
    _, stage, *small = name.split("-")
    zero: dict[str, Any] = {"stage": int(stage)}
    if small:
        zero |= {"reduce_bucket_size": SMALL_BUCKET_NUMEL, "allgather_bucket_size": SMALL_BUCKET_NUMEL}
        if stage == "3":
            zero |= {"stage3_prefetch_bucket_size": SMALL_BUCKET_NUMEL, "stage3_max_live_parameters": 2 * SMALL_BUCKET_NUMEL}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero | options,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its default is 1.0, and no other engine here clips
        "bf16": {"enabled": dtype == "bf16"},
    }


def import_deepspeed(device: str = "cpu") -> Any:
    """The module, made ready for the process group that there is."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # read when it is imported
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed
    import deepspeed.comm

    deepspeed.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated", category=FutureWarning)  # its collectives' names
    # Nothing is compiled: else, on a CPU, its first group builds an extension for messages between ranks, for half a minute.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, dist_init_required=False)
    return deepspeed
