"""The forwards of a step as the outermost recorded module sees them: what went in, under which settings, what came out.

A forward counts where gradients are enabled and its output has a floating tensor that requires one. Those between two calls of
``Recorder.step`` are the micro-batches of the step to come. Hooks on the module see whatever wraps it (DDP, FSDP2, DeepSpeed,
trainers) call it; they leave inputs and outputs alone. Not seen: calls inside of a graph that torch.compile has made (give the
compiled module to `record`, and the calls of that are), forwards within ``torch.func``, and recomputation, which is no forward of its
own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from shardbook.ledger.peers_naming import local
from shardbook.recording.batches import Facts, facts_of, leaves, num_rows_of
from shardbook.recording.fingerprint import Extent, Plan, Prints
from shardbook.recording.fragments import flat
from shardbook.recording.layouts import Recorded
from shardbook.recording.micro_batches import OUTPUT, OUTPUT_GRADIENT
from shardbook.recording.surroundings import generators
from shardbook.recording.taking import type_name
from shardbook.recording.writer import Rows

SAMPLE_NUMEL = 1 << 18
"""Elements of an output that are fingerprinted at most: its leading rows."""

MOST_FORWARDS = 1024
"""In one step. Later ones are passed over: a loop that never calls ``Recorder.step`` must not fill memory."""


@dataclass(slots=True)
class Forward:
    """One forward as it comes together. Numbers are 0-d tensors until they are written."""

    inputs: list[Facts]
    num_rows: int
    learning_rates: list[Any]
    evaluating: int
    autocast: str | None
    holding: int
    held: str | None
    output: Prints | None = None
    sampled: tuple[int, torch.dtype] | None = None  # elements and type of the sample
    gradient: Tensor | None = None  # its sample, the sum of all backwards that have come to it
    width: int = 1  # of the output's last dimension

    def scalars(self) -> dict[str, Any]:
        """As they are written."""
        return {
            "inputs": [facts.row() for facts in self.inputs],
            "rows": self.num_rows,
            "rates": self.learning_rates,
            "evaluating": self.evaluating,
            "autocast": self.autocast,
            "holding": self.holding,
            "held": self.held,
            "silent": self._silent(),
        }

    def _silent(self) -> Tensor | None:
        if self.gradient is None or self.gradient.numel() % self.width:
            return None
        return (self.gradient.view(-1, self.width) == 0).all(1).sum()


@dataclass(slots=True)
class Forwards:
    """The forwards of one step, and the hash of the generators' state before the first and after the last."""

    each: list[Forward] = field(default_factory=list[Forward])
    generators: int | None = None
    generators_after: int | None = None

    def rows(self) -> Iterator[Rows]:
        """Fingerprints of outputs and of their gradients. Rows are named by the number of the forward."""
        found = [(str(place), forward) for place, forward in enumerate(self.each) if forward.sampled is not None]
        gradients = [(place, forward, _prints(forward.gradient)) for place, forward in found if forward.gradient is not None]
        for phase, own in ((OUTPUT, [(place, one, one.output) for place, one in found]), (OUTPUT_GRADIENT, gradients)):
            prints = [(place, forward.sampled, prints) for place, forward, prints in own if forward.sampled and prints is not None]
            if prints:
                table = tuple((place, 0, numel, type_name(dtype)) for place, (numel, dtype), _ in prints)
                yield Rows(phase, table, [one for _, _, one in prints])


class Watch:
    """Hooks on the outermost recorded module, until `close`. Copies of the module, in memory or pickled, have hooks that do nothing.

    Args:
        run: what is recorded.
        is_complete: whether the step to come is, so that outputs are fingerprinted.
    """

    _is_deaf = False

    def __init__(self, run: Recorded, is_complete: Callable[[], bool]) -> None:
        module = run.module
        self._stepper, self._is_complete = run.stepper, is_complete
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._device = next((parameter.device.type for parameter in module.parameters()), "cpu")
        self._forwards = Forwards()
        self._current: Forward | None = None
        # first of all, so that inputs are seen as they were given; an engine may cast them
        self._handles: list[Any] = [
            run.called.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
            run.called.register_forward_hook(self._leave),
        ]
        leaf = _first_leaf(module)
        if leaf is not None:
            self._handles.append(leaf.register_forward_pre_hook(self._inside))

    def take(self) -> Forwards:
        """Those since the last call."""
        taken, self._forwards = self._forwards, Forwards()
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __deepcopy__(self, _: dict[int, Any]) -> "Watch":
        return _deaf()

    def __reduce__(self) -> tuple[Callable[[], "Watch"], tuple[()]]:
        return _deaf, ()

    # ---- hooks: all return None, which leaves everything as it is -----------------------------------------------------------

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._is_deaf or not _is_of_training() or len(self._forwards.each) >= MOST_FORWARDS:
            return
        if not self._forwards.each:
            self._forwards.generators = generators()
        given = _given(args, kwargs)
        self._current = Forward(
            inputs=[facts for tensor in given if (facts := _facts_of(tensor)) is not None],
            num_rows=num_rows_of([tensor for tensor in given if not tensor.is_nested]),
            learning_rates=[_rate(group) for group in self._stepper.param_groups],
            evaluating=sum(not module.training for module in self._modules),
            autocast=self._autocast(),
            holding=len(held := [parameter.grad.dtype for parameter in self._parameters if parameter.grad is not None]),
            held=type_name(min(held, key=lambda dtype: dtype.itemsize)) if held else None,
        )

    def _inside(self, _: nn.Module, __: Any) -> None:
        """Trainers switch autocast on inside of the module's own ``forward``."""
        if torch.compiler.is_compiling() or self._is_deaf:
            return
        current = self._current  # the module may be called from several threads
        if current is not None and current.autocast is None:
            current.autocast = self._autocast()

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._is_deaf:
            return
        forward, self._current = self._current, None
        if forward is None or not _is_of_training():
            return
        first = next((one for one in _tensors(output) if one.requires_grad and one.is_floating_point()), None)
        if first is None:
            return
        self._forwards.each.append(forward)
        self._forwards.generators_after = generators()
        if self._is_complete() and _is_plain(local(first)):
            with contextlib.suppress(Exception):  # an output that can't be hashed is still one
                _watch_output(forward, first)

    def _autocast(self) -> str | None:
        return type_name(torch.get_autocast_dtype(self._device)) if torch.is_autocast_enabled(self._device) else None


def _deaf() -> Watch:
    watch = Watch.__new__(Watch)
    watch._is_deaf = True
    return watch


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments; none where a container of somebody's own can't be read."""
    try:
        return [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
    except Exception:  # noqa: BLE001 - recording must not end a run
        return []


def _watch_output(forward: Forward, output: Tensor) -> None:
    """Fingerprint a sample of it, and the same of its gradient when that comes."""
    with torch.no_grad():
        sample = _sample(local(output))
        forward.output, forward.sampled = _prints(sample), (sample.numel(), sample.dtype)
        forward.width = output.shape[-1] if output.dim() else 1

    def arrived(gradient: Tensor) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            if _is_plain(gradient := local(gradient)):
                mine = _sample(gradient)
                forward.gradient = mine.clone() if forward.gradient is None else forward.gradient.add_(mine)

    output.register_hook(arrived)


def _is_of_training() -> bool:
    """Whether a forward that begins now is to be differentiated: by autograd, and not by torch.func, nor as a recomputation."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and peek_interpreter_stack() is None
        and not torch._C._is_tracing()
    )


def _facts_of(tensor: Tensor) -> Facts | None:
    """None where the tensor can't be hashed."""
    if not _is_plain(tensor):
        return None
    try:
        return facts_of(tensor)
    except Exception:  # noqa: BLE001 - recording must not end a run
        return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is values in memory and no more: torch reads quantized tensors, say, as bits that are not there."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
    )


def _rate(group: Mapping[str, Any]) -> Any:
    rate = group.get("lr", 0.0)
    if not isinstance(rate, Tensor):
        return rate
    return rate.item() if rate.device.type == "cpu" else rate.detach().clone()  # reading it would wait for the device


def _sample(tensor: Tensor) -> Tensor:
    """Whole leading rows, at least a part of the first."""
    if tensor.dim() and tensor.numel() > SAMPLE_NUMEL:
        tensor = tensor[: max(1, SAMPLE_NUMEL * tensor.shape[0] // tensor.numel())].contiguous()
    return flat(tensor.contiguous())[:SAMPLE_NUMEL]


def _prints(sample: Tensor) -> Prints:
    return _plan(sample.numel(), sample.dtype, sample.device).prints([sample])


@lru_cache(maxsize=16)  # lengths of sequences may be many
def _plan(numel: int, dtype: torch.dtype, device: torch.device) -> Plan:
    return Plan([Extent(0, numel)], dtype, device)


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """In the order of the containers, data classes among them."""
    inner: Sequence[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        inner = list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        inner = value  # pyright: ignore[reportUnknownVariableType]
    elif is_dataclass(value):
        inner = [getattr(value, one.name, None) for one in fields(value)]
    if depth < 8:
        for item in inner:
            yield from _tensors(item, depth + 1)


def _first_leaf(module: nn.Module) -> nn.Module | None:
    """The first module inside with parameters of its own."""
    return next((inner for inner in module.modules() if inner is not module and inner._parameters), None)
