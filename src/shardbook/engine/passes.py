"""Forward and backward as the engine sees them: when a unit is gathered, released, and its gradients reduced.

The hooks call :class:`Passes`; it keeps the state between two steps (what has landed, what is being reduced, what the ranks have
seen so far) and decides. How a unit does it is `unit`'s, in which order is `schedule`'s.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.engine import hooks
from shardbook.engine.announce import Said, Word
from shardbook.engine.comm import Pending
from shardbook.engine.context import Context
from shardbook.engine.exchange import Tally
from shardbook.engine.policy import DTYPES
from shardbook.engine.report import StepReport
from shardbook.engine.schedule import GatherOrder, ReduceOrder
from shardbook.engine.unit import Presence, Served, Unit
from shardbook.errors import UsageError
from shardbook.events import Observer


@dataclass(slots=True)
class _MicroBatch:
    """What ``engine.backward`` was told. Without it (``loss.backward()``) a micro-batch has weight 1 and an unknown loss."""

    loss: Tensor | None = None
    weight: float | Tensor | None = None
    last: bool | None = None
    empty: bool = False


class Passes:
    """See the file's header. ``forward_order`` and its two siblings are agreed between ranks at each step, by the step."""

    def __init__(self, context: Context, units: Sequence[Unit], thaw: Callable[[Unit], None], *, trains: bool) -> None:
        self.tally = Tally()
        self.forward_order, self.backward_order = GatherOrder(), GatherOrder()
        self.reduce_order = _first_reduce_order(units)
        self.entered: Counter[tuple[str, int]] = Counter()  # how often this step's passes have entered each unit
        self.loss_scale = 1.0
        self.report: StepReport | None = None  # of the last step, or of the one that is being made
        self.in_backward = False
        self.on_backward: Callable[[Unit], None] | None = None  # told of each unit that backward comes to, while its gather is under way
        self._context, self._config, self._residency = context, context.config, context.residency
        self._journal, self._watch = context.journal, context.watch
        self._units = tuple(units)
        self._trains, self._thaw = trains, thaw
        self._micro_batch: _MicroBatch | None = None
        self._left_behind: list[Pending] = []  # by passes that were ended by an exception
        self._depth = 0
        self._trains_now = False  # the backward under way brings gradients of the parameters
        self._is_over = False  # the step's last micro-batch is done
        self._is_reduced = False  # everything of this step that has landed so far
        self._reducing: Unit | None = None
        self._backward_of: Unit | None = None  # for whoever observes: whose backward runs now
        self._own_modules = [_own_modules(unit, units) for unit in units]

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Send every event of the engine to ``observer`` inside the ``with``."""
        return self._journal.observed(observer)

    # ---- micro-batches --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor | None, weight: float | Tensor | None, last: bool | None) -> None:
        """Backward of one micro-batch of this rank; None: without data."""
        self._check_may_add()
        self._micro_batch = given = _MicroBatch(loss, weight, last, empty=loss is None)
        try:
            if loss is None:
                self._attend()
            else:
                scaled = loss if self.loss_scale == 1.0 else loss * self.loss_scale
                scaled.backward()  # pyright: ignore[reportUnknownMemberType]
                if self._micro_batch is given:  # backward has touched no parameter of the model
                    self._begin_backward()
                    self._end_backward()
        except BaseException as error:
            self._watch.raised(error)
            self.abandon()
            raise

    def finish(self) -> None:
        """Everything of this step is reduced, and every refresh of the last one has arrived."""
        for unit in self._units:
            if unit.presence is Presence.ARRIVING:
                unit.wait()
        if not self._is_reduced:
            for index in self.reduce_order.agreed:
                self._launch(self._units[index])
            self._is_reduced = True
        self._is_over = self._is_over or self._residency.full_gradients
        self._finish_launched()
        for unit in self._units:
            unit.finish_return()

    def clear(self) -> None:
        """The step is over, applied or not: nothing of its gradients is left."""
        for unit in self._units:
            unit.forget_gradients()
        self.tally = Tally()
        self.entered.clear()
        self._is_reduced = self._is_over = False
        self._settle_down()

    def abandon(self) -> None:
        """A pass was ended by an exception: forget the step so far."""
        self._tell_abandoned()
        self.in_backward = False
        self._depth = 0
        self._micro_batch = None
        self._reducing = self._backward_of = None
        with torch.no_grad():
            for unit in self._units:
                self._left_behind += unit.abandon_gather() + unit.abandon_reduction()
                unit.in_use = 0
                unit.end_micro_batch()
            self.reduce_order.restart()
            self._release_all()
            self.clear()

    # ---- forward ----------------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward needs the unit's parameters: gather them if they are not here, and look ahead. Returns changed inputs."""
        recomputes, with_graph = _inside_backward(), torch.is_grad_enabled()
        with torch.no_grad():
            if unit.index == 0 and not recomputes:
                self._begin_forward(with_graph=with_graph)
            if not recomputes:
                if self.forward_order.is_announced if self._depth else with_graph:
                    self._announce("forward", unit)
                    self.entered["forward", unit.index] += 1
                self.forward_order.enter(unit.index)
                self._watch.activity = f"forward of {unit.name!r}"
            else:
                self._announce("ahead", unit)  # a recomputation gathers once more
            unit.fetch()
            unit.in_use += 1
            if not recomputes:
                self._look_ahead(self.forward_order, unit)  # before the wait: the next unit's messages overlap it
            unit.wait()
            if with_graph and not recomputes and self._journal.is_observed:
                self._watch_for_end_of_backward(unit, args, kwargs)
            self._journal.mark("forward", unit.name, "begin")
        return self._cast_inputs(args, kwargs) if unit.index == 0 else None

    def leave_forward(self, unit: Unit, output: Any) -> None:
        """The unit's forward is over (or was ended early): release it, and be called when backward comes back to it."""
        self._journal.mark("forward", unit.name, "end")
        recomputes, with_graph = _inside_backward(), torch.is_grad_enabled()
        reachable = with_graph and not unit.in_backward and self._await_backward(unit, output)
        unit.in_use -= 1
        # a graph that no hook sees may still need the parameters: they stay until backward ends, or the next forward begins
        unseen = with_graph and unit.is_trainable and output is not None and not reachable and not recomputes
        error = sys.exc_info()[1] if output is None else None
        with torch.no_grad():
            if error is not None:
                self._left_behind += unit.abandon_gather()
            if not unit.in_backward and not unseen:
                unit.release()
            if unit.index == 0 and not recomputes:
                self._end_forward(error)

    def _await_backward(self, unit: Unit, output: Any) -> bool:
        """Be called when backward reaches this call of the unit; returns whether it can."""
        returned = False

        def arrived() -> None:
            nonlocal returned
            unit.num_returns += not returned
            returned = True
            self._enter_backward(unit)

        targets = [output] if self._residency.full_parameters else [output, list(hooks.stashed_tensors(self._own_modules[unit.index]))]
        reachable = hooks.on_gradient_of(targets, arrived)
        unit.num_calls += reachable
        return reachable

    def _begin_forward(self, *, with_graph: bool) -> None:
        if self._depth == 0:
            if self.in_backward:  # the last backward ended by an exception that went past the engine
                self.abandon()
            for unit in self._units:
                unit.in_use = 0
            self._release_all()
            if self._trains and with_graph and not self.tally.num_micro_batches:
                self._thaw_units()
                for unit in self._units:
                    unit.check_untouched()
            self._journal.phase = "forward"
            self.forward_order.begin(announced=with_graph)
        self._depth += 1

    def _thaw_units(self) -> None:
        """Frozen parameters that require a gradient since the last step are trained from now on."""
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [(unit, member) for unit in self._units for flat in unit.flats if not flat.trainable for member in flat.members]
            thawed = {unit.index: unit for unit, member in frozen if member.parameter.requires_grad}
        for unit in thawed.values():
            self._thaw(unit)
        if thawed:
            self.reduce_order = _first_reduce_order(self._units)

    def _end_forward(self, error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.forward_order.end()
            if error is None:
                self._release_unused()
            else:
                self._watch.raised(error)
                self._tell_abandoned()
                self._left_behind += [pending for unit in self._units for pending in unit.abandon_gather()]
            self._settle_down()

    # ---- backward ---------------------------------------------------------------------------------------------------------

    def land(self, unit: Unit, flat_index: int, index: int, parameter: nn.Parameter) -> None:
        """Autograd has finished the gradient of one parameter."""
        with torch.no_grad():
            self._begin_backward()
            if not self._trains_now:
                self._check_plain_backward()
            gradient = parameter.grad
            parameter.grad = None
            assert gradient is not None
            if unit.land(flat_index, index, gradient, adds_locally=self._context.adds_locally):
                self._complete(unit)

    def _begin_backward(self) -> None:
        if self.in_backward:
            return
        self.in_backward = True
        self._trains_now = self._micro_batch is not None
        self._journal.phase = self._watch.activity = "backward"
        self._journal.mark("backward pass", "", "begin")
        self.backward_order.begin()
        if _inside_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]

    def _check_plain_backward(self) -> None:
        """The first gradient of a ``loss.backward()`` lands (``torch.autograd.grad`` lands none, and is no micro-batch)."""
        self._check_may_add()
        if self.loss_scale != 1.0:
            raise UsageError("loss.backward() was called on an fp16 loss without its scale; call engine.backward(loss), which scales it")
        self._trains_now = True

    def _enter_backward(self, unit: Unit) -> None:
        """Backward has reached an output of the unit: whatever comes after it in forward, and is not around it, is done."""
        with torch.no_grad():
            self._begin_backward()
            if unit.in_backward and unit.presence is Presence.HERE:
                return
            self._leave_backward()
            self._announce("backward", unit)
            self.backward_order.enter(unit.index)
            self.entered["backward", unit.index] += 1
            self._watch.activity = f"backward of {unit.name!r}"
            unit.fetch()  # before anything is awaited: the other ranks may need this rank's shard to come to that point
            if self.on_backward is not None:
                self.on_backward(unit)
            for other in self._units:
                if other.in_backward and not other.is_related_to(unit):
                    other.release()
                    other.in_backward = False  # until backward comes to another call of it
                    self._close(other)
            unit.in_backward = True
            self._look_ahead(self.backward_order, unit)
            unit.wait()
            self._backward_of = unit
            self._journal.mark("backward", unit.name, "begin")

    def _watch_for_end_of_backward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For whoever observes: backward is past this call of the unit when the gradients of its inputs are there.

        Its parameters' gradients come before: hooks that a person put on the module's backward still run then.
        """
        left = sum(tensor.grad_fn is not None for tensor in hooks.tensors_in((args, kwargs)))

        def arrived() -> None:
            nonlocal left
            left -= 1
            if left == 0 and unit is self._backward_of:
                self._leave_backward()

        hooks.on_gradient_of((args, kwargs), arrived)

    def _leave_backward(self) -> None:
        """What follows is no longer backward of the unit that was entered last."""
        if self._backward_of is not None:
            self._journal.mark("backward", self._backward_of.name, "end")
            self._backward_of = None

    def _close(self, unit: Unit) -> None:
        """Backward has come past all calls of the unit: a gradient that has not landed (an expert without tokens) will not come."""
        if self._trains_now and unit.is_trainable and not unit.is_complete and not unit.is_closed and unit.num_returns >= unit.num_calls:
            unit.is_closed = True
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """All gradients of a unit have landed: nothing needs its trainable parameters any more in this backward."""
        if not unit.is_frozen_in_part:
            unit.release()
        due = self.reduce_order.complete(unit.index)
        if self._reduces_now:
            for index in due:
                self._launch(self._units[index])

    def _end_backward(self) -> None:
        """Backward is over: reduce what waits, count the micro-batch."""
        with torch.no_grad():
            self._leave_backward()
            given = self._micro_batch or _MicroBatch()
            self._release_all()
            if self._trains_now and self._reduces_now:
                for index in self.reduce_order.rest():
                    self._launch(self._units[index])
                self._finish_launched()
                self._is_reduced = True
            for unit in self._units:
                unit.end_micro_batch()
            self.reduce_order.restart()
            self.backward_order.end()
            if self._trains_now:
                if not given.empty and self._announces:
                    self._context.announcer.tell("end")
                self._context.announcer.next_micro_batch()
            if self._trains_now:
                self._is_over = self._reduces_now and (self._residency.full_gradients or bool(given.last))
                self.tally.add(given.loss, given.weight, empty=given.empty)
            self._micro_batch = None
            self.in_backward = False
            self._journal.mark("backward pass", "", "end")
            self._settle_down()

    def _attend(self) -> None:
        """Without data: serve every gather that the other ranks make for theirs, and take part in every reduction.

        Gathers are posted without waiting, whatever the order in which the others come to them; only how often must be right.
        """
        with torch.no_grad():
            if self._residency.full_parameters:
                self._begin_backward()
                self._end_backward()
                return
            sink = self._context.storage.buffer(
                Account.COMM, "root", max(flat.full.nbytes for unit in self._units for flat in unit.flats), torch.uint8
            )
            served: list[Served] = []
            for said in self._what_others_do():
                if said.word == "reduce":
                    for due in self.reduce_order.take():
                        self._launch(self._units[due])
                elif said.enters:
                    (self.forward_order if said.word == "forward" else self.backward_order).enter(said.unit)
                    self.entered[said.word, said.unit] += 1
                if said.gathers:
                    served.append(self._units[said.unit].serve(sink.tensor))
            self._end_backward()
            for each in served:
                each.wait()
            sink.give_back()

    def _what_others_do(self) -> Iterator[Said]:
        """The gathers and reductions of the ranks with data: as one of them announces, or as all have agreed."""
        self.forward_order.begin()
        self._begin_backward()
        if self._announces:
            self._context.announcer.tell("empty")
            yield from self._context.announcer.follow()
        else:
            yield from (Said("forward", index, gathers=True) for index in self.forward_order.agreed)
            yield from (Said("backward", index, gathers=True) for index in self.backward_order.agreed)
        self.forward_order.end()

    @property
    def _announces(self) -> bool:
        """Whether ranks with data say what they do. Where messages have no tags, an agreed order must be kept to and says enough."""
        transport = self._context.transport
        agreed = bool(self.forward_order.agreed and self.backward_order.agreed)
        listened_to = self._trains and transport.num_ranks > 1 and (transport.tagged or not agreed)
        return listened_to and not self._residency.full_parameters

    def _announce(self, word: Word, unit: Unit) -> None:
        if self._announces:
            self._context.announcer.tell(word, unit.index, gathers=word != "reduce" and unit.presence is Presence.AWAY)

    # ---- what both need -----------------------------------------------------------------------------------------------------

    def _launch(self, unit: Unit) -> None:
        """Start one reduction; the one before it ends first, so that only one is in memory."""
        self._finish_launched()
        self._announce("reduce", unit)
        unit.launch()
        self._reducing = unit

    def _finish_launched(self) -> None:
        if self._reducing is not None:
            self._reducing.finish()
            self._reducing = None

    def _look_ahead(self, order: GatherOrder, entered: Unit) -> None:
        """Fetch the units that follow ``entered`` in an agreed order, within the limit; off the order, let go what was fetched."""
        prefetch = self._config.prefetch
        if self._residency.full_parameters or not prefetch.ahead:
            return
        if not order.is_followed:
            self._release_unused(but=entered)
        for index in order.ahead(prefetch.ahead):
            unit = self._units[index]
            if unit.presence is Presence.AWAY:
                if prefetch.limit is not None and self._journal.live(Account.GATHERED) + unit.full_nbytes > prefetch.limit:
                    self._journal.mark("held", unit.name, "begin")
                    self._journal.mark("held", unit.name, "end")
                    break
                if order.is_announced:
                    self._announce("ahead", unit)
                unit.fetch()

    def _release_unused(self, but: Unit | None = None) -> None:
        for unit in self._units:
            if unit.presence is Presence.ARRIVING and unit is not but and not self._residency.full_parameters:
                unit.release()

    def _release_all(self) -> None:
        for unit in self._units:
            unit.release()

    def _tell_abandoned(self) -> None:
        self._journal.mark("abandoned", "", "begin")
        self._journal.mark("abandoned", "", "end")

    def _settle_down(self) -> None:
        self._journal.phase = self._watch.activity = "idle"

    @property
    def _reduces_now(self) -> bool:
        """Whether this micro-batch's gradients go to their owners in this backward."""
        if not self._residency.full_gradients:
            return True
        last = self._micro_batch.last if self._micro_batch is not None else None
        return self.tally.num_micro_batches + 1 == self._config.accumulate if last is None else last

    def _check_may_add(self) -> None:
        """Whether the step takes another micro-batch."""
        if not self._trains:
            raise UsageError(
                "this engine was built without an optimizer and trains nothing: "
                "evaluate under torch.no_grad(), or build it with an optimizer"
            )
        if self._is_over:
            raise UsageError("engine.backward: the last micro-batch of this step has been done already; call engine.step()")
        if self.tally.num_micro_batches >= self._config.accumulate:
            raise UsageError(
                f"engine.backward: this would be micro-batch {self.tally.num_micro_batches + 1} of a step with "
                f"accumulate={self._config.accumulate}; call engine.step() first, or raise ZeroConfig.accumulate"
            )

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        precision = self._config.precision
        if not precision.cast_inputs:
            return None
        dtype = DTYPES[precision.param]
        return tuple(hooks.cast(value, dtype) for value in args), {name: hooks.cast(value, dtype) for name, value in kwargs.items()}


def _first_reduce_order(units: Sequence[Unit]) -> ReduceOrder:
    """Before anything was seen: the reverse of registration, units around others behind, the root last."""
    around = {index for unit in units for index in unit.ancestors} | {0}
    trainable = [unit.index for unit in reversed(units) if unit.is_trainable]
    return ReduceOrder([index for index in trainable if index not in around], last=[index for index in trainable if index in around])


def _inside_backward() -> bool:
    """Whether the calling code runs inside autograd's backward: a forward there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


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
