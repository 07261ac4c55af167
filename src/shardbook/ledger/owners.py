"""Whom the memory belongs to: the models and optimizers of a loop, given or found, and what they hold."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardbook.accounts import Account
from shardbook.errors import ConfigError
from shardbook.events import Observer
from shardbook.ledger.allocator import shown
from shardbook.ledger.items import Items
from shardbook.ledger.memory import REAL, Memory
from shardbook.ledger.peers import Holding, engine_of, holdings, module_of
from shardbook.ledger.peers_shardbook import is_engine
from shardbook.ledger.places import Places
from shardbook.ledger.reach import reached

_REDUCING = ("fsdp2", "deepspeed", "shardbook")


class Owners:
    """See the file's header. ``enter_root`` is told of each call of a model, with its arguments, before anything else happens."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | None,
        places: Places,
        enter_root: Callable[[tuple[Any, ...], dict[str, Any]], None],
        memory: Memory = REAL,
    ) -> None:
        self._memory = memory
        self._models: list[_Known] = []
        self._optimizers: list[weakref.ref[Any]] = [] if optimizer is None else [weakref.ref(optimizer)]
        self._passed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.engine = "plain"
        self._places, self._enter_root = places, enter_root
        self._handles: list[Any] = []
        if model is not None:
            self._adopt(model)
        else:
            self._handles.append(register_module_forward_pre_hook(self._discover))

    def hook(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call ``before`` and ``after`` around each optimizer step: of the given optimizer, or of any."""
        if self.optimizers:
            optimizer = _innermost(self.optimizers[0])
            self._handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            return

        def found(optimizer: Optimizer, *_: Any) -> None:
            if not any(known is optimizer or _innermost(known) is optimizer for known in self.optimizers):
                self._optimizers.append(weakref.ref(optimizer))
            before()

        self._handles += [register_optimizer_step_pre_hook(found), register_optimizer_step_post_hook(after)]

    def unhook(self) -> None:
        """Leave models and optimizers as they were."""
        self._places.unhook()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def num_parameters(self) -> int:
        """Elements of the models' parameters, as they show themselves now; of a model that is gone, when it was first seen."""
        shapes = [known.shape if (model := known.model()) is None else _shape_of(model) for known in self._models]
        return sum(numel for shape in shapes for numel, _ in shape.values())

    @property
    def models(self) -> list[Any]:
        """Those that somebody still holds."""
        return [model for known in self._models if (model := known.model()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        """Those that somebody still holds."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def scan(self, items: Items) -> None:
        """Ask what is held, and book it. What an engine books itself stays as it is."""
        self.engine = next((name for name in self._engines() if name != "plain"), "plain")
        claimed: set[int] = set()
        with shown():
            for holding in self.held():
                item = items.see(holding.tensor, holding.account, (str(holding.account).lower(), holding.unit), holding.name)
                if item is None or id(item) in claimed:
                    continue
                claimed.add(id(item))
                if not item.is_booked:
                    items.know(item, holding.account, holding.name, holding.unit)

    def held(self) -> Iterator[Holding]:
        """Everything that models and optimizers hold now; a storage may come twice, first where it belongs."""
        if len(self.models) == 1 and len(self.optimizers) <= 1:
            yield from holdings(self.models[0], next(iter(self.optimizers), None), self._memory)
            return
        for model in self.models:
            yield from holdings(model, None, self._memory)
        for optimizer in self.optimizers:
            for model in self.models or (None,):
                yield from holdings(model, optimizer, self._memory)

    def hanging(self) -> Iterator[Any]:
        """Tensors and storages that the models' modules reach in any way: attributes, containers, closures, classes of their own."""
        for model in self.models:
            modules = list(module_of(model).modules())
            own = {kind for module in modules for kind in type(module).__mro__ if not kind.__module__.startswith("torch")}
            yield from reached([*map(vars, modules), *(list(vars(kind).values()) for kind in own - {object})])

    def sampled(self) -> dict[str, int]:
        """Account to bytes held now, by looking alone."""
        totals: dict[str, int] = {}
        claimed: set[int] = set()
        with shown():
            for holding in self.held():
                storage = holding.tensor.untyped_storage()
                if storage._cdata not in claimed:
                    claimed.add(storage._cdata)
                    totals[str(holding.account)] = totals.get(str(holding.account), 0) + storage.nbytes()
        return {str(account): totals[account] for account in Account if account in totals}

    def observe(self, observer: Observer) -> Any:
        """A context manager that sends the events of shardbook's own engine, if that is what trains; None: it does not, or not yet."""
        for model in self.models:
            whole = getattr(model, "observe", None)
            if is_engine(model) and whole is not None:
                return whole(observer)
            for hook in getattr(model, "_forward_pre_hooks", {}).values():
                found: Any = getattr(hook, "_torchdynamo_orig_callable", hook)
                observe = getattr(getattr(found, "__self__", found), "observe", None)
                if observe is not None:
                    return observe(observer)
        return None

    @property
    def reduces(self) -> bool:
        """Whether the gradients that autograd makes go on to other ranks, and are not what the optimizer sees."""
        return self.engine.startswith(_REDUCING)

    @property
    def num_units(self) -> int:
        return self._places.num_units

    def _engines(self) -> Iterator[str]:
        optimizer = next(iter(self.optimizers), None)
        return (engine_of(model, optimizer) for model in self.models)

    def changes(self) -> str:
        """What is different about the models since they were adopted, in words; empty where nothing is."""
        if self.engine.startswith("deepspeed"):
            return ""  # its small parameters come and go
        return "; ".join(fault for known in self._models if (model := known.model()) is not None for fault in self._faults(known, model))

    def _faults(self, known: "_Known", model: Any) -> Iterator[str]:
        before, now = known.shape, _shape_of(model)
        kept = sorted(now.keys() & before.keys())
        found = {
            "added": sorted(now.keys() - before.keys()),
            "gone": sorted(before.keys() - now.keys()),
            "of another size": [name for name in kept if now[name][0] != before[name][0] > 0],  # 0: it was a lazy one
        }
        if self.engine in ("plain", "ddp"):  # the others replace what a model is made of themselves
            found["replaced"] = [name for name in kept if now[name][1] != before[name][1]]
        return (f"{what}: {', '.join(names)}" for what, names in found.items() if names)

    def _adopt(self, model: Any) -> None:
        inside = {id(module) for module in module_of(model).modules()}
        # a part of it that was called earlier is no model of its own
        self._models = [known for known in self._models if (old := known.model()) is not None and id(module_of(old)) not in inside]
        self._models.append(_Known(weakref.ref(model), _shape_of(model)))
        self._places.hook(module_of(model), self._enter_root)

    def _discover(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module that is called from outside of all known ones, and has something to train, is a model."""
        if self._places.is_entered or module in self._passed:
            return
        self._passed.add(module)
        if any(module is part for known in self.models for part in (known, *module_of(known).modules())):
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._adopt(module)
            if module_of(module) is module:  # this call of it has begun
                self._enter_root(args, {})
                self._places.enter_late()


@dataclass(frozen=True, slots=True)
class _Known:
    """A model, held weakly, and what it was made of when it was first seen."""

    model: weakref.ref[Any]
    shape: dict[str, tuple[int, int]]


def _shape_of(model: Any) -> dict[str, tuple[int, int]]:
    """Name to elements and ``id`` of each parameter, as it shows itself."""
    with shown():
        return {name: (parameter.numel(), id(parameter)) for name, parameter in module_of(model).named_parameters()}


def _innermost(optimizer: Any) -> Optimizer:
    """torch's own optimizer, inside of whatever wraps it (DeepSpeed, Accelerate and Lightning do)."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if isinstance(optimizer, Optimizer) and not isinstance(inner, Optimizer):
            return optimizer
        optimizer = inner
    raise ConfigError(f"optimizer is {type(optimizer).__name__}: no torch.optim.Optimizer is in it; give the one whose step() is called")
