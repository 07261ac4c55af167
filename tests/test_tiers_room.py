"""Too little host memory is known before anything is taken: the engine, and a run on the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardbook as sb
from shardbook.cli.main import run
from shardbook.errors import ConfigError
from shardbook.tiers import memory
from tests import ranks

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "--sequence", "32", "--micro-batch", "2"]
NUMEL = 64 * 64


def engine(precision: str = "bf16", stage: int = 3, **offload: Any) -> sb.Engine:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision.preset(precision), offload=sb.Offload(**offload))
    return sb.Engine(model, torch.optim.AdamW(model.parameters()), config)


@pytest.mark.parametrize(
    ("offload", "per_element"),
    [
        ({"optimizer": "host"}, 4 + 8 + 4),  # master, moments, gradients
        ({"optimizer": "host", "params": "host"}, 4 + 8 + 4),  # the master is the source of gathers
        ({"params": "host"}, 2),
        ({"optimizer": "disk"}, 4),
    ],
)
def test_an_engine_takes_what_there_is_and_not_a_byte_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offload: dict[str, str], per_element: int
) -> None:
    needed = 4 * NUMEL * per_element
    if offload.get("optimizer") == "disk":
        offload = {**offload, "path": str(tmp_path)}
    monkeypatch.setattr(memory, "available_nbytes", lambda: needed)
    engine(**offload).close()
    monkeypatch.setattr(memory, "available_nbytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"ZeroConfig\.offload = .*needs .*of host memory of .* present .*offload less"):
        engine(**offload)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(memory, "available_nbytes", lambda: None)  # a system that does not say is taken at its silence
    engine(**offload).close()


def test_nothing_is_asked_where_nothing_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: 0)
    engine().close()


def refused_on(rank: int, available: int) -> str:
    """One rank sees less memory than the others; what each is told."""
    import torch.distributed as dist

    before = memory.available_nbytes
    memory.available_nbytes = lambda: available if dist.get_rank() == rank else 1 << 40
    try:
        engine(optimizer="host").close()
    except ConfigError as error:
        return str(error)
    finally:
        memory.available_nbytes = before
    return "built"


@pytest.mark.ranks
def test_the_ranks_of_a_host_share_what_it_has_and_all_are_told() -> None:
    needed = 4 * NUMEL * 16  # both halves together
    assert ranks.call(2, refused_on, 1, needed) == ["built", "built"]
    told = ranks.call(2, refused_on, 1, needed - 1)
    assert told[0] == told[1]
    assert "the 2 ranks of one host together, 0 to 1" in told[0]


def test_a_run_that_does_not_fit_the_host_ends_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = ["train", *TINY, "--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "1", "--ranks", "2"]
    monkeypatch.setattr(memory, "available_nbytes", lambda: 1 << 20)
    monkeypatch.setattr("shardbook.train.launch.launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert run([*options, "--offload-optimizer", "host"]) == 2
    said = capsys.readouterr().err
    assert "zero.offload: needs" in said
    assert "of 1.0 MiB present (2 ranks of" in said
    assert "offload less, keep the optimizer on a disk" in said
    assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.ranks
def test_a_run_that_fits_says_what_lay_where_and_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = ["--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu", "--steps", "3", "--ranks", "2", "--stage", "2"]
    assert run(["train", *TINY, *options, "--offload-optimizer", "host"]) == 0
    document = sb.RunDocument.from_json((tmp_path / "out" / "run.json").read_text())
    shard = next(found.closed_form["PARAM"] for found in document.reconciliations) // 2  # in fp32, of two ranks
    for found in document.tiers:
        assert found.tier == "host"
        assert found.accounts["MASTER"] == found.accounts["GRAD"] == shard
    assert {(moved.rank, moved.link): (moved.nbytes_per_step, moved.nbytes) for moved in document.moved} == {
        (rank, link): (shard, 3 * shard) for rank in (0, 1) for link in ("device to host", "host to device")
    }
    assert run(["report", str(tmp_path / "out" / "run.json")]) == 0
    said = capsys.readouterr().out
    assert "outside of the device, each tier at its highest" in said
    assert "moved between tiers" in said
    assert run(["report", str(tmp_path / "out" / "run.json"), "--html", str(tmp_path / "page.html")]) == 0
    assert "<h2>Other tiers</h2>" in (tmp_path / "page.html").read_text()
