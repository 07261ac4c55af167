"""What CPU kernels of torch take and give back inside one operator, beyond their result: bytes of one intra-op thread.

Both witnesses before a run read it: the walk with sizes, and the simulation. Every formula is from the kernel's source and held against
the allocator by the grid of measured runs.
"""


def attention_forward(sequence: int, keys: int, head_dim: int, width: int) -> int:
    """A block of scores, two rows, a block of results, in fp32; scores once more in a narrower type.

    Source: ``cpu_flash_attention`` (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).

    >>> attention_forward(256, 256, 64, 4)
    82432
    """
    rows, columns = _block_of_scores(sequence, keys)
    reduced = rows * columns * width if width < 4 else 0
    return 4 * (rows * columns + 2 * rows + rows * head_dim) + reduced


def attention_backward(sequence: int, keys: int, width: int) -> int:
    """Two blocks of scores, in fp32 and in a narrower type, and a row of sums. Source: ``cpu_flash_attention_backward``, same file.

    >>> attention_backward(256, 256, 4)
    131328
    """
    rows, columns = _block_of_scores(sequence, keys)
    return 2 * rows * columns * (4 + (width if width < 4 else 0)) + 4 * rows


def layer_norm_backward(columns: int, width: int) -> int:
    """Sums over rows for weight and bias. Source: ``LayerNormBackwardKernelImplInternal`` (native/cpu/layer_norm_kernel.cpp)."""
    return 2 * columns * width


def _block_of_scores(sequence: int, keys: int) -> tuple[int, int]:
    """Rows and columns that the kernel works on at a time."""
    return min(256 if sequence >= 768 else 64 if sequence >= 192 else 32, sequence), min(512, keys)
