"""FSDP2 and DDP on fake tensors beside themselves on real ones: the same loop, on two ranks, to the byte.

What a real run holds and a simulated one doesn't: DeviceMesh's table of ranks, four bytes for each. It is a real tensor in both.
"""

import gc
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fsdp2_tracker import Llama, Setting, in_its_own_process
from benchmarks.models import GPT, GPTConfig
from shardbook.config import Offload, Precision, Recompute, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.ledger.measurement import Measurement
from shardbook.ledger.memory import REAL
from shardbook.simulation.memory import FakeMemory
from shardbook.simulation.observe import take_step
from shardbook.simulation.peers import Ddp, Fsdp2
from shardbook.simulation.peers_pieces import FewPieces
from shardbook.simulation.peers_shapes import ShapesOnly
from shardbook.simulation.peers_staging import staged
from shardbook.simulation.trainers import usual_loss
from shardbook.simulation.workspaces import on_cpu
from tests import ranks

NUM_RANKS, SECONDS = 2, 300.0
ROWS, SEQUENCE, VOCABULARY, WIDTH = 4, 64, 4095, 48  # logits are largest, away from reductions; rows of two ranks differ in number
LOGITS_NBYTES = ROWS * SEQUENCE * VOCABULARY * 4
MESH_NBYTES = 4 * NUM_RANKS
HELD = ("PARAM", "MASTER", "MOMENT", "GRAD", "GRAD_FULL", "GATHERED", "BUFFER")
KINDS = {"fsdp2": Fsdp2, "ddp": Ddp}


@dataclass(frozen=True, kw_only=True)
class Case:
    engine: str
    stage: int
    precision: str = "fp32"
    accumulate: int = 1
    clip: float | None = None
    kernel: str = "fused"
    buffers: bool = False
    views: bool = True

    @property
    def config(self):
        precision = Precision.preset(self.precision)
        return ZeroConfig(stage=self.stage, precision=precision, accumulate=self.accumulate, clip_grad_norm=self.clip)


CASES = [
    Case(engine="fsdp2", stage=3, precision="bf16", accumulate=2, clip=1.0),
    Case(engine="ddp", stage=0),
    Case(engine="ddp", stage=0, precision="bf16", accumulate=2, clip=1.0, kernel="foreach"),
]
MORE = [
    Case(engine="fsdp2", stage=2, precision="bf16", kernel="for-loop"),
    Case(engine="ddp", stage=0, precision="pure-bf16", buffers=True),
    Case(engine="fsdp2", stage=3),
    Case(engine="fsdp2", stage=3, precision="pure-bf16", kernel="foreach"),
    Case(engine="ddp", stage=0, precision="bf16", views=False),
]


class Counting(nn.Module):
    """A model with a buffer, which DDP sends around before each forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(1000))

    def forward(self, *batch):
        self.seen.add_(1)
        return self.model(*batch)


def build(case):
    model = GPT(GPTConfig(layers=2, width=WIDTH, heads=3, vocab=VOCABULARY, sequence=SEQUENCE))
    return Counting(model) if case.buffers else model


def trainer_of(case):
    def optimizer(parameters):
        return torch.optim.AdamW(parameters, fused=case.kernel == "fused", foreach=case.kernel == "foreach")

    how = {} if case.views else {"bucket_views": False}
    return KINDS[case.engine](build(case), optimizer, case.config, usual_loss, **how)


@dataclass(frozen=True, kw_only=True)
class Told:
    """By step: what is held after it; (bytes, phase, unit) at its peak. And the accounts and the operator at the highest."""

    held: list[dict[str, int]]
    peaks: list[tuple[int, str, str]]
    books: dict[str, int]
    operator: str


def take_steps(case, memory):
    """Three of them. The measurement begins before anything is built: DDP's first buckets are in no Python object, so it could not find
    them later.
    """
    gc.collect()
    held, run = [], Measurement(None, None, mode="full", memory=memory)
    with run:
        trainer = trainer_of(case)
        for _ in range(3):
            take_step(trainer, batch, case.accumulate)
            balances = Counter({str(account): nbytes for (account, _), nbytes in run.ledger.balances().items()})
            held.append({name: balances[name] for name in HELD})
    trainer.close()
    part = run.part()
    return Told(
        held=held,
        peaks=[(step.peak_allocated, step.phase, step.unit) for step in part.steps],
        books={name: nbytes for name, nbytes in part.reconciliation.books.items() if nbytes},
        operator=part.reconciliation.operator,
    )


def batch():
    return torch.zeros(ROWS, SEQUENCE, dtype=torch.long), torch.zeros(ROWS, SEQUENCE, dtype=torch.long)


def real(case):
    return take_steps(case, REAL)


def simulated(case):
    mode = FakeTensorMode()
    inside = (lambda *ran: on_cpu(*ran) + staged(*ran[:2])) if case.engine == "fsdp2" else on_cpu
    with ShapesOnly() as shapes, mode, FakeMemory(mode, inside, lambda: shapes.is_on) as memory:
        return take_steps(case, memory)


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=str)
def test_equal_to_a_real_run_to_the_byte(case):
    both = ranks.call(NUM_RANKS, real, case, seconds=SECONDS)
    fakes = [ranks.fake_rank(NUM_RANKS, simulated, case, rank=rank, seconds=SECONDS) for rank in range(NUM_RANKS)]
    mesh = MESH_NBYTES if case.engine == "fsdp2" else 0
    for told, fake in zip(both, fakes, strict=True):
        assert fake.held == told.held
        assert [(nbytes + mesh, *place) for nbytes, *place in fake.peaks] == told.peaks
        assert Counter(fake.books) + Counter(WORKSPACE=mesh) == Counter(told.books)
        assert fake.operator == told.operator
        assert len(fake.peaks) == 3
        assert fake.peaks[0][0] > LOGITS_NBYTES


# ---- what is sent, and when ------------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """(operator, elements of what it sends) in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.found.append((func.__name__.split(".")[0], first.numel(), str(first.dtype)))
        return func(*args, **(kwargs or {}))


def what_is_sent(case, *, fake):
    """In each of three steps."""
    mode, sent = FakeTensorMode(), []
    with mode if fake else nullcontext():
        trainer = trainer_of(case)
        for _ in range(3):
            with Sent() as seen:
                take_step(trainer, one_token, case.accumulate)
            sent.append(seen.found)
    return sent


@pytest.mark.ranks
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_sends_what_a_real_run_sends(case):
    """DDP's buckets are dealt out anew in the second step, in the order in which gradients arrive: that is in what it sends."""
    real = ranks.call(NUM_RANKS, what_is_sent, case, fake=False)[0]
    assert ranks.fake_rank(NUM_RANKS, what_is_sent, case, fake=True) == real
    reductions = [sum(name in ("allreduce_", "_reduce_scatter_base_") for name, *_ in step) for step in real]
    if case.engine == "fsdp2":
        assert reductions == [case.accumulate * 3] * 3  # two blocks and the root
    else:
        assert real[0] != real[1] != real[2] or case.precision == "pure-bf16"


# ---- shapes that nobody has --------------------------------------------------------------------------------------------------------

MANY = 64


def steps_from_cold(knows_shapes):
    """Bytes at the peaks of the first three steps of one of many ranks, and the bytes of its whole model."""
    mode = FakeTensorMode()
    with ShapesOnly() as shapes, mode, FakeMemory(mode, on_cpu, lambda: knows_shapes and shapes.is_on) as memory:
        model = GPT(GPTConfig(layers=8, width=64, heads=1, vocab=64, sequence=64))
        nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
        trainer = Fsdp2(model, lambda parameters: torch.optim.AdamW(parameters, foreach=True), ZeroConfig(), usual_loss)
        run = Measurement(trainer.model, trainer.optimizer, mode="full", memory=memory)
        with run:
            for _ in range(3):
                take_step(trainer, one_token, 1)
    return [step.peak_allocated for step in run.part().steps], nbytes


def one_token():
    return torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)


@pytest.mark.full
def test_a_cold_start_counts_no_shapes():
    """In the first step moments aren't there when activations are; in no step is anything there that is as large as the model."""
    (right, whole), (wrong, _) = (ranks.fake_rank(MANY, steps_from_cold, knows, seconds=SECONDS) for knows in (True, False))
    assert right[1:] == wrong[1:]  # shapes are found out once
    assert right[0] < right[1] == right[2] < whole
    assert wrong[0] > 3 * whole


def test_the_lock_around_shapes_is_put_back():
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = ShardingPropagator._fake_mode_lock
    with ShapesOnly() as shapes, ShapesOnly() as inner:
        with ShardingPropagator._fake_mode_lock:
            assert shapes.is_on
            assert inner.is_on
        assert not shapes.is_on
    assert ShardingPropagator._fake_mode_lock is before


def shards_of(all_pieces):
    """Shapes of what a rank of many holds, some of it without an element, and what its first steps take."""
    if all_pieces:
        FewPieces.__torch_function__ = lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
    mode = FakeTensorMode()
    with ShapesOnly() as shapes, mode, FakeMemory(mode, on_cpu, lambda: shapes.is_on) as memory:
        told = take_steps(CASES[0], memory)
        model = trainer_of(CASES[0]).model
        local = [tuple(parameter._local_tensor.shape) for parameter in model.parameters()]
    return told, local, [state.sharded_size for state in states_of(model)]


def states_of(model):
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


@pytest.mark.parametrize("rank", [0, pytest.param(40, marks=pytest.mark.full), 99])
def test_pieces_that_nobody_looks_at_change_nothing(rank):
    few, every = (ranks.fake_rank(100, shards_of, all_pieces, rank=rank, seconds=SECONDS) for all_pieces in (False, True))
    assert few == every
    assert few[1][0][0] == {0: 41, 40: 41, 99: 36}[rank]  # of 4,095 rows of the embedding
    assert any(0 in shape for shape in few[1]) == (rank > 47)  # 48 rows are not enough for all


# ---- beside torch's own tracker ----------------------------------------------------------------------------------------------------

LLAMA = {"ranks": 16, "layers": 3, "hidden": 96, "heads": 4, "kv_heads": 2, "ffn": 208, "vocab": 777, "sequence": 192}
TABLES_NBYTES = 2 * LLAMA["sequence"] * (LLAMA["hidden"] // LLAMA["heads"] // 2) * 4  # of rotations; the tracker is told of tokens alone


def peaks_of_llama(setting):
    """Of two steps of the tracker's own model; logits are held until the step is over, as its loop does."""
    mode, held = FakeTensorMode(), {}

    def given():
        half = setting.hidden // setting.heads // 2
        held["tokens"] = torch.zeros(setting.micro_batch, setting.sequence, dtype=torch.long)
        return held["tokens"], *(torch.ones(setting.sequence, 1, half) for _ in range(2))

    def loss(logits):
        held["logits"] = logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), held["tokens"].flatten()), None

    config = ZeroConfig(stage=3 if setting.reshard else 2, precision=Precision.preset("bf16"))
    with ShapesOnly() as shapes, mode, FakeMemory(mode, lambda *_: 0, lambda: shapes.is_on) as memory:
        trainer = Fsdp2(Llama(setting), lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True), config, loss)
        run = Measurement(trainer.model, trainer.optimizer, mode="full", memory=memory)
        with run:
            for _ in range(2):
                take_step(trainer, given, 1)
                held.clear()
    return [step.peak_allocated for step in run.part().steps]


@pytest.mark.ranks
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.full)])
def test_equal_to_the_tracker_of_fsdp2(reshard):
    setting = Setting(**LLAMA, reshard=reshard)
    _, later = ranks.fake_rank(setting.ranks, peaks_of_llama, setting, seconds=SECONDS)
    assert later == in_its_own_process(setting).nbytes + TABLES_NBYTES


# ---- what they can't be told -------------------------------------------------------------------------------------------------------

REFUSED = [
    (Fsdp2, ZeroConfig(stage=1), "ZeroConfig.stage = 1: allowed is 2 or 3 with fsdp2; choose another engine or stage"),
    (Ddp, ZeroConfig(stage=3), "ZeroConfig.stage = 3: allowed is 0 with ddp; choose another engine or stage"),
    (Fsdp2, ZeroConfig(precision=Precision.preset("2+2+4+8")), "ZeroConfig.precision.grad = 'bf16': allowed is 'fp32'"),
    (Fsdp2, ZeroConfig(precision=Precision(param="bf16", keep_param_shard=True)), "ZeroConfig.precision.keep_param_shard = True"),
    (Fsdp2, ZeroConfig(precision=Precision(keep={"norm*": "fp32"})), "ZeroConfig.precision.keep = {'norm*': 'fp32'}"),
    (Fsdp2, ZeroConfig(recompute=Recompute(policy="full")), "ZeroConfig.recompute.policy = 'full'"),
    (Fsdp2, ZeroConfig(offload=Offload(params="host")), "ZeroConfig.offload.params = 'host'"),
    (
        Ddp,
        ZeroConfig(stage=0, precision=Precision(param="bf16", reduce="bf16", grad="fp32")),
        "ZeroConfig.precision.reduce = 'bf16': allowed is 'fp32'",
    ),
]


@pytest.mark.parametrize(("engine", "config", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_told_is_refused_by_name(engine, config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine(nn.Linear(2, 2), torch.optim.SGD, config, usual_loss)
