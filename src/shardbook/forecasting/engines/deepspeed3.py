"""DeepSpeed's stage 3: everything partitioned, parameter by parameter.

Beside the parameters (``deepspeed_fetch.py``) a rank has its parts of parameters, gradients, masters and moments in flat buffers, and
one bucket for gradients that is there from the beginning, as large as its setting says. A full bucket is put in the order of ranks in
a copy, and reduce-scattered there. The step goes by sub-groups, each with its gradients side by side and in fp32. Source: DeepSpeed
0.19.8, deepspeed/runtime/zero/stage3.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.forecasting.engines.deepspeed import NORM_NBYTES, Partitioned, Setup
from shardbook.forecasting.engines.deepspeed_fetch import Fetcher, module_of
from shardbook.forecasting.graph import Node, Rule, Value, Weight
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.tape import Tape

NEVER_LEFT = ("embedding", "root")
"""Their inputs have no gradient, so nothing tells that backward is past them."""


class DeepSpeed3(Partitioned):
    """See the file's header. ``recomputed``: names of the blocks whose forward runs again in backward."""

    def __init__(self, tape: Tape, setup: Setup, *, recomputed: frozenset[str] = frozenset(), steady: bool = True) -> None:
        self._knobs, self._width = setup.knobs, setup.width
        super().__init__(tape, setup, sum(self._part(weight, setup) for weight in setup.trained), steady=steady)
        modules: dict[str, list[Weight]] = {}
        for weight in setup.weights:
            modules.setdefault(module_of(weight), []).append(weight)
        self._counts = Counter(module_of(weight) for weight in setup.trained)
        self._missing = Counter(self._counts)
        self._filled: list[Weight] = []
        self._apart: list[Value] = []
        tape.at("between", "")
        held = sum(self._part(weight, setup) for weight in setup.weights) * self._width if self._knobs.offload_param == "none" else 0
        tape.take(Account.PARAM, held, "shards of the parameters")
        self._take_optimizer()
        if setup.keeps_optimizer:
            tape.take(Account.GRAD, self._partition * DTYPE_NBYTES[self._knobs.grad_accum_dtype], "averaged gradients")
        bucket = self._knobs.reduce_bucket_size * DTYPE_NBYTES[self._knobs.communication_dtype]
        tape.take(Account.COMM, bucket if self._knobs.contiguous_gradients else 0, "ipg bucket")
        order = _order(modules, recomputed) if steady else []
        self._fetcher = Fetcher(tape, self._knobs, modules, order, ranks=setup.ranks, width=self._width, on_cuda=setup.on_cuda)

    @staticmethod
    def _part(weight: Weight, setup: Setup) -> int:
        return -(-weight.numel // setup.ranks)

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def kernels(self, tape: Tape, landed: Callable[[Weight, Value], None]) -> "Fetching":
        """Operators that fetch what they use."""
        return Fetching(tape, landed, self._fetcher)

    def enter_forward(self, unit: str) -> None:
        """Modules around others have hooks as well: they look ahead."""
        if unit == "root":
            self._fetcher.begin()
        if unit == "root" or unit.startswith("blocks."):
            self._fetcher.enter(unit)

    def enter_backward(self, unit: str) -> None:
        """As in forward."""
        if unit == "root" or unit.startswith("blocks."):
            self._fetcher.enter(unit)

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def land(self, weight: Weight, gradient: Value) -> None:
        """Into the bucket; the last gradient of a module ends its backward."""
        size = self._knobs.reduce_bucket_size
        if self._filled and sum(each.numel for each in self._filled) + weight.numel > size:
            self._reduce()
        if weight.numel > size or not self._knobs.contiguous_gradients:
            self._apart.append(gradient)
        self._filled.append(weight)
        module = module_of(weight)
        self._missing[module] -= 1
        if not self._missing[module] and module not in NEVER_LEFT:
            self._fetcher.leave(module)

    def end_backward(self) -> None:
        """Reduce what is in the bucket."""
        self._reduce()
        self._missing = Counter(self._counts)

    def _reduce(self) -> None:
        knobs, ranks = self._knobs, self._setup.ranks
        total = sum(self._part(weight, self._setup) * ranks for weight in self._filled)
        way = DTYPE_NBYTES[knobs.communication_dtype]
        whole = len(self._filled) == 1 and not self._filled[0].numel % ranks
        copies = [] if whole or not knobs.reduce_scatter else [total * way]
        if way != self._width:
            copies.append(total * way)
        taken = [self._tape.take(Account.COMM, nbytes, "gradients in the order of ranks") for nbytes in copies]
        if not self._setup.on_cuda and ranks > 1:
            self._briefly(Account.WORKSPACE, total * way, "inside a reduce-scatter")
        for entry in taken:
            self._tape.give(entry)
        self._filled, self._apart = [], []

    # ---- step ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The norm, then sub-group by sub-group: gradients side by side, in fp32, and the optimizer."""
        self._fetcher.let_all_go()
        largest = max((self._part(weight, self._setup) for weight in self._setup.trained), default=0)
        self._briefly(Account.WORKSPACE, largest * NORM_NBYTES, "gradient in fp64 for the norm")
        if self._setup.keeps_optimizer:
            self._step_on_sub_group()
        self._fetcher.keep_small()

    def _step_on_sub_group(self) -> None:
        numel, wide = min(self._partition, max(1, self._knobs.sub_group_size)), self._setup.master_nbytes
        narrow = DTYPE_NBYTES[self._knobs.grad_accum_dtype]
        flat = self._tape.take(Account.WORKSPACE, 0 if narrow == wide else numel * narrow, "gradients side by side")
        copied = self._tape.take(Account.GRAD, numel * wide, "fp32 gradients")
        self._tape.give(flat)
        self._optimizer_steps()
        self._tape.give(copied)


class Fetching(Kernels):
    """Operators whose parameters are fetched before they run, forwards and backwards, and let go behind them."""

    def __init__(self, tape: Tape, landed: Callable[[Weight, Value], None], fetcher: Fetcher) -> None:
        super().__init__(tape, landed)
        self._fetcher = fetcher

    def linear(self, x: Value, weight: Weight, rows: int, bias: Weight | None = None) -> Value:
        self._fetcher.enter(module_of(weight))
        return self._left(super().linear(x, weight, rows, bias), weight)

    def grouped_linear(self, x: Value, weight: Weight, rows: int, columns: int) -> Value:
        self._fetcher.enter(module_of(weight))
        return self._left(super().grouped_linear(x, weight, rows, columns), weight)

    def embedding(self, weight: Weight, rows: int, columns: int, numbers: Value | None = None) -> Value:
        self._fetcher.enter(module_of(weight))
        return self._left(super().embedding(weight, rows, columns, numbers), weight)

    def layer_norm(self, x: Value, weight: Weight | None, bias: Weight | None, rows: int, **how: Any) -> Value:
        if weight is None:
            return super().layer_norm(x, weight, bias, rows, **how)
        self._fetcher.enter(module_of(weight))
        return self._left(super().layer_norm(x, weight, bias, rows, **how), weight)

    def rms_norm(self, x: Value, weight: Weight, rows: int) -> Value:
        self._fetcher.enter(module_of(weight))
        return self._left(super().rms_norm(x, weight, rows), weight)

    def mul_row(self, x: Value, row: Value | Weight, row_numel: int) -> Value:
        if isinstance(row, Value):
            return super().mul_row(x, row, row_numel)
        self._fetcher.enter(module_of(row))
        return self._left(super().mul_row(x, row, row_numel), row)

    def fused_linear_cross_entropy(self, x: Value, head: Weight, rows: int) -> Value:
        self._fetcher.enter(module_of(head))
        return self._left(super().fused_linear_cross_entropy(x, head, rows), head)

    def _left(self, out: Value, weight: Weight) -> Value:
        """Forward is past it; backward enters before its rule runs."""
        module = module_of(weight)
        self._fetcher.leave(module)
        if out.node is not None:
            out.node.rule = _entering(out.node.rule, self._fetcher, module)
        return out


def _entering(rule: Rule, fetcher: Fetcher, module: str) -> Rule:
    def entering(node: Node, grads: list[Value | None]) -> Sequence[Value | None]:
        fetcher.enter(module)
        return rule(node, grads)

    return entering


def _order(modules: dict[str, list[Weight]], recomputed: frozenset[str]) -> list[str]:
    """Modules as forward and backward enter them: the model, each block before its own, and the other way round."""
    forward, backward = ["root"], ["root"]
    for block, inner in reversed(_grouped(modules)):
        backward += [block] if block else []
        backward += inner if block in recomputed else []
        backward += reversed(inner)
    for block, inner in _grouped(modules):
        forward += [block, *inner] if block else inner
    if "head" not in modules and "embedding" in modules:  # tied
        forward.append("embedding")
        backward.insert(1, "embedding")
    return forward + backward


def _grouped(modules: dict[str, list[Weight]]) -> list[tuple[str, list[str]]]:
    """(block or "", its modules), in the order of registration."""
    found: dict[str, list[str]] = {}
    for name in modules:
        parts = name.split(".")
        block = ".".join(parts[:2]) if parts[0] == "blocks" else ""
        if name != "root":
            found.setdefault(block or name, []).append(name)
    return [(block if block.startswith("blocks.") else "", inner) for block, inner in found.items()]
