"""Corruption at random: nothing that is not what was saved is ever loaded, and what is refused has changed nothing."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shardbook as sb
from shardbook.checkpoint import manifest
from tests import ranks
from tests.checkpoints import Setup, build, held, saved, train
from tests.test_checkpoint_resume import same

SOURCE, HERE = Setup(3, 2, "bf16"), Setup(2, 1, "bf16")


def flip(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 20))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def flip_head(folder: Path, rng: random.Random) -> None:
    """In the first bytes, where lengths, names and types are."""
    file = rng.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    data[rng.randrange(min(len(data), 600))] = rng.randrange(256)
    file.write_bytes(data)


def cut(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    data = file.read_bytes()
    begin = rng.randrange(len(data))
    file.write_bytes(rng.choice((data[:begin], data[begin:], data[:begin] + data[begin + 8 :], data + data[begin:])))


def overwrite(folder: Path, rng: random.Random) -> None:
    """One stretch of a file over another."""
    file = rng.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    length = rng.choice((4, 64, 512))
    first, second = (rng.randrange(len(data) - length) for _ in range(2))
    data[first : first + length] = data[second : second + length]
    file.write_bytes(data)


def swap(folder: Path, rng: random.Random) -> None:
    first, second = rng.sample(sorted(folder.iterdir()), 2)
    contents = first.read_bytes()
    shutil.copyfile(second, first)
    if rng.random() < 0.7:
        second.write_bytes(contents)


def remove(folder: Path, rng: random.Random) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def edit(folder: Path, rng: random.Random) -> None:
    """One value of the manifest becomes another, without its checksum being made anew."""
    body = json.loads((folder / manifest.NAME).read_text())
    change(body, rng)
    (folder / manifest.NAME).write_text(json.dumps(body))


def change(node: Any, rng: random.Random) -> None:
    """Walk down at random; replace, remove or exchange what is found there."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        below = node[key]
        if isinstance(below, dict | list) and below and rng.random() < 0.85:
            node = below
            continue
        what = rng.randrange(4)
        if what == 0:
            del node[key]
        elif what == 1:
            other = rng.choice(keys)
            node[key], node[other] = node[other], node[key]
        else:
            node[key] = rng.choice((None, -1, 0, 1, 1 << 40, 1.5, "", "x", [], {}, [1], {"$tensor": ["F32", [1 << 40], ""]}, True))
        return


CORRUPTIONS: list[Callable[[Path, random.Random], None]] = [flip, flip, flip_head, cut, overwrite, swap, remove, edit, edit]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("good"))


def made(folder: Path) -> Path:
    ranks.call(2, saved, [SOURCE], folder)
    return folder / str(SOURCE)


@dataclass(kw_only=True)
class Fuzzed:
    """What came of many corruptions, by their numbers. ``raised``: what is no CheckpointError."""

    refused: list[int] = field(default_factory=list)
    as_saved: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[Any]:
        return [*self.changed, *self.wrong, *self.raised]


def run(good: Path, folder: Path, count: int, seed: int) -> Fuzzed:
    """Corrupt ``count`` copies, each in its own way, and load them."""
    engine = build(HERE)
    engine.load(good)
    expected = held(engine)
    train(engine, 1)
    before = held(engine)
    found = Fuzzed()
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        path = folder / str(number)
        shutil.copytree(good, path)
        rng.choice(CORRUPTIONS)(path, rng)
        try:
            engine.load(path)
        except sb.CheckpointError:
            (found.refused if same(held(engine), before) else found.changed).append(number)
        except Exception as error:
            found.raised.append(f"{number}: {error!r}")
        else:
            (found.as_saved if same(held(engine), expected) else found.wrong).append(number)
            train(engine, 1)
            before = held(engine)
        shutil.rmtree(path)
    engine.close()
    return found


@pytest.mark.ranks
def test_corrupted(good: Path, tmp_path: Path):
    found = run(good, tmp_path, 100, seed=0)
    assert found.bad == []
    assert len(found.refused) > 80, found


@pytest.mark.full
@pytest.mark.ranks
def test_a_thousand_corrupted(good: Path, tmp_path: Path):
    found = run(good, tmp_path, 1000, seed=1)
    assert found.bad == []
    assert len(found.refused) > 800, found


@pytest.mark.ranks
def test_a_forged_manifest(good: Path, tmp_path: Path):
    """Its checksum made anew: what it says may be anything, and still nothing but a refusal or a whole load comes of it."""
    engine = build(HERE)
    refused = 0
    for number in range(150):
        rng = random.Random(number)
        body = json.loads((good / manifest.NAME).read_text())
        change(body, rng)
        body.pop("sha256", None)
        path = tmp_path / str(number)
        shutil.copytree(good, path)
        (path / manifest.NAME).write_text(json.dumps({"sha256": manifest._digest(body), **body}))
        before = held(engine)
        try:
            engine.load(path)
        except sb.CheckpointError:
            refused += 1
            assert same(held(engine), before), number
        shutil.rmtree(path)
    assert refused > 30
    engine.close()
