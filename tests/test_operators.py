"""What an operator keeps and what is live inside it, in sizes, beside torch's own operator and the allocator's records of it.

Every case is written twice: on tensors and on sizes. Inputs stand before; then three figures are compared: bytes live when forward is
over, the highest instant inside forward, and the highest inside backward, each above what was live when it began.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.tape import Tape
from shardbook.ledger.allocator import CpuRecords

ROWS, COLUMNS, HEADS = 48, 64, 4
WRAPPED = 64
"""Bytes. ``0.5 * x`` makes a tensor of the number, and so do a loss and its weight; the smallest buffer here has 96."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Figures:
    """Bytes: kept after forward, highest in forward and in backward."""

    kept: int
    forward: int
    backward: int

    def matches(self, measured: "Figures", scratch: int = 0) -> bool:
        """Up to the numbers that torch wraps in tensors; ``scratch`` bytes more may be live inside the measured operator."""
        inside = (measured.forward - self.forward, measured.backward - self.backward)
        return abs(self.kept - measured.kept) <= WRAPPED and all(-WRAPPED <= more <= scratch + WRAPPED for more in inside)


# ---- the two witnesses ------------------------------------------------------------------------------------------------------


def real(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Figures:
    """What the allocator says."""
    function(*_sources(inputs, [])).sum().backward()  # whatever is made once
    kept: list[torch.Tensor] = []
    sources = _sources(inputs, kept)
    records = CpuRecords()
    records.start()
    out = function(*sources)
    forward = _totals(records)
    gradient = torch.ones_like(out)
    records.start()
    out.backward(gradient)
    backward = _totals(records)
    return Figures(kept=forward[-1], forward=max(forward), backward=max(backward))


class _Source(torch.autograd.Function):
    """What comes from before: its gradient is kept as it arrives, where a leaf would copy what somebody else holds too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.kept = kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.kept.extend(gradients)
        return None, None


def _sources(inputs: Sequence[torch.Tensor], kept: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_Source.apply(each, kept) if each.requires_grad else each for each in inputs]


def _totals(records: CpuRecords) -> list[int]:
    found = records.stop()
    assert found is not None
    totals = [0]
    for change in found:
        totals.append(totals[-1] + change.nbytes)
    return totals


def walked(function: Callable[..., Value], sizes: Sequence[tuple[int, int, bool]]) -> Figures:
    """What the walk says. ``sizes``: elements, bytes of one, and whether it has a gradient."""
    tape, landed = Tape(), []
    ops = Kernels(tape, lambda _, gradient: landed.append(gradient))
    values = [_input(ops, *size) for size in sizes]
    begun = _level(tape)
    out = function(ops, *values)
    forward = _after(tape, begun)
    assert out.node is not None
    gradient = ops.new(out.numel, out.width)
    node, slot = out.node, out.slot
    begun = _level(tape)
    ops.backward_from(node, slot, gradient)
    return Figures(kept=forward[-1], forward=max(forward), backward=max(_after(tape, begun)))


def _input(ops: Kernels, numel: int, width: int, wants_gradient: bool) -> Value:
    """Something that was there before; its gradient stays, as a leaf's does."""
    value = ops.new(numel, width)
    if wants_gradient:
        ops.result(value, [Weight("leaf", "", numel, width)], lambda _, grads: grads)
    return value


def _level(tape: Tape) -> int:
    return len(tape._log)


def _after(tape: Tape, begun: int) -> list[int]:
    totals = [0]
    for _, change in tape._log[begun:]:
        totals.append(totals[-1] + change)
    return totals


# ---- the cases --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """One operator: on tensors, on sizes, and the shapes of what goes in; ``frozen`` inputs have no gradient.

    ``product``: of matrices. In 16 bits the CPU's library packs them in scratch, which differs by processor: no figure is known, only
    that it is no more than all matrices in fp32.
    """

    on_tensors: Callable[..., torch.Tensor]
    on_sizes: Callable[..., Value]
    shapes: tuple[tuple[int, ...], ...] = ((ROWS, COLUMNS),)
    frozen: frozenset[int] = frozenset()
    product: bool = False


def _weight(value: Value, width: int) -> Weight:
    return Weight("weight", "", value.numel, width)


def _linear(ops: Kernels, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return ops.linear(x, _weight(weight, x.width), ROWS, None if bias is None else _weight(bias, x.width))


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


def _sized_gelu_new(ops: Kernels, x: Value) -> Value:
    half = ops.mul_const(x)
    tanh = ops.pointwise(ops.mul_const(ops.add(x, ops.mul_const(ops.power(x, 3)))), "tanh", saves_result=True)
    return ops.mul(half, ops.add_const(tanh))


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    left, right = x[..., : COLUMNS // 2], x[..., COLUMNS // 2 :]
    return torch.cat((-right, left), dim=-1)


def _halves(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((right, left), dim=-1)


def _sized_halves(ops: Kernels, x: Value) -> Value:
    left, right = ops.split(x, [x.numel // 2, x.numel // 2])
    return ops.cat((right, left))


CASES: dict[str, Pair] = {
    "view": Pair(lambda x: x.view(-1), lambda ops, x: ops.view(x)),
    "contiguous": Pair(lambda x: x.t().contiguous(), lambda ops, x: ops.copy(x)),
    "halves put together": Pair(_halves, _sized_halves),
    "slices put together, one negated": Pair(_rotate_half, lambda ops, x: ops.rolled(x)),
    "sum": Pair(torch.add, lambda ops, x, y: ops.add(x, y), ((ROWS, COLUMNS),) * 2),
    "difference": Pair(torch.sub, lambda ops, x, y: ops.sub(x, y), ((ROWS, COLUMNS),) * 2),
    "product": Pair(torch.mul, lambda ops, x, y: ops.mul(x, y), ((ROWS, COLUMNS),) * 2),
    "product with a number": Pair(lambda x: 0.5 * x, lambda ops, x: ops.mul_const(x)),
    "sum with a number": Pair(lambda x: 1.0 + x, lambda ops, x: ops.add_const(x)),
    "product with a table": Pair(torch.mul, lambda ops, x, y: ops.mul_const(x, y), ((ROWS, COLUMNS),) * 2, frozenset({1})),
    "product with a weight": Pair(torch.mul, lambda ops, x, y: ops.mul_row(x, _weight(y, x.width), y.numel), ((ROWS, COLUMNS), (COLUMNS,))),
    "product with one number a row": Pair(torch.mul, lambda ops, x, y: ops.mul_row(x, y, y.numel), ((ROWS, COLUMNS), (ROWS, 1))),
    "sum with a row": Pair(torch.add, lambda ops, x, y: ops.add_row(x, y, rows_numel=y.numel), ((ROWS, COLUMNS), (COLUMNS,))),
    "square": Pair(torch.square, lambda ops, x: ops.power(x)),
    "cube": Pair(lambda x: torch.pow(x, 3.0), lambda ops, x: ops.power(x, 3)),
    "silu": Pair(F.silu, lambda ops, x: ops.pointwise(x, "silu")),
    "gelu": Pair(F.gelu, lambda ops, x: ops.pointwise(x, "gelu")),
    "relu": Pair(F.relu, lambda ops, x: ops.pointwise(x, "relu", saves_result=True)),
    "tanh": Pair(torch.tanh, lambda ops, x: ops.pointwise(x, "tanh", saves_result=True)),
    "GPT-2's gelu": Pair(_gelu_new, _sized_gelu_new),
    "dropout": Pair(lambda x: F.dropout(x, 0.1), lambda ops, x: ops.dropout(x, 0.1)),
    "linear": Pair(F.linear, _linear, ((ROWS // 4, 4, COLUMNS), (96, COLUMNS)), product=True),
    "linear with a bias": Pair(F.linear, _linear, ((ROWS // 4, 4, COLUMNS), (96, COLUMNS), (96,)), product=True),
    "linear, frozen": Pair(
        F.linear,
        lambda ops, x, y: ops.linear(x, Weight("weight", "", y.numel, y.width, trainable=False), ROWS),
        ((ROWS // 4, 4, COLUMNS), (96, COLUMNS)),
        frozenset({1}),
        product=True,
    ),
    "layer norm": Pair(
        lambda x, weight, bias: F.layer_norm(x, (COLUMNS,), weight, bias),
        lambda ops, x, weight, bias: ops.layer_norm(x, _weight(weight, x.width), _weight(bias, x.width), ROWS),
        ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)),
    ),
}


def _tensors(pair: Pair, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape).add_(0.5).to(dtype).requires_grad_(number not in pair.frozen) for number, shape in enumerate(pair.shapes)]


def _sizes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, bool]]:
    return [(each.numel(), each.element_size(), each.requires_grad) for each in tensors]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_an_operator(name: str, dtype: str) -> None:
    pair = CASES[name]
    tensors = _tensors(pair, TYPES[dtype])
    scratch = 4 * (sum(each.numel() for each in tensors) + ROWS * 96) if pair.product and dtype == "bf16" else 0
    assert walked(pair.on_sizes, _sizes(tensors)).matches(real(pair.on_tensors, tensors), scratch)


def test_the_mean_of_rows() -> None:
    """In fp32, in which norms take it."""
    tensors = _tensors(Pair(torch.relu, lambda ops, x: x), torch.float32)
    assert walked(lambda ops, x: ops.mean_last(x, ROWS), _sizes(tensors)).matches(real(lambda x: x.mean(-1, keepdim=True), tensors))


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")])
def test_a_cast(before: str, after: str) -> None:
    tensors = _tensors(Pair(torch.relu, lambda ops, x: x), TYPES[before])
    width = TYPES[after].itemsize
    found = walked(lambda ops, x: ops.to(ops.view(x), width), _sizes(tensors))
    assert found.matches(real(lambda x: x.view_as(x).to(TYPES[after]), tensors))


@pytest.mark.parametrize("dtype", TYPES)
def test_an_embedding(dtype: str) -> None:
    tokens = torch.arange(ROWS) % 17
    table = torch.rand(32, COLUMNS, dtype=TYPES[dtype], requires_grad=True)
    found = walked(lambda ops, x: ops.embedding(_weight(x, x.width), ROWS, COLUMNS), _sizes([table]))
    assert found.matches(real(lambda x: F.embedding(tokens, x), [table]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sequence", [16, 100, 200, 512, 800])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_attention(sequence: int, head_dim: int, dtype: str) -> None:
    shape = (2, sequence, HEADS, head_dim)
    tensors = [torch.rand(shape).to(TYPES[dtype]).requires_grad_() for _ in range(3)]

    def on_tensors(*parts: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def on_sizes(ops: Kernels, *parts: Value) -> Value:
        return ops.attention(parts, rows=2 * sequence, heads=HEADS, head_dim=head_dim, sequence=sequence)

    scratch = 4 * sum(each.numel() for each in tensors) if dtype == "bf16" else 0
    assert walked(on_sizes, _sizes(tensors)).matches(real(on_tensors, tensors), scratch)


def test_cross_entropy() -> None:
    targets = torch.arange(ROWS) % COLUMNS
    logits = [torch.rand(ROWS, COLUMNS, requires_grad=True)]
    found = walked(lambda ops, x: ops.cross_entropy(x, ROWS), _sizes(logits))
    assert found.matches(real(lambda x: F.cross_entropy(x, targets, reduction="sum"), logits))


def test_a_gradient_that_nobody_else_holds_is_added_to_in_place() -> None:
    """Two branches of one value: their gradients meet in the memory of the first."""
    tensors = _tensors(Pair(torch.relu, lambda ops, x: x), torch.float32)

    def on_sizes(ops: Kernels, x: Value) -> Value:
        x = ops.mul_const(x)
        return ops.add(ops.pointwise(x, "silu"), ops.pointwise(x, "gelu"))

    def on_tensors(x: torch.Tensor) -> Any:
        x = 0.5 * x
        return F.silu(x) + F.gelu(x)

    assert walked(on_sizes, _sizes(tensors)).matches(real(on_tensors, tensors))
