"""FSDP2 (``fully_shard``): what its parameter groups hold, read from their attributes as of torch 2.13.

A group's parameters are always there as shards, padded to equal length. While the group is gathered, all-gather outputs hold its full
parameters, one storage each, which lose their memory and keep their identity when it is released. The output of the collective, which
they were copied from, is kept until the next group has been gathered; likewise the input of the last reduce-scatter.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardbook.accounts import Account
from shardbook.ledger.peers_naming import Found, Tree, attribute, class_names, local


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module itself."""
    return "FSDPModule" in class_names(module)


class Sharded:
    """The parameter groups of all sharded modules of a tree. ``names`` are those of parameters that come and go, by ``id``."""

    def __init__(self, tree: Tree) -> None:
        self._groups: list[tuple[str, Any]] = []
        self.names: dict[int, str] = {}
        for path, inner in tree.modules:
            if is_sharded(inner):
                self._groups += [(path or "root", group) for group in _groups_of(inner)]
        paths = {id(inner): path for path, inner in tree.modules} if self._groups else {}
        self._params = [(unit, param, _name(param, paths)) for unit, group in self._groups for param in group.fsdp_params]
        for _, param, name in self._params:
            for kind in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
                if (parameter := getattr(param, kind, None)) is not None:
                    self.names[id(parameter)] = name

    @property
    def managed(self) -> set[int]:
        """``id`` of every parameter that a group deals with."""
        return set(self.names)

    def found(self) -> Iterator[Found]:
        for unit, param, name in self._params:
            yield from _of_param(unit, param, name)
        for unit, group in self._groups:
            yield from _of_group(unit, group)


def _groups_of(module: Any) -> list[Any]:
    getter = getattr(module, "_get_fsdp_state", None)
    state = getter() if getter is not None else None
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before there were several
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _name(param: Any, paths: dict[int, str]) -> str:
    info = param._module_info
    path = paths.get(id(info.module), "")
    return f"{path}.{info.param_name}" if path else info.param_name


def _of_param(unit: str, param: Any, name: str) -> Iterator[Found]:
    sharded, whole = param.sharded_param, getattr(param, "_unsharded_param", None)
    yield Account.PARAM, name, unit, getattr(param, "_sharded_param_data", sharded._local_tensor)  # with its padding
    if (grad := sharded.grad) is not None:  # one storage for all parameters of the group, if nothing was added to it
        yield Account.GRAD, f"reduced gradients of {unit}", unit, local(grad)
    for kind in ("all_gather_outputs", "_unsharded_inner_tensors"):
        for tensor in getattr(param, kind, ()):
            yield Account.GATHERED, name, unit, tensor
    smaller = getattr(param, "_sharded_post_forward_param_data", None)  # where a group is released to fewer ranks
    for tensor in (whole, smaller):
        if tensor is not None:
            yield Account.GATHERED, name, unit, local(tensor)
    for grad in (getattr(whole, "grad", None), getattr(param, "unsharded_accumulated_grad", None)):
        if grad is not None:
            yield Account.GRAD_FULL, name, unit, local(grad)


def _of_group(unit: str, group: Any) -> Iterator[Found]:
    context = getattr(group, "comm_ctx", None)
    buffers = {
        f"all-gather output of {unit}": attribute(group, "_all_gather_result", "all_gather_output"),
        "all-gather output of the last gather": attribute(context, "all_gather_state", "all_gather_result", "all_gather_output"),
        f"all-reduce input of {unit}": attribute(group, "_all_reduce_state", "all_reduce_input"),
    }
    for state in getattr(context, "reduce_scatter_states", None) or ():
        buffers["reduce-scatter input of the last reduction"] = state.reduce_scatter_input
    for name, tensor in buffers.items():
        if tensor is not None:
            yield Account.COMM, name, unit if unit in name else "root", tensor
    if (partial := getattr(group, "_partial_reduce_output", None)) is not None:
        yield Account.GRAD, f"partly reduced gradients of {unit}", unit, partial
