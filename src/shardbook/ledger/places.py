"""Where a loop is: phase and unit, of any model, from hooks on its modules and from autograd's own numbering.

A unit is a child of a list of modules (a transformer block), or a module outside of such lists that has parameters of its own: what
shardbook's engine, and people, gather and release together.
"""

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

ROOT = "root"


def units_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each unit, in the order of the model."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", block) for index, block in enumerate(child))
        elif _is_chain_of_blocks(child):
            yield from ((f"{path}.{key}", block) for key, block in child.named_children())
        elif any(isinstance(inner, nn.ModuleList) or _is_chain_of_blocks(inner) for inner in child.modules()):
            yield from units_of(child, f"{path}.")
        elif any(True for _ in child.parameters()):
            yield path, child


def _is_chain_of_blocks(module: nn.Module) -> bool:
    """A Sequential whose children are modules with children: blocks, not the two layers of one."""
    children = list(module.children())
    return isinstance(module, nn.Sequential) and len(children) > 1 and all(any(True for _ in child.children()) for child in children)


class Hook:
    """A hook of one module in one thread. A copy of the module, or one that is saved, takes a hook along that does nothing."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module, self._call, self._thread = weakref.ref(module), call, threading.get_ident()

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if module is self._module() and threading.get_ident() == self._thread:
            self._call(*given)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: whoever loads it need not have shardbook


class Places:
    """The phase and unit of this thread, and those of every operator of a backward; without ``follows_units``, the phase alone."""

    def __init__(self, *, follows_units: bool = True) -> None:
        self._follows_units = follows_units
        self.stepping = False
        self.num_units = 0
        self._entered: list[str] = []
        self._starts: list[int] = [0]
        self._units: list[str] = [""]
        self._sites: dict[int, str] = {}
        self._handles: list[Any] = []
        self._names: dict[int, tuple[str, str]] = {}

    def hook(self, model: nn.Module, enter_root: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Follow the model's forwards; ``enter_root`` gets the arguments of each call of the model itself."""
        units = list(units_of(model))
        self.num_units += len(units)
        for name, parameter in model.named_parameters():
            self._names[id(parameter)] = (ROOT, name)
        for path, module in units:
            for name, parameter in module.named_parameters():
                self._names[id(parameter)] = (path, f"{path}.{name}")

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            enter_root(args, kwargs)
            self._enter(ROOT)

        followed = [(path, module, self._entering(path)) for path, module in units] if self._follows_units else []
        with suppress(RuntimeError):  # a scripted module takes no hooks: it is measured without units
            for _, module, entering in (*followed, (ROOT, model, enter)):
                before, after = Hook(module, entering), Hook(module, self._leave)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def enter_late(self) -> None:
        """A model's forward runs already, and was hooked after it had begun."""
        self._enter(ROOT)

    def unhook(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def is_entered(self) -> bool:
        """Whether a known model's forward runs."""
        return bool(self._entered)

    def now(self) -> tuple[str, str]:
        """(phase, unit); ``between`` where neither forward, backward nor the optimizer runs."""
        if torch._C._current_graph_task_id() != -1:
            return "backward", self.unit_in_backward()
        if self._entered:
            return "forward", self._entered[-1]
        return ("step", "") if self.stepping else ("between", "")

    def unit_in_backward(self) -> str:
        """Whose forward made the node that autograd runs now."""
        if self._entered:
            return self._entered[-1]  # a recomputation
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if (variable := getattr(node, "variable", None)) is not None:
            return self.name_of(variable)[0]
        return self._units[bisect_right(self._starts, node._sequence_nr()) - 1]

    def name_of(self, parameter: Any) -> tuple[str, str]:
        """(unit, name) of one of the model's parameters; empty for another's."""
        return self._names.get(id(parameter), ("", ""))

    def note_site(self, site: str) -> None:
        """The forward operator that runs now was called from there: so was, then, its part of the backward."""
        self._sites[_next_number() - 1] = site

    def site_in_backward(self) -> str:
        """Where the forward of the node that autograd runs now was called."""
        node = torch._C._current_autograd_node()
        return "" if node is None else self._sites.get(node._sequence_nr(), "")

    def turn(self) -> None:
        """A step ends: what is known of its graph is not needed any more."""
        if len(self._starts) > 100_000:  # a graph may span steps; without end it may not
            del self._starts[1:-50_000], self._units[1:-50_000]
        self._sites.clear()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._enter(path)

        return enter

    def _enter(self, unit: str) -> None:
        self._entered.append(unit)
        self._change(unit)

    def _leave(self, *_: Any) -> None:
        if self._entered:
            self._entered.pop()
        self._change(self._entered[-1] if self._entered else "")

    def _change(self, unit: str) -> None:
        number = _next_number()
        if number == self._starts[-1]:
            self._units[-1] = unit
        else:
            self._starts.append(number)
            self._units.append(unit)


def _next_number() -> int:
    """What autograd will call the node it makes next in this thread."""
    autograd: Any = torch.autograd
    return autograd._get_sequence_nr()
