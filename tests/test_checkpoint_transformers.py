"""Weights to transformers and back: equal logits there, from there, and for shardbook's own decoder as a Llama."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardbook as sb
from shardbook.cli.main import run
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.models.llama import check_same_model, config_json
from tests import ranks
from tests.test_train_cli import TINY, shardbook

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(24).view(2, 12)


def llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Its head is always tied."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": lambda: llama(tied=False), "tied llama": lambda: llama(tied=True), "gpt2": gpt2}


def engine_of(model: nn.Module, stage: int = 3, param: str = "fp32") -> sb.Engine:
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=param), clip_grad_norm=1.0)
    return sb.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)


def trained(folder: Path) -> list[tuple[Tensor, list[str]]]:
    """A job: two steps at stage 3, saved; its logits, and the units' names."""
    found = []
    for name, build in MODELS.items():
        model = build()
        engine = engine_of(model)
        for step in range(2):
            tokens = (TOKENS + engine.transport.rank + step) % 97
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save(folder / name)
        model.eval()
        with torch.no_grad():
            found.append(engine(input_ids=TOKENS).logits)
        engine.close()
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("trained")
    first, second = ranks.call(2, trained, folder)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return folder, dict(zip(MODELS, first, strict=True))


def logits(path: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.ranks
@pytest.mark.parametrize("size", ["5GB", "0.02MB"])
@pytest.mark.parametrize("name", MODELS)
def test_export_gives_the_same_logits(name: str, size: str, made: tuple[Path, dict[str, Tensor]], tmp_path: Path):
    folder, expected = made
    built = MODELS[name]().eval()
    built.config.to_json_file(tmp_path / "config.json")
    arguments = ["--to", str(tmp_path / "out"), "--file-size", size, "--config", str(tmp_path / "config.json")]
    assert run(["checkpoint", "export", str(folder / name), *arguments]) == 0
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 3) == (size != "5GB")
    assert torch.equal(logits(tmp_path / "out"), expected[name])
    with torch.no_grad():
        assert not torch.equal(built(input_ids=TOKENS).logits, expected[name])
    # and from there into an engine again
    engine = engine_of(MODELS[name](), stage=1)
    engine.load_weights(tmp_path / "out")
    engine.model.eval()
    with torch.no_grad():
        assert torch.equal(engine(input_ids=TOKENS).logits, expected[name])
    engine.close()


@pytest.mark.ranks
def test_a_type_in_the_export_is_the_type_that_transformers_takes(made: tuple[Path, dict[str, Tensor]], tmp_path: Path):
    MODELS["llama"]().config.to_json_file(tmp_path / "config.json")
    arguments = ["--to", str(tmp_path / "out"), "--dtype", "bf16", "--config", str(tmp_path / "config.json")]
    assert run(["checkpoint", "export", str(made[0] / "llama"), *arguments]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_is_imported(name: str, tmp_path: Path):
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        expected = model(input_ids=TOKENS).logits
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    for path in (tmp_path / "whole", tmp_path / "parts"):
        engine = engine_of(MODELS[name]())
        engine.load_weights(path)
        engine.model.eval()
        with torch.no_grad():
            assert torch.equal(engine(input_ids=TOKENS).logits, expected)
        engine.close()


# ---- shardbook train -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def train(text: Path, out: Path, *options: str, sizes: list[str] = TINY) -> Any:
    done = shardbook("train", *sizes, "--text", str(text), "--out", str(out), "--device", "cpu", "--global-batch", "8", *options)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "run.json").read_text())


def test_the_decoder_is_a_llama(tmp_path: Path):
    """Logits within rounding: transformers computes the rotation's angles in another order."""
    config = DecoderConfig(vocab=97, layers=2, width=32, heads=4, kv_heads=2, ffn=48, rope_base=5e4, norm_eps=1e-4)
    model = Decoder(config, seed=3)
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=2))
    extra = {"model": {"decoder": vars(config), "sequence": 16}}
    engine.save(tmp_path / "c", extra=extra)
    assert run(["checkpoint", "export", str(tmp_path / "c"), "--to", str(tmp_path / "out"), "--as", "transformers"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=TOKENS).logits, model.logits(TOKENS), rtol=1e-5, atol=1e-5)
        other = Decoder(DecoderConfig(**{**vars(config), "rope_base": 1e4}), seed=3)
        assert not torch.allclose(other.logits(TOKENS), model.logits(TOKENS), rtol=1e-4, atol=1e-4)
    engine.close()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("names", ["transformers", "model"])
@pytest.mark.full
def test_train_begins_from_an_export(names: str, text: Path, tmp_path: Path):
    """The plain loop begins from the same weights, on its own way; under transformers' names or those of the run."""
    first = train(text, tmp_path / "first", "--ranks", "1", "--steps", "3", "--save-every", "3", "--tied")
    assert run(["checkpoint", "export", str(tmp_path / "first/checkpoints"), "--to", str(tmp_path / "out"), "--as", names]) == 0
    options = ["--ranks", "2", "--steps", "2", "--init-from", str(tmp_path / "out"), "--check-baseline", "2", "--tied"]
    second = train(text, tmp_path / "second", *options, "--precision", "bf16")
    assert second["baseline"]["identical"]
    assert second["losses"][0] < first["losses"][2] < first["losses"][0]


@pytest.mark.ranks
@pytest.mark.full
def test_train_a_transformers_class_and_export_it(text: Path, tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    torch.manual_seed(9)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "begin")
    sizes = ["--config", str(tmp_path / "begin" / "config.json"), "--sequence", "32", "--micro-batch", "2"]
    options = ["--ranks", "2", "--steps", "1", "--init-from", str(tmp_path / "begin"), "--check-baseline", "1", "--save-every", "1"]
    assert train(text, tmp_path / "run", *options, sizes=sizes)["baseline"]["identical"]
    assert run(["checkpoint", "export", str(tmp_path / "run/checkpoints"), "--to", str(tmp_path / "out"), "--as", "transformers"]) == 0
    names = [name for name, _ in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters()]
    assert names == [name for name, _ in transformers.GPT2LMHeadModel(config).named_parameters()]


@pytest.mark.full
def test_train_refuses_what_is_not_its_model(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = ["train", *TINY, "--text", str(text), "--out", str(tmp_path / "out"), "--device", "cpu", "--ranks", "1", "--init-from"]
    llama(tied=False).save_pretrained(tmp_path / "llama")
    torch.save({}, tmp_path / "weights.bin")
    assert run([*base, str(tmp_path / "weights.bin")]) == 2
    assert "a pickle" in capsys.readouterr().err
    assert run([*base, str(tmp_path / "llama"), "--resume", str(tmp_path)]) == 2
    assert "run.init_from" in capsys.readouterr().err
    done = shardbook(*base, str(tmp_path / "llama"))
    assert done.returncode == 2, done.stderr
    assert "vocab_size is 97, and model.vocab is 256" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and model.norm_eps is 1e-05"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, and model.heads is 6"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 500000.0, and model.rope_base is 10000.0"),
        ({"rope_parameters": None, "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
    ],
)  # fmt: skip
def test_what_shapes_do_not_show(change: dict[str, Any], said: str):
    facts = config_json(DecoderConfig(), 256)
    check_same_model(DecoderConfig(), facts, "config.json")
    with pytest.raises(sb.errors.ConfigError) as caught:
        check_same_model(DecoderConfig(), {**facts, **change}, "config.json")
    assert said in str(caught.value)
