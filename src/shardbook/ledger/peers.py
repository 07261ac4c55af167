"""What an engine holds at this moment, found by looking at it: plain loops, DDP, FSDP2, DeepSpeed, shardbook itself.

    for holding in holdings(model, optimizer):
        holding.account, holding.name, holding.tensor

Nothing of another engine is imported: its objects are recognised by the names of their classes and read by their attributes, and
an attribute that a version does not have is passed over. Looking gathers nothing, sends nothing and keeps nothing alive. What
Python can't reach (DDP's buckets while gradients are no views of them) is in no holding; the operators that it passes through are
in `peer_operators`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.ledger import peers_deepspeed, peers_fsdp2, peers_shardbook
from shardbook.ledger.memory import REAL, Memory
from shardbook.ledger.peers_naming import Found, Tree, class_names, local, parts, tensors_in, unit_of

_ORDER = {
    account: place
    for place, account in enumerate(
        (
            Account.PARAM, Account.BUFFER, Account.MASTER, Account.MOMENT, Account.GRAD, Account.GATHERED, Account.GRAD_FULL, Account.COMM,
        )
    )
}  # fmt: skip
_MODEL_WRAPPERS = {"DeepSpeedEngine": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
_OPTIMIZER_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "DeepSpeedOptimizerWrapper": "optimizer", "LightningOptimizer": "_optimizer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A storage that an engine keeps.

    Args:
        account: what its bytes are for.
        name: a parameter, or what it is where it serves several.
        unit: the module whose parameters are used together, ``"root"`` where it serves more than one.
        tensor: a tensor on the storage; on this rank's part of it where it is distributed. The storage may be larger.
    """

    account: Account
    name: str
    unit: str
    tensor: Tensor


def engine_of(model: Any, optimizer: Any) -> str:
    """``"plain"``, ``"ddp"``, ``"fsdp2"``, ``"deepspeed k"`` or ``"shardbook stage k"``.

    >>> engine_of(nn.Linear(2, 2), None)
    'plain'
    """
    optimizer = _layers(optimizer, _OPTIMIZER_WRAPPERS)[-1]
    layers = _layers(model, _MODEL_WRAPPERS)
    stage = peers_deepspeed.stage_of(model, optimizer)
    if stage is not None:
        return f"deepspeed {stage}"
    inner = layers[-1]
    if (own := peers_shardbook.passes_of(inner)) is not None:
        return f"shardbook stage {peers_shardbook.stage_of(own)}"
    if isinstance(inner, nn.Module) and any(peers_fsdp2.is_sharded(module) for module in inner.modules()):
        return "fsdp2"
    return "ddp" if any("DistributedDataParallel" in class_names(layer) for layer in layers) else "plain"


def module_of(model: Any) -> nn.Module:
    """The person's own module, inside of whatever wraps it."""
    module = _layers(model, _MODEL_WRAPPERS)[-1]
    return module if isinstance(module, nn.Module) else module.model


def optimizer_of(model: Any, optimizer: Any) -> Any:
    """The optimizer inside of whatever wraps it; DeepSpeed's own where only its engine is given."""
    optimizer = _layers(optimizer, _OPTIMIZER_WRAPPERS)[-1]
    if optimizer is None and "DeepSpeedEngine" in class_names(model):
        return getattr(model, "optimizer", None)
    return optimizer


def holdings(model: Any, optimizer: Any, memory: Memory = REAL) -> Iterator[Holding]:
    """Every tensor that ``model`` and ``optimizer`` hold now: each storage once, in the first account that claims it.

    Args:
        model: a module, what wraps it (DDP, DeepSpeed's engine), a shardbook engine, or None.
        optimizer: torch's, or DeepSpeed's around it, or None.
        memory: which storages count.

    Storages without memory, and tensors on the meta device, are left out.

    >>> model = nn.Linear(3, 2)
    >>> [(held.account.value, held.name, held.tensor.untyped_storage().nbytes()) for held in holdings(model, None)]
    [('PARAM', 'weight', 24), ('PARAM', 'bias', 8)]
    """
    claimed: set[int] = set()
    held: list[Holding] = []
    with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter's guard would refuse to show its storage
        for account, name, unit, tensor in sorted(_found(model, optimizer), key=_order):
            for part in (tensor,) if tensor.layout is torch.strided else parts(tensor):
                if part.is_meta or part.layout is not torch.strided:
                    continue
                storage = memory.storage_of(part)
                if storage is not None and storage._cdata not in claimed and storage.nbytes():
                    claimed.add(storage._cdata)
                    held.append(Holding(account=account, name=name, unit=unit, tensor=part))
    return iter(held)


def _order(found: Found) -> int:
    return _ORDER[found[0]]


def _found(model: Any, optimizer: Any) -> list[Found]:
    """What is held, in no order; a storage may come several times."""
    optimizer = optimizer_of(model, optimizer)
    module = _layers(model, _MODEL_WRAPPERS)[-1]
    own = peers_shardbook.passes_of(module)
    if own is not None:
        found, names = list(peers_shardbook.found(own)), peers_shardbook.piece_names(own)
        whole = peers_shardbook.model_of(module)
        return found + list(_buffers(Tree(whole) if whole is not None else None)) + list(_optimizer_state(optimizer, names))
    if not isinstance(module, nn.Module):
        return list(_optimizer(optimizer, {}))
    tree = Tree(module)
    sharded = peers_fsdp2.Sharded(tree)
    names = {id(parameter): name for name, parameter in tree.parameters} | sharded.names
    found = [*sharded.found(), *_buffers(tree)]
    if optimizer is not None and peers_deepspeed.is_zero(optimizer):
        return found + list(peers_deepspeed.found(optimizer, tree)) + list(_optimizer(optimizer.optimizer, names))
    return found + list(_parameters(tree, sharded.managed)) + list(_optimizer(optimizer, names))


def _parameters(tree: Tree, managed: set[int]) -> Iterator[Found]:
    """Parameters and gradients of a plain module, or of one under DDP; ``managed`` are another's, by ``id``."""
    for name, parameter in tree.parameters:
        if id(parameter) in managed:
            continue
        unit = unit_of(name)
        yield Account.PARAM, name, unit, local(parameter)
        if (grad := parameter.grad) is not None:
            mine = local(grad)
            shares = mine.layout is torch.strided and mine.untyped_storage().nbytes() > mine.nbytes  # DDP's bucket: they are views of it
            yield Account.GRAD, f"bucket of {name} and others" if shares else name, "root" if shares else unit, mine


def _buffers(tree: Tree | None) -> Iterator[Found]:
    if tree is not None:
        for name, buffer in tree.buffers:
            yield Account.BUFFER, name, unit_of(name), local(buffer)


def _optimizer(optimizer: Any, names: dict[int, str]) -> Iterator[Found]:
    """State, and what the optimizer steps on where that is not the model's."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in names:
                continue
            name = names[id(parameter)] = f"parameter {place} of group {number}"
            yield Account.MASTER, name, "root", local(parameter)
            if (grad := parameter.grad) is not None:
                yield Account.GRAD, name, "root", local(grad)
    yield from _optimizer_state(optimizer, names)


def _optimizer_state(optimizer: Any, names: dict[int, str]) -> Iterator[Found]:
    state: dict[Any, Any] = getattr(optimizer, "state", None) or {}
    for parameter, values in state.items():
        name = names.get(id(parameter), "")
        unit = unit_of(name) if name and " " not in name else "root"
        for key, value in values.items():
            what = f"{key} of {name}" if name else str(key)
            for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                yield Account.MOMENT, what, unit, local(tensor)


def _layers(thing: Any, wrappers: Mapping[str, str]) -> list[Any]:
    """``thing`` and what is inside it, wrapper by wrapper, as far as their classes are known by name; the innermost last."""
    layers = [thing]
    while len(layers) < 8:  # no wrapper can go round in circles
        attributes = (wrappers[name] for name in class_names(layers[-1]) if name in wrappers)
        inner = getattr(layers[-1], next(attributes, ""), None)
        if inner is None:
            break
        layers.append(inner)
    return layers
