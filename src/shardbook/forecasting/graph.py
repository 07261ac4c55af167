"""Autograd on sizes: results, the nodes that made them, and the order in which backward comes to them.

    Value ──made by──▶ Node ──inputs──▶ Node | Weight | None

A :class:`Value` is a tensor without values: elements, bytes of one, and :class:`~shardbook.forecasting.tape.Memory` that it may
share with others (a view). As in torch a node keeps what it saved until its backward has run, nodes run latest first, gradients
that meet are added in place where nobody else holds them, a weight's land together when the last has come, and what nobody refers to
is freed at once: Python's own reference counts
stand for torch's, so that a block written here in the lines of the real one holds what the real one holds, when it holds it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Optional

from shardbook.accounts import Account
from shardbook.forecasting.recomputing import Recomputing
from shardbook.forecasting.tape import Memory, Tape

Rule = Callable[["Node", list[Optional["Value"]]], Sequence[Optional["Value"]]]
"""Gradients of a node's outputs to gradients of its inputs."""


class Weight:
    """A parameter as it is used.

    ``width``: bytes of an element in the type it computes in. ``fused``: its gradient is added where it stays by whatever makes it.
    """

    __slots__ = ("fused", "name", "numel", "trainable", "unit", "width")

    def __init__(self, name: str, unit: str, numel: int, width: int, *, trainable: bool = True, fused: bool = False) -> None:
        self.name, self.unit, self.numel, self.width = name, unit, numel, width
        self.trainable, self.fused = trainable, fused


class Value:
    """A tensor: ``numel`` elements of ``width`` bytes in ``memory``; ``node`` made it, as its output ``slot``; None: no gradient."""

    __slots__ = ("is_view", "memory", "node", "numel", "slot", "stands_for", "width")

    def __init__(self, memory: Memory, numel: int, width: int, node: Optional["Node"] = None, slot: int = 0) -> None:
        self.memory, self.numel, self.width, self.node, self.slot = memory, numel, width, node, slot
        self.is_view = False
        self.stands_for: Memory | None = None  # what is saved instead: it can be made again from that


class Node:
    """One operator's backward. ``inputs``: where each gradient that ``rule`` gives goes."""

    __slots__ = ("grads", "hook", "inputs", "number", "rule", "saved", "waits")

    def __init__(self, number: int, inputs: Sequence["tuple[Node, int] | Weight | None"], rule: Rule, num_outputs: int = 1) -> None:
        self.number, self.inputs, self.rule = number, inputs, rule
        self.saved: list[Memory] = []
        self.grads: list[Value | None] = [None] * num_outputs
        self.waits = 0
        self.hook: Callable[[], None] | None = None  # before it runs


_SOLE_VALUE, _SOLE_MEMORY = 3, 2
"""References that :func:`sys.getrefcount` counts where nobody else has any, its own argument included."""


class Graph:
    """Makes values and nodes on a tape, and runs backward. ``landed`` is called with each parameter's finished gradient."""

    def __init__(self, tape: Tape, landed: Callable[[Weight, Value], None]) -> None:
        self.tape = tape
        self._landed = landed
        self._number = 0
        self.records = True  # False: under no_grad, or a first pass of what will be computed again
        self._chosen: Callable[[str], bool] | None = None  # which operators' results a first pass keeps
        self._kept: list[Memory] = []
        self._replays = False
        self.recomputing: Recomputing | None = None

    def new(self, numel: int, width: int, label: str = "", account: Account = Account.WORKSPACE) -> Value:
        """A result in memory of its own."""
        return Value(Memory(self.tape, account, numel * width, label), numel, width)

    def kept_or_new(self, kind: str, numel: int, width: int, label: str) -> Value:
        """A result that selective recomputation may keep from the first pass: then the second one does not make it."""
        if self._chosen is None or not self._chosen(kind):
            return self.new(numel, width, label)
        if self._replays:
            return Value(self._kept.pop(0), numel, width)
        value = self.new(numel, width, label)
        value.memory.entry.account = Account.ACTIVATION
        self._kept.append(value.memory)
        return value

    def checkpoint(
        self, forward: Callable[[Value], Value], x: Value, choose: Callable[[], Callable[[str], bool]] | None = None, unit: str = ""
    ) -> Value:
        """``torch.utils.checkpoint``: keeps ``x`` and what ``choose`` says, and runs ``forward`` once more in backward.

        Where :attr:`recomputing` is set, as shardbook's engine does it: with random states, and inputs that may rest on the host.
        """
        numel, width, recomputing = x.numel, x.width, self.recomputing
        call = None if recomputing is None or x.node is None else recomputing.leave(unit, numel * width)
        states = None if recomputing is None else recomputing.hold_states(Account.ACTIVATION)
        out, kept = self._first_pass(forward, x, choose)

        def rule(node: Node, grads: list[Value | None]) -> list[Value | None]:
            nonlocal states
            gradient = grads.pop()
            assert gradient is not None
            now = None if recomputing is None else recomputing.hold_states(Account.WORKSPACE)
            again = Value(node.saved[0] if call is None else call.take(), numel, width)
            found: list[Value | None] = []

            def caught(_: Node, arrived: list[Value | None]) -> list[Value | None]:
                found.extend(arrived)
                return []

            again.node = Node(0, [], caught)
            before = (self._chosen, self._kept, self._replays)
            self._chosen, self._kept, self._replays = choose() if choose else None, node.saved[0 if call else 1 :], True
            del node.saved[0 if call else 1 :]  # what was kept goes as it is served
            result = forward(again)
            self._chosen, self._kept, self._replays = before
            assert result.node is not None
            start, slot = result.node, result.slot
            del result, again, now
            self.backward_from(start, slot, gradient)
            states = None
            if recomputing is not None and call is not None:
                recomputing.end(call)
            return found

        node = self.node([x], rule, [x] if call is None else [])
        if node is not None:
            node.saved += kept
        out.node = node
        return out

    def _first_pass(
        self, forward: Callable[[Value], Value], x: Value, choose: Callable[[], Callable[[str], bool]] | None
    ) -> tuple[Value, list[Memory]]:
        """Without a graph; what is chosen stays."""
        before = (self.records, self._chosen, self._kept, self._replays)
        self.records, self._chosen, self._kept, self._replays = False, choose() if choose else None, [], False
        out = forward(x)
        kept = self._kept
        self.records, self._chosen, self._kept, self._replays = before
        return out, kept

    def gradient_of(self, weight: Weight, width: int) -> Value | None:
        """Memory for a weight's gradient; None where it is not trained."""
        if not weight.trainable:
            return None
        return self.new(0 if weight.fused else weight.numel, width, weight.name)

    def result(self, value: Value, inputs: Sequence[Value | Weight | None], rule: Rule, saved: Sequence[Value] = ()) -> Value:
        """``value`` was made from ``inputs``; saved ones stay until backward has run. Nothing is noted where none has a gradient."""
        node = self.node(inputs, rule, saved)
        value.node = node
        return value

    def node(self, inputs: Sequence[Value | Weight | None], rule: Rule, saved: Sequence[Value] = (), num_outputs: int = 1) -> Node | None:
        """The node behind one or more results; None where no input has a gradient or nothing is recorded."""
        if not self.records:
            return None
        targets = [_target(each) for each in inputs]
        if not any(targets):
            return None
        self._number += 1
        node = Node(self._number, targets, rule, num_outputs)
        for each in saved:
            memory = each.memory if each.stands_for is None else each.stands_for
            if memory.entry.account is Account.WORKSPACE:
                memory.entry.account = Account.ACTIVATION
            node.saved.append(memory)
        return node

    def backward(self, root: Value) -> None:
        """From a loss whose gradient is one number."""
        assert root.node is not None, "nothing with a gradient leads to this value"
        self.backward_from(root.node, root.slot, self.new(root.numel, root.width, "gradient of the loss"))

    def backward_from(self, start: Node, slot: int, gradient: Value) -> None:
        """From any node; the gradient is dropped here as soon as it is used."""
        uses, sums = _count_waits(start), dict[Weight, Value]()
        start.grads[slot] = gradient
        del gradient
        ready: list[tuple[int, Node]] = [(-start.number, start)]
        del start
        while ready:
            node = heappop(ready)[1]
            if node.hook is not None:
                node.hook()
            grads, node.grads = node.grads, []
            results = list(node.rule(node, grads))
            node.saved = []
            del grads
            self._land(node, results, uses, sums)
            self._route(node, results, ready)
            del node, results

    def _land(self, node: Node, results: "list[Value | None]", uses: Counter[Weight], sums: dict[Weight, Value]) -> None:
        """Gradients of weights: one that is used more than once waits for all of its gradients, added in place."""
        for number, target in enumerate(node.inputs):
            if not isinstance(target, Weight):
                continue
            gradient, results[number] = results[number], None
            uses[target] -= 1
            if uses[target] and gradient is not None:
                sums.setdefault(target, gradient)
            elif target in sums:
                del gradient
                gradient = sums.pop(target)
                gradient.memory.becomes(Account.GRAD_FULL)
            elif gradient is not None:
                gradient.memory.entry.account = Account.GRAD_FULL
            if not uses[target] and gradient is not None:
                self._landed(target, gradient)

    def _route(self, node: Node, results: "list[Value | None]", ready: list[tuple[int, Node]]) -> None:
        results.reverse()
        for target in node.inputs:
            gradient = results.pop()
            if target is None or isinstance(target, Weight):
                continue
            other, slot = target
            if gradient is not None:
                other.grads[slot] = self._added(other, slot, gradient)
            del gradient
            other.waits -= 1
            if other.waits == 0:
                heappush(ready, (-other.number, other))

    def _added(self, node: Node, slot: int, gradient: Value) -> Value:
        held = node.grads[slot]
        if held is None:
            return gradient
        # torch adds in place where the tensor and its memory have one owner: here the node's list, this variable and the call
        if not held.is_view and sys.getrefcount(held) == _SOLE_VALUE and sys.getrefcount(held.memory) == _SOLE_MEMORY:
            return held
        return self.new(held.numel, held.width, "sum of gradients")


def _target(value: Value | Weight | None) -> "tuple[Node, int] | Weight | None":
    if isinstance(value, Value):
        return None if value.node is None else (value.node, value.slot)
    return value if value is not None and value.trainable else None


def _count_waits(start: Node) -> Counter[Weight]:
    """How many gradients each node below waits for; and each weight."""
    uses: Counter[Weight] = Counter()
    seen: set[int] = {id(start)}
    todo = [start]
    for node in _each(todo):
        for target in node.inputs:
            if isinstance(target, Weight):
                uses[target] += 1
            elif target is not None:
                other = target[0]
                if id(other) not in seen:
                    seen.add(id(other))
                    other.waits = 0
                    todo.append(other)
                other.waits += 1
    return uses


def _each(todo: list[Node]) -> Iterator[Node]:
    while todo:
        yield todo.pop()


def view_of(value: Value, numel: int) -> Value:
    """Other elements of the same memory."""
    view = Value(value.memory, numel, value.width)
    view.is_view = True
    return view


def as_view(value: Value | None) -> Value | None:
    """The same elements in another shape."""
    return None if value is None else view_of(value, value.numel)


def has_gradient(value: Value) -> bool:
    """Whether backward comes to what made it."""
    return value.node is not None


def given(value: Value | None) -> Value:
    """A value that must be there."""
    assert value is not None
    return value
