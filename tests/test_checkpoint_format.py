"""The format: a checkpoint of each version that was ever written loads still, and the files are what any safetensors reader reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardbook as sb
from shardbook.checkpoint import manifest
from shardbook.checkpoint.plain import decoded, encoded
from tests import ranks

GOLDEN = Path(__file__).with_name("checkpoint_v1")
"""Written by version 1 on two ranks at stage 2, by ``write``."""


def built(stage: int) -> tuple[sb.Engine, torch.optim.lr_scheduler.LRScheduler]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.Linear(8, 1, bias=False))
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param="bf16"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return sb.Engine(model, optimizer, config), scheduler


def values_of(numel: int, step: float) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) * step - 1


def write(folder: Path) -> None:
    """A job for two ranks: values that are known from outside, in places of known numbers."""
    engine, scheduler = built(2)
    for flat in (flat for unit in engine._units for flat in unit.flats):
        for piece in flat.pieces:
            numel = piece.member.parameter.numel()
            piece.parameter.data.copy_(values_of(numel, 0.001)[piece.span.start : piece.span.stop])
            buffer = values_of(numel, 0.5)[piece.span.start : piece.span.stop].clone()
            engine.optimizer.state[piece.parameter] = {"momentum_buffer": buffer}
    engine.num_steps = 7
    engine.model.count.fill_(engine.transport.rank + 5)
    engine.optimizer.param_groups[0]["lr"] = 0.125
    scheduler.last_epoch = 2
    engine.save(folder, extra={"position": (3, 1.5)}, schedulers=[scheduler])
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_version_1_loads(stage: int):
    engine, scheduler = built(stage)
    assert engine.load(GOLDEN, schedulers=[scheduler]) == {"position": (3, 1.5)}
    for name, value in engine.state_dict().items():
        expected = torch.full((2,), 5) if name == "count" else values_of(value.numel(), 0.001).bfloat16().view(value.shape)
        assert torch.equal(value, expected), name
    for flat in (flat for unit in engine._units for flat in unit.flats):
        for piece in flat.pieces:
            numel = piece.member.parameter.numel()
            assert torch.equal(piece.parameter, values_of(numel, 0.001))
            assert torch.equal(engine.optimizer.state[piece.parameter]["momentum_buffer"], values_of(numel, 0.5))
    assert (engine.num_steps, engine.optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (7, 0.125, 2)
    engine.close()


@pytest.mark.ranks
def test_what_is_written_today_is_that(tmp_path: Path):
    ranks.call(2, write, tmp_path / "c")
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        assert (tmp_path / "c" / name).read_bytes() == (GOLDEN / name).read_bytes()
    found, expected = (json.loads((folder / manifest.NAME).read_text()) for folder in (tmp_path / "c", GOLDEN))
    for field in set(expected) - {"sha256", "rng", "written_by"}:
        assert found[field] == expected[field], field
    assert set(found) == set(expected)


def test_any_reader_reads_it():
    found = {**load_file(GOLDEN / "rank-00000.safetensors"), **load_file(GOLDEN / "rank-00001.safetensors")}
    assert torch.equal(torch.cat([found["weight:0.weight:0"], found["weight:0.weight:256"]]), values_of(320, 0.001))
    assert found["buffer:count:1"].tolist() == [6, 6]


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_data_come_back_as_they_were(value: Any):
    found = decoded(json.loads(json.dumps(encoded(value, "extra"), allow_nan=False)))
    assert found == value
    assert repr(found) == repr(value)


def test_other_plain_data():
    from collections import Counter

    tensor = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    value = {"nan": float("nan"), "counter": Counter({3: 2}), "tensor": tensor, "scalar": torch.tensor(4), "none": torch.empty(0, 3)}
    found = decoded(json.loads(json.dumps(encoded(value, "extra"))))
    assert found["nan"] != found["nan"]
    assert type(found["counter"]) is Counter
    assert torch.equal(found["tensor"].view(torch.int16), tensor.view(torch.int16))
    assert found["scalar"].shape == ()
    assert found["none"].shape == (0, 3)
    with pytest.raises(sb.CheckpointError, match=r"extra\['x'\]: a tensor of"):
        encoded({"x": torch.zeros(1 << 19)}, "extra")


def golden() -> None:
    """Writes the fixture anew: ``python -c "from tests.test_checkpoint_format import golden; golden()"``, for a new version only."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    ranks.call(2, write, GOLDEN)


def test_the_fixture_is_whole():
    from shardbook.checkpoint.verify import faults

    assert list(faults(GOLDEN)) == []
    assert manifest.read(GOLDEN).content["version"] == 1
