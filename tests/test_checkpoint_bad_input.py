"""What can't be loaded or saved is refused by name, with the training and the last good checkpoint as they were."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardbook as sb
from shardbook.checkpoint import manifest
from shardbook.checkpoint.folder import Lock, around
from shardbook.checkpoint.verify import faults
from tests import ranks
from tests.checkpoints import Setup, build, held, saved, train
from tests.test_checkpoint_resume import same

SOURCE = Setup(2, 2, "bf16")
HERE = Setup(1, 1, "bf16")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    ranks.call(2, saved, [SOURCE], folder)
    return folder / str(SOURCE)


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy"))


def refused(path: Path, *said: str, engine: sb.Engine | None = None, **options: Any) -> None:
    """Loading raises an error that says all of ``said``, and changes nothing."""
    engine = engine or build(HERE, seed=8)
    train(engine, 1)
    before = held(engine)
    with pytest.raises(sb.CheckpointError) as caught:
        engine.load(path, **options)
    missing = [text for text in said if text not in str(caught.value)]
    assert not missing, str(caught.value)
    assert same(held(engine), before)
    engine.close()


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = True) -> None:
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    if seal:
        body.pop("sha256")
        body = {"sha256": manifest._digest(body), **body}
    (path / "manifest.json").write_text(json.dumps(body))


def test_the_copy_is_good(copy: Path):
    engine = build(HERE)
    engine.load(copy)
    assert list(faults(copy)) == []
    engine.close()


def test_a_flipped_bit(copy: Path):
    file = copy / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    stored = next(one for one in manifest.read(copy).files[1].tensors if one.what == "exp_avg")
    data[stored.begin + 5] ^= 4
    file.write_bytes(data)
    refused(copy, "rank-00001.safetensors", "exp_avg", repr(stored.name), "damaged")
    assert [stored.name in text for text in faults(copy)] == [True]


def test_truncated(copy: Path):
    file = copy / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 3)
    refused(copy, "rank-00000.safetensors", "truncated")
    os.truncate(file, 5)
    refused(copy, "rank-00000.safetensors", "truncated")


def test_a_file_is_missing(copy: Path):
    (copy / "rank-00001.safetensors").unlink()
    refused(copy, "rank-00001.safetensors", "can't be read")


def test_two_files_are_swapped(copy: Path):
    first, second = copy / "rank-00000.safetensors", copy / "rank-00001.safetensors"
    third = copy / "x"
    first.rename(third), second.rename(first), third.rename(second)
    refused(copy, "rank-00000.safetensors", "manifest")


def test_an_edited_manifest(copy: Path):
    edit(copy, lambda body: body.update(step=3), seal=False)
    refused(copy, "manifest.json", "checksum")


def test_a_newer_version(copy: Path):
    edit(copy, lambda body: body.update(version=2))
    refused(copy, "version 2", "up to 1")


@pytest.mark.parametrize("name", ["../copy/rank-00000.safetensors", "/etc/passwd", "..", "a/b", ""])
def test_names_that_leave_the_folder(name: str, copy: Path):
    edit(copy, lambda body: body["files"][0].update(name=name))
    refused(copy, "no plain name")


def test_a_file_that_is_a_link(copy: Path):
    file = copy / "rank-00000.safetensors"
    file.rename(copy.parent / "elsewhere")
    file.symlink_to(copy.parent / "elsewhere")
    refused(copy, "rank-00000.safetensors", "can't be read")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("rng"),
        lambda body: body.update(parameters=[]),
        lambda body: body.update(block_nbytes=0),
        lambda body: body.update(rng=["x"]),
        lambda body: body["rng"][0].update(torch={"$tensor": ["U8", [3], "AAAA"]}),
        lambda body: body.update(files=[]),
        lambda body: body["files"][0]["tensors"][0].update(xxh3=[]),
        lambda body: body["files"][0]["tensors"][0].update(start=-64),
        lambda body: body["files"][0]["tensors"][0].update(dtype="F128"),
        lambda body: body["files"][0]["tensors"].pop(),
        lambda body: body["extra"].update({"$eval": "1"}),
        lambda body: body["optimizer"]["groups"][0].pop("options"),
        lambda body: body["optimizer"].update(scalars=None),
    ],
)
def test_a_manifest_of_other_kinds_of_things(change: Callable[[dict[str, Any]], None], copy: Path):
    edit(copy, change)
    refused(copy)


def test_no_checkpoint(tmp_path: Path):
    refused(tmp_path, "no checkpoint there")
    refused(tmp_path / "nowhere", "no checkpoint there")


def test_another_model(copy: Path):
    refused(copy, "'embed.weight'", "(19, 20)", "(19, 40)", "more", engine=other_width())
    refused(copy, "'added'", "missing", "allow_missing", engine=build(HERE, net={"extra": True}))


def other_width() -> sb.Engine:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(19, 40)})
    model.forward = lambda tokens: model["embed"](tokens).sum()
    optimizer = torch.optim.AdamW(model.parameters())
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=1), scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [2]))


def test_what_is_missing_may_be_allowed(copy: Path):
    engine = build(HERE, net={"extra": True}, seed=4)
    before = engine.state_dict()["added"].clone()
    engine.load(copy, allow_missing=["add*"])
    assert torch.equal(engine.state_dict()["added"], before)
    train(engine, 1)
    engine.save(copy.parent / "with")
    engine.close()
    refused(copy.parent / "with", "'added'", "not in the model", "allow_unexpected")
    engine = build(HERE)
    engine.load(copy.parent / "with", allow_unexpected=["added"])
    engine.close()


def test_another_optimizer(copy: Path):
    refused(copy, "AdamW", "SGD", engine=build(HERE, optimizer="sgd"))


def test_other_groups(copy: Path):
    torch.manual_seed(0)
    from tests.checkpoints import Net

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    refused(
        copy,
        "one parameter group here",
        engine=sb.Engine(model, optimizer, sb.ZeroConfig(stage=1), scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])),
    )


def test_other_schedulers(copy: Path):
    engine = build(HERE)
    refused(copy, "schedulers", "MultiStepLR", engine=engine, schedulers=[engine._scheduler])


def test_an_engine_that_trains_nothing_takes_the_weights(copy: Path):
    expected = build(HERE)
    expected.load(copy)
    from tests.checkpoints import Net

    engine = sb.Engine(Net(), None, sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16")))
    with pytest.raises(sb.CheckpointError, match="schedulers"):
        engine.load(copy)
    edit(copy, lambda body: body.update(schedulers=[]))
    engine.load(copy)
    assert same(dict(engine.state_dict()), dict(expected.state_dict()))
    engine.save(copy.parent / "bare")
    refused(copy.parent / "bare", "no optimizer state", 'allow_missing=("optimizer",)', engine=build(HERE))
    engine.close(), expected.close()


# ---- saving ---------------------------------------------------------------------------------------------------------------


def test_what_is_no_plain_data(tmp_path: Path):
    engine = build(HERE)
    for extra, said in (({"a": [1, object()]}, r"extra\['a'\]\[1\].*builtins.object"), ({"a": torch.nn.Linear}, "builtins.type")):
        with pytest.raises(sb.CheckpointError, match=said):
            engine.save(tmp_path / "c", extra=extra)
    with pytest.raises(sb.CheckpointError, match="keep: 0"):
        engine.save(tmp_path / "c", keep=0)
    assert list(tmp_path.iterdir()) == []
    engine.close()


def test_in_the_middle_of_a_step(good: Path, tmp_path: Path):
    engine = build(HERE)
    engine.backward(engine(torch.zeros(1, 2, dtype=torch.int64)))
    with pytest.raises(RuntimeError, match=r"engine\.save: in the middle of a step"):
        engine.save(tmp_path / "c")
    with pytest.raises(RuntimeError, match=r"engine\.load: in the middle of a step"):
        engine.load(good)
    engine.step()
    with engine.gathered(), pytest.raises(RuntimeError, match="gathered"):
        engine.load(good)
    engine.close()


def test_something_else_is_there(tmp_path: Path):
    engine = build(HERE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for name in ("mine", "mine/thesis.tex", "mine/thesis.tex/below"):
        with pytest.raises(sb.CheckpointError, match="mine"):
            engine.save(tmp_path / name)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    engine.close()


def test_another_run_writes_there(tmp_path: Path):
    engine = build(HERE)
    path = engine.save(tmp_path / "c")
    around(path).mkdir()
    lock = Lock(around(path) / "lock")
    with pytest.raises(sb.CheckpointError, match="in use"):
        engine.save(path)
    lock.release()
    engine.save(path)
    assert list(tmp_path.iterdir()) == [path]
    engine.close()


def too_little_space(folder: Path) -> str:
    """A job: the file system takes 30 kB to a file."""
    engine = build(HERE)
    engine.save(folder / "c", extra={"which": 1})
    train(engine, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    try:
        engine.save(folder / "c", extra={"which": 2})
    except sb.CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert list(faults(folder / "c")) == []
        assert build(HERE).load(folder / "c") == {"which": 1}
        train(engine, 1)
        engine.save(folder / "c", extra={"which": 3})
        return str(error)
    return "saved"


@pytest.mark.ranks
def test_no_space(tmp_path: Path):
    ending = ranks.alone(too_little_space, tmp_path)
    assert "errno 27" in ending.value, ending
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def one_rank_cannot_write(folder: Path) -> str:
    """A job: rank 1 finds no space; both ranks say so, and can go on."""
    engine = build(Setup(3, 2))
    if engine.transport.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
    try:
        engine.save(folder / "c")
    except sb.CheckpointError as error:
        assert not (folder / "c").exists()
        train(engine, 1)
        engine.close()
        return str(error)
    return "saved"


@pytest.mark.ranks
def test_one_rank_cannot_write(tmp_path: Path):
    first, second = (ending.value for ending in ranks.fresh_ranks(2, one_rank_cannot_write, tmp_path))
    assert first == second
    assert first.startswith("rank 1: ")
    assert list(tmp_path.iterdir()) == []


def one_rank_reads_damage(folder: Path) -> tuple[str, bool]:
    """A job: only what rank 1 reads is damaged."""
    engine = build(Setup(3, 2, "bf16"), seed=5)
    before = held(engine)
    try:
        engine.load(folder)
    except sb.CheckpointError as error:
        train(engine, 0)
        unchanged = same(held(engine), before)
        engine.close()
        return str(error), unchanged
    return "loaded", False


@pytest.mark.ranks
def test_one_rank_reads_damage(copy: Path):
    file = copy / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    stored = next(one for one in manifest.read(copy).files[1].tensors if one.what == "exp_avg")
    data[stored.end - 1] ^= 1
    file.write_bytes(data)
    (first, unchanged), (second, also) = ranks.call(2, one_rank_reads_damage, copy)
    assert first == second
    assert "rank 1: " in first
    assert "exp_avg" in first
    assert unchanged
    assert also


# ---- a series -------------------------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path):
    engine = build(HERE)
    (tmp_path / "step-x").mkdir()
    engine.save(tmp_path / "best-1")
    for number in (1, 2, 3, 10):
        engine.save(tmp_path / f"step-{number}", extra={"number": number}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-1", "step-10", "step-3", "step-x"]
    assert build(HERE).load(tmp_path) == {"number": 10}
    engine.save(tmp_path / "step-3", extra={"number": 33}, keep=1)  # gone back to, and on from there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-1", "step-3", "step-x"]
    assert build(HERE).load(tmp_path) == {"number": 33}
    engine.close()


def test_what_a_crash_left_is_cleared_away(tmp_path: Path):
    engine = build(HERE)
    left = around(tmp_path / "c")
    (left / "0123").mkdir(parents=True)
    (left / "0123" / "rank-00000.safetensors").write_bytes(b"half")
    (left / "lock").touch()
    engine.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    engine.close()


def test_what_a_crash_left_under_another_number_is_cleared_away(tmp_path: Path):
    engine = build(HERE)
    for name in ("step-4", "step-5", "other-1"):
        (around(tmp_path / name) / "0123").mkdir(parents=True)
    lock = Lock(around(tmp_path / "step-5") / "lock")
    engine.save(tmp_path / "step-6")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other-1.writing", ".step-5.writing", "step-6"]
    assert (around(tmp_path / "step-5") / "0123").is_dir()
    lock.release()
    engine.close()


def test_a_crash_between_the_two_renames_of_a_replacement(tmp_path: Path):
    engine = build(HERE)
    path = engine.save(tmp_path / "c", extra={"which": "old"})
    around(path).mkdir()
    path.rename(around(path) / "replaced")
    assert build(HERE).load(path) == {"which": "old"}
    engine.close()
