"""Operators under ``torch.autocast``: products compute in 16 bits, whatever the types of their inputs; the residual stream stays wide.

A weight's cast is made once in a forward pass, kept by autocast until it is over, and by autograd until the product's backward. Its
gradient comes back through the cast, in the weight's own type. Source: ATen/autocast_mode.h of torch 2.13.
"""

from collections.abc import Callable, Sequence

from shardbook.forecasting.graph import Node, Value, Weight, as_view, has_gradient
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.tape import Tape

NARROW = 2
"""Bytes of bf16 and fp16."""


class Autocast(Kernels):
    """See the file's header."""

    def __init__(self, tape: Tape, landed: Callable[[Weight, Value], None]) -> None:
        super().__init__(tape, landed)
        self._casts: dict[str, Value] = {}
        self._in_backward = False

    # ---- what is cast --------------------------------------------------------------------------------------------------

    def narrowed(self, weight: Weight) -> Value:
        """A weight in 16 bits, from the cache if this pass has cast it already."""
        found = self._casts.get(weight.name)
        if found is None:
            found = self.new(weight.numel, NARROW, f"cast of {weight.name}")
            found = self.result(found, [weight], lambda _, __: [self.gradient_of(weight, weight.width)])
            if weight.trainable:  # what has no gradient is cast each time
                self._casts[weight.name] = found
        return found

    def linear(self, x: Value, weight: Weight, rows: int, bias: Weight | None = None) -> Value:
        """Input, weight and bias are cast; saves the first two."""
        columns = weight.numel // (x.numel // rows)
        x = self.to(x, NARROW)
        wide = self.narrowed(weight)
        row = None if bias is None else self.narrowed(bias)
        return self._product(x, wide, self.kept_or_new("linear", rows * columns, NARROW, weight.name), row, columns)

    def grouped_linear(self, x: Value, weight: Weight, rows: int, columns: int) -> Value:
        """Input and weights are cast; saves both."""
        return self._product(
            self.to(x, NARROW), self.narrowed(weight), self.kept_or_new("linear", rows * columns, NARROW, weight.name), None, 0
        )

    def _product(self, x: Value, weight: Value, out: Value, bias: Value | None, columns: int) -> Value:
        numels, wanted, has_bias = (x.numel, weight.numel), (has_gradient(x), has_gradient(weight)), bias is not None

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_bias = self.new(columns, NARROW, "gradient of a bias") if has_bias else None
            of_x = as_view(self.new(numels[0], NARROW, "gradient of a linear layer's input")) if wanted[0] else None
            of_weight = self.new(numels[1], NARROW, "gradient of a cast weight") if wanted[1] else None
            return [of_bias, of_x, of_weight]

        saved = [*([x] if wanted[1] else []), *([weight] if wanted[0] else [])]
        return self.result(out, [bias, x, weight], rule, saved)

    def attention(self, parts: Sequence[Value], *, rows: int, heads: int, head_dim: int, sequence: int, on_cuda: bool = False) -> Value:
        """Queries, keys and values are cast."""
        parts = [self.to(part, NARROW) for part in parts]
        return super().attention(parts, rows=rows, heads=heads, head_dim=head_dim, sequence=sequence, on_cuda=on_cuda)

    # ---- what is promoted ----------------------------------------------------------------------------------------------

    def add(self, x: Value, y: Value) -> Value:
        """A wide and a narrow one give a wide one; the narrow one's gradient is cast."""
        if x.width == y.width:
            return super().add(x, y)
        numel, width, widths = x.numel, max(x.width, y.width), (x.width, y.width)

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            return [grads[0] if own == width else self.new(numel, own, "cast gradient") for own in widths]

        return self.result(self.new(numel, width, "sum"), [x, y], rule)

    # ---- when casts are dropped ----------------------------------------------------------------------------------------

    def backward(self, root: Value) -> None:
        """It runs outside of autocast's context, whose end dropped the casts."""
        self._casts.clear()
        self._in_backward = True
        super().backward(root)
        self._in_backward = False

    def checkpoint(
        self, forward: Callable[[Value], Value], x: Value, choose: Callable[[], Callable[[str], bool]] | None = None, unit: str = ""
    ) -> Value:
        """The second pass has a context, hence casts, of its own."""

        def pass_once(inner: Value) -> Value:
            out = forward(inner)
            if self._in_backward:
                self._casts.clear()
            return out

        return super().checkpoint(pass_once, x, choose, unit)
