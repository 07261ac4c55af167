"""DeepSpeed's stages 1 and 2: whole parameters in one flat buffer, a partition of everything else, gradients through a bucket.

The bucket is as large as its setting says, however small the model, and is there from a backward's first gradient to its end. A
gradient is copied into it and freed; when it is full it is reduced, in a copy where it holds parts of more than one rank, and what
belongs to this rank goes to a buffer of its own. Stage 1 keeps whole gradients until the last backward of a step is over, then does
the same, in the order of registration. At the step the partition's gradients are copied twice: side by side, and to fp32. The
forecast is for the rank whose own gradients are reduced first: the last one, at stage 1 the first. Source: DeepSpeed 0.19.8,
deepspeed/runtime/zero/stage_1_and_2.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.forecasting.engines.optimizers import step_temporaries
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.tape import Entry, Tape

ALIGNMENT = 2
"""Partitions begin at multiples of four bytes."""
NORM_NBYTES = 8
"""Norms are computed in fp64, a gradient at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How DeepSpeed is used.

    Args:
        knobs: its settings.
        ranks: N.
        weights: all parameters, in the order of registration.
        moments_nbytes: bytes of the optimizer's state for an element; ``counter_nbytes`` for each tensor that it steps on.
        kernel: of torch's optimizer.
        accumulate: micro-batches of a step.
        on_cuda: collectives work in place; gloo's all-gather has its output twice.
    """

    knobs: Knobs
    ranks: int
    weights: Sequence[Weight]
    moments_nbytes: float = 8
    counter_nbytes: int = 4
    kernel: str = "fused"
    accumulate: int = 1
    on_cuda: bool = False

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.trainable]

    @property
    def keeps_optimizer(self) -> bool:
        """Masters and moments are on the device."""
        return self.knobs.offload_optimizer == "none"

    @property
    def master_nbytes(self) -> int:
        return 2 if self.knobs.narrow_master else 4

    @property
    def width(self) -> int:
        """Bytes of an element of the model."""
        return DTYPE_NBYTES[self.knobs.dtype]


class Partitioned:
    """What all stages do alike: a partition of masters and moments, and the optimizer's step."""

    def __init__(self, tape: Tape, setup: Setup, partition: int, *, steady: bool) -> None:
        self._tape, self._setup, self._partition, self._steady = tape, setup, partition, steady
        self._moments = int(partition * setup.moments_nbytes) + setup.counter_nbytes

    def enter_forward(self, unit: str) -> None:
        """Whatever has to be done is done weight by weight."""

    def leave_forward(self, unit: str) -> None:
        """As in :meth:`enter_forward`."""

    def enter_backward(self, unit: str) -> None:
        """As in :meth:`enter_forward`."""

    def back_in_root(self) -> None:
        """As in :meth:`enter_forward`."""

    def _take_optimizer(self) -> None:
        if self._setup.keeps_optimizer:
            self._tape.take(Account.MASTER, self._partition * self._setup.master_nbytes, "fp32 partition")
            if self._steady:
                self._tape.take(Account.MOMENT, self._moments, "moments")

    def _optimizer_steps(self) -> None:
        if not self._setup.keeps_optimizer:
            return
        if not self._steady:
            self._tape.take(Account.MOMENT, self._moments, "moments")
        nbytes = step_temporaries(self._setup.kernel, [self._partition * self._setup.master_nbytes])
        self._briefly(Account.WORKSPACE, nbytes, f"temporaries of a {self._setup.kernel} optimizer")

    def _briefly(self, account: Account, nbytes: int, label: str) -> None:
        self._tape.give(self._tape.take(account, nbytes, label))


class DeepSpeed(Partitioned):
    """Stages 1 and 2. See the file's header."""

    def __init__(self, tape: Tape, setup: Setup, *, steady: bool = True) -> None:
        numel = sum(weight.numel for weight in setup.trained)
        unit = ALIGNMENT * setup.ranks
        padded = -(-numel // unit) * unit
        super().__init__(tape, setup, padded // setup.ranks, steady=steady)
        self._padded, self._knobs = padded, setup.knobs
        self._width, self._grad_width = setup.width, DTYPE_NBYTES[setup.knobs.grad_accum_dtype]
        self._compact = setup.knobs.grad_accum_dtype != setup.knobs.dtype
        self._rank = 0 if setup.knobs.stage < 2 and not setup.knobs.overlap_comm else setup.ranks - 1
        self._owners = _owners(setup.trained, self._partition)
        self._mine = sum(weight.numel for weight in setup.trained if self._rank in self._owners[weight.name])
        self._micro_batch = 0
        self._buckets: list[Entry] = []
        self._filled: list[Weight] = []
        self._apart: list[Value] = []  # gradients that are in no bucket until they are reduced
        self._whole: dict[str, Value] = {}  # of stage 1
        self._reduced: Entry | None = None
        self._added: Entry | None = None
        tape.at("between", "")
        frozen = sum(weight.numel for weight in setup.weights if not weight.trainable)
        tape.take(Account.PARAM, (padded + frozen) * self._width, "flat parameters")
        self._take_optimizer()
        if not setup.keeps_optimizer:
            tape.take(Account.COMM, max((each.numel for each in setup.trained), default=0) * self._width, "gradient on its way to the host")

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def land(self, weight: Weight, gradient: Value) -> None:
        """Into the bucket; at stage 1 it waits for the end of the last backward."""
        self._set_up_buckets()
        if self._knobs.stage >= 2 or self._knobs.overlap_comm:
            self._put(weight, gradient)
        else:
            self._whole.setdefault(weight.name, gradient)

    def end_backward(self) -> None:
        """Reduce what is in the bucket; at stage 1 everything, in the order of registration."""
        self._micro_batch += 1
        last = self._micro_batch == self._setup.accumulate
        if self._knobs.stage < 2 and not last:
            return
        for weight in self._setup.trained:
            if weight.name in self._whole:
                self._put(weight, self._whole.pop(weight.name))
        self._reduce()
        for bucket in self._buckets:
            self._tape.give(bucket)
        self._buckets = []
        if self._compact:
            return
        if self._added is None:
            self._added, self._reduced = self._reduced, None
        elif self._reduced is not None:
            self._tape.give(self._reduced)
            self._reduced = None

    def _set_up_buckets(self) -> None:
        if not self._buckets and self._knobs.contiguous_gradients:
            width = self._grad_width if self._knobs.stage < 2 else self._width
            nbytes = self._knobs.reduce_bucket_size * width
            self._buckets = [self._tape.take(Account.COMM, nbytes, "ipg bucket") for _ in range(1 + self._knobs.overlap_comm)]

    def _put(self, weight: Weight, gradient: Value) -> None:
        size = self._knobs.reduce_bucket_size
        if sum(each.numel for each in self._filled) + weight.numel > size:
            self._reduce()
        if weight.numel > size or not self._knobs.contiguous_gradients:
            self._apart.append(gradient)
        self._filled.append(weight)

    def _reduce(self) -> None:
        if not self._filled:
            return
        self._send([weight.numel * self._width for weight in self._filled])
        if any(self._rank in self._owners[weight.name] for weight in self._filled):
            self._have_reduced()
        self._filled, self._apart = [], []

    def _send(self, nbytes: Sequence[int]) -> None:
        """One all-reduce of a bucket's parts, side by side in a copy where there are several; in its own type for the way."""
        knobs, total = self._knobs, sum(nbytes)
        owners = [owner for weight in self._filled for owner in self._owners[weight.name]]
        several = knobs.reduce_scatter and knobs.multi_rank_buckets and len(set(owners)) > 1
        copies = [total] if several or not knobs.contiguous_gradients else []
        if knobs.communication_dtype != knobs.dtype:
            copies.append(total // self._width * DTYPE_NBYTES[knobs.communication_dtype])
        taken = [self._tape.take(Account.COMM, each, "bucket on its way") for each in copies]
        for entry in taken:
            self._tape.give(entry)

    def _have_reduced(self) -> None:
        if self._reduced is None and self._setup.keeps_optimizer:
            numel, width = (self._partition, self._grad_width) if self._compact else (self._mine, self._width)
            self._reduced = self._tape.take(Account.GRAD, numel * width, "gradients of the partition")

    # ---- step ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The norm, the partition's gradients side by side and in fp32, the optimizer, and the new parameters for everybody."""
        self._micro_batch = 0
        mine = [weight.numel for weight in self._setup.trained if self._rank in self._owners[weight.name]]
        self._briefly(Account.WORKSPACE, max(mine, default=0) * NORM_NBYTES, "gradient in fp64 for the norm")
        if self._setup.keeps_optimizer:
            self._step_on_partition()
        gathered = 0 if self._setup.on_cuda or self._setup.ranks == 1 else self._padded * self._width
        self._briefly(Account.COMM, gathered, "all-gather of the parameters")

    def _step_on_partition(self) -> None:
        tape, wide = self._tape, self._setup.master_nbytes
        flat = None
        if self._grad_width != wide and not self._compact:
            flat = tape.take(Account.WORKSPACE, self._partition * self._grad_width, "gradients side by side")
        copied = None if self._compact and self._grad_width == wide else tape.take(Account.GRAD, self._partition * wide, "fp32 gradients")
        for entry in (flat, self._added, *((self._reduced,) if copied is not None else ())):
            if entry is not None:
                tape.give(entry)
        self._optimizer_steps()
        for entry in (copied, *((self._reduced,) if copied is None else ())):
            if entry is not None:
                tape.give(entry)
        self._added = self._reduced = None


def _owners(weights: Sequence[Weight], partition: int) -> Mapping[str, frozenset[int]]:
    """The ranks in whose partitions some of each parameter lies."""
    found: dict[str, frozenset[int]] = {}
    begin = 0
    for weight in weights:
        end = begin + weight.numel
        found[weight.name] = frozenset((begin // partition, max(begin, end - 1) // partition))
        begin = end
    return found
