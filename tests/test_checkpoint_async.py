"""Saves that go on while the training does: the same bytes as a save that is waited for, booked, and lost by nobody in silence."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardbook as sb
from shardbook.accounts import Account
from shardbook.checkpoint import background, board, manifest
from shardbook.checkpoint.folder import find
from shardbook.checkpoint.verify import faults
from shardbook.checkpoint.write import BLOCK_NBYTES
from shardbook.engine.storage import Storage
from shardbook.errors import ConfigError, RankLostError, UsageError
from shardbook.models.config import DecoderConfig
from shardbook.train.keeping import Keeping
from shardbook.train.settings import RunSettings
from tests import ranks
from tests.checkpoints import Setup, build, held, train
from tests.test_checkpoint_resume import same

SETUPS = [Setup(0, 1, "fp32"), Setup(0, 2, "fp32"), Setup(1, 2, "bf16-no-master"), Setup(3, 2, "bf16")]
SNAPSHOT = ("WORKSPACE", "device")
WIDTH = 256


@contextmanager
def writing_after(ready: Callable[[], object]) -> Generator[None]:
    """The thread begins to write when ``ready`` returns."""
    original = background.write_own

    def write_later(*args: Any) -> None:
        ready()
        original(*args)

    with mock.patch.object(background, "write_own", write_later):
        yield


def contents(path: Path) -> dict[str, bytes]:
    """Every file's bytes, without the time of the save (and the sum over it)."""
    return {found.name: re.sub(rb'("time_ns": )\d+|("sha256": )"\w+"', rb"\1\2", found.read_bytes()) for found in path.iterdir()}


def hidden(folder: Path) -> list[str]:
    return [found.name for found in folder.iterdir() if found.name.startswith(".")]


def beside(setup: Setup, folder: Path) -> tuple[Any, Any]:
    """A job: save twice at one step, the second time while the weights change under the thread; what goes on, and what is loaded."""
    engine = build(setup)
    train(engine, 2)
    engine.save(folder / "waited", extra={"at": 2})
    trained = threading.Event()
    with writing_after(trained.wait):
        assert engine.save(folder / "async", extra={"at": 2}, wait=False) == folder / "async"
        going_on = train(engine, 3)
        assert not (folder / "async").exists()
        trained.set()
        assert engine.wait_saved() == folder / "async"
    assert engine.wait_saved() is None
    expected = held(engine)
    engine.close()
    again = build(setup, seed=5)
    assert again.load(folder / "async") == {"at": 2}
    assert train(again, 3) == going_on
    found = held(again)
    again.close()
    return expected, found


@pytest.mark.ranks
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_the_bytes_of_a_save_at_that_step(setup: Setup, tmp_path: Path):
    for expected, found in ranks.call(setup.num_ranks, beside, setup, tmp_path):
        assert same(expected, found)
    assert contents(tmp_path / "async") == contents(tmp_path / "waited")
    assert hidden(tmp_path) == []


def booked(stage: int, folder: Path) -> dict[str, int]:
    """A job: what a snapshot takes, by the ledger and, where the save is measured, by books and allocator; and what is left of it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model.register_buffer("seen", torch.full((1000,), float(dist.get_rank())))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param="bf16")))
    data = torch.randn(2, WIDTH)

    def step() -> None:
        engine.backward(engine(data).float().square().mean())
        engine.step()

    step()
    ledger = sb.Ledger(engine)
    before = ledger.balances()
    trained = threading.Event()
    with writing_after(trained.wait), sb.measure(engine) as run:
        with run.step():
            engine.save(folder / "c", wait=False)
        during = dict(ledger.balances())
        with run.step():
            step()
        stays = ledger.balances()[SNAPSHOT]
        trained.set()
        while not engine._background._saving.is_over:  # pyright: ignore[reportOptionalMemberAccess]
            time.sleep(0.01)
        with run.step():
            step()
    after = ledger.balances()
    engine.close()
    own = manifest.read(folder / "c").files[engine.transport.rank]
    assert {key: value for key, value in during.items() if key != SNAPSHOT} == before
    found = run.document()
    return {
        "snapshot": during[SNAPSHOT],
        "stays": stays,
        "formula": sum(-(-(one.end - one.begin) // 64) * 64 for one in own.tensors),
        "state": sum(one.end - one.begin for one in own.tensors),
        "after": after.get(SNAPSHOT, 0),
        "peak": found.peak["WORKSPACE"],
        "unaccounted": found.peak.get("UNACCOUNTED", 0),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_the_snapshot_is_booked_until_the_save_has_ended(stage: int, tmp_path: Path):
    found = ranks.call(2, booked, stage, tmp_path)
    for one in found:
        assert one["snapshot"] == one["stays"] == one["formula"]
        assert one["after"] == 0
        assert one["peak"] >= one["snapshot"]
        assert one["unaccounted"] < 64, "the allocator holds what the books say"
    buffers = 2 * 4000  # rank 1's differs, so both keep theirs
    assert sum(one["state"] for one in found) == 3 * 4 * 4 * WIDTH * (WIDTH + 1) + buffers, "weight, and two moments: of each element once"
    assert sum(one["formula"] - one["state"] for one in found) == 2 * 32


def test_on_a_device_the_snapshot_is_the_hosts():
    engine = build(Setup(2, 1))
    ledger = sb.Ledger(engine)
    elsewhere = Storage(torch.device("meta"), engine._journal)
    with sb.measure(engine) as run, run.step():
        train(engine, 1)
        buffer = elsewhere.host_buffer(Account.WORKSPACE, "checkpoint", 1 << 20, torch.uint8)
        assert buffer.tensor.device.type == "cpu"
        assert ledger.balances()["WORKSPACE", "host"] == 1 << 20
        buffer.give_back()
    assert ("WORKSPACE", "host") not in ledger.balances()
    engine.close()
    assert any(note.endswith("beside it up to 1,048,576 bytes of host memory were held") for note in run.document().notes)


def broken(folder: Path, asks: str) -> str:
    """A job: rank 1 has no space while its thread writes; what each rank is told, and that the next save is as good as any."""
    engine = build(Setup(2, 2, "bf16"))
    train(engine, 1)
    engine.save(folder / "step-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.transport.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
    try:
        engine.save(folder / "step-2", wait=False)
        train(engine, 1)
        with pytest.raises(sb.CheckpointError) as caught:
            {"save": lambda: engine.save(folder / "step-3", wait=False), "wait": engine.wait_saved, "close": engine.close}[asks]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if asks != "close":
        assert engine.wait_saved() is None  # told once
        train(engine, 1)
        engine.save(folder / "step-3", keep=2, wait=False)
    engine.close()
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("asks", ["save", "wait", "close"])
def test_a_failure_on_one_rank_is_told_to_all(asks: str, tmp_path: Path):
    first, second = ranks.call(2, broken, tmp_path, asks)
    assert first == second
    assert str(tmp_path / "step-2") in first
    assert "rank 1:" in first
    assert "File too large" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", *(["step-3"] if asks != "close" else [])]
    assert [list(faults(path)) for path in tmp_path.iterdir()] == [[]] * len(list(tmp_path.iterdir()))


def no_memory(folder: Path) -> str:
    """A job: rank 1 has no memory for its snapshot."""
    engine = build(Setup(3, 2, "fp32"))
    train(engine, 1)
    short = mock.patch.object(torch, "empty", side_effect=RuntimeError("can't allocate memory"))
    with pytest.raises(sb.CheckpointError) as caught:
        if engine.transport.rank == 1:
            with short:
                engine.save(folder / "c", wait=False)
        else:
            engine.save(folder / "c", wait=False)
    assert sb.Ledger(engine).balances().get(SNAPSHOT, 0) == 0
    engine.save(folder / "d")
    engine.close()
    return str(caught.value)


@pytest.mark.ranks
def test_no_memory_for_a_snapshot(tmp_path: Path):
    first, second = ranks.call(2, no_memory, tmp_path)
    assert first == second
    assert "rank 1:" in first
    assert "wait=True" in first
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def killed(folder: Path) -> str:
    """A job: rank 1 is killed while its thread writes, and rank 0 trains on."""
    engine = build(Setup(3, 2, "bf16"))
    train(engine, 1)
    engine.save(folder / "step-1")
    is_last = engine.transport.rank == 1
    with mock.patch.object(board, "PATIENCE_AFTER_FAILURE_SECONDS", 1.0), writing_after(die if is_last else lambda: None):
        engine.save(folder / "step-2", wait=False)
        with pytest.raises(RankLostError):
            train(engine, 100_000)
        with pytest.raises(sb.CheckpointError) as caught:
            engine.close()
    return str(caught.value)


def die() -> None:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_killed_while_the_thread_writes(tmp_path: Path):
    first, second = ranks.fresh_ranks(2, killed, tmp_path)
    assert second.how == "lost"
    assert first.how == "value", first.text
    assert "rank 1 has not been heard of" in first.value
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert list(faults(tmp_path / "step-1")) == []


def all_killed(folder: Path) -> None:
    """A job: save, save once more, and be killed in the middle of the thread's file."""
    engine = build(Setup(0, 1, "fp32"))
    if folder.exists() and any(folder.iterdir()):
        engine.load(folder)
        engine.save(folder / "step-2", wait=False)
        engine.close()
        return
    engine.save(folder / "step-1")
    with mock.patch("shardbook.checkpoint.write.write_bytes", side_effect=lambda *_: die()):
        engine.save(folder / "step-2", wait=False)
        time.sleep(30)


@pytest.mark.ranks
def test_a_kill_leaves_the_last_good_one_and_the_next_save_clears_the_rest(tmp_path: Path):
    assert ranks.alone(all_killed, tmp_path).how == "lost"
    assert hidden(tmp_path) == [".step-2.writing"]
    assert find(tmp_path) == tmp_path / "step-1"
    assert list(faults(tmp_path / "step-1")) == []
    assert ranks.alone(all_killed, tmp_path).how == "value"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert list(faults(tmp_path / "step-2")) == []


def one_after_the_other(folder: Path) -> None:
    """A job: whatever needs the checkpoint waits for it; so does the next save, and of a series the last are kept."""
    engine = build(Setup(2, 2, "fp32"))
    with writing_after(lambda: time.sleep(0.3)):
        engine.save(folder / "step-1", extra={"at": 1}, wait=False)
        assert not (folder / "step-1").exists()
        assert engine.load(folder / "step-1") == {"at": 1}
        for step in (2, 3):
            before = find(folder)
            engine.save(folder / f"step-{step}", keep=2, wait=False)
            assert find(folder) == folder / f"step-{step - 1}"
            assert step == 2 or before != find(folder), "the second save did not wait for the first"
        begun = time.monotonic()
        engine.close()
        assert time.monotonic() - begun > 0.2
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    assert list(faults(folder / "step-3")) == []


@pytest.mark.ranks
def test_one_save_at_a_time_and_close_waits(tmp_path: Path):
    ranks.call(2, one_after_the_other, tmp_path)


def test_in_the_middle_of_a_step(tmp_path: Path):
    engine = build(Setup(2, 1))
    train(engine, 1)
    tokens = torch.randint(19, (3, 6))
    engine.backward(engine(tokens), weight=18.0)
    with pytest.raises(UsageError, match=r"middle of a step.*engine.step"):
        engine.save(tmp_path / "c", wait=False)
    engine.step()
    engine.close()
    assert list(tmp_path.iterdir()) == []


NEVER_CLOSED = """
import errno, sys, time
from pathlib import Path
import torch
import shardbook as sb
from shardbook.checkpoint import background

original = background.write_own

def later(folder, *rest):
    time.sleep(0.3)
    if "lost" in str(folder):
        raise OSError(errno.ENOSPC, "No space left on device")
    original(folder, *rest)

background.write_own = later
for name in ("kept", "lost"):
    engine = sb.Engine(torch.nn.Linear(1500, 1500), None, sb.ZeroConfig())
    engine.save(Path(sys.argv[1]) / name, wait=False)
print("at its end")
"""


def test_the_interpreter_waits_at_its_end(tmp_path: Path):
    said = subprocess.run([sys.executable, "-c", NEVER_CLOSED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "at its end\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert list(faults(tmp_path / "kept")) == []
    assert (tmp_path / "kept" / "rank-00000.safetensors").stat().st_size > 2 * BLOCK_NBYTES, "no thread was needed at the end"
    assert f"{tmp_path / 'lost'}: the save in the background has failed" in said.stderr
    assert "free some space" in said.stderr


@pytest.mark.parametrize(("is_async", "step", "ends", "waits"), [(1, 4, 0, 0), (1, 4, 1, 1), (1, 6, 0, 1), (0, 4, 0, 1), (1, 5, 0, None)])
def test_train_waits_where_nothing_goes_on_beside_it(is_async: int, step: int, ends: int, waits: int | None, tmp_path: Path):
    training = mock.Mock(device="cpu")
    training.recipe.run = RunSettings(steps=6, save_every=2, save_async=bool(is_async), out=tmp_path)
    training.recipe.model_file = None
    training.recipe.model = DecoderConfig()
    training.recipe.batch.global_batch = 8
    training.engine.transport.exchange = lambda vector, _: vector
    assert Keeping(training).after(step, ends=bool(ends)) == bool(ends)
    assert [call.kwargs["wait"] for call in training.engine.save.call_args_list] == ([] if waits is None else [bool(waits)])


def test_saving_in_the_background_needs_checkpoints():
    with pytest.raises(ConfigError, match="save_async = True: .*save_every"):
        RunSettings(save_async=True)


class Store(dict[str, bytes]):
    """What a board needs of a store."""

    def set(self, key: str, text: str) -> None:
        self[key] = text.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_that_stops_beating_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(board, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(board, "BEAT_SECONDS", 0.1)
    store = Store()
    mine, theirs = (board.Board(store, "0123456789abcdef", rank, lambda: True) for rank in (0, 1))
    board.Board(store, "another save's..", 1, lambda: True).say("written", "old")
    theirs.open()
    timer = threading.Timer(1.5, lambda: theirs.say("written", "done"))
    timer.start()
    assert mine.hear("written", 1) == "done"  # slower than the patience, but it beats
    timer.join()
    theirs.close()
    with pytest.raises(board.SilentError, match="rank 1 has not been heard of"):
        mine.hear("known", 1)
    store.check = mock.Mock(side_effect=RuntimeError("connection lost"))  # type: ignore[method-assign]
    with pytest.raises(board.SilentError, match="store .* has gone .connection lost"):
        mine.hear("known", 1)
