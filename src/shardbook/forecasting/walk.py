"""A step, walked through with sizes: forward, loss, backward, step, under an engine's rules.

Residence   what an engine does at each border of a unit; one class an engine, in ``engines/``
Walk        runs a model's forward and backward between them
"""

from collections.abc import Callable
from typing import Protocol

from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.tape import Tape

MakeKernels = Callable[[Tape, Callable[[Weight, Value], None]], Kernels]
"""Operators on a tape, and whom they tell of finished gradients."""


class Residence(Protocol):
    """What an engine keeps, gathers and frees while a step goes on. Units go by their names."""

    def enter_forward(self, unit: str) -> None: ...
    def leave_forward(self, unit: str) -> None: ...
    def enter_backward(self, unit: str) -> None: ...
    def back_in_root(self) -> None: ...
    def land(self, weight: Weight, gradient: Value) -> None: ...
    def end_backward(self) -> None: ...
    def step(self) -> None: ...


class Walk:
    """See the file's header."""

    def __init__(self, tape: Tape, engine: Residence, make: MakeKernels = Kernels) -> None:
        self.tape, self._engine = tape, engine
        self.ops = make(tape, engine.land)
        self._inside = self._left = False
        self.held: list[Value] = []  # by whoever calls the model, to the end of the micro-batch

    def unit(self, name: str, forward: Callable[[Value | None], Value], x: Value | None = None) -> Value:
        """Run the forward of a unit, and let the engine know when backward comes to it.

        What the root holds besides its units runs inside of it: there is nothing to enter, only something to come back to.
        """
        if name == "root" and self._inside:
            out = forward(x)
            if out.node is not None:
                out.node.hook = self._back_in_root
            return out
        self.tape.at("forward", name)
        self._engine.enter_forward(name)
        out = forward(x)
        if name == "root" and self._left:  # before the loss
            return out
        self._engine.leave_forward(name)
        if out.node is not None:
            out.node.hook = lambda: self._enter_backward(name)
        return out

    def leave_model(self, logits: Value) -> None:
        """The model's forward is over, and the loss is somebody else's: backward enters the model with the logits' gradient."""
        self._left = True
        self._engine.leave_forward("root")
        if logits.node is not None:
            inner = logits.node.hook

            def enter() -> None:
                self._enter_backward("root")
                if inner is not None:
                    inner()

            logits.node.hook = enter

    def units(self, name: str, forward: Callable[[Value | None], list[Value]], x: Value) -> list[Value]:
        """The same for a unit with several results; backward comes to it with the gradient of any of them."""
        if name == "root" and self._inside:
            return forward(x)
        self.tape.at("forward", name)
        self._engine.enter_forward(name)
        outs = forward(x)
        self._engine.leave_forward(name)
        for out in outs:
            if out.node is not None:
                out.node.hook = lambda: self._enter_backward(name)
        return outs

    def micro_batch(self, forward: Callable[[], Value]) -> None:
        """Forward of the whole model, and backward from its loss."""
        self._inside = self._left = False
        loss = self.unit("root", lambda _: self._within(forward))
        self.ops.backward(loss)
        self.tape.at("backward", "end")
        self._engine.end_backward()
        self.held = []

    def _within(self, forward: Callable[[], Value]) -> Value:
        self._inside = True
        return forward()

    def _back_in_root(self) -> None:
        self.tape.at("backward", "root")
        self._engine.back_in_root()

    def step(self) -> None:
        """The optimizer's step."""
        self.tape.at("step", "")
        self._engine.step()

    def _enter_backward(self, name: str) -> None:
        self.tape.at("backward", name)
        self._engine.enter_backward(name)
