"""What torch's operators take, save and give back, in forward and backward.

Each function stands for one operator and does with sizes what the operator does with values: it makes the result, says what autograd
saves, and gives the rule of its backward with the temporaries that are live inside it. Sources: ``tools/autograd/derivatives.yaml``
and ``aten/src/ATen/native`` of torch 2.13, held against the allocator by ``tests/test_operators.py``. What differs on CUDA is said
where it does.

>>> from shardbook.forecasting.tape import Tape
>>> tape = Tape()
>>> ops = Operators(tape, landed=lambda weight, gradient: None)
>>> x = ops.new(1024, 4, "x")
>>> weight = Weight("weight", "unit", 32 * 64, 4)
>>> y = ops.linear(x, weight, rows=32)  # saves x, for the gradient of the weight
>>> y.numel, x.memory.entry.account.name
(2048, 'ACTIVATION')
"""

from collections.abc import Sequence

from shardbook.forecasting import scratch
from shardbook.forecasting.graph import Graph, Node, Value, Weight, as_view, has_gradient, view_of


class Operators(Graph):
    """See the file's header."""

    # ---- views and copies ------------------------------------------------------------------------------------------------

    def view(self, x: Value, numel: int | None = None) -> Value:
        """Another shape of the same memory; with ``numel``, a part of it whose gradient comes back as it is."""
        view = Value(x.memory, x.numel if numel is None else numel, x.width)
        return self.result(view, [x], lambda _, grads: [as_view(grads[0])])

    def to(self, x: Value, width: int) -> Value:
        """A cast; nothing where the type is the same."""
        if x.width == width:
            return x
        numel, before = x.numel, x.width
        return self.result(self.new(numel, width, "cast"), [x], lambda _, __: [self.new(numel, before, "gradient of a cast")])

    def copy(self, x: Value, label: str = "copy") -> Value:
        """``contiguous()`` of what is not: a copy forwards, a view backwards."""
        return self.result(self.new(x.numel, x.width, label), [x], lambda _, grads: grads)

    def split(self, x: Value, numels: Sequence[int]) -> list[Value]:
        """Views side by side. Backward puts their gradients together again in new memory."""
        numel, width = x.numel, x.width

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            return [self.new(numel, width, "gradient of a split")]

        node = self.node([x], rule, num_outputs=len(numels))
        return [Value(x.memory, part, width, node, slot) for slot, part in enumerate(numels)]

    def slice_of(self, x: Value, numel: int) -> Value:
        """A view of some elements. Backward puts their gradient into zeros as large as ``x``."""
        whole, width = x.numel, x.width
        return self.result(Value(x.memory, numel, width), [x], lambda _, __: [self.new(whole, width, "gradient of a slice")])

    def cat(self, parts: Sequence[Value]) -> Value:
        """Side by side in new memory; backward hands out views."""
        numels = [part.numel for part in parts]

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            (grad,) = grads
            assert grad is not None
            return [view_of(grad, numel) for numel in numels]

        return self.result(self.new(sum(numels), parts[0].width, "cat"), parts, rule)

    # ---- element by element ----------------------------------------------------------------------------------------------

    def add(self, x: Value, y: Value) -> Value:
        """``x + y`` of one shape; both get the same gradient. A wider one decides the type."""
        width = max(x.width, y.width)
        return self.result(self.new(x.numel, width, "sum"), [x, y], lambda _, grads: [grads[0], grads[0]])

    def sub(self, x: Value, y: Value) -> Value:
        """``x - y`` of one shape: the gradient of ``y`` is a negated copy."""
        numel, width = x.numel, x.width
        out = self.new(numel, width, "difference")
        return self.result(out, [x, y], lambda _, grads: [grads[0], self.new(numel, width, "negated gradient")])

    def add_row(self, x: Value, row: Value | Weight, *, rows_numel: int) -> Value:
        """``x + row`` where ``row`` is repeated; its gradient is summed over the repetitions."""
        width = row.width

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            return [grads[0], self.new(rows_numel, width, "gradient of a row")]

        return self.result(self.new(x.numel, x.width, "sum"), [x, row], rule)

    def mul(self, x: Value, y: Value) -> Value:
        """``x * y`` of one shape: each saves the other where both have gradients."""
        saved = [each for each, other in ((x, y), (y, x)) if has_gradient(other)]
        numel, widths, wanted = x.numel, (x.width, y.width), (has_gradient(x), has_gradient(y))

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            return [self.new(numel, width, "gradient of a product") if want else None for width, want in zip(widths, wanted, strict=True)]

        return self.result(self.new(numel, max(widths), "product"), [x, y], rule, saved)

    def mul_const(self, x: Value, table: Value | None = None, label: str = "product") -> Value:
        """Times a table without a gradient (saved, if given) or a number."""
        numel, width = x.numel, x.width
        saved = [] if table is None else [table]
        return self.result(self.new(numel, width, label), [x], lambda _, __: [self.new(numel, width, "gradient of a product")], saved)

    def mul_row(self, x: Value, row: Value | Weight, row_numel: int) -> Value:
        """``x * row``, with a row for each (or one element for each) repeated: backward multiplies in full, then sums."""
        saved: list[Value] = [x] if isinstance(row, Weight) or has_gradient(row) else []
        if isinstance(row, Value):
            saved.append(row)
        wanted = row.trainable if isinstance(row, Weight) else has_gradient(row)
        numel, width, row_width, x_wanted = x.numel, x.width, row.width, has_gradient(x)
        out = max(width, row_width)

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_x = self.new(numel, out, "gradient of a product") if x_wanted else None
            if not wanted:
                return [of_x, None]
            whole = self.new(numel, out, "product before its sum")
            of_row = self.new(row_numel, row_width, "gradient of a row")
            del whole
            return [of_x, of_row]

        return self.result(self.new(numel, out, "product"), [x, row], rule, saved)

    def power(self, x: Value, exponent: int = 2) -> Value:
        """``x ** exponent`` by ``pow``: backward forms ``x ** (exponent - 1)`` and a multiple of it before it multiplies."""
        numel, width = x.numel, x.width

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            power = self.new(numel, width, f"x ** {exponent - 1}")
            multiple = self.new(numel, width, f"{exponent} times it")
            result = self.new(numel, width, "gradient of a power")
            del power, multiple
            return [result]

        return self.result(self.new(numel, width, "power"), [x], rule, [x])

    def mean_last(self, x: Value, rows: int) -> Value:
        """The mean of each row; its gradient is as large as ``x`` again."""
        numel, width = x.numel, x.width
        return self.result(self.new(rows, width, "mean"), [x], lambda _, __: [self.new(numel, width, "gradient of a mean")])

    def pointwise(self, x: Value, label: str, *, saves_result: bool = False, temporaries: int = 0) -> Value:
        """An activation function: saves its input, or its result."""
        numel, width = x.numel, x.width
        out = self.new(numel, width, label)

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            inner = [self.new(numel, width, f"inside {label}") for _ in range(temporaries)]
            result = self.new(numel, width, f"gradient of {label}")
            del inner
            return [result]

        return self.result(out, [x], rule, [out if saves_result else x])

    def dropout(self, x: Value, share: float, *, on_cuda: bool = False) -> Value:
        """Saves a mask: one byte an element on CUDA, a scaled one in the input's type on the CPU."""
        if not share:
            return x
        mask = self.new(x.numel, 1 if on_cuda else x.width, "dropout mask")
        numel, width = x.numel, x.width
        out = self.new(numel, width, "dropout")
        return self.result(out, [x], lambda _, __: [self.new(numel, width, "gradient of dropout")], [mask])

    # ---- layers ----------------------------------------------------------------------------------------------------------

    def linear(self, x: Value, weight: Weight, rows: int, bias: Weight | None = None) -> Value:
        """``x @ weight.T + bias``: saves ``x`` for the weight's gradient; the weight is where the engine keeps it."""
        columns = weight.numel // (x.numel // rows)
        out = self.kept_or_new("linear", rows * columns, x.width, weight.name)
        x_numel, width, x_wanted = x.numel, x.width, has_gradient(x)
        has_bias, trains = bias is not None, weight.trainable

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_bias = self.new(columns, width, "gradient of a bias") if has_bias else None
            of_x = as_view(self.new(x_numel, width, "gradient of a linear layer's input")) if x_wanted else None
            of_weight = self.gradient_of(weight, width)
            return [of_bias, of_x, of_weight]

        return self.result(out, [bias, x, weight], rule, [x] if trains else [])

    def embedding(self, weight: Weight, rows: int, columns: int, numbers: Value | None = None) -> Value:
        """A row of the table for each token, whose ``numbers`` are saved; the gradient is as large as the table."""
        out = self.new(rows * columns, weight.width, "embedding")
        saved = [] if numbers is None else [numbers]
        return self.result(out, [weight], lambda _, __: [self.gradient_of(weight, weight.width)], saved)

    def layer_norm(self, x: Value, weight: Weight | None, bias: Weight | None, rows: int, *, fp32_statistics: bool = False) -> Value:
        """Saves ``x`` and a mean and a deviation of each row, which the CPU keeps in the type of ``x`` and CUDA in fp32."""
        out = self.new(x.numel, x.width, "norm")
        statistics = [self.new(rows, 4 if fp32_statistics else x.width, f"{what} of a row") for what in ("mean", "deviation")]
        numel, width, on_cpu, columns = x.numel, x.width, not fp32_statistics, x.numel // rows
        rowwise = [None if each is None else (each.numel, each.trainable) for each in (weight, bias)]

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_x = self.new(numel, width, "gradient of a norm's input")
            of_rows = [self.new(each[0], width, "gradient of a norm") if each and each[1] else None for each in rowwise]
            sums = self.new(scratch.layer_norm_backward(columns, width) if on_cpu else 0, 1, "one thread's sums over rows")
            del sums
            return [of_x, *of_rows]

        return self.result(out, [x, weight, bias], rule, [x, *statistics])

    def attention(self, parts: Sequence[Value], *, rows: int, heads: int, head_dim: int, sequence: int, on_cuda: bool = False) -> Value:
        """``scaled_dot_product_attention`` of query, key and value, causal, by torch's flash kernel for the CPU.

        Saves all three, the result, and a logarithm of sums in fp32 for each row and head. Its scratch on the CPU is one thread's.
        """
        query, _, _ = parts
        out = self.kept_or_new("attention", rows * heads * head_dim, query.width, "attention")
        sums = self.kept_or_new("attention", rows * heads, 4, "logarithms of sums")
        inside = self.new(0 if on_cuda else scratch.attention_forward(sequence, sequence, head_dim, query.width), 1, "scratch of attention")
        del inside
        numels, width, query_numel = [part.numel for part in parts], query.width, query.numel

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            results: list[Value | None] = [self.new(numel, width, "gradient of attention's input") for numel in numels]
            # FlashAttention-2 adds the queries' gradient up in fp32, and has a number for each row and head
            nbytes = 4 * (query_numel + rows * heads) if on_cuda else scratch.attention_backward(sequence, sequence, width)
            inside = self.new(nbytes, 1, "scratch of attention")
            del inside
            return results

        return self.result(out, parts, rule, [*parts, out, sums])

    # ---- the loss --------------------------------------------------------------------------------------------------------

    def cross_entropy(self, logits: Value, rows: int) -> Value:
        """``log_softmax`` (saves its result) and ``nll_loss`` (saves the same): two gradients of full size in backward."""
        numel, width = logits.numel, logits.width
        log_probabilities = self.new(numel, width, "log-probabilities")
        soft = self.result(
            log_probabilities, [logits], lambda _, __: [self.new(numel, width, "gradient of the logits")], [log_probabilities]
        )
        total = self.new(1, width, "total weight")
        return self.result(
            self.new(1, width, "loss"), [soft], lambda _, __: [self.new(numel, width, "gradient of log-probabilities")], [soft, total]
        )
