"""Records of several ranks: parts add up to what one process has, stages agree to the bit, other engines within rounding."""

import contextlib
import importlib.util
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardbook as sb
from benchmarks import engines
from benchmarks.models import SMALL, build
from shardbook.errors import ConfigError
from shardbook.recording.format import file_of
from shardbook.recording.prints import compare
from tests import equality, oracle, ranks
from tests.zoo import ZOO

pytestmark = pytest.mark.ranks
STEPS = 3
CLIP = 0.5
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make peers")


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, SMALL.vocab, (2, SMALL.sequence + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def rank_of_group() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- jobs -----------------------------------------------------------------------------------------------------------------


def under_shardbook(path: str, stage: int, param: str = "fp32") -> None:
    model = build(SMALL)
    optimizer = adamw(model.parameters())
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, clip_grad_norm=CLIP, precision=sb.Precision(param=param)))
    with sb.record(model, optimizer, path) as recorder:
        for step in range(STEPS):
            inputs, targets = batch(rank_of_group(), step)
            loss = engine(inputs, targets)
            engine.backward(loss, weight=1)
            recorder.step(loss=loss, batch=(inputs, targets))
            engine.step()
    engine.close()


def under_torch(path: str, name: str, drift: bool = False) -> None:
    model = build(SMALL)
    if name == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model) if name == "ddp" else model
    optimizer = adamw(wrapped.parameters())
    with sb.record(wrapped, optimizer, path) as recorder:
        for step in range(STEPS):
            inputs, targets = batch(rank_of_group(), step)
            loss = wrapped(inputs, targets)
            loss.backward()
            recorder.step(loss=loss, batch=(inputs, targets))
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if drift and step == 1 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.blocks[1].up.bias[7] += 1e-3


def under_deepspeed(path: str, stage: int, dtype: str) -> None:
    model = build(SMALL)
    warnings.simplefilter("ignore")  # DeepSpeed's own
    settings = engines.deepspeed_config(f"deepspeed-{stage}", dtype, {}) | {"gradient_clipping": CLIP}
    engine, optimizer, *_ = engines.import_deepspeed().initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    with sb.record(engine, optimizer, path) as recorder:
        for step in range(STEPS):
            inputs, targets = batch(rank_of_group(), step)
            loss = engine(inputs, targets)
            engine.backward(loss)
            recorder.step(loss=loss, batch=(inputs, targets))
            engine.step()


def only_rank_0(path: str) -> str:
    model = nn.Linear(4, 4)
    if dist.get_rank() == 0:
        with sb.record(model, torch.optim.SGD(model.parameters()), path):
            pass
    return ""


def tensor_parallel(path: str) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    model = nn.Linear(8, 8, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    try:
        with sb.record(model, torch.optim.SGD(model.parameters()), path):
            return ""
    except ConfigError as error:
        return str(error)


# ---- what they leave ----------------------------------------------------------------------------------------------------------


def recorded(num_ranks: int, job, *args) -> list:
    with tempfile.TemporaryDirectory() as folder:
        ranks.call(num_ranks, job, str(Path(folder) / "a"), *args)
        return whole(sb.Record.open(Path(folder) / "a"))


def whole(record: sb.Record) -> list:
    """Its steps, after what must hold of every record: all elements are there, replicas agree."""
    steps = list(record.steps())
    assert len(steps) == STEPS + 1
    for step in steps:
        assert step.missing == []
        assert step.disagreements == []
        for phase in step.phases:
            if phase != "buffer":
                assert step.phases[phase].keys() == record.parameters.keys(), phase
    return steps


def plain(num_ranks: int, **options) -> list:
    """The oracle's loop over what all ranks were given, in this process."""
    model = build(SMALL)
    optimizer = adamw(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        recorders = []
        optimizer.register_step_pre_hook(lambda *_: recorders[0].step(loss=0.0, batch=[batch(r, step) for r in range(num_ranks)]))
        with sb.record(model, optimizer, Path(folder) / "a") as recorder:
            recorders.append(recorder)
            for step in range(STEPS):
                batches = [[batch(rank, step)] for rank in range(num_ranks)]
                forward = lambda model, given: (model(*given), 1)  # noqa: E731
                oracle.plain_step(model, list(model.parameters()), optimizer, batches, forward, clip=CLIP)
        return whole(sb.Record.open(Path(folder) / "a"))


def hashes(step, phase: str) -> dict[str, int]:
    return {name: one.hash for name, one in step.phases[phase].items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_stages_have_the_bits_of_the_plain_loop(num_ranks):
    expected = plain(num_ranks)
    for stage in range(4):
        steps = recorded(num_ranks, under_shardbook, stage)
        for step, other in zip(steps, expected, strict=True):
            assert hashes(step, "weight") == hashes(other, "weight"), (stage, step.number)
            assert step.data == other.data
            if step.number:
                for phase in ("state.exp_avg", "state.exp_avg_sq"):
                    assert hashes(step, phase) == hashes(other, phase), (stage, step.number, phase)
                assert hashes(step, "stepped") == hashes(other, "gradient")  # the oracle has clipped when it is recorded
                for name, one in step.phases["weight"].items():
                    assert one.squares == pytest.approx(other.phases["weight"][name].squares, rel=1e-12)
                    assert compare(one, other.phases["weight"][name]).distance < 1e-12


def test_sums_of_gradients_agree_between_stages_and_differ_from_means_by_the_weight():
    first, *others = (recorded(2, under_shardbook, stage) for stage in range(4))
    means = recorded(2, under_torch, "ddp")
    for other in others:
        assert [hashes(step, "gradient") for step in other[1:]] == [hashes(step, "gradient") for step in first[1:]]
    for name, one in first[1].phases["gradient"].items():
        assert compare(one, means[1].phases["gradient"][name]).ratio == pytest.approx(2.0, rel=1e-5)


def test_masters_add_up_and_are_not_rounded():
    two, three = recorded(2, under_shardbook, 1, "bf16"), recorded(3, under_shardbook, 3, "bf16")
    assert hashes(two[0], "weight") == hashes(plain(1)[0], "weight") == hashes(three[0], "weight")
    assert {one.dtype for one in two[1].phases["weight"].values()} == {"float32"}
    assert {one.dtype for one in two[1].phases["model"].values()} == {"bfloat16"}
    assert "model" not in three[1].phases


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_other_engines_are_within_rounding(name, num_ranks):
    steps, expected = recorded(num_ranks, under_torch, name), plain(num_ranks)
    assert hashes(steps[0], "weight") == hashes(expected[0], "weight")
    for step, other in zip(steps[1:], expected[1:], strict=True):
        assert step.data == other.data
        assert step.norm("stepped") == pytest.approx(CLIP, rel=1e-5)
        for name_of, one in step.phases["stepped"].items():
            assert compare(one, other.phases["gradient"][name_of]).distance < 1e-3, (step.number, name_of)
        for name_of, one in step.phases["weight"].items():
            assert compare(one, other.phases["weight"][name_of]).distance < 1e-2


def test_a_rank_that_drifts_is_named():
    with tempfile.TemporaryDirectory() as folder:
        ranks.call(2, under_torch, str(Path(folder) / "a"), "ddp", drift=True)
        steps = list(sb.Record.open(Path(folder) / "a").steps())
    assert [step.disagreements for step in steps[:3]] == [[], [], []]
    found = {(one.phase, one.parameter, one.rank) for one in steps[3].disagreements}
    assert {("before", "blocks.1.up.bias", 1), ("weight", "blocks.1.up.bias", 1)} <= found
    assert {phase for phase, _, _ in found} <= {"before", "weight"}  # gradients are the same everywhere


def test_a_rank_is_missing():
    with tempfile.TemporaryDirectory() as folder:
        ranks.call(2, only_rank_0, str(Path(folder) / "a"))
        with pytest.raises(ConfigError, match=r"rank 1 of 2 is missing \(rank-00001.rec\)"):
            sb.Record.open(Path(folder) / "a")


def test_ranks_of_different_lengths():
    with tempfile.TemporaryDirectory() as folder:
        for name, num_steps in (("a", 3), ("b", 2)):
            ranks.call(2, steps_of_a_line, str(Path(folder) / name), num_steps)
        file_of(Path(folder) / "b", 1).replace(file_of(Path(folder) / "a", 1))
        with pytest.raises(ConfigError, match="rank 0: 3, rank 1: 2"):
            sb.Record.open(Path(folder) / "a")
        assert sb.Record.open(Path(folder) / "a", unfinished=True).num_steps == 2


def steps_of_a_line(path: str, num_steps: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, path) as recorder:
        for _ in range(num_steps):
            model(torch.ones(1, 2)).sum().backward()
            recorder.step(loss=0.0)
            optimizer.step()


def test_a_layout_that_is_no_run_of_elements_is_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        for said in ranks.call(2, tensor_parallel, folder + "/a"):
            assert "'weight'" in said
            assert "first dimension" in said


def deepspeed_steps(stage: int, dtype: str) -> list:
    with tempfile.TemporaryDirectory() as folder:
        ranks.raise_first(ranks.fresh_ranks(2, under_deepspeed, str(Path(folder) / "a"), stage, dtype))
        record = sb.Record.open(Path(folder) / "a")
        assert record.engine == f"deepspeed {stage}"
        assert record.manifest["compute"] == {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        steps = whole(record)
        for step in steps[1:]:
            for given, mine in zip(step.given, step.micro_batches, strict=True):
                assert [one.inputs for one in mine] == list(given)
                assert [(one.evaluating, one.output_gradient.total) for one in mine] == [(0, 1.0)]
        return steps


@needs_deepspeed
@pytest.mark.peers
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_adds_up(stage):
    steps, expected = deepspeed_steps(stage, "fp32"), plain(2)
    assert hashes(steps[0], "weight") == hashes(expected[0], "weight")
    for step, other in zip(steps[1:], expected[1:], strict=True):
        assert step.norm("stepped") == pytest.approx(CLIP, rel=1e-4)
        for name, one in step.phases["stepped"].items():
            assert compare(one, other.phases["gradient"][name]).distance < 1e-3, (step.number, name)
        clipped = step.norm("stepped") / step.norm("gradient")
        for name, one in step.phases["gradient"].items():  # a mean over ranks here
            assert compare(step.phases["stepped"][name], one).ratio == pytest.approx(clipped, rel=1e-5)
        for name, one in step.phases["weight"].items():
            assert compare(one, other.phases["weight"][name]).distance < 1e-2, (step.number, name)
        for phase in ("state.exp_avg", "state.exp_avg_sq"):
            for name, one in step.phases[phase].items():
                assert one.norm == pytest.approx(other.phases[phase][name].norm, rel=1e-3), (step.number, phase, name)


@needs_deepspeed
@pytest.mark.peers
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_masters_of_rounded_weights_are_seen(stage):
    start, expected = deepspeed_steps(stage, "bf16")[0], plain(1)[0]
    matrices = [name for name in start.phases["weight"] if name.endswith("up.weight")]
    for name in matrices:
        assert start.phases["weight"][name].dtype == "float32"
        assert 2**-12 < compare(start.phases["weight"][name], expected.phases["weight"][name]).distance < 2**-7


def zoo_under_shardbook(folder: str, entries: list[str], stage: int, precision: str) -> list[bool]:
    """Every model of the zoo, recorded and not: whether the parameters came out the same to the bit."""
    same = []
    for entry in entries:
        finals = []
        for path in (None, f"{folder}/{entry}"):
            case = equality.Case(entry=entry, stage=stage, precision=precision, accumulate=2)
            model = equality.built(ZOO[entry], equality.SEED)
            optimizer = equality.OPTIMIZERS[case.optimizer]([(n, p) for n, p in model.named_parameters() if p.requires_grad])
            engine = sb.Engine(model, optimizer, equality.engine_config(case))
            with sb.record(engine, None, path) if path else contextlib.nullcontext() as recorder:
                for step in range(STEPS):
                    for batch in equality.micro_batches(case, rank_of_group(), step):
                        loss, weight = equality.forward(case, engine, batch)
                        engine.backward(loss, weight=weight)
                    if recorder is not None:
                        recorder.step(loss=loss, weight=1)
                    engine.step()
            finals.append({name: value.clone() for name, value in engine.full_parameters()})
            engine.close()
        same.append(all(torch.equal(value, finals[1][name]) for name, value in finals[0].items()))
    return same


AWKWARD = ["tied", "frozen", "odd_shapes", "used_on_some_ranks", "integer_weights"]


@pytest.mark.parametrize("stage, precision", [pytest.param(3, "bf16", marks=pytest.mark.full), (0, "fp32")])
def test_awkward_models_are_recorded_in_full_and_left_alone(stage, precision):
    recorded_and_left_alone(AWKWARD, stage, precision)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_zoo_is_recorded_in_full_and_left_alone(stage, precision):
    recorded_and_left_alone(list(ZOO), stage, precision)


def recorded_and_left_alone(entries: list[str], stage: int, precision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for same in ranks.call(2, zoo_under_shardbook, folder, entries, stage, precision, seconds=180):
            assert all(same), [name for name, one in zip(entries, same, strict=True) if not one]
        for entry in entries:
            record = sb.Record.open(Path(folder) / entry)
            for step in record.steps():
                assert step.disagreements == [], entry
                assert [item for item in step.missing if item[0] != "model"] == [], entry
                if step.applied or not step.number:
                    assert step.phases["weight"].keys() == {n for n, one in record.parameters.items() if one.numel}, entry
