"""Runs that save after every step and are killed at any moment: what is left is a whole checkpoint, and the finished run is the same."""

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardbook.checkpoint.folder import find, finished
from shardbook.checkpoint.verify import faults
from tests import ranks
from tests.checkpoints import Setup, build, held, train
from tests.test_checkpoint_resume import same

SETUP = Setup(3, 2, "bf16")


def run(folder: Path, steps: int, setup: Setup = SETUP) -> Any:
    """A job: go on from the last checkpoint, if there is one, and save after every step."""
    engine = build(setup)
    if finished(folder):
        extra = engine.load(folder)
        assert extra == {"next": engine.num_steps}
    while engine.num_steps < steps:
        train(engine, 1)
        engine.save(folder / f"step-{engine.num_steps:05d}", extra={"next": engine.num_steps}, keep=2)
        if engine.transport.rank == 0:
            (folder / "reached").write_text(str(engine.num_steps))
    found = held(engine)
    engine.close()
    return found


def killed(folder: Path, rng: random.Random, steps: int, setup: Setup, *, inside: bool) -> tuple[int, bool]:
    """Start the run, kill one rank or both at some moment, or at some moment inside a save; the step whose save had ended before that,
    and whether one was under way.
    """
    before = reached(folder)
    workers = ranks.server().fork(2, "gloo")
    for worker in workers:
        worker.send(run, (folder, steps, setup), {})
    until = time.monotonic() + 30
    while reached(folder) == before and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.15)
    if inside:
        while not is_writing(folder) and time.monotonic() < until:
            time.sleep(0.0002)
        time.sleep(rng.random() * 0.004)
    last = reached(folder)
    victims = rng.choice((workers, workers[:1], workers[1:]))
    for worker in victims:
        os.kill(worker.pid, signal.SIGKILL)
    was_inside = is_writing(folder)
    if len(victims) == 1:
        ranks.collect([worker for worker in workers if worker not in victims], 30)
    ranks.stop(workers)
    return last, was_inside


def is_writing(folder: Path) -> bool:
    return any(name.endswith(".writing") for name in os.listdir(folder))


def reached(folder: Path) -> int:
    try:
        return int((folder / "reached").read_text() or 0)
    except FileNotFoundError:
        return 0


@dataclass(kw_only=True)
class Killed:
    """What came of many kills. ``lost``: checkpoints that had been saved before a kill and were gone after it."""

    num_kills: int
    num_inside: int = 0
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    is_same: bool = False
    rubbish: list[str] = field(default_factory=list)


def killed_often(folder: Path, kills: int, seed: int, setup: Setup = SETUP) -> Killed:
    """Kill a run again and again, let it end, and hold it against one that nobody killed."""
    steps = 12 * kills
    (folder / "whole").mkdir()
    expected = ranks.call(2, run, folder / "whole", steps, setup, seconds=180.0)
    rng, found = random.Random(seed), Killed(num_kills=kills)
    broken = folder / "broken"
    broken.mkdir()
    for number in range(kills):
        last, was_inside = killed(broken, rng, steps, setup, inside=number % 2 == 0)
        found.num_inside += was_inside
        path = find(broken)
        found.damaged += faults(path)
        if int(path.name[5:]) < last:
            found.lost.append(f"step {last}: {path.name} is the last one")
    found.is_same = same(ranks.call(2, run, broken, steps, setup, seconds=180.0), expected)
    wanted = {"reached", *(f"step-{step:05d}" for step in (steps - 1, steps))}
    found.rubbish = sorted({path.name for path in broken.iterdir()} ^ wanted)
    return found


def check(found: Killed) -> None:
    assert found.damaged == []
    assert found.lost == []
    assert found.num_inside > 0, "no kill came while a checkpoint was written: nothing is shown"
    assert found.is_same
    assert found.rubbish == []


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_four_times(tmp_path: Path):
    check(killed_often(tmp_path, 4, seed=0))


@pytest.mark.full
@pytest.mark.ranks
def test_killed_fifteen_times(tmp_path: Path):
    """``make evidence-checkpoints`` does it fifty times."""
    check(killed_often(tmp_path, 15, seed=1))
