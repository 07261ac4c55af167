"""One flat buffer under a configuration: how many elements lie where, and how many bytes each costs in which role.

The arithmetic of `docs/how-it-works.md`, written a second time and on purpose without the engine's code, so that the two can be
held against each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardbook.checks import DTYPE_NBYTES
from shardbook.config import Precision, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.structure import ELEMENT_NBYTES, FlatFacts, GroupFacts

ALIGNMENT = 64
"""Elements. Each parameter starts, and each shard is cut, at a multiple of it."""


def shard_numel(numels: tuple[int, ...], num_ranks: int, header_numel: int = 0) -> int:
    """Elements of one rank's shard, padding included: s = 64 · ⌈(Σ 64⌈n/64⌉ + h) / 64N⌉, for parameters of n elements each.

    >>> shard_numel((100, 10), num_ranks=2)
    128
    """
    used = sum(_up(numel, ALIGNMENT) for numel in numels) + header_numel
    return _up(used, ALIGNMENT * num_ranks) // num_ranks


def piece_numels(numels: tuple[int, ...], first: int, end: int) -> Iterator[int]:
    """Elements of each parameter that lie between elements ``first`` and ``end`` of the buffer; parameters with none are left out.

    >>> list(piece_numels((100, 10), first=64, end=192))
    [36, 10]
    """
    offset = 0
    for numel in numels:
        inside = min(end, offset + numel) - max(first, offset)
        if inside > 0:
            yield inside
        offset += _up(numel, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class FlatForm:
    """Elements (``*_numel``) and bytes of one element (``*_nbytes``) of a flat buffer on one rank."""

    trainable: bool
    full_numel: int  # all shards, padding included: N·s
    shard_numel: int  # s
    real_numel: int  # elements of parameters in the whole buffer
    own_numel: int  # elements of parameters in this rank's shard; the last ranks may have fewer, or none
    pieces: tuple[int, ...]  # elements of each piece that this rank's optimizer steps on
    param_nbytes: int
    grad_nbytes: int  # reduced, waiting for the step
    wire_nbytes: int  # unreduced, and as it is received
    master_nbytes: int  # 0 where the parameters are their own master; an optimizer that is offloaded always has a copy of its own

    @property
    def stepped_nbytes(self) -> int:
        """Of one element of what the optimizer steps on."""
        return self.master_nbytes or self.param_nbytes


def flat_form(flat: FlatFacts, config: ZeroConfig, group: GroupFacts) -> FlatForm:
    """The form of one flat buffer.

    Raises:
        ConfigError: the buffer is under the policy and has another type than it.
    """
    precision = config.precision
    if not flat.kept and flat.param != precision.param:
        raise ConfigError(
            f"FlatFacts.param = {flat.param!r}: allowed is {precision.param!r}, which Precision.param says; "
            f"write kept=True for parameters that stay out of the policy"
        )
    shard = shard_numel(flat.numels, group.num_ranks, group.header_numel)
    first = group.rank * shard
    own = tuple(piece_numels(flat.numels, first, first + shard))
    stepped = own if config.stage else tuple(numel for numel in flat.numels if numel)
    grad, wire, master = _gradient_types(flat, config, group) if flat.trainable else ("", "", "")
    return FlatForm(
        trainable=flat.trainable,
        full_numel=shard * group.num_ranks,
        shard_numel=shard,
        real_numel=sum(flat.numels),
        own_numel=sum(own),
        pieces=stepped if flat.trainable else (),
        param_nbytes=ELEMENT_NBYTES[flat.param],
        grad_nbytes=DTYPE_NBYTES.get(grad, 0),
        wire_nbytes=DTYPE_NBYTES.get(wire, 0),
        master_nbytes=DTYPE_NBYTES.get(master, 0),
    )


def adds_locally(config: ZeroConfig) -> bool:
    """Whether a rank adds several micro-batches itself before it reduces: stages 0 and 1 with accumulation."""
    return config.stage <= 1 and config.accumulate > 1


def _gradient_types(flat: FlatFacts, config: ZeroConfig, group: GroupFacts) -> tuple[str, str, str]:
    """Types of the reduced gradient, of the unreduced one, and of the master ("" where there is none)."""
    precision: Precision = config.precision
    reduce, grad = precision.reduce, precision.grad_dtype
    if flat.kept:  # never added or kept waiting in a narrower type than its own
        reduce, grad = _wider(reduce, flat.param), _wider(grad, flat.param)
    wire = flat.param if group.ordered or group.num_ranks == 1 else reduce
    if adds_locally(config):
        wire = _wider(reduce, grad)
    master = precision.master or ""
    own = flat.param if config.offload.optimizer != "none" else ""
    return grad, wire, master if DTYPE_NBYTES.get(master, 0) > DTYPE_NBYTES[flat.param] else own


def _wider(one: str, other: str) -> str:
    """The type that holds every value of both."""
    if {one, other} == {"bf16", "fp16"}:
        return "fp32"
    return max(one, other, key=DTYPE_NBYTES.__getitem__)


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
