"""Kinds of data: buffers of every type, what ``extra`` takes, files that are none, manifests that somebody has written by hand."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardbook as sb
from shardbook.checkpoint import save as saving
from shardbook.checkpoint.export import Form, export
from shardbook.checkpoint.verify import faults
from shardbook.cli.main import run
from tests import ranks
from tests.checkpoints import Setup, build, held, train
from tests.test_checkpoint_bad_input import edit, refused

HERE = Setup(1, 1, "bf16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    engine = build(HERE)
    train(engine, 1)
    engine.save(tmp_path / "c")
    engine.close()
    return tmp_path / "c"


def with_buffer(values: torch.Tensor) -> sb.Engine:
    model = torch.nn.Linear(3, 2)
    model.register_buffer("table", values)
    return sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2, torch.float64])
def test_a_buffer_of_a_rare_type(dtype: torch.dtype, tmp_path: Path):
    values = torch.arange(64, dtype=torch.uint8).view(dtype)
    engine, again = with_buffer(values.clone()), with_buffer(torch.zeros(64, dtype=torch.uint8).view(dtype))
    again.load(engine.save(tmp_path / "c"))
    assert torch.equal(again.model.table.view(torch.uint8), values.view(torch.uint8))
    export(tmp_path / "c", tmp_path / "out", Form())
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["table"].view(torch.uint8), values.view(torch.uint8))
    engine.close(), again.close()


@pytest.mark.parametrize("values", [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_buffer_that_can_not_be_kept_is_named(values: torch.Tensor, path: Path):
    engine = with_buffer(values)
    with pytest.raises(sb.CheckpointError, match="'table'.*persistent=False"):
        engine.save(path.parent / "d")
    with pytest.raises(sb.CheckpointError, match="'table' is missing"):
        engine.load(path, allow_missing=["weight", "bias"], allow_unexpected=["*"])
    assert os.listdir(path.parent) == ["c"]
    engine.close()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def round_and_round() -> Any:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (nested(5000), "deep"),
        (round_and_round(), "in itself"),
        (10**5000, "bits"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
    ids=["deep", "cyclic", "integer", "sparse", "meta"],
)
def test_extra_that_can_not_be_kept_is_named(value: Any, said: str, tmp_path: Path):
    engine = build(HERE)
    with pytest.raises(sb.CheckpointError, match=rf"^extra\['v'\].*{said}"):
        engine.save(tmp_path / "c", extra={"v": value})
    assert os.listdir(tmp_path) == []
    engine.close()


@pytest.mark.parametrize("extra", [[1], "x", 3, [], 0])
def test_extra_is_a_mapping(extra: Any, tmp_path: Path):
    engine = build(HERE)
    with pytest.raises(sb.CheckpointError, match="extra: .*mapping"):
        engine.save(tmp_path / "c", extra=extra)
    engine.close()


def test_extra_at_the_limits_comes_back(tmp_path: Path):
    engine = build(HERE)
    value = {"deep": nested(90), "large": -(2**13_999), "conj": torch.tensor([1 + 2j, 3j]).conj()}
    found = engine.load(engine.save(tmp_path / "c", extra=value))
    assert torch.equal(found.pop("conj"), value.pop("conj"))
    assert found == value
    engine.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_file_that_is_none(make: Any, path: Path):
    (path / "rank-00000.safetensors").unlink()
    make(path / "rank-00000.safetensors")
    refused(path, "rank-00000.safetensors", "can't be read")
    assert "can't be read" in next(faults(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(parameters=3),
        lambda body: next(iter(body["parameters"].values())).pop("shape"),
        lambda body: next(iter(body["parameters"].values())).update(shape=["x"]),
        lambda body: body["files"][0].update(name="a\0b"),
    ],
)
def test_a_manifest_by_hand_is_a_fault(change: Any, path: Path):
    edit(path, change)
    refused(path)
    assert any("manifest.json" in fault for fault in faults(path))


@pytest.mark.parametrize("field", ["config", "units", "buffers", "schedulers"])
def test_inspect_names_a_manifest_by_hand(field: str, path: Path, capsys: pytest.CaptureFixture[str]):
    edit(path, lambda body: body.update({field: 3}))
    assert run(["checkpoint", "inspect", str(path)]) == 2
    assert "manifest.json: a field" in capsys.readouterr().err


@pytest.mark.parametrize("change", [lambda body: body.update(rng=[]), lambda body: body["rng"][0]["numpy"]["$tuple"].__setitem__(2, 2**70)])
def test_random_numbers_by_hand_are_refused_before_anything_changes(change: Any, path: Path):
    edit(path, change)
    refused(path, "manifest.json")


def one_rank_has_no_memory(folder: Path) -> str:
    """A job: what goes wrong on rank 1 is no error of a file system; both say what it is, and go on."""
    engine = build(Setup(3, 2))
    train(engine, 1)
    before = held(engine)
    original = saving.write_file

    def fails(path: Path, items: Any) -> Any:
        raise MemoryError("no more")

    if engine.transport.rank == 1:
        saving.write_file = fails
    try:
        engine.save(folder / "c")
    except sb.CheckpointError as error:
        saving.write_file = original
        assert held(engine)["steps"] == before["steps"]
        train(engine, 1)
        engine.save(folder / "d")
        engine.close()
        return str(error)
    return "saved"


@pytest.mark.ranks
def test_whatever_goes_wrong_on_one_rank_is_told_to_all(tmp_path: Path):
    first, second = (ending.value for ending in ranks.fresh_ranks(2, one_rank_has_no_memory, tmp_path))
    assert first == second
    assert "rank 1: " in first
    assert "MemoryError: no more" in first
    assert os.listdir(tmp_path) == ["d"]
