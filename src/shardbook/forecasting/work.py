"""What a walk's operators do: a second reading of the same walk, for seconds instead of bytes.

The operators of `operators` and `kernels` say what they take and save; here each of them also says what it does, as a :class:`Deed`:
a product of such sizes, attention over so many tokens, so many bytes read and written. What a deed takes is a calibration's business.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shardbook.forecasting.graph import Node, Rule, Value, Weight, has_gradient
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.tape import Memory, Tape


class Deed(NamedTuple):
    """One call of what a calibration has measured, in a phase: forward, backward, or recompute."""

    phase: str
    what: str
    dtype: str
    sizes: tuple[int, ...]


class Undated(NamedTuple):
    """A deed whose phase is not known yet, so many times."""

    what: str
    dtype: str
    sizes: tuple[int, ...]
    times: int = 1


class Working(Kernels):
    """Operators that keep account of what they do, in ``deeds``."""

    def __init__(self, tape: Tape, landed: Callable[[Weight, Value], None]) -> None:
        super().__init__(tape, landed)
        self.deeds: Counter[Deed] = Counter()
        self.nodes = 0  # that backward came to
        self._known: list[tuple[Sequence[Undated], Sequence[Undated]]] = []  # forward and backward of the results that come next
        self._made = 0  # bytes of new results
        self._again: list[tuple[Undated, str]] = []  # of a recomputation that is under way
        self._needed = 0  # how many of them backward needs
        self._was_kept = False

    # ---- account ---------------------------------------------------------------------------------------------------------

    def new(self, numel: int, width: int, label: str = "", *args: object) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._made += numel * width
        return super().new(numel, width, label, *args)  # pyright: ignore[reportArgumentType]

    def kept_or_new(self, kind: str, numel: int, width: int, label: str) -> Value:
        before = len(self._kept)
        value = super().kept_or_new(kind, numel, width, label)
        self._was_kept = self._replays and len(self._kept) < before
        return value

    def result(self, value: Value, inputs: Sequence[Value | Weight | None], rule: Rule, saved: Sequence[Value] = ()) -> Value:
        forward, backward = self._known.pop(0) if self._known else (self._pass_over(value, inputs), None)
        if self._was_kept:
            forward, self._was_kept = (), False
        if saved:
            self._needed = len(self._again)
        self._log(forward)
        if any(each.memory is value.memory for each in saved):
            self._needed = len(self._again)
        self._known.insert(0, ((), backward)) if backward is not None else None
        value.node = self.node(inputs, rule, saved)
        return value

    def node(self, inputs: Sequence[Value | Weight | None], rule: Rule, saved: Sequence[Value] = (), num_outputs: int = 1) -> Node | None:
        backward = self._known.pop(0)[1] if self._known else None
        return super().node(inputs, self._counted(rule, backward), saved, num_outputs)

    def backward_from(self, start: Node, slot: int, gradient: Value) -> None:
        """What was computed again for it stops at the last result that it needs, as in torch."""
        again, self._again = self._again[: self._needed], []
        self._needed = 0
        for deed, _ in again:
            self._count(deed, "recompute")
        super().backward_from(start, slot, gradient)

    def _first_pass(
        self, forward: Callable[[Value], Value], x: Value, choose: Callable[[], Callable[[str], bool]] | None
    ) -> tuple[Value, list[Memory]]:
        made = super()._first_pass(forward, x, choose)
        self._known.append(((), ()))  # the checkpoint's own node
        return made

    def _added(self, node: Node, slot: int, gradient: Value) -> Value:
        if node.grads[slot] is not None:
            self._log(_pass(3 * _nbytes(gradient), gradient.width))
        return super()._added(node, slot, gradient)

    def _counted(self, rule: Rule, known: Sequence[Undated] | None) -> Rule:
        def counted(node: Node, grads: list[Value | None]) -> Sequence[Value | None]:
            self.nodes += 1
            read = sum(_nbytes(each) for each in grads) + sum(memory.entry.nbytes for memory in node.saved)
            width = max((each.width for each in grads if each is not None), default=4)
            self._made = 0
            results = rule(node, grads)
            self._log(_pass(read + self._made, width) if known is None else known)
            return results

        return counted

    def _pass_over(self, value: Value, inputs: Iterable[Value | Weight | None]) -> Sequence[Undated]:
        """Inputs read and the result written; nothing for a view."""
        values = [each for each in inputs if isinstance(each, Value)]
        if any(each.memory is value.memory for each in values):
            return ()
        read = sum(_nbytes(each) for each in values)
        return _pass(read + _nbytes(value), max([value.width, *(each.width for each in values)]))

    def _log(self, deeds: Iterable[Undated]) -> None:
        phase = self.tape.here[0]
        for deed in deeds:
            if self._replays:
                self._again.append((deed, phase))
            else:
                self._count(deed, phase)

    def _count(self, deed: Undated, phase: str) -> None:
        self.deeds[Deed(phase, deed.what, deed.dtype, deed.sizes)] += deed.times

    # ---- what is more than reading and writing -----------------------------------------------------------------------------

    def linear(self, x: Value, weight: Weight, rows: int, bias: Weight | None = None) -> Value:
        inner = x.numel // rows
        self._products(x, weight, (rows, inner, weight.numel // inner))
        return super().linear(x, weight, rows, bias)

    def grouped_linear(self, x: Value, weight: Weight, rows: int, columns: int) -> Value:
        inner = x.numel // rows
        count = max(1, weight.numel // (inner * columns))
        self._products(x, weight, (-(-rows // count), inner, columns), count)
        return super().grouped_linear(x, weight, rows, columns)

    def _products(self, x: Value, weight: Weight, sizes: tuple[int, int, int], times: int = 1) -> None:
        dtype = _dtype(x.width)
        backward = [("product.input", has_gradient(x)), ("product.weight", weight.trainable)]
        forward = (Undated("product.forward", dtype, sizes, times),)
        self._known.append((forward, tuple(Undated(what, dtype, sizes, times) for what, wanted in backward if wanted)))

    def attention(self, parts: Sequence[Value], *, rows: int, heads: int, head_dim: int, sequence: int, on_cuda: bool = False) -> Value:
        dtype, times = _dtype(parts[0].width), heads * max(1, rows // sequence)
        grouped = _repeated(parts)
        forward = (*grouped, Undated("attention.forward", dtype, (sequence, head_dim), times))
        self._known.append((forward, (*grouped, Undated("attention.backward", dtype, (sequence, head_dim), times))))
        return super().attention(parts, rows=rows, heads=heads, head_dim=head_dim, sequence=sequence, on_cuda=on_cuda)

    def mul_const(self, x: Value, table: Value | None = None, label: str = "product") -> Value:
        if table is not None:
            short = (Undated("pass.short", _dtype(x.width), (2 * _nbytes(x),)),)
            self._known.append((short, short))
        return super().mul_const(x, table, label)

    def pointwise(self, x: Value, label: str, *, saves_result: bool = False, temporaries: int = 0) -> Value:
        if label in _ACTIVATIONS:
            dtype, sizes = _dtype(x.width), (x.numel,)
            self._known.append(((Undated("activation.forward", dtype, sizes),), (Undated("activation.backward", dtype, sizes),)))
        return super().pointwise(x, label, saves_result=saves_result, temporaries=temporaries)

    def embedding(self, weight: Weight, rows: int, columns: int, numbers: Value | None = None) -> Value:
        cleared = _pass(weight.numel * weight.width, weight.width)
        forward = (Undated("embedding.forward", "fp32", (rows, columns)),)
        self._known.append((forward, (Undated("embedding.backward", "fp32", (rows, columns)), *cleared)))
        return super().embedding(weight, rows, columns, numbers)

    def cross_entropy(self, logits: Value, rows: int) -> Value:
        sizes = (rows, logits.numel // rows)
        self._known += [((Undated("loss.forward", "fp32", sizes),), (Undated("loss.backward", "fp32", sizes),)), ((), ())]
        return super().cross_entropy(logits, rows)


_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_new")


def _repeated(parts: Sequence[Value]) -> Sequence[Undated]:
    """Keys and values of grouped heads, repeated for every query head: forwards written, backwards added up."""
    query, *others = parts
    return [deed for part in others if part.numel < query.numel for deed in _pass(_nbytes(part) + _nbytes(query), query.width)]


def _pass(nbytes: int, width: int) -> Sequence[Undated]:
    return (Undated("pass", _dtype(width), (nbytes,)),) if nbytes else ()


def _nbytes(value: Value | None) -> int:
    return 0 if value is None else value.numel * value.width


def _dtype(width: int) -> str:
    """Whose rates count: all types of 16 bits have those of bf16."""
    return "bf16" if width <= 2 else "fp32"
