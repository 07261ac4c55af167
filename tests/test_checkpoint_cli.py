"""``shardbook checkpoint``: a tree with sizes, every byte looked at, and weights that others load as they are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardbook as sb
from shardbook.cli.main import run
from tests import ranks
from tests.checkpoints import Net, Setup, build, train

SETUP = Setup(3, 2, "bf16")


def job(folder: Path) -> dict[str, Any]:
    engine = build(SETUP)
    train(engine, 2)
    engine.save(folder / "step-2", extra={"note": "here"})
    found = dict(engine.state_dict())
    engine.close()
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cli")
    return folder, ranks.call(2, job, folder)[0]


@pytest.mark.ranks
def test_inspect(made: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]):
    assert run(["checkpoint", "inspect", str(made[0])]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"step-2  step 2, .* of 2 ranks", shown)
    assert "blocks.0.inner.weight  F32 [37, 20]" in shown
    assert "fixed  BF16 [5, 20] frozen" in shown
    assert run(["checkpoint", "inspect", str(made[0]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    numel = sum(parameter.numel() for parameter in Net().parameters() if parameter.requires_grad)
    without_gradient = 3  # "unused" has no optimizer state
    assert facts["nbytes_by_kind"]["weight"] == 4 * numel + 2 * 100
    assert facts["nbytes_by_kind"]["exp_avg"] == 4 * (numel - without_gradient)
    assert facts["extra"] == {"note": "here"}
    assert facts["config"]["stage"] == 3


@pytest.mark.ranks
def test_verify(made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import shutil

    path = Path(shutil.copytree(made[0] / "step-2", tmp_path / "c"))
    assert run(["checkpoint", "verify", str(path)]) == 0
    assert "whole" in capsys.readouterr().out
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    assert run(["checkpoint", "verify", str(path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 1
    assert run(["checkpoint", "verify", str(tmp_path / "none")]) == 2
    assert "no checkpoint there" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.parametrize("size", ["5GB", "0.004MB"])
def test_export(size: str, made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["checkpoint", "export", str(made[0]), "--to", str(tmp_path / "out"), "--file-size", size]) == 0
    files = [Path(line) for line in capsys.readouterr().out.split()]
    values: dict[str, Any] = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        values |= load_file(file)
    assert set(values) == set(made[1]) - {"head.weight"}
    assert all(torch.equal(value, made[1][name]) and value.dtype == made[1][name].dtype for name, value in values.items())
    if size == "0.004MB":
        index = json.loads(files[-1].read_text())
        assert set(index["weight_map"]) == set(values)
        assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in values.values())
        assert len(files) > 3
    assert run(["checkpoint", "export", str(made[0]), "--to", str(tmp_path / "out")]) == 2
    assert "exists and is no checkpoint" in capsys.readouterr().err


@pytest.mark.ranks
def test_wrong_usage(made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, said in (
        (["export", str(made[0])], "--to is missing"),
        (["export", str(made[0]), "--to", str(tmp_path / "x"), "--file-size", "7G"], "--file-size"),
        (["inspect", str(made[0]), "--to", "x"], "no effect"),
        (["verify", str(made[0]), "--config", "x"], "no effect"),
        (["export", str(made[0]), "--to", str(tmp_path / "x"), "--as", "transformers"], "doesn't say what its model is"),
        (["export", str(made[0]), "--to", str(tmp_path / "x"), "--as", "transformers", "--config", "x"], "--config: no effect"),
        (["export", str(made[0]), "--to", str(tmp_path / "x"), "--config", str(tmp_path / "none.json")], "can't be read"),
    ):
        assert run(["checkpoint", *arguments]) == 2
        assert said in capsys.readouterr().err


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_transformers_gives_the_same_logits(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    model = llama()
    engine = sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), sb.ZeroConfig(stage=2))
    tokens = torch.arange(24).view(2, 12)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save(tmp_path / "c")
    assert run(["checkpoint", "export", str(tmp_path / "c"), "--to", str(tmp_path / "out"), "--file-size", "0.02MB"]) == 0
    model.config.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = engine(input_ids=tokens).logits
        assert torch.equal(again(input_ids=tokens).logits, expected)
        assert not torch.equal(llama()(input_ids=tokens).logits, expected)
    engine.close()


def test_a_parameter_in_another_order_of_memory(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten()).to(memory_format=torch.channels_last)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=3))
    expected = engine.state_dict()
    engine.save(tmp_path / "c")
    assert run(["checkpoint", "export", str(tmp_path / "c"), "--to", str(tmp_path / "out")]) == 0
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    engine.close()
