"""What other engines hold, recognised on real ranks: bytes of each account against figures worked out by hand.

The model is Linear(6, 10), ReLU, Linear(10, 5): 60 + 10 + 50 + 5 = 125 parameters. FSDP2 cuts each along its first dimension and pads
the shards to equal length: on two ranks 30 + 5 + 30 + 3 elements, of which rank 1 has 30 + 5 + 20 + 2 in use.
"""

import importlib.util
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import shardbook as sb
from benchmarks import engines
from shardbook.accounts import Account
from shardbook.ledger.ledger import Ledger
from shardbook.ledger.peer_operators import OPERATORS, STAGED, places_of
from shardbook.ledger.peers import engine_of, holdings
from shardbook.ledger.peers_naming import unit_of
from tests import ranks

NUMEL = 125
FP32 = 4
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make peers")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def totals(model, optimizer) -> dict[str, int]:
    """Bytes by account; a storage that comes twice is a mistake."""
    held = list(holdings(model, optimizer))
    keys = [holding.tensor.untyped_storage()._cdata for holding in held]
    assert len(keys) == len(set(keys))
    sums: Counter[str] = Counter()
    for holding in held:
        sums[holding.account] += holding.tensor.untyped_storage().nbytes()
    return dict(sums)


# ---- one process ------------------------------------------------------------------------------------------------------------


def test_a_plain_loop():
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 5))
    optimizer = adamw(model)
    param = (NUMEL + 20) * FP32
    buffer = 2 * 10 * FP32 + 8  # running mean and variance, and a counter
    assert engine_of(model, optimizer) == "plain"
    assert totals(model, optimizer) == {"PARAM": param, "BUFFER": buffer}
    model(torch.ones(3, 6)).sum().backward()
    assert totals(model, optimizer) == {"PARAM": param, "BUFFER": buffer, "GRAD": param}
    optimizer.step()
    assert totals(model, optimizer)["MOMENT"] == 2 * param + 6 * 4  # and a step count for each of six parameters
    assert totals(None, optimizer) == {"MASTER": param, "GRAD": param, "MOMENT": 2 * param + 6 * 4}


def test_names_and_units():
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5))
    optimizer = adamw(model)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    found = {(holding.account, holding.name): holding.unit for holding in holdings(model, optimizer)}
    assert found[Account.PARAM, "1.weight"] == "1"
    assert found[Account.MOMENT, "exp_avg of 0.bias"] == "0"
    assert unit_of("scale") == "root"


def test_shared_parameters_and_views_count_once_and_meta_not_at_all():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, device="meta"))
    model[1].weight = model[0].weight
    model.register_buffer("row", model[0].weight.detach()[0])
    assert totals(model, None) == {"PARAM": 64}


def test_a_master_that_is_not_the_models():
    model = build().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, fused=True)
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    expected = {"PARAM": NUMEL * 2, "MASTER": NUMEL * FP32, "MOMENT": 2 * NUMEL * FP32 + 4 * 4, "GRAD": NUMEL * FP32}
    assert totals(model, optimizer) == expected


def test_a_storage_without_memory_is_left_out():
    model = build()
    model[0].weight.untyped_storage().resize_(0)
    assert totals(model, None) == {"PARAM": (NUMEL - 60) * FP32}


def test_looking_keeps_nothing_alive():
    model = build()
    model(torch.ones(2, 6)).sum().backward()
    grads = [StorageWeakRef(parameter.grad.untyped_storage()) for parameter in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    assert "GRAD" in totals(model, None)
    half_way = holdings(model, None)
    next(half_way)
    del half_way
    model.zero_grad()
    assert all(reference.expired() for reference in grads)
    assert versions == [parameter._version for parameter in model.parameters()]


def test_wrappers_of_trainers_are_looked_through():
    class AcceleratedOptimizer:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = build()
    assert totals(None, AcceleratedOptimizer(adamw(model))) == {"MASTER": NUMEL * FP32}


# ---- DDP --------------------------------------------------------------------------------------------------------------------


def under_ddp(view: bool):
    wrapped = nn.parallel.DistributedDataParallel(build(), gradient_as_bucket_view=view)
    optimizer = adamw(wrapped)
    seen = []
    for _ in range(2):
        wrapped(torch.ones(3, 6)).sum().backward()
        grads = [holding.name for holding in holdings(wrapped, optimizer) if holding.account is Account.GRAD]
        seen.append((totals(wrapped, optimizer), len(grads)))
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(wrapped, optimizer), seen, totals(wrapped, optimizer)


@pytest.mark.ranks
@pytest.mark.parametrize("view", [True, False])
def test_ddp(view):
    for name, seen, after in ranks.call(2, under_ddp, view):
        param = NUMEL * FP32
        assert name == "ddp"
        num_grads = 1 if view else 4  # all are views of one bucket, or each has its own storage
        assert seen[0] == ({"PARAM": param, "GRAD": param}, num_grads)
        assert seen[1] == ({"PARAM": param, "MOMENT": 2 * param + 16, "GRAD": param}, num_grads)
        assert after == {"PARAM": param, "MOMENT": 2 * param + 16}


# ---- FSDP2 ------------------------------------------------------------------------------------------------------------------


def shard(*, reshard: bool, dtype: torch.dtype | None = None):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model, adamw(model)


def under_fsdp2(reshard: bool, dtype: torch.dtype | None = None):
    """Bytes by account as a step goes on, and in the middle of the second layer's forward."""
    model, optimizer = shard(reshard=reshard, dtype=dtype)
    seen = {"built": totals(model, optimizer)}
    model[2].register_forward_hook(lambda *_: seen.__setitem__("in forward", totals(model, optimizer)), prepend=True)
    output = model(torch.ones(3, 6))
    seen["forward"] = totals(model, optimizer)
    output.sum().backward()
    seen["backward"] = totals(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    seen["step"] = totals(model, optimizer)
    return engine_of(model, optimizer), seen


SHARD = (30 + 5 + 30 + 3) * FP32
USED = (SHARD, (30 + 5 + 20 + 2) * FP32)  # by rank; optimizer state is made for what is in use


@pytest.mark.ranks
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_fsdp2(reshard, dtype):
    itemsize = 2 if dtype else FP32
    first, second = 2 * (30 + 5) * itemsize, 2 * (30 + 3) * itemsize
    for rank, (name, seen) in enumerate(ranks.call(2, under_fsdp2, reshard, dtype)):
        assert name == "fsdp2"
        assert seen["built"] == {"PARAM": SHARD}
        gathered = second if reshard else first + second
        assert seen["in forward"] == {"PARAM": SHARD, "GATHERED": gathered, "COMM": second}  # what it was copied from is still there
        assert seen["forward"] == ({"PARAM": SHARD} if reshard else {"PARAM": SHARD, "GATHERED": gathered})
        assert seen["backward"] == {"PARAM": SHARD, "GRAD": SHARD}
        assert seen["step"] == {"PARAM": SHARD, "MOMENT": 2 * USED[rank] + 4 * 4}


def accumulating(dtype: torch.dtype | None):
    model, optimizer = shard(reshard=True, dtype=dtype)
    model.set_requires_gradient_sync(False)
    model(torch.ones(3, 6)).sum().backward()
    return totals(model, optimizer), sorted({holding.unit for holding in holdings(model, optimizer)})


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_fsdp2_gradients_that_wait_unreduced(dtype):
    for seen, units in ranks.call(2, accumulating, dtype):
        assert seen == {"PARAM": SHARD, "GRAD_FULL": NUMEL * FP32}  # in bf16 as well: added up in the type of reduction
        assert units == ["0", "2"]


class Seen(TorchDispatchMode):
    """Operators of the table, and the accounts of arguments that no holding claims."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.accounts: dict[str, set] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for place in places_of(str(func), "fsdp2"):
            given = result if place.argument == "result" else args[place.argument] if isinstance(place.argument, int) else kwargs["out"]
            assert any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(given)), (func, place)
            self.accounts.setdefault(".".join(str(func).split(".")[:2]), set()).add(place.account)
        return result


def operators_of_fsdp2():
    model, optimizer = shard(reshard=True)
    with Seen(model, optimizer) as mode:
        model(torch.ones(3, 6)).sum().backward()
    return mode.accounts


@pytest.mark.ranks
def test_the_operators_of_fsdp2_are_those_in_the_table():
    for accounts in ranks.call(2, operators_of_fsdp2):
        assert accounts == {
            "fsdp.all_gather_copy_in": {Account.COMM},
            "c10d._allgather_base_": {Account.COMM},
            "fsdp.split_with_sizes_copy": {Account.COMM, Account.GATHERED},
            "fsdp.chunk_cat": {Account.GRAD_FULL, Account.COMM},
            "c10d._reduce_scatter_base_": {Account.GRAD, Account.COMM},
        }


def staged_nbytes(numel: int):
    """Sizes of what is allocated, unseen by any mode, while rank 0's all-gather of ``numel`` elements runs."""
    from benchmarks.measure import AllocationRecords

    output, mine = torch.empty(numel), torch.empty(numel // 2)
    dist.barrier()
    with AllocationRecords() as records, records.span("gather"):
        dist.all_gather_single(output, mine)
    return records.peak("gather").nbytes, sorted(change.nbytes for change in records._changes if change.nbytes >= 4096)


@pytest.mark.ranks
def test_gloo_stages_an_all_gather_in_a_copy_of_its_output():
    assert STAGED == {"c10d._allgather_base_": 0}
    for ending in ranks.fresh_ranks(2, staged_nbytes, 1 << 16):
        assert ending.how == "value", ending.text
        peak, allocated = ending.value
        assert allocated[-1] == 4 << 16
        assert peak < 2 * (4 << 16)


def test_the_table_names_places_once():
    for name, places in OPERATORS.items():
        for engine in ("plain", "ddp", "fsdp2", "deepspeed 3"):
            arguments = [place.argument for place in places_of(f"{name}.default", engine)]
            assert len(arguments) == len(set(arguments)) == len({place.argument for place in places})
    assert places_of("aten.add.Tensor", "ddp") == ()


# ---- shardbook --------------------------------------------------------------------------------------------------------------


def under_shardbook(stage: int):
    model = build()
    optimizer = adamw(model)
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage))
    ledger = Ledger(engine)
    seen = []

    def compare():
        books = {account: nbytes for (account, _), nbytes in ledger.balances().items()}
        seen.append((totals(model, optimizer), totals(engine, optimizer), books))

    compare()
    model[2].register_forward_hook(lambda *_: compare())
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 6)).sum())
        compare()
        engine.step()
        compare()
    name = engine_of(model, optimizer), engine_of(engine, optimizer)
    ledger.close()
    engine.close()
    return name, seen


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shardbook_seen_from_outside_holds_what_it_books(stage):
    for names, seen in ranks.call(2, under_shardbook, stage):
        assert set(names) == {f"shardbook stage {stage}"}
        for by_model, by_engine, books in seen:
            assert by_model == by_engine == books


# ---- DeepSpeed --------------------------------------------------------------------------------------------------------------


def under_deepspeed(stage: int, dtype: str, numel: int | None):
    """As :func:`under_fsdp2`; ``numel``: elements of its buckets, None for its own default."""
    warnings.simplefilter("ignore")  # its own
    deepspeed = engines.import_deepspeed()
    options = {} if numel is None else {"reduce_bucket_size": numel, "allgather_bucket_size": numel}
    model = build()
    config = engines.deepspeed_config(f"deepspeed-{stage}", dtype, options)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    seen = {"built": totals(engine, optimizer)}
    inputs = torch.ones(3, 6, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    for _ in range(2):
        loss = engine(inputs).sum()
        seen["forward"] = totals(engine, optimizer)
        largest: Counter = Counter()

        class Watching(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                for account, nbytes in totals(engine, optimizer).items():
                    largest[account] = max(largest[account], nbytes)  # noqa: B023
                return result

        with Watching():
            engine.backward(loss)
        seen["in backward"] = dict(largest)
        engine.step()
        seen["step"] = totals(engine, optimizer)
    inner = totals(model, optimizer)
    buckets = {holding.name for holding in holdings(engine, None) if holding.account is Account.COMM}
    return engine_of(engine, optimizer), engine_of(model, optimizer), seen, inner, buckets


def deepspeed_values(*arguments):
    endings = ranks.fresh_ranks(2, under_deepspeed, *arguments)  # stage 3 changes torch for the whole process
    assert [ending.how for ending in endings] == ["value", "value"], endings[0].text or endings[1].text
    return [ending.value for ending in endings]


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_1_and_2(stage, dtype):
    padded, itemsize = 128, 2 if dtype == "bf16" else FP32  # 125 elements, to a multiple of 2 a rank
    for name, inner_name, seen, inner, _ in deepspeed_values(stage, dtype, 1000):
        assert (name, inner_name) == (f"deepspeed {stage}", f"deepspeed {stage}")
        rests = {"PARAM": padded * itemsize, "MASTER": padded // 2 * FP32}
        assert seen["built"] == rests
        rests["MOMENT"] = padded * FP32 + 4
        assert seen["forward"] == seen["step"] == inner == rests
        assert seen["in backward"]["COMM"] == 1000 * itemsize


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_3(dtype):
    shard, itemsize = 30 + 5 + 25 + 3, 2 if dtype == "bf16" else FP32
    for name, inner_name, seen, inner, buckets in deepspeed_values(3, dtype, 1000):
        assert (name, inner_name) == ("deepspeed 3", "deepspeed 3")
        rests = {"PARAM": shard * itemsize, "MASTER": shard * FP32, "GRAD": shard * itemsize, "COMM": 1000 * itemsize}
        assert seen["built"] == rests
        assert {account: seen["step"][account] for account in rests} == rests
        assert seen["step"]["MOMENT"] == 2 * shard * FP32 + 4
        assert inner == seen["step"]
        assert buckets == {"ipg bucket"}


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "dtype", "expected"), [(1, "fp32", 2_000_000_000), (2, "bf16", 1_000_000_000), (3, "bf16", 1_000_000_000)]
)
def test_the_default_bucket_is_the_one_or_two_gigabytes_that_it_is(stage, dtype, expected):
    for *_, seen, _, _ in deepspeed_values(stage, dtype, None):
        assert seen["in backward"]["COMM"] == expected
        assert seen["step"].get("COMM", 0) == (expected if stage == 3 else 0)


def steep_step(stage: int):
    """A step of SGD whose gradient is much longer than 1, under DeepSpeed and alone."""
    warnings.simplefilter("ignore")
    plain = build()
    (100 * plain(torch.ones(3, 6)).sum()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = engines.deepspeed_config(f"deepspeed-{stage}", "fp32", {"reduce_bucket_size": 1000})
    engine, *_ = engines.import_deepspeed().initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(100 * engine(torch.ones(3, 6)).sum())
    engine.step()
    return [parameter.detach().tolist() for parameter in plain.parameters()], [
        parameter.detach().tolist() for parameter in model.parameters()
    ]


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
def test_deepspeed_trains_as_the_others_do_although_its_default_is_to_clip():
    for ending in ranks.fresh_ranks(2, steep_step, 2):
        assert ending.how == "value", ending.text
        plain, under = ending.value
        assert under == plain


@needs_deepspeed
def test_deepspeed_can_be_run_here():
    assert engines.not_run("deepspeed-3") is None


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed here")
def test_an_engine_that_is_not_installed_says_so():
    assert "make peers" in (engines.not_run("deepspeed-3") or "")
    assert engines.not_run("fsdp2-keep") is None
