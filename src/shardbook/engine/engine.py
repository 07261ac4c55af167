"""The engine: a model, its optimizer and a configuration become a training step over all ranks.

A step, in the order things happen to one parameter: its unit is gathered when forward enters it and released when forward leaves
it; gathered again when backward reaches it; its gradient lands in the unit's flat buffer; the complete unit is sent to the owners
of its shards and added in rank order; ``step`` exchanges one vector, scales, clips, steps on pieces and, where parameters stay
full, sends the new values around. This file decides when; `unit` and `flat` know how, `schedule` in which order.
"""

import logging
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardbook.accounts import Account
from shardbook.config import ZeroConfig
from shardbook.engine import describe, hooks, numerics
from shardbook.engine.build import build_units, check_model, choose_device
from shardbook.engine.comm import Collectives, Transport, connect
from shardbook.engine.journal import Journal
from shardbook.engine.optimizer import PieceOptimizer, check_elementwise, check_groups
from shardbook.engine.policy import DTYPES
from shardbook.engine.report import StepReport
from shardbook.engine.residency import residency_of
from shardbook.engine.schedule import GatherOrder, ReduceOrder
from shardbook.engine.step import LossScale, Tally, Totals, add_up, assumed, pack, scale_of
from shardbook.engine.storage import Storage, is_memory_known
from shardbook.engine.unit import Presence, Unit
from shardbook.engine.watch import Watch
from shardbook.errors import ConfigError, DivergenceError, UsageError
from shardbook.events import Observer

_log = logging.getLogger("shardbook")


class Engine:
    """Trains ``model`` under ZeRO. See the file's header for how a step goes.

    Args:
        model: any module; on the meta device with ``init=``.
        optimizer: an element-wise torch optimizer, built on the model's parameters before the engine, which takes over its groups and
            state. None: nothing is trained.
        config: what is partitioned, in which types, and how a step is made.
        scheduler: anything with ``step()``; called once per applied step.
        mesh: a one-dimensional device mesh; else the default process group; without one, a single rank.
        init: for models on the meta device: initialises the modules of one unit in place.
        device: where the engine keeps its memory; else where the model is.

    Raises:
        ConfigError: the model, the optimizer or the configuration can't be honoured.
        DivergenceError: the ranks built different models.

    >>> model = torch.nn.Linear(4, 2)
    >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(stage=2))
    >>> engine.backward(engine(torch.ones(3, 4)).sum(), weight=3)
    >>> engine.step().weight
    3.0
    >>> engine.close()
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig, *, scheduler: Any = None, mesh: DeviceMesh | None = None,
                 init: Callable[[nn.Module], None] | None = None, device: torch.device | None = None) -> None:  # fmt: skip
        self.model, self.optimizer, self.config, self.num_steps = model, optimizer, config, 0
        self._scheduler = scheduler
        self._residency = residency_of(config.stage)
        named = check_model(model)
        self._names = tuple(named)
        group = _group_of(mesh)
        self._device = choose_device(named, device, group)
        if optimizer is not None:
            check_groups(optimizer, named)
            check_elementwise(optimizer, self._device)
        self._journal = Journal()
        self._storage = Storage(self._device, self._journal)
        self._watch, self._transport = _connect(group, self._journal, config)
        with torch.no_grad():
            self._units: list[Unit] = build_units(model, named, config, self._residency, self._transport, self._storage, self._journal,
                                                  trains=optimizer is not None, init=init)  # fmt: skip
            self._move_buffers()
        flats = [flat for unit in self._units for flat in unit.flats]
        self._pieces = PieceOptimizer(optimizer, flats, self._journal) if optimizer is not None else None
        self._flats = [flat for flat in flats if flat.trainable]
        self._handles = hooks.install(self._units, self)
        self._forward_order, self._backward_order = GatherOrder(), GatherOrder()
        self._reduce_order = ReduceOrder([unit.index for unit in (*self._units[:0:-1], self._units[0]) if unit.is_trainable])
        scale = config.effective_loss_scale
        self._loss_scale = LossScale(2.0**16 if scale == "dynamic" else float(scale), dynamic=scale == "dynamic")
        self._tally = Tally()
        self._given: tuple[Tensor | None, Any, bool | None] | None = None
        self._depth = 0
        self._in_backward = False
        self._is_reduced = False
        self._reducing: Unit | None = None
        self._stash = {unit.index: _own_modules(unit, self._units) for unit in self._units}
        self._journal.phase = self._watch.activity = "idle"

    # ---- what a person calls --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def register_forward(self, method: str) -> None:
        """Let another method of the model gather and release as its forward does."""
        original = getattr(self.model, method, None)
        if not callable(original):
            raise ConfigError(f"register_forward: {type(self.model).__name__} has no method {method!r}")
        root = self._units[0]

        def entering(*args: Any, **kwargs: Any) -> Any:
            changed = self.enter_forward(root, args, kwargs)
            args, kwargs = changed or (args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self.leave_forward(root, self.model, output)
            return output

        setattr(self.model, method, entering)

    def backward(self, loss: Tensor | None, weight: float | Tensor | None = None, last: bool | None = None) -> None:
        """Backward of one micro-batch.

        Args:
            loss: a scalar: the sum of losses when ``weight`` is given, else a mean that counts 1. None: this rank has no data for this
                micro-batch and takes part with weight 0.
            weight: what the loss is a sum over (tokens, say).
            last: whether this is the step's last micro-batch; None: the ``accumulate``-th is.

        Raises:
            UsageError: too many micro-batches in a step; a loss that is no scalar.
            RankError: another rank makes it impossible to go on.
        """
        self._check_micro_batch()
        if loss is not None and loss.numel() != 1:
            raise UsageError(
                f"engine.backward: loss has shape {tuple(loss.shape)}; a scalar is needed: a sum over what weight= counts, or a mean"
            )
        self._given = (loss, weight, last)
        try:
            if loss is None:
                self._empty_micro_batch()
            else:
                scaled = loss if self._loss_scale.value == 1.0 else loss * self._loss_scale.value
                scaled.backward()  # pyright: ignore[reportUnknownMemberType]
                if self._given is not None:  # backward has touched nothing of the model
                    self._begin_backward(queue=False)
                    self._end_backward()
        except BaseException as error:
            self._watch.raised(error)
            self._abandon_step()
            raise
        finally:
            self._given = None

    def step(self) -> StepReport:
        """Reduce what is left, scale, clip, step and clear gradients.

        Raises:
            UsageError: no micro-batch since the last step; no optimizer; weights that don't add up to a positive number.
            RankError: another rank makes it impossible to go on.
        """
        if self._pieces is None:
            raise UsageError(
                "engine.step: this engine was built without an optimizer and trains nothing; build it with one, or only evaluate"
            )
        if not self._tally.num_micro_batches:
            raise UsageError(
                "engine.step: no micro-batch since the last step; call engine.backward(loss) first (engine.backward(None) for a rank without data)"
            )
        self._journal.phase = self._watch.activity = "step"
        try:
            with torch.no_grad():
                self._finish_reductions()
                totals = self._exchange()
                report = self._apply(totals)
        except BaseException as error:
            self._watch.raised(error)
            raise
        finally:
            self._clear_step()
        if report.applied and self._scheduler is not None:
            self._scheduler.step()
        return report

    @contextmanager
    def gathered(self, *modules: nn.Module, write_back: bool = False) -> Generator[None]:
        """Full parameters of everything below the modules (none given: the model), for reading, or for changing.

        Where parameters are sharded all ranks must enter it. With ``write_back`` they must at every stage: rank 0's values are taken over.
        """
        wanted = {id(parameter) for module in modules or (self.model,) for parameter in module.parameters()}
        units = [unit for unit in self._units if any(id(member.parameter) in wanted for _, _, member in unit.members)]
        with torch.no_grad():
            for unit in units:
                unit.wait()
                unit.pins += 1
        try:
            yield
            if write_back:
                with torch.no_grad():
                    for unit in units:
                        for flat in unit.flats:
                            self._transport.broadcast(flat.full.tensor, unit.name)
                            flat.write_back()
        finally:
            for unit in units:
                unit.pins -= 1
                if not self._in_backward and not self._depth:
                    with torch.no_grad():
                        unit.release()

    @contextmanager
    def grads(self) -> Generator[Mapping[str, Tensor]]:
        """Between backward and step: this rank's pieces of the reduced gradients by name, for reading or changing in place.

        They are sums over ranks and micro-batches, not yet divided by the weight (nor by the loss scale). Reduces what is left, so
        all ranks must enter it.
        """
        if not self._tally.num_micro_batches:
            raise UsageError("engine.grads: there are no gradients before engine.backward, and none after engine.step")
        with torch.no_grad():
            self._finish_reductions()
        yield {piece.member.name: flat.gradient_of(piece) for flat in self._flats for piece in flat.pieces}

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) on rank 0, one unit gathered at a time; the other ranks iterate as well and get nothing."""
        for unit in self._units:
            with torch.no_grad():
                was_here = unit.presence is Presence.HERE
                unit.wait()
                found = (
                    [(member.name, member.parameter.detach().clone()) for _, _, member in unit.members] if self._transport.rank == 0 else []
                )
                if not was_here:
                    unit.release()
            yield from found

    def state_dict(self) -> Mapping[str, Tensor]:
        """Full values under the model's own names, buffers included, on rank 0 (empty elsewhere). All ranks must call it."""
        full = dict(self.full_parameters())
        if self._transport.rank:
            return {}
        aliases = {id(parameter): name for name, parameter in self.model.named_parameters()}
        values = {name: full[aliases[id(parameter)]] for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    values[f"{path}.{name}" if path else name] = buffer.detach().clone()
        return values

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Send every event to ``observer`` inside the ``with``; it begins with a booking for each account that holds something."""
        return self._journal.observed(observer)

    def describe(self) -> str:
        """Units and their sizes, what is partitioned, who owns which piece, and the convention in force."""
        return describe.text(self.config, self._residency, self._transport, self._units, self._device)

    def save(self, path: Path, *, extra: Mapping[str, Any] | None = None, schedulers: Sequence[Any] = ()) -> Path:
        """Not in this version."""
        raise NotImplementedError(
            "engine.save: checkpoints are not in this version; engine.state_dict() gives the full parameters on rank 0"
        )

    def load(
        self, path: Path, *, schedulers: Sequence[Any] = (), allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Not in this version."""
        raise NotImplementedError(
            "engine.load: checkpoints are not in this version; write values inside engine.gathered(model, write_back=True)"
        )

    def close(self) -> None:
        """Give back the process group and the watchdog, and take the hooks off the model, whose parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._pieces is not None:
            self._pieces.close()
        self._watch.stop()
        self._transport.close()

    # ---- what the hooks call ----------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward needs the unit's parameters: gather them if they are not here, and look ahead."""
        recomputes = _inside_backward()
        changed = None
        with torch.no_grad():
            if unit.index == 0:
                if not recomputes:
                    self._begin_forward()
                changed = self._cast_inputs(args, kwargs)
            if not recomputes:
                self._forward_order.enter(unit.index)
                self._watch.activity = f"forward of {unit.name!r}"
            unit.wait()
            self._journal.mark("forward", unit.name, "begin")
            if not recomputes:
                self._look_ahead(self._forward_order)
        return changed

    def leave_forward(self, unit: Unit, module: nn.Module, output: Any) -> None:
        """The unit's forward is over (or was ended early): release it, and be called when backward comes back to it."""
        self._journal.mark("forward", unit.name, "end")
        reachable = hooks.on_gradient_of(output, lambda: self._enter_backward(unit))
        recomputes = _inside_backward()
        if not self._residency.full_parameters and torch.is_grad_enabled():
            stashed = list(hooks.stashed_tensors(self._stash[unit.index]))
            reachable = hooks.on_gradient_of(stashed, lambda: self._enter_backward(unit)) or reachable
        with torch.no_grad():
            # a graph that no hook can see may still need the parameters: they stay until backward or the next forward
            if not unit.in_backward and (
                reachable or recomputes or not torch.is_grad_enabled() or output is None or not unit.is_trainable or unit.index
            ):
                unit.release()
            if unit.index == 0 and not recomputes:
                self._end_forward()

    def land(self, unit: Unit, flat_index: int, index: int, parameter: nn.Parameter) -> None:
        """Autograd has finished the gradient of one parameter."""
        with torch.no_grad():
            self._begin_backward()
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            if unit.land(flat_index, index, gradient, adds_locally=self._adds_locally):
                self._complete(unit)

    # ---- forward and backward ---------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        if self._depth == 0:
            if self._in_backward:  # the last backward ended by an exception that the engine did not see
                self._abandon_step()
            self._release_all()
            self._journal.phase = "forward"
            self._forward_order.begin()
        self._depth += 1

    def _end_forward(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            error = sys.exc_info()[1]
            if error is not None:
                self._watch.raised(error)
            self._forward_order.end()
            for unit in self._units[1:]:
                if unit.presence is Presence.ARRIVING and not self._residency.full_parameters:
                    unit.release()  # fetched ahead for an order that was not followed to its end
            self._journal.phase = self._watch.activity = "idle"

    def _begin_backward(self, *, queue: bool = True) -> None:
        if self._in_backward:
            return
        if self._given is None:
            self._check_micro_batch()
            if self._loss_scale.value != 1.0:
                raise UsageError(
                    "loss.backward() was called on an fp16 loss without its scale; call engine.backward(loss), which scales it"
                )
        self._in_backward = True
        self._journal.phase = self._watch.activity = "backward"
        self._backward_order.begin()
        if queue:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore

    def _enter_backward(self, unit: Unit) -> None:
        """Backward has reached an output of the unit: whatever lies after it in the graph is done."""
        with torch.no_grad():
            self._begin_backward()
            if unit.in_backward and unit.presence is Presence.HERE:
                return
            self._backward_order.enter(unit.index)
            self._watch.activity = f"backward of {unit.name!r}"
            for other in self._units:
                if other.in_backward and not other.is_related_to(unit):
                    other.release()
            unit.wait()
            unit.in_backward = True
            self._look_ahead(self._backward_order)

    def _complete(self, unit: Unit) -> None:
        """All gradients of a unit have landed: nothing needs its trainable parameters any more in this backward."""
        if not unit.is_frozen_in_part:
            unit.release()
        due = self._reduce_order.complete(unit.index)
        if self._reduces_now:
            for index in due:
                self._launch(self._units[index])

    def _launch(self, unit: Unit) -> None:
        """Start one reduction; the one before it ends first, so that only one is in memory."""
        self._finish_launched()
        unit.launch()
        self._reducing = unit

    def _finish_launched(self) -> None:
        if self._reducing is not None:
            self._reducing.finish()
            self._reducing = None

    def _end_backward(self) -> None:
        """Backward is over: reduce what waits, count the micro-batch."""
        with torch.no_grad():
            loss, weight, _ = self._given if self._given is not None else (None, None, None)
            empty = self._given is not None and loss is None
            self._release_all()
            if self._reduces_now:
                self._is_reduced = True
                for index in self._reduce_order.rest():
                    self._launch(self._units[index])
                self._finish_launched()
            for unit in self._units:
                unit.end_micro_batch()
            self._reduce_order.restart()
            self._backward_order.end()
            self._tally.add(loss, weight, empty=empty)
            self._given = None
            self._in_backward = False
            self._journal.phase = self._watch.activity = "idle"

    def _empty_micro_batch(self) -> None:
        """Without data: take part in every gather and reduction that the other ranks make for theirs."""
        with torch.no_grad():
            if not self._residency.full_parameters:
                modules = [(0, 0), *sorted((position, unit.index) for unit in self._units[1:] for position in self._positions(unit))]
                forward = self._forward_order.agreed or tuple(index for _, index in modules)
                backward = self._backward_order.agreed or (0, *reversed(forward[1:]))
                for order, sequence in ((self._forward_order, forward), (self._backward_order, backward)):
                    order.begin()
                    for index in sequence:
                        order.enter(index)
                        self._units[index].wait()
                        self._units[index].release()
                    order.end()
            self._begin_backward(queue=False)
            self._end_backward()

    def _positions(self, unit: Unit) -> list[int]:
        """Where the unit's modules stand among the model's."""
        order = {id(module): position for position, module in enumerate(self.model.modules())}
        return [order[id(module)] for module in unit.modules]

    def _look_ahead(self, order: GatherOrder) -> None:
        """Fetch the next units of an agreed order, within the limit."""
        prefetch = self.config.prefetch
        if self._residency.full_parameters or not prefetch.ahead or not order.is_followed:
            return
        for index in order.ahead(prefetch.ahead):
            unit = self._units[index]
            if unit.presence is not Presence.AWAY:
                continue
            if prefetch.limit is not None and self._journal.live(Account.GATHERED) + unit.full_nbytes > prefetch.limit:
                break
            unit.fetch()

    def _release_all(self) -> None:
        if not self._residency.full_parameters:
            for unit in self._units:
                unit.release()

    @property
    def _adds_locally(self) -> bool:
        return self._residency.full_gradients and self.config.accumulate > 1

    @property
    def _reduces_now(self) -> bool:
        """Whether this micro-batch's gradients go to their owners in this backward."""
        if not self._residency.full_gradients:
            return True
        last = self._given[2] if self._given is not None else None
        return self._tally.num_micro_batches + 1 == self.config.accumulate if last is None else last

    def _check_micro_batch(self) -> None:
        if self._pieces is None:
            raise UsageError(
                "this engine was built without an optimizer and trains nothing: evaluate under torch.no_grad(), or build it with an optimizer"
            )
        if self._is_reduced and self._residency.full_gradients:
            raise UsageError("engine.backward: the last micro-batch of this step has been reduced already; call engine.step()")
        if self._tally.num_micro_batches >= self.config.accumulate:
            raise UsageError(
                f"engine.backward: this would be micro-batch {self._tally.num_micro_batches + 1} of a step with accumulate={self.config.accumulate}; call engine.step() first, or raise ZeroConfig.accumulate"
            )

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        precision = self.config.precision
        if not precision.cast_inputs:
            return None
        dtype = DTYPES[precision.param]

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype else value

        return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}

    # ---- the step -----------------------------------------------------------------------------------------------------------

    def _finish_reductions(self) -> None:
        """Everything that was sent is added up; what was only added locally is reduced now."""
        for unit in self._units:
            if unit.presence is Presence.ARRIVING:
                unit.wait()  # a refresh of the last step that nobody has used
        if not self._is_reduced:
            for index in self._reduce_order.agreed:
                self._launch(self._units[index])
            self._is_reduced = True
        self._finish_launched()
        for unit in self._units:
            unit.finish_return()

    def _exchange(self) -> Totals:
        """The step's one exchange between ranks and its one read from the device."""
        numbers, squares = self._sum_squares()
        has_gradient = [False] * len(self._names)
        for flat in self._flats:
            for member, flag in zip(flat.members, flat.has_gradient, strict=True):
                has_gradient[member.number] = flag
        digests = (self._forward_order.digest(), self._backward_order.digest(), self._reduce_order.digest())
        mismatch = self._transport.mismatch if isinstance(self._transport, Collectives) else None
        vector = pack(self._tally, squares, mismatch, numbers, digests, has_gradient)
        gathered = self._transport.exchange(vector, "the step")
        if not is_memory_known(gathered):
            return assumed(self._tally, has_gradient, self._transport.num_ranks, len(digests))
        totals = add_up(gathered.tolist(), len(self._names), len(digests))
        if totals.mismatch:
            raise DivergenceError(
                "ranks took part in different operations in one collective (their headers differ); all ranks must enter the same units in each step"
            )
        return totals

    def _sum_squares(self) -> tuple[list[int], Tensor]:
        """Numbers of the parameters that lie in this rank's shards, and the sums of their squared gradients there, in float64."""
        scratch = self._storage.buffer(Account.WORKSPACE, "root", numerics.BLOCK_NUMEL, torch.float64)
        numbers: list[int] = []
        sums: list[Tensor] = []
        for flat in self._flats:
            for member, span, gradient in flat.own_gradients():
                numbers.append(member.number)
                sums.append(numerics.sum_of_squares(gradient, span.start, scratch.tensor))
        scratch.give_back()
        return numbers, torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=self._device)

    def _apply(self, totals: Totals) -> StepReport:
        """Scale, step and publish, or skip on every rank alike."""
        assert self._pieces is not None
        loss_scale, rates = self._loss_scale.value, self._pieces.learning_rates
        norm, clip_factor, scale = scale_of(totals.raw_norm, totals.weight, loss_scale, self.config.clip_grad_norm)
        applied = totals.is_finite
        nonfinite = None
        if not applied:
            nonfinite = "loss" if totals.first_nonfinite is None else self._names[totals.first_nonfinite]
            _log.warning("step not applied: non-finite %s", f"gradient of {nonfinite!r}" if nonfinite != "loss" else "loss")
        else:
            self._step_pieces(scale, totals.has_gradient)
            self.num_steps += 1
        self._loss_scale.update(applied=applied)
        forward_agrees, backward_agrees, reduce_agrees = totals.orders_agree
        self._forward_order.settle(agreed=forward_agrees)
        self._backward_order.settle(agreed=backward_agrees)
        self._reduce_order.settle(agreed=reduce_agrees)
        return StepReport(applied=applied, loss=totals.loss, weight=totals.weight, grad_norm=norm, clip_factor=clip_factor, learning_rates=rates,
                          loss_scale=loss_scale, nonfinite=nonfinite)  # fmt: skip

    def _step_pieces(self, scale: float, has_gradient: Sequence[bool]) -> None:
        assert self._pieces is not None
        temporary = [
            flat.scaled_gradients(scale, [has_gradient[member.number] for member in flat.members])
            for flat in self._flats
            if flat.layout.numel
        ]
        self._pieces.step()
        for buffer in temporary:
            if buffer is not None:
                buffer.give_back()
        for flat in self._flats:
            flat.forget_gradients()
        for unit in self._units:
            if unit.is_trainable:
                unit.publish()
                unit.changed()
                if self._residency.refreshes:
                    unit.refresh()

    def _clear_step(self) -> None:
        """Nothing of this step is left, whether it was applied or not."""
        for flat in self._flats:
            flat.forget_gradients()
        self._tally = Tally()
        self._is_reduced = False
        self._journal.phase = self._watch.activity = "idle"

    def _abandon_step(self) -> None:
        """A backward was ended by an exception: forget the step's gradients."""
        self._in_backward = False
        self._depth = 0
        self._given = None
        with torch.no_grad():
            self._reducing = None
            for unit in self._units:
                unit.end_micro_batch()
            self._reduce_order.restart()
            self._release_all()
        self._clear_step()

    def _move_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self._device and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self._device)


def _inside_backward() -> bool:
    """Whether the calling code runs inside autograd's backward: a forward there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _group_of(mesh: DeviceMesh | None) -> Any:
    if mesh is not None:
        if mesh.ndim != 1:
            raise ConfigError(
                f"mesh: it has {mesh.ndim} axes {mesh.mesh_dim_names or ''}; one axis of data-parallel ranks is supported: pass mesh['axis']"
            )
        return mesh.get_group()
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _connect(group: Any, journal: Journal, config: ZeroConfig) -> tuple[Watch, Transport]:
    """The transport, and the watchdog over it."""
    if group is None or dist.get_world_size(group) == 1:
        return Watch(0, 1, None, ""), connect(None, Watch(0, 1, None, ""), journal, config.reduction)
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    store: Any = None
    prefix = ""
    if dist.get_backend(group) != "fake":
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store
        ranks = "-".join(map(str, dist.get_process_group_ranks(group))) if num_ranks < dist.get_world_size() else "all"
        prefix = f"shardbook/{ranks}/{store.add(f'shardbook/{ranks}/engines/{rank}', 1)}"
    watch = Watch(rank, num_ranks, store, prefix)
    transport = connect(group, watch, journal, config.reduction)
    watch.start(getattr(transport, "pairs", None))
    return watch, transport


def _own_modules(unit: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """Modules below the unit's that are in no unit further in."""
    others = {id(module) for other in units if other is not unit for module in other.modules}
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        found.append(module)
        for child in module.children():
            if id(child) not in others:
                visit(child)

    for module in unit.modules:
        visit(module)
    return found
