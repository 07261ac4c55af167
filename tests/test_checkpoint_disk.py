"""Checkpoints of engines that keep master and state on a disk: to and from any other engine, in bounded memory, and after errors."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardbook as sb
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.verify import faults
from shardbook.errors import DiskError, UsageError
from shardbook.tiers import direct
from tests import ranks
from tests.checkpoints import Setup, build, held, loaded, saved, together, train

DISK = [Setup(stage=1, offload="disk"), Setup(stage=3, precision="bf16", offload="disk")]
MEMORY = [Setup(stage=2, precision="bf16"), Setup(stage=3)]
PAIRS = [(DISK[0], MEMORY[0]), (DISK[1], MEMORY[1]), (MEMORY[0], DISK[0]), (MEMORY[1], DISK[1]), (DISK[0], DISK[1]), (DISK[1], DISK[0])]


@pytest.mark.ranks
def test_to_and_from_any_other_engine(tmp_path: Path) -> None:
    before = ranks.call(2, saved, [*DISK, *MEMORY], tmp_path, seconds=60)
    after = ranks.call(2, loaded, PAIRS, tmp_path, seconds=60)
    sizes = {name: parameter.numel() for name, parameter in build(Setup(num_ranks=1)).model.named_parameters()}
    for number, (source, target) in enumerate(PAIRS):
        stored = together([one[[*DISK, *MEMORY].index(source)] for one in before], sizes)
        here = together([one[number] for one in after], sizes)
        assert set(here) == set(stored)
        for name, parts in stored.items():
            assert set(here[name]) == set(parts)
            assert all(torch.equal(here[name][key], part) for key, part in parts.items()), (source, target, name)
    assert not any(list(faults(tmp_path / str(setup))) for setup in (*DISK, *MEMORY))


def gone_on(folder: Path) -> list[dict[str, Any]]:
    """A job: a run of four steps, and one that is stopped after two and goes on in another engine."""
    found = []
    for setup in DISK:
        whole = build(setup)
        train(whole, 4)
        first = build(setup)
        train(first, 2)
        first.save(folder / str(setup), wait=False)
        first.wait_saved()
        second = build(setup, seed=5)
        second.load(folder / str(setup))
        train(second, 2)
        found.append({"whole": held(whole), "second": held(second)})
        for engine in (whole, first, second):
            engine.close()
    return found


@pytest.mark.ranks
def test_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    for found in ranks.call(2, gone_on, tmp_path, seconds=60):
        for pair in found:
            whole, second = pair["whole"], pair["second"]
            assert all(torch.equal(whole["model"][name], value) for name, value in second["model"].items())
            for (name, start, value, state), (name2, start2, value2, state2) in zip(whole["pieces"], second["pieces"], strict=True):
                assert (name, start, set(state)) == (name2, start2, set(state2))
                assert torch.equal(value, value2)
                assert all(torch.equal(one, state2[key]) for key, one in state.items())


def alone(optimizer: str = "adamw") -> sb.Engine:
    return build(Setup(stage=3, num_ranks=1, offload="disk"), optimizer=optimizer)


def test_state_without_room_is_refused_by_name(tmp_path: Path) -> None:
    def engine(amsgrad: bool) -> sb.Engine:
        model = torch.nn.Linear(8, 8)
        made = torch.optim.Adam(model.parameters(), amsgrad=amsgrad)
        return sb.Engine(model, made, sb.ZeroConfig(offload=sb.Offload(optimizer="disk", path=tmp_path)))

    one, other = engine(True), engine(False)
    one.backward(one(torch.ones(2, 8)).sum())
    one.step()
    one.save(tmp_path / "saved")
    before = dict(other.state_dict())
    with pytest.raises(CheckpointError, match=r"it has 'max_exp_avg_sq' of '(weight|bias)', for which the optimizer here has no room"):
        other.load(tmp_path / "saved")
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    one.close()
    other.close()


def test_weights_of_others_reach_the_master(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = build(Setup(num_ranks=1), seed=8)
    values = dict(source.state_dict())
    save_file({name: value.contiguous().clone() for name, value in values.items() if name != "head.weight"}, tmp_path / "model.safetensors")
    engine = alone()
    engine.load_weights(tmp_path, allow_missing=("seen", "*.calls"))
    masters = {name: torch.zeros(value.numel()) for name, value in engine.model.named_parameters()}
    for name, start, value, _ in held(engine)["pieces"]:
        masters[name][start : start + value.numel()] = value
        assert torch.equal(value, values[name].reshape(-1)[start : start + value.numel()])
    engine.close()


def test_an_error_of_the_disk_ends_the_step_and_the_checkpoint_stays(tmp_path: Path) -> None:
    engine = alone()
    train(engine, 2)
    kept = held(engine)
    engine.save(tmp_path / "saved")
    preadv = os.preadv

    def fails(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor == engine._context.disk._file._descriptor and offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    with mock.patch.object(direct.os, "preadv", fails), pytest.raises(DiskError, match=r"reading .* at offset .* returned EIO") as found:
        train(engine, 2)
    assert found.value.errno == errno.EIO
    for what in (lambda: train(engine, 1), lambda: engine.save(tmp_path / "other"), lambda: engine.load(tmp_path / "saved")):
        with pytest.raises((DiskError, UsageError, CheckpointError), match="EIO"):
            what()
    engine.close()
    again = alone()
    again.load(tmp_path / "saved")
    for (_, _, value, state), (_, _, value2, state2) in zip(kept["pieces"], held(again)["pieces"], strict=True):
        assert torch.equal(value, value2)
        assert all(torch.equal(one, state2[key]) for key, one in state.items())
    again.close()


def test_a_step_that_ends_half_way_is_refused_until_a_load(tmp_path: Path) -> None:
    engine = alone()
    train(engine, 1)
    engine.save(tmp_path / "saved")
    kept, calls = held(engine), 0
    step = torch.optim.AdamW.step.__wrapped__

    def stops(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return step(self, *args)

    with mock.patch("shardbook.engine.optimizer._unwatched_step", stops), pytest.raises(KeyboardInterrupt):
        train(engine, 1)
    for what in (lambda: train(engine, 1), lambda: engine.save(tmp_path / "torn")):
        with pytest.raises((UsageError, CheckpointError), match=r"a step was ended half-way.*load the last checkpoint"):
            what()
    assert not (tmp_path / "torn").exists()
    engine._passes.clear()
    engine.load(tmp_path / "saved")
    for (_, _, value, state), (_, _, value2, state2) in zip(kept["pieces"], held(engine)["pieces"], strict=True):
        assert torch.equal(value, value2)
        assert all(torch.equal(one, state2[key]) for key, one in state.items())
    train(engine, 1)
    engine.close()


KILLED = """
import sys
from pathlib import Path
from tests.checkpoints import Setup, build, train
engine = build(Setup(stage=3, num_ranks=1, offload="disk"))
train(engine, 1)
engine.save(Path(sys.argv[1]) / "saved")
print("saved", flush=True)
while True:
    train(engine, 1)
"""


def test_a_killed_run_leaves_its_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many: sums are the same
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "saved\n"
        run.send_signal(signal.SIGKILL)
    assert list(scratch.iterdir()) == []
    expected = alone()
    train(expected, 2)
    engine = alone()
    engine.load(tmp_path)
    train(engine, 1)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in engine.state_dict().items())
    expected.close()
    engine.close()
