"""What comes on top of the bytes that an allocator gives out: its own slack, the context of the device, the communicators' buffers.

Each is an interval that others' figures span, with its source, and none has been validated.

>>> for line in lines(10 * GIB, Surroundings(device="h100-80gb", ranks=8)):
...     print(f"{line.name}: {line.low / GIB:.2f} to {line.high / GIB:.2f} GiB")
reserved: 0.00 to 1.77 GiB
context: 0.39 to 0.98 GiB
communicators: 0.05 to 0.70 GiB

One thing that is often counted here is not: cuBLAS's workspace. torch takes it from the caching allocator, so that it is part of what
is allocated (:func:`cublas_workspace`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardbook.checks import Check
from shardbook.forecasting.result import Above

MIB, GIB = 2**20, 2**30
SEGMENT = 2 * MIB
"""The caching allocator takes multiples of it from the driver (c10/core/AllocatorConfig: kSmallBuffer, kRoundLarge)."""

FRAGMENTED, FRAGMENTED_MOST = 0.15, 0.43
"""Share of the reserved bytes that lies in holes: on average over fine-tuning runs, and at most. Sources below."""
SLACK = FRAGMENTED / (1 - FRAGMENTED)
"""Share of the allocated bytes that is reserved beyond them, at most, where each stream frees what it took."""
SLACK_RECORDED = FRAGMENTED_MOST / (1 - FRAGMENTED_MOST)
"""The same where tensors cross streams by ``record_stream``: their memory comes back late (FSDP1; DeepSpeed with ``overlap_comm``)."""
SLACK_EXPANDABLE = 0.03
"""The same with ``expandable_segments``: an assumption without a source, as pieces of a segment can be unmapped."""

_SLACK_SOURCE = "segments of 2 MiB, and holes between live blocks: 15% on average by GMLake (Guo et al. 2024, arXiv:2401.08156)"
_RECORDED_SOURCE = "memory recorded on a second stream comes back late; up to 43% of what is reserved lies idle (arXiv:2507.16274)"
_EXPANDABLE_SOURCE = "expandable segments unmap holes; 3% is an assumption"
_LAZY = "pytorch/pytorch #86509 (0.27 GiB, kernels loaded when first used), unslothai/unsloth-zoo #1053 (0.42 GiB, RTX 6000 Ada)"
_HOPPER = "NVIDIA/nccl #1685 (0.99 GiB with one communicator, H100); pytorch/pytorch #109888 (0.39 GiB)"
_NCCL = "NVIDIA/nccl #964 (0.53 GiB of 2 and 0.67 GiB of 4 A100 over NVLink, each group), #986 (linear in the channels; few over PCIe)"
_NCCL_NODES = "NVIDIA/nccl #864 (1.5 GiB with the first all-reduce), #986 (grows to two nodes, not beyond)"
_ALL_TO_ALL = "NVIDIA/nccl #1685 (1.0 to 4.0 GiB with the first all-to-all of 8 H100: up to 32 channels to each peer)"
_RCCL = "Lumi-supercomputer/LUMI-AI-Guide #111 (1 GiB for the first communicator, 0.65 GiB for each further one)"

_CONTEXT_LATER, _CONTEXT_EARLIER = (400 * MIB, 1000 * MIB), (270 * MIB, 700 * MIB)
_LATER = ("h100", "h200", "h800", "h20", "gh200", "b100", "b200", "gb200", "b300", "rtx-5090", "rtx-pro-6000")
"""Hopper and Blackwell: their contexts are larger, and so is cuBLAS's workspace (compute capability 9.0 up)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What runs beside the tensors.

    Args:
        device: name as in the catalog of devices; "" where it is not known.
        ranks: all devices.
        groups: process groups that have sent something; one for data parallelism, one more for each further degree.
        ranks_per_node: devices that share a host.
        all_to_all: whether gradients travel in an all-to-all: shardbook's ordered reduction, and expert parallelism.
        expandable: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        records_streams: whether the engine frees memory across streams by ``record_stream``.
        settled: bytes that are made once and stay, side by side: parameters, moments, reduced gradients. Holes lie among the rest.

    Raises:
        ConfigError: a count below its least.
    """

    device: str = ""
    ranks: int = 1
    groups: int = 1
    ranks_per_node: int = 8
    all_to_all: bool = False
    expandable: bool = False
    records_streams: bool = False
    settled: int = 0

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("ranks", least=1, remedy="1 is a single process")
        check.integer("groups", least=0, remedy="0: nothing is sent")
        check.integer("ranks_per_node", least=1, remedy="8 is usual")
        check.done()

    @property
    def is_amd(self) -> bool:
        """Whether it runs on ROCm."""
        return self.device.startswith("mi")

    @property
    def is_later(self) -> bool:
        """Hopper or Blackwell."""
        return self.device.startswith(_LATER)


def lines(peak_allocated: int, around: Surroundings) -> tuple[Above, ...]:
    """Everything above the allocator; the first line, ``reserved``, is what ``peak_reserved`` counts already."""
    return tuple(line for line in (_reserved(peak_allocated, around), _context(around), *_communicators(around)) if line.high)


def reserved(peak_allocated: int, around: Surroundings, pooled: int = 0) -> tuple[int, int]:
    """Least and most bytes that the caching allocator holds when so many are allocated.

    Args:
        peak_allocated: highest bytes of live tensors.
        around: what decides how much lies in holes.
        pooled: the highest bytes of each stream's pool, added up: no pool gives its free bytes to another, so that at least these
            are held. Share of holes and pools are not added up: both are part of what was seen idle.

    >>> reserved(3 * MIB + 1, Surroundings())
    (4194304, 4194304)
    """
    slack = SLACK_RECORDED if around.records_streams else SLACK
    if around.expandable:
        slack = SLACK_EXPANDABLE
    low = _up(max(peak_allocated, pooled))
    moving = max(0, peak_allocated - around.settled)
    return low, max(low, _up(int(peak_allocated + moving * slack)))


def cublas_workspace(device: str, *, threads: int = 2, transformer_engine: bool = False) -> int:
    """Bytes that torch takes from the caching allocator for cuBLAS, part of what is allocated.

    One workspace for each thread's handle on its stream: forward runs in one thread, backward in another. 8.125 MiB each before
    Hopper, 32 MiB from it on, and 32 MiB on AMD's (128 MiB on MI300 and later). Source: aten/src/ATen/cuda/CublasHandlePool.cpp of
    torch 2.11, ``parseChosenWorkspaceSize``; ``CUBLAS_WORKSPACE_CONFIG`` changes it. Transformer Engine has one more of its own, of 4 MiB
    before Hopper and 32 MiB from it on (``get_cublas_workspace_size_bytes``). What Megatron-LM's tests hold between steps beyond their
    states is these bytes to 2 MiB; else read from sources.

    >>> cublas_workspace("a100-80gb", threads=1), cublas_workspace("h100-80gb")
    (8519680, 67108864)
    """
    around = Surroundings(device=device)
    if around.is_amd:
        return threads * (128 * MIB if device.startswith("mi3") else 32 * MIB)
    own = (32 * MIB if around.is_later else 4 * MIB) if transformer_engine else 0
    return own + threads * (32 * MIB if around.is_later else 8 * MIB + 128 * 2**10)


def _reserved(peak_allocated: int, around: Surroundings) -> Above:
    low, high = reserved(peak_allocated, around)
    source = _RECORDED_SOURCE if around.records_streams else _SLACK_SOURCE
    if around.expandable:
        source = _EXPANDABLE_SOURCE
    return Above(name="reserved", low=low - peak_allocated, high=high - peak_allocated, source=source)


def _context(around: Surroundings) -> Above:
    """Driver, kernels and stacks of one process; both intervals together where the device is not known."""
    known = bool(around.device)
    low = _CONTEXT_LATER[0] if around.is_later else _CONTEXT_EARLIER[0]
    high = _CONTEXT_LATER[1] if around.is_later or not known else _CONTEXT_EARLIER[1]
    return Above(name="context", low=low, high=high, source=_HOPPER if around.is_later else _LAZY)


def _communicators(around: Surroundings) -> Iterator[Above]:
    """Buffers of NCCL: by channel and protocol for each connection, whatever is sent. One rank makes none."""
    if around.ranks == 1 or not around.groups:
        return
    if around.is_amd:
        further = around.groups - 1
        yield Above(name="communicators", low=GIB // 2, high=GIB + further * 666 * MIB, source=_RCCL)
        return
    nodes = around.ranks > around.ranks_per_node
    each = (100 * MIB, 1536 * MIB) if nodes else (50 * MIB, 717 * MIB)
    source = _NCCL_NODES if nodes else _NCCL
    yield Above(name="communicators", low=around.groups * each[0], high=around.groups * each[1], source=source)
    if around.all_to_all:
        peers = min(around.ranks, around.ranks_per_node) - 1
        yield Above(name="all-to-all connections", low=0, high=peers * 480 * MIB, source=_ALL_TO_ALL)


def _up(nbytes: int) -> int:
    return -(-nbytes // SEGMENT) * SEGMENT
