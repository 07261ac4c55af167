"""From anything to facts; devices; adapters and frozen shares; and what bad input of every kind is told."""

import json
from pathlib import Path

import pytest
from torch import nn

from shardbook.errors import ConfigError
from shardbook.facts import catalog, find, hardware
from shardbook.facts.adapters import with_adapters, with_share_trained
from shardbook.facts.model import ModelFacts

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


def written(folder: Path, content) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refused(model) -> str:
    with pytest.raises(ConfigError) as caught:
        find.resolve(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- counts, names, modules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (7e9, 7 * 10**9),
        (7_500_000_000, 7_500_000_000),
        ("7e9", 7 * 10**9),
        ("7B", 7 * 10**9),
        (" 1.5b ", 1_500_000_000),
        ("7.6156b", 7_615_600_000),
        ("350M", 350 * 10**6),
        ("1T", 10**12),
        ("7_000_000_000", 7 * 10**9),
        (1, 1),
    ],
)
def test_a_count_is_read(model, count):
    facts = find.resolve(model)
    assert (facts.num_parameters, facts.units, facts.architecture, facts.largest_unit) == (count, (), None, None)


@pytest.mark.parametrize("model", [0, -7, "-7e9", 7.5, "0", "nan", float("inf"), "1e16", 10**30, "1e400"])
def test_a_count_that_cannot_be_is_refused(model):
    assert "allowed is a whole number of parameters" in refused(model)


@pytest.mark.parametrize("model", [True, None, [], {}, object(), b"7e9", 3j, int])
def test_what_is_no_model_is_refused(model):
    assert "allowed is a number of parameters" in refused(model)


def test_facts_stay_facts():
    facts = ModelFacts.of_count(7)
    assert find.resolve(facts) is facts


def test_names_and_modules_are_found():
    assert find.resolve("Mixtral-8x7B").architecture.experts.count == 8
    assert find.resolve(nn.Linear(3, 4)).num_parameters == 16


@pytest.mark.parametrize(
    ("text", "said"), [("llama-3-9b", "llama-3-8b"), ("mixtral", "mixtral-8x7b"), ("", "for example"), ("7x9", "nearest|known are")]
)
def test_an_unknown_name_is_told_the_nearest(text, said):
    message = refused(text)
    assert any(part in message for part in said.split("|"))


# ---- config.json ---------------------------------------------------------------------------------------------------------


def test_a_file_and_its_folder_are_the_same(tmp_path):
    path = written(tmp_path, TINY)
    for model in (path, tmp_path, str(path), f"{tmp_path}/"):
        facts = find.resolve(model)
        assert (facts.name, facts.num_parameters) == (tmp_path.name, 3 * 38_016 + 64 + 2 * 320 * 64)


def test_what_transformers_fills_in_is_noted(tmp_path):
    facts = find.resolve(written(tmp_path, TINY))
    (note,) = [note for note in facts.notes if "not in the file" in note]
    assert "tie_word_embeddings = False" in note
    assert "max_position_embeddings = 2048" in note


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "holds a list"),
        ("[" * 100_000, "is not JSON"),
        ({"zero_optimization": {"stage": 3}}, 'has no "model_type"'),
        ({"model_type": 7}, 'has no "model_type"'),
        ({"model_type": "bert"}, "model_type = 'bert' is not modelled"),
        ({"model_type": "lama"}, "nearest: llama"),
        ({"model_type": "qwen3_next"}, "nearest: qwen3"),
        ({"model_type": "llama"}, "missing: hidden_size, num_attention_heads, num_hidden_layers, intermediate_size, vocab_size"),
        ({k: v for k, v in TINY.items() if k != "vocab_size"}, "field is missing: vocab_size; a llama needs it"),
        ({**TINY, "hidden_size": "64"}, "hidden_size = '64', where a whole number"),
        ({**TINY, "num_hidden_layers": 0}, "num_hidden_layers = 0, where"),
        ({**TINY, "num_hidden_layers": -3}, "num_hidden_layers = -3, where"),
        ({**TINY, "num_hidden_layers": 10**6}, "Architecture.layers = 1000000"),
        ({**TINY, "num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000, where"),
        ({**TINY, "hidden_size": 10**8, "intermediate_size": 10**8}, "more than 1e+15"),
        ({**TINY, "hidden_size": True}, "hidden_size = True, where"),
        ({**TINY, "num_attention_heads": 5}, "num_attention_heads = 5 does not divide hidden_size = 64"),
        ({**TINY, "num_key_value_heads": 3}, "Architecture.kv_heads = 3"),
        ({**TINY, "tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes', where true or false"),
        ({**TINY, "attention_dropout": 1.5}, "attention_dropout = 1.5, where a share"),
        ({**TINY, "hidden_act": 3}, "hidden_act = 3, where a text"),
        ({**TINY, "model_type": "mixtral"}, "missing: num_local_experts, num_experts_per_tok"),
        ({**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok = 5 is more than 4"),
        (
            {
                **TINY,
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "mlp_only_layers": [1],
            },
            "which is not modelled",
        ),
        (
            {
                **TINY,
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "mlp_only_layers": 1,
            },
            "mlp_only_layers = 1, where a list",
        ),
        ({**TINY, "model_type": "phi", "qk_layernorm": True}, "qk_layernorm = True is not modelled"),
        (
            {"model_type": "opt", "ffn_dim": 8, "word_embed_proj_dim": 3, **{k: v for k, v in TINY.items() if k != "model_type"}},
            "word_embed_proj_dim = 3",
        ),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, content, said):
    path = written(tmp_path, content)
    message = refused(path)
    assert said in message
    assert message.startswith(str(path))


def test_a_file_that_is_not_there(tmp_path):
    assert "can't be read (No such file or directory)" in refused(tmp_path)
    assert "can't be read" in refused("./llama-3.1-8b")
    assert "can't be read (File name too long)" in refused("./" + "x" * 5000)
    assert "there is no such name or file" in refused("x" * 5000)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refused(tmp_path)


def test_the_text_tower_of_gemma_3(tmp_path):
    """Published files leave out heads and vocabulary, which transformers fills in."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    facts = find.resolve(written(tmp_path, {"model_type": "gemma3", "text_config": inner, "vision_config": {}}))
    assert facts.num_parameters == catalog.facts("gemma-3-4b-text").num_parameters
    assert "text tower" in " ".join(facts.notes)


# ---- devices -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("h100-80gb", 79.1, 79.7),
        ("NVIDIA H100 80GB", 79.1, 79.7),
        ("H100", 79.1, 79.7),
        ("a100-80gb", 79.1, 79.4),
        ("A100_40GB", 39.3, 39.6),
        ("rtx 4090", 23.5, 23.7),
        ("titan-rtx", 23.6, 23.7),
        ("h200", 139.7, 139.9),
        ("b200", 178.3, 180),
        ("mi300x", 191.6, 192),
        ("24GiB", 24, 24),
        ("80 GB", 74.5, 74.6),
    ],
)
def test_a_device_has_what_torch_reports(name, low, high):
    assert low <= hardware.device(name).memory / 2**30 <= high


@pytest.mark.parametrize("name", hardware.names())
def test_every_device_is_whole(name):
    device = hardware.device(name)
    assert device.name == name
    assert 0 < device.memory <= device.sold * 2**30 / 10**9
    assert device.memory > 0.85 * device.sold
    assert device.host > 0
    assert device.source


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100-90gb", "h100-80gb"),
        ("a1000", "a100"),
        ("mi300", "mi300x"),
        ("80", "nearest|known are"),
        ("-3GiB", "allowed"),
        ("", "allowed"),
        ("0GiB", "allowed"),
        (None, "allowed"),
        (80, "allowed"),
    ],
)
def test_an_unknown_device_is_told_the_nearest(name, said):
    with pytest.raises(ConfigError) as caught:
        hardware.device(name)
    assert any(part in str(caught.value) for part in said.split("|"))
    assert "\n" not in str(caught.value)


# ---- adapters and frozen shares ------------------------------------------------------------------------------------------


def test_adapters_on_queries_and_values():
    """Llama 3.1 8B: 32 blocks, rank 16 between 4,096 and 4,096, and between 4,096 and 1,024."""
    base = catalog.facts("llama-3.1-8b")
    facts = with_adapters(base, 16)
    added = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    assert facts.num_trainable == added == 6_815_744
    assert facts.num_parameters == base.num_parameters + added


def test_adapters_on_every_layer():
    """The seven matrices of a block: 41,943,040 for rank 16, as adapters on Llama 3.1 8B are usually quoted."""
    assert with_adapters(catalog.facts("llama-3.1-8b"), 16, "all").num_trainable == 41_943_040


def test_adapters_on_named_layers_and_on_one_matrix():
    facts = catalog.facts("gpt2")
    assert with_adapters(facts, 8).num_trainable == 12 * 8 * (768 + 3 * 768) == with_adapters(facts, 8, ["qkv"]).num_trainable


def test_adapters_of_a_module():
    from shardbook.models.config import DecoderConfig
    from shardbook.models.decoder import Decoder

    config = DecoderConfig(layers=2, width=32, heads=2, kv_heads=1, ffn=64)
    assert with_adapters(find.resolve(Decoder(config)), 4).num_trainable == 2 * 4 * ((32 + 32) + (32 + 16))


@pytest.mark.parametrize(
    ("model", "rank", "targets", "said"),
    [
        ("gpt2", 0, "attention", "lora_rank = 0"),
        ("gpt2", 2.5, "attention", "lora_rank = 2.5"),
        ("7e9", 8, "attention", "known by its count alone"),
        ("gpt2", 8, "q_proj", "some of down, out, qkv, up"),
    ],
)
def test_adapters_that_cannot_be(model, rank, targets, said):
    with pytest.raises(ConfigError) as caught:
        with_adapters(find.resolve(model), rank, targets)
    assert said in str(caught.value)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.999, 1])
def test_a_share_is_trained(share):
    facts = catalog.facts("llama-3.1-8b")
    trained = with_share_trained(facts, share).num_trainable / facts.num_parameters
    largest = facts.largest_tensor.numel / facts.num_parameters
    assert share - largest <= trained <= share
    assert with_share_trained(ModelFacts.of_count(1000), share).num_trainable == int(1000 * share)


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", None, True, float("nan")])
def test_a_share_that_cannot_be(share):
    with pytest.raises(ConfigError, match="allowed is a share from 0 to 1"):
        with_share_trained(catalog.facts("gpt2"), share)
