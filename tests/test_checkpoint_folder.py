"""What may be replaced, pruned and found in a folder of checkpoints: never anything that is not one, never another series."""

import os
import re
import shutil
from pathlib import Path

import pytest

import shardbook as sb
from shardbook.checkpoint.export import Form, export
from shardbook.checkpoint.folder import Lock, around
from tests.checkpoints import Setup, build

HERE = Setup(1, 1, "bf16")


@pytest.fixture
def engine():
    made = build(HERE)
    yield made
    made.close()


def foreign(path: Path) -> list[str]:
    """A folder of somebody else's, with a file of the name that manifests have."""
    path.mkdir(parents=True)
    (path / "manifest.json").write_text('{"name": "an extension of a browser"}')
    (path / "thesis.tex").write_text("x")
    os.utime(path / "manifest.json", (4e9, 4e9))
    return sorted(os.listdir(path))


def test_a_manifest_of_something_else_is_no_checkpoint(engine: sb.Engine, tmp_path: Path):
    names = foreign(tmp_path / "step-1")
    with pytest.raises(sb.CheckpointError, match="exists and is no checkpoint"):
        engine.save(tmp_path / "step-1")
    for number in (2, 3):
        engine.save(tmp_path / f"step-{number}", extra={"number": number}, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    assert sorted(os.listdir(tmp_path / "step-1")) == names
    assert engine.load(tmp_path) == {"number": 3}
    with pytest.raises(sb.CheckpointError, match="no checkpoint there"):
        engine.load(tmp_path / "step-1")


def test_an_export_replaces_no_checkpoint(engine: sb.Engine, tmp_path: Path):
    path, other = engine.save(tmp_path / "a"), engine.save(tmp_path / "b")
    for to in (path, other):
        before = sorted(os.listdir(to))
        with pytest.raises(sb.CheckpointError, match="must not replace"):
            export(path, to, Form())
        assert sorted(os.listdir(to)) == before
    assert engine.load(path) == {}


def test_another_run_is_another_series(engine: sb.Engine, tmp_path: Path):
    for name in ("run1-step1", "run2-step1", "run2-step2", "2-run-1"):
        engine.save(tmp_path / name, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["2-run-1", "run1-step1", "run2-step2"]


def test_the_last_is_the_same_in_a_copy(engine: sb.Engine, tmp_path: Path):
    for number in (11, 2, 9, 10):
        engine.save(tmp_path / "runs" / f"step-{number}", extra={"number": number})
    copy = shutil.copytree(tmp_path / "runs", tmp_path / "copy", copy_function=shutil.copyfile)
    for number, name in enumerate(("step-10", "step-9", "step-2", "step-11")):
        os.utime(copy / name / "manifest.json", (number, number))
    assert engine.load(copy) == {"number": 10}


def test_of_the_same_time_the_larger_number_is_the_last(engine: sb.Engine, tmp_path: Path):
    for number in (9, 10):
        manifest = engine.save(tmp_path / f"step-{number}", extra={"number": number}) / "manifest.json"
        manifest.write_bytes(re.sub(rb', "time_ns": \d+', b"", manifest.read_bytes()))  # as the first ones were written
        os.utime(manifest, (5, 5))
    with pytest.raises(sb.CheckpointError, match=r"step-10/manifest\.json: damaged"):
        engine.load(tmp_path)


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "True", "'2'"])
def test_keep_is_a_number(number: str, engine: sb.Engine, tmp_path: Path):
    with pytest.raises(sb.CheckpointError, match=re.escape(f"keep: {number};")):
        engine.save(tmp_path / "c", keep=eval(number))
    assert os.listdir(tmp_path) == []


def test_a_link_to_nowhere_is_seen_before_anything_is_written(engine: sb.Engine, tmp_path: Path):
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    with pytest.raises(sb.CheckpointError, match="exists and is no checkpoint"):
        engine.save(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_that_could_not_begin_is_not_in_its_own_way(engine: sb.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("shardbook.checkpoint.folder._clear", full)
        with pytest.raises(sb.CheckpointError, match="errno 28"):
            engine.save(tmp_path / "c")
    assert os.listdir(tmp_path) == []
    engine.save(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_another_process_leaves_just_now(engine: sb.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It takes its folder away between our making of it and our opening of the lock."""
    opened = os.open
    turns: list[Path] = []

    def slow(path: Path, *rest: int) -> int:
        if str(path).endswith("writing/lock") and not turns:
            turns.append(path)
            path.parent.rmdir()
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", slow)
    engine.save(tmp_path / "c", extra={"which": 1})
    assert turns
    assert engine.load(tmp_path / "c") == {"which": 1}


def test_another_process_comes_just_now(engine: sb.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It opens a lock of its own between our release of ours and our removal of the folder: what is saved is saved."""
    release = Lock.release

    def followed(lock: Lock) -> None:
        release(lock)
        (around(tmp_path / "c") / "lock").touch()

    monkeypatch.setattr(Lock, "release", followed)
    engine.save(tmp_path / "c", extra={"which": 1})
    assert engine.load(tmp_path / "c") == {"which": 1}
