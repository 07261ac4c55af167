"""Sees what operators make and what autograd saves, and books it: for any loop, without a word from it.

Every operator of this thread passes through here, above the device's kernels: a kernel's own temporaries are seen by the allocator
alone, and are told apart later by when the operator ran (`reconcile`). What autograd saves is seen by its own hooks; what they are
given back has the same version check as without them.
"""

import os
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.accounts import Account
from shardbook.errors import BudgetError
from shardbook.ledger.items import Item, Items
from shardbook.ledger.peer_operators import STAGED, Place, places_of
from shardbook.ledger.places import Places

SITE_NBYTES = 64 * 1024
"""From this size on the line of user code that made a storage is looked up."""

_FOREIGN = ("<", str(Path(__file__).parents[1]), str(Path(torch.__file__).parents[1]), sysconfig.get_paths()["stdlib"])


_STAGED = {f"{name.split('.')[1]}.default": argument for name, argument in STAGED.items()}
_LANDING = {"aten.detach.default", "aten.add_.Tensor", "aten.add.Tensor", "aten.clone.default"}
"""With these autograd lays a gradient at its parameter; what else runs then are hooks of an engine."""

_TOUCHED = {"between": (Account.INPUT, "read by the loop"), "backward": (Account.ACTIVATION, "saved before the measurement")}
"""What a tensor is that is older than the measurement, is nobody's, and is used in a phase: what batches are made of, or what a forward
before the measurement has left; else something that the model reads as it would a buffer."""
_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True)
class Operator:
    """One operator as it ran: nanoseconds of ``time.perf_counter_ns``. ``staged``: bytes that its transport copies unseen."""

    begin: int
    end: int
    name: str
    phase: str
    unit: str
    staged: int = 0


class Watcher(TorchDispatchMode):
    """See the file's header.

    ``on_failure`` is told of an operator that could not get memory, while everything is still held; ``on_move`` of each change of phase
    or unit, before the operator there.
    """

    def __init__(
        self, items: Items, places: Places, on_failure: Callable[[RuntimeError, Operator], None], on_move: Callable[[], None]
    ) -> None:
        super().__init__()
        self._items, self._places, self._on_failure, self._on_move = items, places, on_failure, on_move
        self._recomputed: list[Item] = []
        self._process = os.getpid()
        self._known: dict[Any, tuple[str, tuple[Place, ...]]] = {}
        self._engine = ""
        self.operators: list[Operator] = []
        self.blind: dict[str, str] = {}  # operators whose tensors could not be booked, and why
        self.reduces = False

    def serve(self, engine: str, *, reduces: bool) -> None:
        """Whose operators come by from now on, and whether the gradients that autograd makes go on to other ranks."""
        self.reduces = reduces
        if engine != self._engine:
            self._engine = engine
            self._known.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a sharded tensor: what it does inside comes by
        if func is _DEVICE or os.getpid() != self._process:
            return func(*args, **(kwargs or {}))  # it makes nothing; or a child of this process, such as a worker that loads data
        phase, unit = place = self._places.now()
        operator = Operator(time.perf_counter_ns(), sys.maxsize, func.__name__, phase, unit)
        if not self.operators or (self.operators[-1].phase, self.operators[-1].unit) != place:
            self._on_move()
        self.operators.append(operator)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._on_failure(error, operator)
            raise
        operator.end = time.perf_counter_ns()
        if operator.name in _STAGED:
            operator.staged = sum(tensor.numel() * tensor.element_size() for tensor in tensors_among(args[_STAGED[operator.name]]))
        try:
            self._see(func, args, kwargs, result, place)
        except BudgetError:
            raise
        except Exception as error:  # noqa: BLE001 - what can't be booked must not stop what is measured
            self.blind[operator.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        return result

    def turn(self) -> list[Operator]:
        """A step ends: its operators."""
        ended, self.operators = self.operators, []
        return ended

    @contextmanager
    def saving(self) -> Generator[None]:
        """While it is open, what autograd saves is seen.

        ``torch.func`` refuses to run where saved tensors have hooks: for its transforms ours step aside.
        """
        native: Any = torch._C
        graph: Any = torch.autograd.graph
        original = graph.disable_saved_tensors_hooks

        @contextmanager
        def disable(message: str) -> Generator[None]:
            top = native._autograd._top_saved_tensors_default_hooks(False)
            ours = top is not None and top[0] == self._pack
            if ours:
                native._autograd._pop_saved_tensors_default_hooks()
            try:
                with original(message):
                    yield
            finally:
                if ours:
                    native._autograd._push_saved_tensors_default_hooks(self._pack, _unpack)

        graph.disable_saved_tensors_hooks = disable
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            graph.disable_saved_tensors_hooks = original

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any, place: tuple[str, str]) -> None:
        if (known := self._known.get(func)) is None:
            known = self._known[func] = str(func), places_of(str(func), self._engine)
        name, told = known
        for entry in told:
            self._claim(entry, args, kwargs or {}, result, (place, name))
        tier = self._items.tier_of_results(tensors_among(args))
        for tensor in tensors_among(result):
            item = self._items.see(tensor, Account.WORKSPACE, place, name, tier)
            if item is not None:
                self._note(item, place)
        if place[0] == "backward":
            self._see_backward(name, args)
        if self._items.unclaimed:
            account, by = _TOUCHED.get(place[0], (Account.BUFFER, "read by the model"))
            for tensor in tensors_among(args):
                self._items.touch(tensor, account, by)

    def _claim(self, told: Place, args: Any, kwargs: Any, result: Any, seen: tuple[tuple[str, str], str]) -> None:
        """What an operator says of one argument, where nobody has said anything yet."""
        if told.argument == "result":
            found = result
        elif isinstance(told.argument, int):
            found = args[told.argument] if told.argument < len(args) else ()
        else:
            found = kwargs.get(told.argument, ())
        place, name = seen
        for tensor in tensors_among(found):
            item = self._items.see(tensor, told.account, place, name)
            if item is not None and item.account is Account.WORKSPACE:
                self._items.know(item, told.account, name)

    def _note(self, item: Item, place: tuple[str, str]) -> None:
        """Of a large one: who made it. Of a recomputation's: that it may be kept."""
        if item.nbytes >= SITE_NBYTES and not item.site:
            if place[0] == "backward":
                item.site = self._places.site_in_backward()
            if not item.site:
                item.site = user_site()
                if place[0] == "forward":
                    self._places.note_site(item.site)
        if place[0] == "backward" and torch.is_grad_enabled() and item.account is Account.WORKSPACE:
            self._recomputed.append(item)

    def _see_backward(self, operator: str, args: Any) -> None:
        """What of a recomputation is still there when backward goes on, is what it was made for; and gradients of parameters."""
        if self._recomputed and not torch.is_grad_enabled():
            for item in self._recomputed:
                if item.died is None:
                    self._items.know(item, Account.ACTIVATION)
            self._recomputed = []
        if operator not in _LANDING:
            return
        variable = getattr(torch._C._current_autograd_node(), "variable", None)
        if variable is None:
            return
        unit, name = self._places.name_of(variable)
        for tensor in tensors_among(args):
            item = self._items.find(tensor)
            if item is not None and item.account is Account.WORKSPACE:
                self._items.know(item, Account.GRAD_FULL if self.reduces else Account.GRAD, f"gradient of {name}", unit)

    def _pack(self, tensor: Tensor) -> Any:
        if os.getpid() != self._process:
            return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor, tensor._version
        item = self._items.find(tensor)
        if item is None:
            self._items.see(tensor, Account.ACTIVATION, self._places.now(), "saved by autograd")
        elif item.account is Account.WORKSPACE:
            self._items.know(item, Account.ACTIVATION)
        if tensor.is_leaf or type(tensor) is not Tensor:
            return tensor, tensor._version
        with torch._C._DisableTorchDispatch():
            return tensor.detach(), tensor._version  # the tensor itself would hold the node that holds it


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # with hooks torch leaves the check to them
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
        )
    return tensor


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had no memory to give."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def user_site() -> str:
    """``file.py:12 in function`` of the innermost frame that is neither this library's, torch's nor Python's own; or empty."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_FOREIGN):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Tensors of an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        items: Iterable[Any] = values  # pyright: ignore[reportUnknownVariableType]
        for value in items:
            yield from tensors_among(value)
