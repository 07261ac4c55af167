"""DeepSpeed's ZeRO optimizers: what they hold, read from their attributes as of DeepSpeed 0.19.

Stages 1 and 2 keep all parameters of a group in one flat tensor, stage 3 keeps their shards in one; masters are flat partitions. While
a gradient is in a bucket on its way to reduction, ``parameter.grad`` is a view of that bucket, whose storage is as large as
``reduce_bucket_size`` elements (5·10^8 by default) however little is in it: whoever holds such a view holds the bucket.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.ledger.peers_naming import Found, Tree, attribute, class_names, local, tensors_in, unit_of

_STAGES = {"DeepSpeedZeroOptimizer_Stage3": 3, "DeepSpeedZeroOptimizer": 1, "BF16_Optimizer": 1}

# Attribute -> what lies there: of any of the optimizers, one after the other.
_FLAT: tuple[tuple[str, Account, str], ...] = (
    ("bit16_groups_flat", Account.PARAM, "flat parameters"),
    ("bf16_groups_flat", Account.PARAM, "flat parameters"),
    ("lp_param_buffer", Account.PARAM, "flat shards of the parameters"),
    ("fp16_partitioned_groups_flat", Account.PARAM, "flat shards of the parameters"),
    ("single_partition_of_fp32_groups", Account.MASTER, "fp32 partition"),
    ("fp32_partitioned_groups_flat", Account.MASTER, "fp32 partition"),
    ("fp32_groups_flat_partition", Account.MASTER, "fp32 partition"),
    ("grads_in_partition", Account.GRAD, "averaged gradients"),
    ("grad_partitions_flat_buffer", Account.GRAD, "averaged gradients"),
    ("averaged_gradients", Account.GRAD, "averaged gradients"),
    ("fp32_groups_gradients_flat", Account.GRAD, "fp32 gradients"),
    ("accumulated_grads_in_cpu", Account.GRAD, "accumulated gradients"),
    ("all_grad_tensors", Account.GRAD_FULL, "gradients"),
    ("temp_grad_buffer_for_cpu_offload", Account.COMM, "staging buffer of the offload"),
    ("temp_grad_buffer_for_gpu_offload", Account.COMM, "staging buffer of the offload"),
    ("param_buffer_of_bit16_for_cpu_offload_groups", Account.COMM, "staging buffer of the offload"),
)


def is_zero(optimizer: Any) -> bool:
    """Whether it is one of DeepSpeed's that hold partitions."""
    return any(name in _STAGES for name in class_names(optimizer)) and hasattr(optimizer, "optimizer")


def stage_of(model: Any, optimizer: Any) -> int | None:
    """The stage of ZeRO, 0 under DeepSpeed's engine without it; None where neither is DeepSpeed's."""
    engine = "DeepSpeedEngine" in class_names(model)
    if engine and not is_zero(optimizer):
        optimizer = getattr(model, "optimizer", None)
    for name in class_names(optimizer):
        if name in _STAGES:
            return 2 if getattr(optimizer, "partition_gradients", False) and _STAGES[name] == 1 else _STAGES[name]
    if isinstance(model, nn.Module) and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return 3
    return 0 if engine else None


def found(zero: Any, tree: Tree) -> Iterator[Found]:
    """What the optimizer ``zero`` and the parameters of ``tree`` hold, its inner optimizer's state apart."""
    buckets = _Buckets(zero)
    yield from buckets.found()
    for key, account, what in _FLAT:
        for tensor in tensors_in(getattr(zero, key, None)):
            yield buckets.or_else(account, what, "root", tensor)
    for partition in _masters(zero):
        if (grad := partition.grad) is not None:
            yield buckets.or_else(Account.GRAD, "fp32 gradients of the partition", "root", grad)
    for name, parameter in tree.parameters:
        yield from _of_parameter(parameter, name, buckets)
    yield from _in_flight(zero)


def _masters(zero: Any) -> Iterator[Tensor]:
    for key in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        yield from getattr(zero, key, None) or ()


def _of_parameter(parameter: Any, name: str, buckets: "_Buckets") -> Iterator[Found]:
    unit = unit_of(name)
    shards = [getattr(parameter, kind, None) for kind in ("ds_tensor", "ds_secondary_tensor")]
    for tensor in tensors_in(shards):
        yield Account.PARAM, name, unit, tensor
    yield Account.PARAM if shards[0] is None else Account.GATHERED, name, unit, local(parameter)
    for grad in (parameter.grad, getattr(parameter, "grad_accum", None)):
        if grad is not None:
            yield buckets.or_else(Account.GRAD_FULL, name, unit, grad)


def _in_flight(zero: Any) -> Iterator[Found]:
    """Stage 3: what gathers that nobody has waited for are filling."""
    registry = attribute(zero, "parameter_offload", "param_coordinator", "_PartitionedParameterCoordinator__inflight_param_registry")
    for handle in (registry or {}).values():
        for tensor in tensors_in(getattr(handle, "partitions", None)):
            yield Account.GATHERED, "parameters on their way", "root", tensor


class _Buckets:
    """The buckets that gradients are copied to for reduction (``ipg`` in DeepSpeed: independent parallel gradients)."""

    def __init__(self, zero: Any) -> None:
        buckets: Mapping[Any, Any] = getattr(zero, "ipg_buckets", None) or {}
        self._buffers = [tensor for bucket in buckets.values() for tensor in tensors_in(getattr(bucket, "buffer", None))]
        self._storages = {tensor.untyped_storage()._cdata for tensor in self._buffers}
        self._numel = getattr(zero, "reduce_bucket_size", 0)

    def found(self) -> Iterator[Found]:
        for tensor in self._buffers:
            yield Account.COMM, "ipg bucket", "root", tensor

    def or_else(self, account: Account, name: str, unit: str, tensor: Tensor) -> Found:
        """As given, unless the tensor is a view of a bucket: of one that is listed, or of one that only its views keep."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return Account.COMM, "ipg bucket", "root", tensor
        if storage.nbytes() == self._numel * tensor.element_size() > tensor.numel() * tensor.element_size():
            return Account.COMM, "ipg bucket, kept by its gradients", "root", tensor
        return account, name, unit, tensor
