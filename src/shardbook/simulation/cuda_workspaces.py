"""What CUDA's kernels take from the caching allocator while they run, besides their results: named models, none validated yet.

    workspaces_on(device)    the function that a simulation asks, operator by operator
    held(device)             what stays once the first product has been computed
    MODELS                   every model by name, with the source it was read from
    NOT_MODELLED             what is known to differ and has no figure

A simulation runs the operators of a CPU on fake tensors, so CUDA's kernels are found by the names of the CPU's that they replace, and by
their own. Sources are of PyTorch 2.13 unless they say otherwise; a GPU check compares them with an allocator's own history.

>>> workspaces_on("h100-80gb") is workspaces_on("h100-80gb"), held("h100-80gb")
(True, 67108864)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardbook.forecasting import above
from shardbook.simulation.workspaces import Workspaces

_CUDA = "aten/src/ATen/native/cuda"
_ATTENTION = "aten/src/ATen/native/transformers/cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model, to be printed: what is modelled, where it was read, and whether a GPU check has held it."""

    name: str
    source: str
    validated: bool = False


@dataclass(frozen=True, slots=True)
class Chip:
    """What kernels ask of a chip before they choose how much to take."""

    multiprocessors: int
    threads: int = 2048  # of one multiprocessor at once


MODELS = (
    Model(
        name="matrix products: one workspace a thread and stream, kept; cuBLASLt uses the same one",
        source="aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize, getCUDABlasLtWorkspace",
    ),
    Model(
        name="flash attention, forward: results of each split of the keys in fp32, where few blocks would leave the chip idle",
        source=f"{_ATTENTION}/flash_attn/flash_api.cpp: set_params_splitkv, num_splits_heuristic",
    ),
    Model(
        name="flash attention, backward: queries' gradient in fp32 and a sum for each row; keys and values by query head if they share",
        source=f"{_ATTENTION}/flash_attn/flash_api.cpp: mha_bwd",
    ),
    Model(
        name="memory-efficient attention, backward: a tile of the queries' gradient in fp32 for each block, and a sum for each row",
        source=f"{_ATTENTION}/mem_eff_attention/kernel_backward.h: workspace_size; {_ATTENTION}/attention_backward.cu",
    ),
    Model(
        name="layer norm, backward: sums of 32 rows each, where there are many rows and few columns",
        source=f"{_CUDA}/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel",
    ),
    Model(
        name="embedding, backward, above 3,072 tokens: sorted indices, four lists of segments, a row in fp32 for each token",
        source=f"{_CUDA}/Embedding.cu: embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
    ),
    Model(
        name="sums and means over the first or the last dimensions: results of blocks that share an output",
        source=f"{_CUDA}/Reduce.cuh: setReduceConfig, global_memory_size",
    ),
    Model(
        name="softmax, log_softmax, nll_loss and their backward: nothing",
        source=f"{_CUDA}/SoftMax.cu, Loss.cu: sums stay in shared memory",
    ),
    Model(
        name="foreach and fused optimizers: nothing",
        source=f"{_CUDA}/MultiTensorApply.cuh: lists of tensors travel in the kernels' arguments",
    ),
)

NOT_MODELLED = (
    "cuDNN's attention, which torch prefers on compute capability 9.0 and 10.0: its plan says how much it takes; pin flash or efficient",
    "dropout: CUDA keeps a mask of one byte an element; a simulation has the CPU's, in the type of the input",
    "rms_norm: CUDA has one kernel that saves the input and one number a row; a simulation has the CPU's composed operators",
    "statistics of layer_norm under 16 bits: fp32 on CUDA, the input's type on a CPU",
    "memory-efficient attention with heads wider than 128: which kernel is launched depends on shared memory",
    "attention with a head width that is no multiple of 8: flash attention pads its inputs",
    "index_put and scatter with accumulation: sorted indices and cub's temporaries",
    "cub's temporaries of sorts and scans: they are gone before the operators modelled here hold most",
    "reductions over other layouts than contiguous ones, and norms (linalg_vector_norm, _foreach_norm)",
    "products that split the inner dimension inside a workspace: part of the workspace that is held anyway",
)

_CHIPS: Mapping[str, Chip] = {
    "h100": Chip(132), "h200": Chip(132), "h800": Chip(132), "gh200": Chip(132), "h20": Chip(78), "b200": Chip(148), "gb200": Chip(152),
    "a100": Chip(108), "a800": Chip(108), "a30": Chip(56), "v100": Chip(80), "a10": Chip(72, 1536), "a40": Chip(84, 1536),
    "l4": Chip(58, 1536), "l40": Chip(142, 1536), "rtx-3090": Chip(82, 1536), "rtx-4090": Chip(128, 1536), "rtx-5090": Chip(170, 1536),
    "t4": Chip(40, 1024), "titan-rtx": Chip(72, 1024),
}  # fmt: skip
"""Makers' figures, by the beginning of a name in the catalog of devices."""
_UNKNOWN = Chip(132)


def held(device: str) -> int:
    """Bytes that stay allocated once products have been computed in forward and backward: cuBLAS's workspaces."""
    return above.cublas_workspace(device)


@cache
def workspaces_on(device: str) -> Workspaces:
    """Who says how many bytes an operator holds besides its result on a device of the catalog; of any other, as an H100."""
    chip = chip_of(device)

    def workspaces(func: Any, args: Sequence[Any], result: Any) -> int:
        model = _BY_OPERATOR.get(func.__name__.split(".")[0])
        return model(chip, args, result) if model is not None else 0

    return workspaces


def chip_of(device: str) -> Chip:
    """The chip of a device of the catalog: by the longest name that it begins with.

    >>> chip_of("a100-80gb").multiprocessors, chip_of("l40s").threads
    (108, 1536)
    """
    names = [name for name in _CHIPS if device.startswith(name)]
    return _CHIPS[max(names, key=len)] if names else _UNKNOWN


# ---- attention -------------------------------------------------------------------------------------------------------------


def _attention_forward(chip: Chip, args: Sequence[Any], _: Any) -> int:
    query, key = args[0], args[1]
    dropout = args[3] if len(args) > 3 and isinstance(args[3], float) else 0.0
    if query.element_size() > 2 or dropout:
        return 0  # memory-efficient attention keeps its results in registers; dropout is never split
    batch, heads, rows, head = query.shape
    splits = flash_splits(batch * heads * _blocks(rows, 64), 2 * chip.multiprocessors, _blocks(key.shape[-2], _columns(head)))
    return 4 * splits * batch * heads * rows * (1 + _head(head)) if splits > 1 else 0


def flash_splits(blocks: int, slots: int, key_blocks: int) -> int:
    """Into how many parts flash attention splits the keys, so that ``slots`` are busy: the fewest that are nearly as good as the best.

    >>> flash_splits(512, 264, 8), flash_splits(8, 264, 8)
    (1, 8)
    """
    if blocks >= 0.8 * slots:
        return 1
    parts = [n for n in range(1, min(128, slots, key_blocks) + 1) if n == 1 or _blocks(key_blocks, n) != _blocks(key_blocks, n - 1)]
    busy = {n: blocks * n / slots / math.ceil(blocks * n / slots) for n in parts}
    return next((n for n in parts if busy[n] >= 0.85 * max(busy.values())), 1)


def _attention_backward(chip: Chip, args: Sequence[Any], result: Any) -> int:
    query, key = args[1], args[2]
    if query.element_size() > 2:
        return _efficient_backward(chip, args, result)
    batch, heads, rows, head = query.shape
    rounded = _up(rows, 128)
    accumulated = batch * heads * rounded * _head(head)
    if torch.are_deterministic_algorithms_enabled():
        accumulated *= _blocks(chip.multiprocessors, batch * heads)
    expanded = 2 * batch * heads * key.shape[-2] * head * query.element_size() if key.shape[1] != heads else 0
    return 4 * (accumulated + batch * heads * rounded) + expanded


def _efficient_backward(_: Chip, args: Sequence[Any], __: Any) -> int:
    """Heads up to 128 wide: a sum for each row and the tiles; in fp32 the sums are of a product that other operators make first."""
    query: Tensor = args[1]
    batch, heads, rows, head = query.shape
    if head > 128:
        return 0
    half = query.element_size() <= 2
    tall, wide = (64, 64) if head <= 64 else (128, 128 if half else 64)
    tiles = _blocks(rows, tall) * _blocks(head, wide) * (16 + 4 * tall * wide)
    return 4 * batch * heads * rows + max(0 if half else 4 * query.numel(), batch * heads * _up(tiles, 16))


# ---- norms, embeddings, sums -------------------------------------------------------------------------------------------------


def _layer_norm_backward(chip: Chip, args: Sequence[Any], _: Any) -> int:
    x: Tensor = args[1]
    columns = math.prod(args[2])
    rows = x.numel() // columns
    if rows <= 64 * 1024 or columns // 32 >= chip.multiprocessors // 2:
        return 0
    blocks = min(32 * 1024 // _blocks(columns, 32), _blocks(rows, 32))
    return 2 * blocks * columns * x.element_size()


def _embedding_backward(_: Chip, args: Sequence[Any], __: Any) -> int:
    gradient, indices = args[0], args[1]
    tokens = indices.numel()
    if tokens <= 3072:
        return 0
    return 6 * tokens * indices.element_size() + 2 * 8 + 4 * tokens * gradient.shape[-1]


def _sum(chip: Chip, args: Sequence[Any], result: Any) -> int:
    x: Tensor = args[0]
    chosen = args[1] if len(args) > 1 and args[1] else range(x.dim())
    reduced = sorted({dim % x.dim() for dim in chosen}) if x.dim() else []
    if not reduced or not x.is_contiguous() or not x.is_floating_point():
        return 0
    inputs = math.prod(x.shape[dim] for dim in reduced)
    last = reduced == list(range(x.dim() - len(reduced), x.dim()))
    if not last and reduced != list(range(len(reduced))):
        return 0
    return reduction(chip, inputs, x.numel() // max(1, inputs), is_last=last, width=max(4, result.element_size()))


def reduction(chip: Chip, inputs: int, outputs: int, *, is_last: bool, width: int = 4) -> int:
    """Bytes of a reduction of so many inputs for each of so many outputs; ``is_last``: an output's inputs lie side by side.

    Blocks share an output where each thread would else add 256 values and more and the chip is not full. Each stores a row as wide as
    the block, for each output.

    >>> reduction(Chip(132), 2048, 1024, is_last=False), reduction(Chip(132), 128, 4096, is_last=True)
    (16777248, 0)
    """
    vector = 1 if is_last else math.gcd(4, outputs)
    across, down = (inputs // 4 if inputs >= 128 else inputs, outputs) if is_last else (outputs // vector, inputs)
    most = 512 // vector
    across, down = _power(min(across, most)), _power(min(down, most))
    high = min(down, most // min(across, 32))
    block = min(across, most // high)
    each = _blocks(inputs, block if is_last else 1)
    if each < min(16 * high, 256):
        return 0
    each = _blocks(inputs, high * (block if is_last else 1))
    grid = _blocks(outputs // vector, 1 if is_last else block)
    slots = chip.multiprocessors * (chip.threads // (block * high))
    if each < 256 or grid > slots:
        return 0
    sharing = max(min(_blocks(slots, grid), _blocks(each, 16)), _blocks(each, 256))
    return width * outputs * sharing * (1 if is_last else block * vector) + 4 * grid if sharing > 1 else 0


# ---- arithmetic --------------------------------------------------------------------------------------------------------------


def _blocks(count: int, each: int) -> int:
    return -(-count // each)


def _up(count: int, multiple: int) -> int:
    return _blocks(count, multiple) * multiple


def _power(count: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << max(0, count.bit_length() - 1)


def _head(width: int) -> int:
    return _up(width, 32 if width <= 128 else 64)


def _columns(head: int) -> int:
    """Keys that flash attention works on at a time."""
    return 256 if head <= 64 else 128 if head <= 128 else 64


_BY_OPERATOR: Mapping[str, Callable[[Chip, Sequence[Any], Any], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
    "_scaled_dot_product_flash_attention": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "embedding_dense_backward": _embedding_backward,
    "sum": _sum,
    "mean": _sum,
}
