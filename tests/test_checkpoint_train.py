"""``shardbook train`` saves, is ended, and goes on where it was: the same losses, the same weights, whatever the number of ranks."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shardbook.checkpoint.verify import faults
from tests.test_train_cli import TINY, Running, shardbook


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def train(text: Path, out: Path, *options: str) -> Any:
    return shardbook("train", *TINY, "--text", str(text), "--out", str(out), "--device", "cpu", "--global-batch", "8", *options)


def losses(out: Path) -> list[float]:
    return json.loads((out / "run.json").read_text())["losses"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.full
def test_it_goes_on_bit_for_bit(text: Path, tmp_path: Path):
    options = ["--ranks", "2", "--steps", "6", "--save-every", "4", "--resume", "auto"]
    whole = train(text, tmp_path / "whole", *options, "--save-async")  # step 4 is written while step 5 goes on
    assert whole.returncode == 0, whole.stderr
    assert sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "step-00000004", tmp_path / "again" / "checkpoints" / "step-00000004")
    again = train(text, tmp_path / "again", *options)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "again")) == 6
    for rank in (0, 1):
        name = f"checkpoints/step-00000006/rank-{rank:05d}.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    done = train(text, tmp_path / "again", *options)
    assert done.returncode == 0
    assert done.stderr.count("all 6 steps are done already") == 1
    alone = train(text, tmp_path / "alone", "--ranks", "1", "--steps", "6", "--resume", str(tmp_path / "whole/checkpoints/step-00000004"))
    assert alone.returncode == 0, alone.stderr
    found, expected = losses(tmp_path / "alone"), losses(tmp_path / "whole")
    assert found[:4] == expected[:4]
    assert found[4:] == pytest.approx(expected[4:], rel=1e-5)
    assert found != pytest.approx(expected[4:] + expected[:4], rel=1e-5)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_sigterm_saves(num_ranks: str, text: Path, tmp_path: Path):
    options = [*TINY, "--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu", "--global-batch", "8", "--ranks", num_ranks]
    with Running([*options, "--save-every", "20", "--keep", "1", *(["--save-async"] if num_ranks == "2" else [])]) as running:
        until = time.monotonic() + 60
        while not list((tmp_path / "out").glob("checkpoints/step-*")) and time.monotonic() < until:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        _, said = running.process.communicate(timeout=60)
    assert running.process.returncode == 143
    (path,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert list(faults(path)) == []
    step = int(path.name[5:])
    assert f"SIGTERM: saved after step {step};" in said
    again = train(text, tmp_path / "out", "--ranks", num_ranks, "--steps", str(step + 2), "--resume", "auto")
    assert again.returncode == 0, again.stderr
    assert len(losses(tmp_path / "out")) == step + 2


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.slow
def test_other_data_are_refused(text: Path, tmp_path: Path):
    first = train(text, tmp_path / "out", "--ranks", "1", "--steps", "2", "--save-every", "2")
    assert first.returncode == 0, first.stderr
    other = train(text, tmp_path / "out", "--ranks", "1", "--steps", "4", "--seed", "5", "--resume", "auto")
    assert other.returncode == 2
    assert "seed is 0, and this run's is 5" in other.stderr
    beside = train(text, tmp_path / "out", "--ranks", "1", "--steps", "4", "--check-baseline", "1", "--resume", "auto")
    assert beside.returncode == 2
    assert "check_baseline" in beside.stderr
    nowhere = train(text, tmp_path / "out", "--ranks", "1", "--steps", "4", "--resume", str(tmp_path / "none"))
    assert nowhere.returncode == 2
    assert "no checkpoint there" in nowhere.stderr
