"""Rates of what a step computes. Results go to new memory each time, as in a step; inputs are taken in turn, so that they are cold."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardbook.engine import numerics
from shardbook.engine.host_step import host_threads, planned_threads
from shardbook.train.calibration.clock import Clock, Work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS, INNER, OUTER = (64, 256, 1024), (64, 256, 1024), (64, 256, 1024)
PASS_NBYTES = (1 << 14, 1 << 18, 1 << 21, 1 << 24, 3 << 25)
NUMELS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
SEQUENCES, HEAD_DIMS = (64, 256, 512, 1024, 2048), (32, 64, 128)
LOSS_ROWS, VOCABULARIES = (64, 512), (256, 2048, 8192)
EMBEDDED_ROWS, COLUMNS = (64, 1024), (64, 1024)
_HEADS, _SHORT = 4, 32
_COLD_NBYTES, _MOST_RESULTS = 16 << 20, 64


def compute(clock: Clock) -> None:
    """Everything of this file."""
    for name, dtype in DTYPES.items():
        products(clock, name, dtype)
        passes(clock, name, dtype)
        attention(clock, name, dtype)
    loss(clock)
    embedding(clock)
    optimizers(clock)
    engine_passes(clock)


def products(clock: Clock, name: str, dtype: torch.dtype) -> None:
    """Thin ones are measured, not derived: their rate follows no simple rule."""
    axes = (ROWS, INNER, OUTER)

    def make(kind: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[int, int, int], Work]:
        def of(rows: int, inner: int, outer: int) -> Work:
            x, weight = _several(clock, dtype, rows, inner), _several(clock, dtype, outer, inner)
            gradient = _several(clock, dtype, rows, outer)
            return lambda: kind(next(x), next(weight), next(gradient))

        return of

    clock.curve("product.forward", name, axes, make(lambda x, weight, _: F.linear(x, weight)))
    clock.curve("product.input", name, axes, make(lambda _, weight, gradient: gradient @ weight))
    clock.curve("product.weight", name, axes, make(lambda x, _, gradient: gradient.t() @ x))


def passes(clock: Clock, name: str, dtype: torch.dtype) -> None:
    """Two inputs and a result; and the one activation function that is not memory-bound everywhere."""

    def multiply(nbytes: int) -> Work:
        numel = max(1, nbytes // 3 // dtype.itemsize)
        left, right = _several(clock, dtype, numel), _several(clock, dtype, numel)
        return _into_cold(lambda: next(left) * next(right))

    def short(nbytes: int) -> Work:
        rows = max(1, nbytes // 2 // dtype.itemsize // (_HEADS * _SHORT))
        left = _several(clock, dtype, rows, _HEADS, 2 * _SHORT)
        table = torch.randn(rows, 1, _SHORT, device=clock.device).to(dtype)
        return _into_cold(lambda: next(left)[..., :_SHORT] * table)

    def forward(numel: int) -> Work:
        x = _several(clock, dtype, numel)
        return lambda: F.silu(next(x))

    def backward(numel: int) -> Work:
        x, gradient = _several(clock, dtype, numel), _several(clock, dtype, numel)
        return lambda: torch.ops.aten.silu_backward(next(gradient), next(x))

    clock.curve("pass", name, (PASS_NBYTES,), multiply)
    clock.curve("pass.short", name, (PASS_NBYTES[:-1],), short)
    clock.curve("activation.forward", name, (NUMELS,), forward)
    clock.curve("activation.backward", name, (NUMELS,), backward)


def attention(clock: Clock, name: str, dtype: torch.dtype) -> None:
    """Seconds of one head. The inputs lie as models have them: heads side by side in a row."""
    axes, powers = (SEQUENCES, HEAD_DIMS), (2.0, 1.0)

    def parts(sequence: int, head_dim: int, *, requires_grad: bool) -> list[Tensor]:
        shape = (1, sequence, _HEADS, head_dim)
        made = [torch.randn(shape, device=clock.device).to(dtype).transpose(1, 2) for _ in range(3)]
        return [part.requires_grad_(requires_grad) for part in made]

    forward: list[float] = []
    backward: list[float] = []
    for sequence in SEQUENCES:
        for head_dim in HEAD_DIMS:
            query, key, value = parts(sequence, head_dim, requires_grad=True)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            gradient = torch.randn_like(out)
            work: Work = lambda q=query, k=key, v=value: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
            forward.append(clock.usual(work) / _HEADS)
            back: Work = lambda o=out, g=gradient, q=query, k=key, v=value: torch.autograd.grad(o, (q, k, v), g, retain_graph=True)  # noqa: E731
            backward.append(clock.usual(back) / _HEADS)
    clock.keep("attention.forward", name, axes, forward, powers)
    clock.keep("attention.backward", name, axes, backward, powers)


def loss(clock: Clock) -> None:
    """Cross-entropy of fp32 logits, summed."""
    axes = (LOSS_ROWS, VOCABULARIES)
    forward: list[float] = []
    backward: list[float] = []
    for rows in LOSS_ROWS:
        for vocabulary in VOCABULARIES:
            logits = torch.randn(rows, vocabulary, device=clock.device, requires_grad=True)
            targets = torch.randint(vocabulary, (rows,), device=clock.device)
            out = F.cross_entropy(logits, targets, reduction="sum")
            forward.append(clock.usual(lambda x=logits, y=targets: F.cross_entropy(x, y, reduction="sum")))
            backward.append(clock.usual(lambda o=out, x=logits: torch.autograd.grad(o, x, retain_graph=True)))
    clock.keep("loss.forward", "fp32", axes, forward, None)
    clock.keep("loss.backward", "fp32", axes, backward, None)


def embedding(clock: Clock) -> None:
    """Of a table small enough that clearing its gradient takes next to no time."""
    axes, vocabulary = (EMBEDDED_ROWS, COLUMNS), 64
    forward: list[float] = []
    backward: list[float] = []
    for rows in EMBEDDED_ROWS:
        for columns in COLUMNS:
            table = torch.randn(vocabulary, columns, device=clock.device, requires_grad=True)
            numbers = torch.randint(vocabulary, (rows,), device=clock.device)
            out = F.embedding(numbers, table)
            gradient = torch.randn_like(out)
            forward.append(clock.usual(lambda n=numbers, t=table: F.embedding(n, t)))
            backward.append(clock.usual(lambda o=out, t=table, g=gradient: torch.autograd.grad(o, t, g, retain_graph=True)))
    clock.keep("embedding.forward", "fp32", axes, forward, None)
    clock.keep("embedding.backward", "fp32", axes, backward, None)


OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "adamw-fused": lambda values: torch.optim.AdamW(values, fused=True),
    "adamw-foreach": lambda values: torch.optim.AdamW(values, foreach=True),
    "adamw-for-loop": lambda values: torch.optim.AdamW(values, foreach=False, fused=False),
    "sgd": lambda values: torch.optim.SGD(values, lr=1e-3),
    "sgd-momentum": lambda values: torch.optim.SGD(values, lr=1e-3, momentum=0.9),
}
"""Names as :class:`shardbook.forecasting.choices.Choices` has them."""


def optimizers(clock: Clock) -> None:
    """One step on one fp32 tensor; and fused AdamW on 16 bits. Beside a GPU on the host as well, on as many threads as an engine takes."""
    _optimizers(clock, "optimizer", clock.device)
    if clock.device.type != "cpu":
        with host_threads(planned_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))):
            _optimizers(clock, "host.optimizer", torch.device("cpu"))


def _optimizers(clock: Clock, kind: str, device: torch.device) -> None:
    for name, make in OPTIMIZERS.items():
        for dtype in ("fp32", "bf16") if name == "adamw-fused" else ("fp32",):

            def stepped(numel: int, make: Callable[[Sequence[Tensor]], Any] = make, dtype: str = dtype) -> Work:
                value = torch.randn(numel, device=device).to(DTYPES[dtype]).requires_grad_()
                value.grad = torch.randn_like(value) * 1e-3
                return make([value]).step

            clock.curve(f"{kind}.{name}", dtype, (NUMELS,), stepped)


def engine_passes(clock: Clock) -> None:
    """What the engine does with gradients beside moving them."""

    def add(numel: int) -> Work:
        out, left, right = (torch.randn(numel, device=clock.device) for _ in range(3))
        return lambda: numerics.add_in_order(out, [left, right], None, add_to_out=False)

    def squares(numel: int) -> Work:
        piece = torch.randn(numel, device=clock.device)
        scratch = torch.empty(numerics.BLOCK_NUMEL, dtype=torch.float64, device=clock.device)
        return lambda: numerics.sum_of_squares(piece, 0, scratch)

    clock.curve("add", "fp32", (NUMELS,), add)
    clock.curve("squares", "fp32", (NUMELS,), squares)


def _into_cold(work: Callable[[], Tensor]) -> Work:
    """Keeps results for a while, as a forward does, so that each goes to memory that no cache has."""
    results: deque[Tensor] = deque([work()])
    most = max(1, min(_MOST_RESULTS, _COLD_NBYTES // results[0].nbytes))

    def again() -> None:
        results.append(work())
        if len(results) > most:
            results.popleft()

    return again


def _several(clock: Clock, dtype: torch.dtype, *shape: int) -> Any:
    """Tensors in turn, so many that the first is out of the inner caches when it comes again."""
    made = torch.randn(shape, device=clock.device).to(dtype)
    copies = max(1, min(8, _COLD_NBYTES // max(1, made.numel() * dtype.itemsize)))
    return cycle([made, *(made.clone() for _ in range(copies - 1))])
