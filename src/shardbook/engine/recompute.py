"""Recomputation: chosen blocks keep little of their forward, and run it once more in backward.

Which blocks: the repeated blocks of the model, numbers 0, ``every``, 2·``every``... as they are registered. With ``units=`` of a
person's own: the units with no further unit inside, and of them those that are, hold or are part of a repeated block, where there is one.
An embedding or a head is no repeated block, nor is the root.

A block's ``forward`` is replaced in the module, below all hooks: the engine's own see one call, so that the unit is gathered once in
forward and once in backward, and stays for both its recomputation and its backward. The rest is torch's checkpoint (not reentrant); what
it leaves open is done here: the random numbers are drawn again and the model's buffers are as they were, to the bit; what is kept beside
the inputs (`selective`), and inputs that rest on the host (`resting`).
"""

import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from shardbook.accounts import Account
from shardbook.engine.changing import Changing, Held
from shardbook.engine.context import Context
from shardbook.engine.partition import repeated_blocks
from shardbook.engine.resting import RestingInputs, Slot
from shardbook.engine.selective import Keeping, Kept, Serving
from shardbook.engine.storage import Storage
from shardbook.engine.unit import Unit
from shardbook.errors import ConfigError, UsageError


class Recomputation:
    """One per engine that recomputes; takes over ``forward`` of the chosen blocks until :meth:`remove`.

    Raises:
        ConfigError: no unit is a block.
    """

    def __init__(self, context: Context, model: nn.Module, units: Sequence[Unit]) -> None:
        self._storage, self._is_selective = context.storage, context.config.recompute.policy == "selective"
        self.resting = RestingInputs(context.storage, context.journal) if context.config.recompute.offload else None
        chosen = _blocks(model, units)[:: context.config.recompute.every]
        self.units = tuple(unit.name for unit in chosen)
        self._blocks = [_Block(self, unit.name, module) for unit in chosen for module in unit.modules]

    def run(self, block: "_Block", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's forward, whose graph recomputes."""
        leaves, shape = pytree.tree_flatten((args, kwargs))
        call = _Call(block, shape, self._storage, Kept(self._storage, block.unit) if self._is_selective else None)
        graph = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        versions = [tensor._version for tensor in graph]
        with ExitStack() as leaving:
            if self.resting is not None:
                leaves = leaving.enter_context(self.resting.leaving(block.unit, leaves))
            output = checkpoint(call, *leaves, use_reentrant=False, preserve_rng_state=False)
        if [tensor._version for tensor in graph] != versions:
            raise UsageError(
                f"unit {block.unit!r} changes an input in place, so that backward could not compute it again from its input: let it "
                f"work on a copy (x = x.clone()), or leave it out by ZeroConfig.units or Recompute.every"
            )
        return output

    def look_ahead(self, unit: Unit) -> None:
        """Backward has come to the unit."""
        if self.resting is not None:
            self.resting.look_ahead(unit.name)

    def remove(self) -> None:
        """Give the blocks their own forward again."""
        for block in self._blocks:
            block.remove()
        self._blocks = []


class _Block:
    """Stands in a module in place of its ``forward``. It holds the engine weakly, and without it does what the module did before."""

    def __init__(self, owner: Recomputation, unit: str, module: nn.Module) -> None:
        self._owner, self.unit, self._module = weakref.ref(owner), unit, weakref.ref(module)
        self._before: Any = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        self.changing = Changing(module)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        if owner is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return owner.run(self, args, kwargs)

    def remove(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]
            if self._before is not None:
                module.__dict__["forward"] = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is under no engine."""
        copied = memo.get(id(self._module()))
        return self.original if self._before is not None or copied is None else types.MethodType(type(copied).forward, copied)


class _Call:
    """One forward of a block, which torch's checkpoint runs twice, the second time in backward (and again where a graph is retained)."""

    def __init__(self, block: _Block, shape: Any, storage: Storage, kept: Kept | None) -> None:
        self._block, self._shape, self._storage, self._kept = block, shape, storage, kept
        self._states: _RandomStates | None = None
        self._held: list[Held] = []
        self._is_over = False

    def __call__(self, *leaves: Any) -> Any:
        slots = [leaf for leaf in leaves if isinstance(leaf, Slot)]
        args, kwargs = pytree.tree_unflatten([leaf.get() if isinstance(leaf, Slot) else leaf for leaf in leaves], self._shape)
        if not self._is_over:
            return self._first(args, kwargs)
        try:
            return self._again(args, kwargs)
        finally:
            for slot in slots:
                slot.used()

    def _first(self, args: Any, kwargs: Any) -> Any:
        self._states = _RandomStates(self._storage, Account.ACTIVATION, self._block.unit)
        self._held = self._block.changing.hold(self._storage, self._block.unit)
        kept = self._kept
        with nullcontext() if kept is None else Keeping(kept):
            output = self._block.original(*args, **kwargs)
        if kept is not None:
            kept.end()
        self._held = self._block.changing.changed(self._held)
        self._is_over = True
        return output

    def _again(self, args: Any, kwargs: Any) -> Any:
        kept = self._kept
        serving: AbstractContextManager[Any] = nullcontext() if kept is None else Serving(kept)
        now = _RandomStates(self._storage, Account.WORKSPACE, self._block.unit)
        assert self._states is not None
        self._states.restore()
        try:
            with self._block.changing.as_held(self._held, self._storage, self._block.unit), serving:
                return self._block.original(*args, **kwargs)
        finally:
            now.restore()


class _RandomStates:
    """Of the generators that a forward draws from: the host's, and the device's where that is another.

    A generator makes its copy without an operator, so it is booked here. Among fake tensors it is real, and a fake one is booked for it.
    """

    def __init__(self, storage: Storage, account: Account, unit: str) -> None:
        self._device = storage.device
        self._states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._states.append(torch.cuda.get_rng_state(self._device))
        if storage.is_fake:
            self._booked = [storage.fresh(account, unit, state.numel(), state.dtype) for state in self._states]
        else:
            self._booked = [storage.adopt(state, account, unit) for state in self._states]

    def restore(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)


def _blocks(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """See the file's header."""
    around = {index for unit in units for index in unit.ancestors} | {0}
    innermost = [unit for unit in units if unit.index not in around]
    names = repeated_blocks(model)
    chosen = [unit for unit in innermost if any(_are_nested(unit.name, name) for name in names)]
    if not (chosen or innermost):
        raise ConfigError(
            "ZeroConfig.recompute: the model has no repeated blocks, so that there is nothing to recompute block by block: "
            'give ZeroConfig.units= the modules to be recomputed, or drop it (Recompute(policy="none"))'
        )
    return chosen or innermost


def _are_nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
