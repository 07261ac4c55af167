"""Fused kernels, routing, and what tensor-parallel devices exchange: more operators, each with what it saves and frees."""

from collections.abc import Sequence

from shardbook.forecasting.graph import Node, Value, Weight, as_view, has_gradient, view_of
from shardbook.forecasting.operators import Operators


class Kernels(Operators):
    """See the file's header."""

    # ---- norms and activations -----------------------------------------------------------------------------------------

    def rms_norm(self, x: Value, weight: Weight, rows: int) -> Value:
        """One kernel: saves ``x`` and one fp32 number a row. Source: ``_fused_rms_norm`` of torch 2.9, Transformer Engine's RMSNorm."""
        scale = self.new(rows, 4, "deviation of a row")
        numel, width = x.numel, x.width

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_x = self.new(numel, width, "gradient of a norm's input")
            return [of_x, self.gradient_of(weight, width)]

        return self.result(self.new(numel, width, "norm"), [x, weight], rule, [x, scale])

    def gated_kernel(self, both: Value) -> Value:
        """SwiGLU in one kernel: saves gate and up as they are, and computes the activation again. Source: Megatron's fused_bias_swiglu."""
        numel, width = both.numel, both.width
        return self.result(
            self.new(numel // 2, width, "swiglu"), [both], lambda _, __: [self.new(numel, width, "gradient of swiglu")], [both]
        )

    def joined(self, left: Value, right: Value) -> Value:
        """Two results of one fused matrix: side by side in memory already, so nothing is copied."""
        return self.cat((left, right))

    def pointwise_in_place(self, x: Value, label: str) -> Value:
        """A kernel that needs no input in backward: new memory, nothing saved."""
        numel, width = x.numel, x.width
        return self.result(self.new(numel, width, label), [x], lambda _, __: [self.new(numel, width, f"gradient of {label}")])

    def rolled(self, x: Value) -> Value:
        """``rotate_half``: a negated half, and both halves put together."""
        left, right = self.slice_of(x, x.numel // 2), self.slice_of(x, x.numel // 2)
        return self.cat((self.pointwise_in_place(right, "negated half"), left))

    def expanded(self, x: Value, numel: int) -> Value:
        """A view that repeats; the gradient is summed over the repetitions."""
        small, width = x.numel, x.width
        return self.result(view_of(x, numel), [x], lambda _, __: [self.new(small, width, "sum over repetitions")])

    # ---- attention -----------------------------------------------------------------------------------------------------

    def eager_attention(
        self, parts: Sequence[Value], *, scores: int, out: int, dropout: float, wide: bool = True, on_cuda: bool = False
    ) -> Value:
        """Scores in full: their product, the softmax, and the product with the values.

        Saves queries, keys and values, the softmax, and where there is dropout a mask and what is left. ``wide``: the softmax is
        computed in fp32 by operators, which keep it beside its copy in the queries' type; else one kernel keeps it in that type:
        5·a·s/h in Korthikanti et al. 2022.
        """
        query, _, value = parts
        width = query.width
        product = self.new(scores, width, "scores")
        numels = [part.numel for part in parts]
        made = self.result(product, parts[:2], lambda _, __: [self.new(numel, width, "gradient") for numel in numels[:2]], parts[:2])
        del product
        if wide:
            scaled = self.add_const(self.mul_const(made, label="scaled scores"))
            del made
            soft = self.to(self.pointwise(self.to(scaled, 4), "softmax", saves_result=True), width)
            del scaled
        else:
            soft = self.pointwise(made, "softmax", saves_result=True)
            del made
        soft = self.dropout(soft, dropout, on_cuda=on_cuda)
        wanted = [soft, value]
        return self.result(
            self.new(out, width, "attention"),
            wanted,
            lambda _, __: [self.new(scores, width, "gradient of scores"), self.new(numels[2], width, "gradient")],
            wanted,
        )

    def add_const(self, x: Value) -> Value:
        """Plus a mask without a gradient."""
        return self.result(self.new(x.numel, x.width, "masked"), [x], lambda _, grads: grads)

    # ---- experts -------------------------------------------------------------------------------------------------------

    def chosen(self, probabilities: Value, visits: int) -> Value:
        """``topk``: saves the numbers of the experts; the gradient is as large as all probabilities."""
        numbers = self.new(visits, 8, "numbers of experts")
        numel, width = probabilities.numel, probabilities.width
        out = self.new(visits, width, "weights of experts")
        return self.result(out, [probabilities], lambda _, __: [self.new(numel, width, "gradient of probabilities")], [numbers])

    def picked(self, x: Value, numel: int) -> Value:
        """A copy of each token for each expert that it visits."""
        small, width = x.numel, x.width
        return self.result(self.new(numel, width, "tokens by expert"), [x], lambda _, __: [self.new(small, width, "sum over experts")])

    def combined(self, x: Value, numel: int) -> Value:
        """What comes back from the experts, added up by token."""
        large, width = x.numel, x.width
        return self.result(self.new(numel, width, "sum over experts"), [x], lambda _, __: [self.new(large, width, "gradient by expert")])

    def grouped_linear(self, x: Value, weight: Weight, rows: int, columns: int) -> Value:
        """One product for all experts: saves its input; the weight's gradient is as large as all of them."""
        out = self.kept_or_new("linear", rows * columns, x.width, weight.name)
        numel, width, wanted = x.numel, x.width, has_gradient(x)

        def rule(_: Node, grads: list[Value | None]) -> list[Value | None]:
            of_x = self.new(numel, width, "gradient of an expert's input") if wanted else None
            return [of_x, self.gradient_of(weight, width)]

        return self.result(out, [x, weight], rule, [x] if weight.trainable else [])

    # ---- the loss ------------------------------------------------------------------------------------------------------

    def fused_cross_entropy(self, logits: Value, rows: int) -> Value:
        """One kernel that overwrites its fp32 logits with their gradient. Source: Megatron's and Transformer Engine's."""
        saved = self.new(logits.numel, 4, "softmax of the logits") if logits.width < 4 else logits
        numel, width = logits.numel, logits.width

        def rule(node: Node, grads: list[Value | None]) -> list[Value | None]:
            if width == 4:
                return [as_view(Value(node.saved[0], numel, 4))]
            return [self.new(numel, width, "gradient of the logits")]

        return self.result(self.new(rows, 4, "loss"), [logits], rule, [saved])

    def narrow_cross_entropy(self, logits: Value, rows: int) -> Value:
        """One kernel that saves the logits and a logarithm of sums of each row. Source: flash-attn, losses/cross_entropy.py."""
        numel, width = logits.numel, logits.width
        sums = self.new(rows, 4, "logarithms of sums")
        loss = self.new(rows, 4, "loss")
        return self.result(loss, [logits], lambda _, __: [self.new(numel, width, "gradient of the logits")], [logits, sums])

    def fused_linear_cross_entropy(self, x: Value, head: Weight, rows: int) -> Value:
        """Head and loss in one kernel, a piece of the rows at a time: both gradients are made in forward and kept.

        Source: Liger Kernel's fused_linear_cross_entropy: pieces of as many rows as ``x`` is narrower than the vocabulary.
        """
        hidden = x.numel // rows
        vocab = head.numel // hidden
        piece = max(1, rows // max(1, -(-vocab // hidden)))
        of_x, of_head = self.new(x.numel, x.width, "gradient of the head's input"), self.new(head.numel, head.width, head.name)
        logits = self.new(piece * vocab, x.width, "logits of a piece")
        wide = self.new(piece * vocab, 4, "logits of a piece in fp32")
        del logits, wide
        numels, width = (x.numel, head.numel), x.width

        def rule(node: Node, grads: list[Value | None]) -> list[Value | None]:
            return [Value(node.saved[0], numels[0], width), Value(node.saved[1], numels[1], head.width) if head.trainable else None]

        return self.result(self.new(1, 4, "loss"), [x, head], rule, [of_x, of_head])

    # ---- between tensor-parallel devices -------------------------------------------------------------------------------

    def gathered_rows(self, x: Value, devices: int, *, gathers_again: bool = True) -> Value:
        """Every device's part of the tokens: an all-gather forwards, a reduce-scatter backwards; nothing on one device.

        ``gathers_again``: what is saved is this device's part, from which backward gathers once more (Korthikanti et al. 2022).
        """
        if devices == 1:
            return x
        small, width = x.numel, x.width
        out = self.new(x.numel * devices, width, "gathered tokens")
        if gathers_again:
            out.stands_for = x.memory
        return self.result(out, [x], lambda _, __: [self.new(small, width, "scattered gradient")])

    def scattered_rows(self, x: Value, devices: int) -> Value:
        """The sum over devices of this one's tokens: a reduce-scatter forwards, an all-gather backwards."""
        if devices == 1:
            return x
        large, width = x.numel, x.width
        return self.result(
            self.new(x.numel // devices, width, "scattered tokens"), [x], lambda _, __: [self.new(large, width, "gathered gradient")]
        )
