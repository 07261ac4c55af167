"""The examples of docs/recording.md run as they stand, and leave the records that they say."""

import contextlib
import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import shardbook as sb
from tests import ranks

TEXT = (Path(__file__).parents[1] / "docs" / "recording.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LOOP, READING = BLOCKS[0], BLOCKS[-1]
needs = lambda name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed: make peers")  # noqa: E731


def block_with(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def run_in(folder: str, *blocks: str) -> None:
    """One after the other, in one namespace."""
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other trainers' own
        namespace = {"__name__": "page"}
        for block in blocks:
            exec(compile(block, "recording.md", "exec"), namespace)


def definitions() -> str:
    """What the page's other examples take from the first."""
    return LOOP[: LOOP.index("model = Model()")]


def check(path: Path, *, num_ranks: int = 1, num_micro_batches: int = 2) -> None:
    record = sb.Record.open(path)
    assert (record.num_ranks, record.num_steps) == (num_ranks, 6)
    for step in list(record.steps())[1:]:
        assert step.missing == step.disagreements == []
        for mine, given in zip(step.micro_batches, step.given, strict=True):
            assert len(mine) == len(given) == num_micro_batches
            for one, tensors in zip(mine, given, strict=True):
                assert set(one.inputs) <= set(tensors)
        assert step.applied
        assert all(3 < loss / weight < 6 for loss, weight in zip(step.losses, step.weights, strict=True))


def test_the_plain_loop_and_how_it_is_read(tmp_path, capsys):
    run_in(tmp_path, LOOP, READING)
    check(tmp_path / "runs" / "plain.rec")
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "plain 6 AdamW float32"
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5", "6", "4", "4"]
    assert lines[-1].startswith("4 (0.001,) ")


@pytest.mark.ranks
def test_loops_of_several_ranks(tmp_path):
    ranks.call(
        2,
        run_in,
        str(tmp_path),
        definitions(),
        block_with("fully_shard(Model())"),
        "import torch.distributed as dist",
        block_with("sb.Engine"),
    )
    for name, num in (("ddp", 1), ("fsdp2", 1), ("shardbook", 2)):
        check(tmp_path / "runs" / f"{name}.rec", num_ranks=2, num_micro_batches=num)


@needs("deepspeed")
@pytest.mark.peers
@pytest.mark.ranks
def test_deepspeed(tmp_path):
    prepared = "from benchmarks.engines import import_deepspeed\nimport torch.distributed as dist\nimport_deepspeed()"
    ranks.raise_first(ranks.fresh_ranks(2, run_in, str(tmp_path), definitions(), prepared, block_with("import deepspeed")))
    check(tmp_path / "runs" / "deepspeed.rec", num_ranks=2, num_micro_batches=1)


@pytest.mark.peers
@pytest.mark.parametrize(
    "name", [pytest.param("lightning", marks=needs("lightning")), pytest.param("transformers", marks=needs("accelerate"))]
)
def test_trainers(name, tmp_path):
    run_in(tmp_path, definitions(), block_with(f"import {name}\n"))
    check(tmp_path / "runs" / f"{name}.rec")
