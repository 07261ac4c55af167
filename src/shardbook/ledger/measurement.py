"""``measure``: books and measurement around any PyTorch loop.

Steps are told apart by themselves: one ends when the model is called again after an optimizer's step (or where ``run.step()`` says so).
In ``full`` mode every operator is seen and every allocation recorded; ``light`` mode looks at step boundaries alone and costs
nothing per operator. Whatever happens inside, what was seen until then can be had from ``document()``.
"""

import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardbook.accounts import Account
from shardbook.errors import ConfigError, UsageError
from shardbook.events import Booking, Event
from shardbook.ledger._stub import engine_of, holdings
from shardbook.ledger.allocator import live_storages, records_of, shown
from shardbook.ledger.items import Items
from shardbook.ledger.ledger import Ledger
from shardbook.ledger.places import Places
from shardbook.ledger.reconcile import Blocks, StepLog
from shardbook.ledger.watcher import Operator, Watcher

Mode = Literal["full", "light"]
_OLDER = "older than the measurement"
_current: list["Measurement"] = []  # the profiler and the stack of dispatch modes are the process's own, so measurements can't nest


class Measurement:
    """What :func:`measure` gives. Open it with ``with``; read it by :meth:`document`, also after an exception."""

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None, *, mode: Mode, excluded: Iterable[Tensor] = ()) -> None:
        if mode not in ("full", "light"):
            raise ConfigError(f"mode = {mode!r}: allowed are 'full' and 'light'; full sees every operator, light looks at step boundaries")
        self.mode, self._model, self._optimizer = mode, model, optimizer
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self.ledger = Ledger()
        self.items = Items(self.ledger)
        self.places = Places()
        self.watcher = Watcher(self.items, self.places, self._fail)
        self.logs: dict[int, StepLog] = {}
        self.notes: list[str] = []
        self.num_steps = 0
        self._stepped = self._marked = False
        self._stack = ExitStack()

    # ---- what a person calls --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if _current:
            raise UsageError("measure: a measurement is open already, and they can't nest; close it first, or use its step()")
        _current.append(self)
        self._stack.callback(_current.clear)
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._end_step()
            if error is not None:
                self.notes.append(f"ended by {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}")
            if not self.num_steps:
                self.notes.append("the optimizer never stepped: what there is, is of one step that did not end")
        finally:
            self._stack.close()

    @contextmanager
    def step(self) -> Generator[None]:
        """Marks a step; from the first one on, steps are what is marked and nothing else."""
        if not self._marked:
            self._marked = True
        self._turn(counts=False)
        try:
            yield
        finally:
            self._turn(counts=True)

    # ---- inside -----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._device = _device_of(self._model)
        self._hook_optimizer()
        self._stack.callback(self.places.unhook)
        if self._model is not None:
            self.places.hook(self._model, self._enter_root)
        self._observe_engine()
        if self.mode == "full":
            self._take_base()
            self._records = records_of(self._device)
            self._stack.enter_context(self.watcher.saving())
            self._stack.enter_context(self.watcher)
        self._scan()
        self._begin_step()
        self._stack.callback(self._stop)

    def _take_base(self) -> None:
        found = live_storages(self._device)
        for address, (tensor, _) in found.items():
            if address not in self._excluded:
                self.items.see(tensor, Account.UNACCOUNTED, ("before", ""), _OLDER)
        base = {address: item for address, item in self.items.live.items()}
        unknown = 0
        if self._device.type == "cuda":
            unknown = max(0, torch.cuda.memory_allocated(self._device) - sum(item.nbytes for item in base.values()))
        self.base = sum(item.nbytes for item in base.values()) + unknown
        self.blocks = Blocks(base, unknown)

    def _hook_optimizer(self) -> None:
        if self._optimizer is not None:
            before, after = self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook
        else:
            before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        for handle in (before(self._before_step), after(self._after_step)):
            self._stack.callback(handle.remove)

    def _observe_engine(self) -> None:
        """An engine of shardbook's own tells of its memory itself."""
        if self._model is None:
            return
        for hook in self._model._forward_pre_hooks.values():
            found: Any = getattr(hook, "_torchdynamo_orig_callable", hook)
            observe = getattr(getattr(found, "__self__", found), "observe", None)
            if observe is not None:
                self._stack.enter_context(observe(self._hear))
                self._observed = True
                return

    def _hear(self, event: Event) -> None:
        if isinstance(event, Booking) and self.mode == "full":
            self.items.book(event)

    def _enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepped and not self._marked:
            self._turn(counts=True)
        for tensor in _tensors((args, kwargs)):
            item = self.items.see(tensor, Account.INPUT, ("between", ""), "input")
            if item is not None and item.account in (Account.WORKSPACE, Account.UNACCOUNTED):
                self.items.know(item, Account.INPUT, "input")

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.places.stepping = True
        if self._optimizer is None:
            self._optimizer = optimizer
        self._scan()

    def _after_step(self, *_: Any) -> None:
        self.places.stepping = False
        self._stepped = True
        self._scan()

    def _scan(self) -> None:
        """Model, optimizer and engine are asked what they hold."""
        self._owners = engine_of(self._model, self._optimizer)
        with shown():
            for holding in holdings(self._model, self._optimizer):
                item = self.items.see(holding.tensor, holding.account, (str(holding.account).lower(), holding.unit), holding.name)
                if item is not None and item.reference is not None:
                    self.items.know(item, holding.account, holding.name, holding.unit)

    def _turn(self, *, counts: bool) -> None:
        self._stop(counts=counts)
        self._begin_step()

    def _end_step(self) -> None:
        self._stop(counts=self._stepped)

    def _begin_step(self) -> None:
        self._began = time.perf_counter_ns()
        self._is_open = True
        if self.mode == "full":
            self._records.start()

    def _stop(self, *, counts: bool = False) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._stepped = False
        if counts:
            self.num_steps += 1
        self.places.turn()
        if self.mode == "full":
            self._log(self.num_steps if counts else 0)

    def _log(self, number: int) -> None:
        recorded, end = self._records.stop(), time.perf_counter_ns()
        before, items, operators = dict(self.blocks.live), self.items.turn(), self.watcher.turn()
        changes, peak = self.blocks.follow(recorded, end, items)
        self.logs[number] = StepLog(number, self._began, end, before, changes, items, operators, self.blocks.unknown, peak)

    def _fail(self, error: RuntimeError, operator: Operator) -> None:
        self.notes.append(f"out of memory in {operator.name}: {error}")


def measure(model: nn.Module | None = None, optimizer: Optimizer | None = None, *, mode: Mode = "full") -> Measurement:
    return Measurement(model, optimizer, mode=mode)


def _device_of(model: nn.Module | None) -> torch.device:
    first = None if model is None else next(model.parameters(), None)
    if first is not None and first.device.type == "cuda":
        return first.device
    return torch.device("cpu")


def _tensors(value: Any, depth: int = 0) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 6:
        for inner in value:
            yield from _tensors(inner, depth + 1)
