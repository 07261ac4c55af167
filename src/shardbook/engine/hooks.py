"""Puts the engine's callbacks on modules, parameters and outputs. No policy: each hook says what happened, and to which unit."""

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardbook.engine.unit import Unit
from shardbook.events import Observer


class Callbacks(Protocol):
    """What the engine does when something happens in forward or backward."""

    def enter_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...
    def leave_forward(self, unit: Unit, output: Any) -> None: ...
    def land(self, unit: Unit, flat_index: int, index: int, parameter: nn.Parameter) -> None: ...
    def observe(self, observer: Observer) -> AbstractContextManager[None]: ...


class _UnitHook:
    """A hook of one unit, by which another engine recognises that a module is taken.

    It holds its engine weakly: torch keeps hooks of parameters where the garbage collector does not look.
    """

    __call__: Callable[..., Any]

    def __init__(self, callbacks: Callbacks, unit: Unit) -> None:
        self._callbacks, self._unit = weakref.ref(callbacks), weakref.ref(unit)

    @property
    def is_live(self) -> bool:
        """Whether the engine is still there."""
        return self._callbacks() is not None

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """The engine's events, for who has only its model at hand; as :meth:`shardbook.Engine.observe`."""
        callbacks = self._callbacks()
        return nullcontext() if callbacks is None else callbacks.observe(observer)


class _Enter(_UnitHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        callbacks, unit = self._callbacks(), self._unit()
        return callbacks.enter_forward(unit, args, kwargs) if callbacks is not None and unit is not None else None


class _Leave(_UnitHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        callbacks, unit = self._callbacks(), self._unit()
        if callbacks is not None and unit is not None:
            callbacks.leave_forward(unit, output)


class _Land(_UnitHook):
    def __init__(self, callbacks: Callbacks, unit: Unit, flat_index: int, index: int) -> None:
        super().__init__(callbacks, unit)
        self._flat_index, self._index = flat_index, index

    def __call__(self, parameter: Any) -> None:
        callbacks, unit = self._callbacks(), self._unit()
        if callbacks is not None and unit is not None:
            callbacks.land(unit, self._flat_index, self._index, parameter)


def install(units: list[Unit], callbacks: Callbacks) -> list[Any]:
    """Hook every unit; returns the handles that take the hooks away again."""
    handles: list[Any] = []
    for unit in units:
        for module in unit.modules:
            enter, leave = _outside_of_compilation(_Enter(callbacks, unit)), _outside_of_compilation(_Leave(callbacks, unit))
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            # recomputation ends a forward early by an exception: the unit must be left all the same
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        handles.extend(install_landing(unit, callbacks))
    return handles


def install_landing(unit: Unit, callbacks: Callbacks, *, first: int = 0) -> list[Any]:
    """Hook the gradients of the unit's trainable flat buffers, from number ``first`` on."""
    trainable = [flat for flat in unit.flats if flat.trainable]
    return [
        member.parameter.register_post_accumulate_grad_hook(_Land(callbacks, unit, flat_index, index))
        for flat_index, flat in enumerate(trainable)
        if flat_index >= first
        for index, member in enumerate(flat.members)
    ]


def is_taken(module: nn.Module) -> bool:
    """Whether an engine has hooked the module or one of its own parameters."""
    found: list[Any] = list(module._forward_pre_hooks.values())
    for parameter in module._parameters.values():
        hooks: Mapping[Any, Any] | None = None if parameter is None else getattr(parameter, "_post_accumulate_grad_hooks", None)
        found.extend((hooks or {}).values())
    originals = [getattr(hook, "_torchdynamo_orig_callable", hook) for hook in found]
    ours = [hook for hook in (getattr(hook, "__self__", hook) for hook in originals) if isinstance(hook, _UnitHook)]
    return any(hook.is_live for hook in ours)


def on_gradient_of(output: Any, callback: Callable[[], None]) -> bool:
    """Call back when backward reaches one of the tensors in ``output``; returns whether there is any that it can reach."""

    def arrived(_: Tensor) -> None:  # returns None: the gradient is left as it is
        callback()

    reachable = False
    for tensor in tensors_in(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            reachable = True
            tensor.register_hook(arrived)
    return reachable


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, mappings and data classes."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 8 and isinstance(value, Mapping):
        for item in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item, depth + 1)
    elif depth < 8 and isinstance(value, (tuple, list, set, frozenset)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item, depth + 1)
    elif depth < 8 and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def cast(value: Any, dtype: torch.dtype, depth: int = 0) -> Any:
    """Floating-point tensors in nested tuples, lists, dictionaries and data classes in another type; the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if depth == 8 or all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors_in(value, depth)):
        return value
    items: Any = value  # containers of anything
    if isinstance(value, dict):
        return _like(items, {key: cast(item, dtype, depth + 1) for key, item in items.items()})
    if isinstance(value, tuple) and hasattr(items, "_fields"):
        return type(items)(*(cast(item, dtype, depth + 1) for item in items))
    if isinstance(value, (tuple, list)):
        return type(items)(cast(item, dtype, depth + 1) for item in items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: cast(getattr(value, field.name, None), dtype, depth + 1) for field in dataclasses.fields(value) if field.init
        }
        return dataclasses.replace(value, **changed)
    return value


def _like(original: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """A copy that keeps the class (and order, and default) of a dictionary."""
    made = copy.copy(original)
    made.update(changed)
    return made


def stashed_tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    """Tensors that a forward left on its modules (an auxiliary loss, say): backward may reach the unit through them first."""
    for module in modules:
        for name, value in module.__dict__.items():
            if not name.startswith("_") and isinstance(value, (Tensor, list, tuple, dict)):
                yield from tensors_in(value)


def _outside_of_compilation(hook: _UnitHook) -> Any:
    """Keep torch.compile out of the hook, where it is in use (importing it costs a second)."""
    return torch.compiler.disable(hook.__call__) if "torch._dynamo" in sys.modules else hook
