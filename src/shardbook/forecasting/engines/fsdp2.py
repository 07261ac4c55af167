"""FSDP2 (``torch.distributed.fsdp.fully_shard``) on each block and the root: its rules of residence.

Read from ``torch/distributed/fsdp/_fully_shard`` of torch 2.13 and held against torch's own ``FSDPMemTracker``. A gather needs the
collective's output and the parameters' own memory at once; the output of the unit before is freed behind the next one's copy in
forward, and at once in backward. Gradients stay in the type autograd made them in until their block's backward is over; the input of
the reduce-scatter, in the reduce type, stays until the next block's. The root is kept from forward to backward. Collectives have
streams of their own, hence pools of their own in a caching allocator.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.config import Precision
from shardbook.facts.model import UnitParameters
from shardbook.forecasting.engines.optimizers import step_temporaries
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.tape import Entry, Tape

ROOT = "root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP2 was called.

    Args:
        ranks: N.
        precision: ``param`` and ``reduce`` are the MixedPrecisionPolicy's, ``master_dtype`` is what the shards are kept in.
        reshard: whether blocks are freed between forward and backward.
        moments_nbytes: bytes of the optimizer's state for an element.
        kernel: of torch's optimizer.
    """

    ranks: int
    precision: Precision
    reshard: bool = True
    moments_nbytes: float = 8
    kernel: str = "fused"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one unit. Each parameter's rows are padded to a multiple of N, so a shard may be longer than 1/N."""

    full: int  # elements of all parameters
    padded: int  # N times the shard
    trained: int
    trained_padded: int


class Fsdp2:
    """See the file's header. ``units``: the blocks' parameters by unit; what is in none is the root's."""

    def __init__(self, tape: Tape, units: Mapping[str, UnitParameters], how: Sharding, *, steady: bool = True) -> None:
        self._tape, self._how, self._steady = tape, how, steady
        precision = how.precision
        self._param, self._reduce, self._kept = (DTYPE_NBYTES[each] for each in (precision.param, precision.reduce, precision.master_dtype))
        self._sizes = {name: _sizes(unit, how.ranks) for name, unit in units.items()}
        self._order = [name for name in units if name != ROOT]
        self._full: dict[str, Entry] = {}
        self._arrived: dict[str, Entry] = {}  # outputs of all-gathers that are still there
        self._landed: dict[str, list[Value]] = {}
        self._shards: dict[str, Entry] = {}
        self._scattered: Entry | None = None
        self._block = ""
        tape.at("between", "")
        numel = sum(size.padded for size in self._sizes.values()) // how.ranks
        trained = sum(size.trained_padded for size in self._sizes.values()) // how.ranks
        tape.take(Account.PARAM, numel * self._kept, "shards")
        self._moments = int(trained * how.moments_nbytes)
        if steady:
            tape.take(Account.MOMENT, self._moments, "moments")

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: str) -> None:
        """Gather, copy out, and free what the unit before had arrived in."""
        if unit in self._full:
            return
        before = dict(self._arrived)
        self._gather(unit)
        self._copy_out(unit)
        for name, entry in before.items():
            self._tape.give(entry)
            del self._arrived[name]

    def leave_forward(self, unit: str) -> None:
        """Blocks are freed, unless they are kept; the root stays to the end of backward."""
        if unit == ROOT:
            self._drop_arrived()
        elif self._how.reshard:
            self._tape.give(self._full.pop(unit))

    def enter_backward(self, unit: str) -> None:
        """Finish the block before; have this one here; fetch the next."""
        if unit == ROOT:
            if self._how.reshard and self._order:
                self._gather(self._order[-1])
            return
        self._finish_block()
        self._block = unit
        if unit not in self._full:
            if unit not in self._arrived:
                self._gather(unit)
            self._copy_out(unit)
            self._tape.give(self._arrived.pop(unit))
        position = self._order.index(unit)
        if self._how.reshard and position and self._order[position - 1] not in self._full:
            self._gather(self._order[position - 1])

    def back_in_root(self) -> None:
        """What follows is the root's own."""
        self._finish_block()

    def _gather(self, unit: str) -> None:
        size = self._sizes[unit]
        cast = self._param != self._kept
        own = (
            self._tape.take(Account.COMM, size.padded // self._how.ranks * self._param, f"cast shard of {unit}", pool="gather")
            if cast
            else None
        )
        self._arrived[unit] = self._tape.take(Account.COMM, size.padded * self._param, f"all-gather of {unit}", pool="gather")
        if own is not None:
            self._tape.give(own)

    def _copy_out(self, unit: str) -> None:
        self._full[unit] = self._tape.take(Account.GATHERED, self._sizes[unit].full * self._param, f"parameters of {unit}")

    def _drop_arrived(self) -> None:
        for entry in self._arrived.values():
            self._tape.give(entry)
        self._arrived = {}

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def land(self, weight: Weight, gradient: Value) -> None:
        """A gradient waits for the end of its unit's backward."""
        self._landed.setdefault(weight.unit if weight.unit in self._sizes else ROOT, []).append(gradient)

    def end_backward(self) -> None:
        """The last block, then the root."""
        self._finish_block()
        self._drop_arrived()
        self._reduce_scatter(ROOT)
        if self._scattered is not None:
            self._tape.give(self._scattered)
            self._scattered = None

    def _finish_block(self) -> None:
        block, self._block = self._block, ""
        if block:
            self._reduce_scatter(block)

    def _reduce_scatter(self, unit: str) -> None:
        """Free the parameters and the input of the reduction before, copy the gradients into a new one, and keep what comes back."""
        if unit in self._full:
            self._tape.give(self._full.pop(unit))
        size = self._sizes[unit]
        if not size.trained:
            return
        if self._scattered is not None:
            self._tape.give(self._scattered)
        nbytes = size.trained_padded * self._reduce
        self._scattered = self._tape.take(Account.COMM, nbytes, f"reduce-scatter of {unit}", pool="reduce")
        self._landed.pop(unit, None)
        shard = self._tape.take(Account.GRAD, nbytes // self._how.ranks, f"reduced gradients of {unit}", pool="reduce")
        if unit in self._shards:
            self._tape.give(shard)  # added to what the micro-batches before have left
        else:
            self._shards[unit] = shard

    # ---- step ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The optimizer steps on the shards, and the gradients go."""
        if not self._steady:
            self._tape.take(Account.MOMENT, self._moments, "moments")
        shards = [size.trained_padded // self._how.ranks * self._kept for size in self._sizes.values()]
        nbytes = step_temporaries(self._how.kernel, shards)
        self._tape.give(self._tape.take(Account.WORKSPACE, nbytes, f"temporaries of a {self._how.kernel} optimizer"))
        for entry in self._shards.values():
            self._tape.give(entry)
        self._shards = {}


def _sizes(unit: UnitParameters, ranks: int) -> _Sizes:
    padded = [(_padded(parameter.shape, ranks), parameter) for parameter in unit.parameters]
    return _Sizes(
        full=unit.numel,
        padded=sum(numel for numel, _ in padded),
        trained=sum(parameter.numel for parameter in unit.parameters if parameter.trainable),
        trained_padded=sum(numel for numel, parameter in padded if parameter.trainable),
    )


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Elements when the first dimension is cut into N equal parts, the last padded."""
    rows, columns = (shape[0], 1) if shape else (1, 1)
    for extent in shape[1:]:
        columns *= extent
    return -(-rows // ranks) * ranks * columns
