"""torch's elastic agent starts the ranks again after one was killed: the run goes on from its last checkpoint by itself, bit for bit."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from shardbook.checkpoint.verify import faults
from shardbook.train.devices import _store
from shardbook.train.world import World
from tests.test_checkpoint_train import losses, train
from tests.test_train_cli import COMMAND, TINY, environment

STEPS, EVERY = 40, 2
USUAL = ["--steps", str(STEPS), "--save-every", str(EVERY), "--keep", "2"]


def elastic(options: list[str]) -> subprocess.Popen[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--max-restarts=2", "--nproc-per-node=2"]
    place = ["--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1", "--no-python"]
    variables = environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    return subprocess.Popen([*launcher, *place, *COMMAND, "train", *options], env=variables, stderr=subprocess.PIPE, text=True)


def rank_of(launcher: int, rank: int) -> psutil.Process:
    (found,) = [one for one in psutil.Process(launcher).children() if one.environ().get("RANK") == str(rank)]
    return found


def last_step(out: Path) -> int:
    return max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts, and beside it its text."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    done = train(folder / "text.txt", folder, "--ranks", "2", *USUAL)
    assert done.returncode == 0, done.stderr
    return folder


def test_ranks_that_are_started_again_find_no_address_of_those_before(monkeypatch: pytest.MonkeyPatch):
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"}
    for name, value in {**given, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    world = World(rank=0, num_ranks=2, local_rank=0, num_local_ranks=2, started_by="torchrun", variables={})
    before = _store(world)
    before.set("address", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert before.check(["address"])
    assert not _store(world).check(["address"])


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_at_most_an_interval(victim: int, whole: Path, tmp_path: Path):
    out = tmp_path / "out"
    given = ["--text", str(whole / "text.txt"), "--out", str(out), "--device", "cpu", "--global-batch", "8"]
    launcher = elastic([*TINY, *given, *USUAL, "--resume", "auto"])
    try:
        until = time.monotonic() + 60
        while last_step(out) < 8 and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(rank_of(launcher.pid, victim).pid, signal.SIGKILL)
        reached = last_step(out)
        _, said = launcher.communicate(timeout=90)
    finally:
        for process in psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else ():
            process.kill()
        launcher.kill()
    assert launcher.returncode == 0, said
    assert 8 <= reached < STEPS, "nothing was interrupted"
    (first, *_), again = (re.findall(r"^step (\d+)/", part, re.MULTILINE) for part in said.split("exitcode: -9"))
    assert first == "1"
    assert reached < int(again[0]) <= reached + EVERY + 1, "it did not go on from the last checkpoint"
    assert losses(out) == losses(whole)
    last = f"checkpoints/step-{STEPS:08d}"
    assert list(faults(out / last)) == []
    for rank in (0, 1):
        name = f"{last}/rank-{rank:05d}.safetensors"
        assert (out / name).read_bytes() == (whole / name).read_bytes()
