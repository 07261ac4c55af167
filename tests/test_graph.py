"""Autograd on sizes: who saves what for how long, in which order backward runs, and where gradients meet."""

from shardbook.accounts import Account
from shardbook.forecasting.graph import Weight, view_of
from shardbook.forecasting.operators import Operators
from shardbook.forecasting.tape import Tape


class Landing:
    """What lands, in order; and a graph whose operators log when their backward runs."""

    def __init__(self):
        self.tape, self.order, self.landed = Tape(), [], []
        self.ops = Operators(self.tape, self.land)

    def land(self, weight, gradient):
        self.landed.append((weight.name, gradient.numel, gradient.memory.entry.account))

    def named(self, name, *inputs, numel=10):
        """An operator of no memory but its result's, which notes that its backward runs."""
        out = self.ops.new(numel, 4, name)

        def rule(_, grads):
            self.order.append(name)
            return [self.ops.new(numel, 4, f"gradient from {name}") for _ in inputs]

        return self.ops.result(out, inputs, rule)

    @property
    def live(self):
        return sum(change for _, change in self.tape._log)


def weight(name="weight", numel=10, **options):
    return Weight(name, "unit", numel, 4, **options)


def test_backward_runs_latest_first_and_each_once():
    graph = Landing()
    first = graph.named("first", weight())
    left = graph.named("left", first)
    right = graph.named("right", first)
    joined = graph.named("joined", left, right)
    del first, left, right
    graph.ops.backward(joined)
    assert graph.order == ["joined", "right", "left", "first"]
    assert graph.landed == [("weight", 10, Account.GRAD_FULL)]


def test_what_is_saved_is_an_activation_until_its_node_has_run():
    graph = Landing()
    x = graph.named("x", weight())
    y = graph.ops.pointwise(x, "silu")  # saves x
    assert x.memory.entry.account is Account.ACTIVATION
    assert y.memory.entry.account is Account.WORKSPACE
    del x
    assert graph.live == 2 * 40
    graph.ops.backward(y)
    assert graph.live == 40  # y alone, which this test holds


def test_nothing_is_saved_where_nothing_has_a_gradient():
    graph = Landing()
    x = graph.ops.new(10, 4)
    y = graph.ops.pointwise(x, "silu")
    assert (y.node, x.memory.entry.account) == (None, Account.WORKSPACE)
    frozen = graph.ops.linear(x, weight(numel=20, trainable=False), rows=5)
    assert (frozen.node, x.memory.entry.account) == (None, Account.WORKSPACE)


def test_gradients_meet_in_the_memory_of_the_first():
    graph = Landing()
    x = graph.named("x", weight())
    joined = graph.named("joined", graph.named("left", x), graph.named("right", x))
    del x
    begun = len(graph.tape._log)
    graph.ops.backward(joined)
    assert "sum of gradients" not in [entry.label for entry, _ in graph.tape._log[begun:]]


def test_a_gradient_that_is_a_view_or_shared_is_added_to_elsewhere():
    for makes in ("view", "shared"):
        graph = Landing()
        x = graph.named("x", weight())
        kept = []

        def rule(_, grads, graph=graph, makes=makes, kept=kept):
            gradient = graph.ops.new(10, 4, "first gradient")
            kept.append(gradient)
            return [view_of(gradient, 10) if makes == "view" else gradient]

        branch = graph.named("branch", x)
        special = graph.ops.result(graph.ops.new(10, 4), [x], rule)
        joined = graph.named("joined", branch, special)
        graph.ops.backward(joined)
        assert "sum of gradients" in [entry.label for entry, _ in graph.tape._log]


def test_a_weight_that_is_used_twice_lands_once_when_the_last_gradient_has_come():
    graph = Landing()
    shared, between = weight("shared"), weight("between")
    x = graph.named("embedding", shared)
    x = graph.named("block", x, between)
    x = graph.named("head", x, shared)
    graph.tape.at("backward", "")
    graph.ops.backward(x)
    assert [name for name, _, _ in graph.landed] == ["between", "shared"]
    made = [entry for entry, change in graph.tape._log if change > 0 and entry.label.startswith("gradient from head")]
    assert [entry.account for entry in made] == [Account.WORKSPACE, Account.WORKSPACE, Account.GRAD_FULL]  # for x, waiting, landed


def test_every_backward_counts_uses_anew():
    graph = Landing()
    shared = weight("shared")
    for _ in range(2):
        graph.ops.backward(graph.named("head", graph.named("embedding", shared), shared))
    assert [name for name, _, _ in graph.landed] == ["shared", "shared"]


def test_a_checkpoint_keeps_its_input_and_runs_again():
    graph = Landing()
    x = graph.named("x", weight("first"), numel=10)

    def forward(value):
        return graph.ops.pointwise(graph.ops.pointwise(value, "silu"), "gelu")

    out = graph.ops.checkpoint(forward, x)
    del x
    assert graph.live == 2 * 40  # its input and its result: nothing from inside
    begun = len(graph.tape._log)
    graph.ops.backward(out)
    labels = [entry.label for entry, change in graph.tape._log[begun:] if change > 0]
    assert labels.index("silu") < labels.index("gelu") < labels.index("gradient of gelu") < labels.index("gradient of silu")
    assert graph.order == ["x"]
    del out
    assert graph.live == 0


def test_a_checkpoint_that_keeps_products_does_not_make_them_again():
    graph = Landing()
    x = graph.named("x", weight("first"), numel=10)
    products = weight("product", numel=100)

    def forward(value):
        return graph.ops.pointwise(graph.ops.linear(value, products, rows=1), "silu")

    out = graph.ops.checkpoint(forward, x, lambda: lambda kind: kind == "linear")
    begun = len(graph.tape._log)
    graph.ops.backward(out)
    labels = [entry.label for entry, change in graph.tape._log[begun:] if change > 0]
    assert labels.count("product") == 1  # its gradient
    assert "silu" in labels
    assert [name for name, _, _ in graph.landed] == ["product", "first"]


def test_a_whole_backward_leaves_nothing():
    graph = Landing()
    x = graph.ops.embedding(weight("table", 64), 5, 8)
    for _ in range(3):
        x = graph.ops.add(x, graph.ops.linear(graph.ops.pointwise(x, "gelu"), weight(numel=64), rows=5))
    loss = graph.ops.cross_entropy(x, 5)
    del x
    graph.ops.backward(loss)
    del loss
    assert graph.live == 0
    assert len(graph.landed) == 4
