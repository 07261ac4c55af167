"""The decoder: its arithmetic against plain formulas, and its weights, which depend on seed and names alone."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shardbook.errors import ConfigError
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Attention, Block, Decoder, RMSNorm, init_weights, rotary_table, rotate, summed_loss
from shardbook.models.local import build_local

SMALL = DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=64)


def tokens(*shape):
    return torch.randint(0, SMALL.vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_the_parameters(tied):
    config = DecoderConfig(layers=3, width=48, heads=6, kv_heads=3, ffn=80, vocab=100, tied=tied)
    assert config.num_parameters == sum(parameter.numel() for parameter in Decoder(config).parameters())


def test_forward_gives_the_summed_loss_and_the_targets_that_count():
    model, inputs, targets = Decoder(SMALL), tokens(2, 9), tokens(2, 9)
    targets[0, :4] = -100
    loss_sum, num_tokens = model(inputs, targets)
    picked = F.log_softmax(model.logits(inputs).double(), -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert int(num_tokens) == 14
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() == pytest.approx(-picked[targets != -100].sum().item(), rel=1e-5)
    assert loss_sum.item() / 14 == pytest.approx(math.log(SMALL.vocab), abs=0.2)


def test_no_position_sees_a_later_one():
    model, inputs = Decoder(SMALL), tokens(1, 12)
    changed = inputs.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % SMALL.vocab
    before, after = model.logits(inputs), model.logits(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


def test_rotary_positions_are_relative():
    cos, sin = rotary_table(20, 16, 10_000.0, torch.device("cpu"))
    query, key = torch.randn(2, 16).unbind()
    turned = [rotate(vector.expand(1, 20, 1, 16), cos, sin)[0, :, 0] for vector in (query, key)]
    dots = turned[0] @ turned[1].T
    torch.testing.assert_close(dots[3, 1], dots[14, 12], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turned[0].norm(dim=-1), query.norm().expand(20))


def test_grouped_queries_are_repeated_keys_and_values():
    grouped = Attention(SMALL)
    full = Attention(DecoderConfig(layers=2, width=32, heads=4, kv_heads=4, ffn=48, vocab=64))
    full.query.weight, full.out.weight = grouped.query.weight, grouped.out.weight
    for name in ("key", "value"):
        weight = getattr(grouped, name).weight.detach()
        getattr(full, name).weight.data = weight.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    x = torch.randn(2, 10, 32)
    torch.testing.assert_close(grouped(x), full(x))


def test_norm_is_the_root_mean_square_in_fp32():
    norm, x = RMSNorm(32, 1e-5), torch.randn(3, 32, dtype=torch.bfloat16)
    torch.testing.assert_close(norm(x), F.rms_norm(x.float(), (32,), eps=1e-5).bfloat16())
    assert norm(x).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_units_initialised_one_by_one_have_the_whole_models_values(tied):
    config = DecoderConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, tied=tied)
    whole = Decoder(config, seed=7)
    with torch.device("meta"):
        late = Decoder(config, seed=7)
    late.to_empty(device="cpu")
    late.head.weight = late.embedding.weight if tied else late.head.weight
    for unit in (late.blocks[1], late.head, late.embedding, late.blocks[0], late.norm):
        torch.randn(3)  # the default generator has no part in it
        init_weights(unit)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), late.parameters(), strict=True))
    assert torch.equal(Block(config, "7.blocks.1").attention.key.weight, whole.blocks[1].attention.key.weight)
    assert not torch.equal(Decoder(config, seed=8).embedding.weight, whole.embedding.weight)
    assert list(whole.buffers()) == []


def test_a_tied_head_is_the_embedding():
    model = Decoder(DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, ffn=16, vocab=32, tied=True))
    assert model.head.weight is model.embedding.weight


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch._dynamo looks at it and hides the warning
def test_fake_bf16_and_compiled():
    with FakeTensorMode():
        loss_sum, _ = Decoder(SMALL)(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
        loss_sum.backward()
    model, inputs = Decoder(SMALL), tokens(2, 8)
    expected, _ = model(inputs, inputs)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    loss_sum, _ = model(inputs, inputs)
    loss_sum.backward()
    torch.testing.assert_close(loss_sum, expected)
    rounded, _ = Decoder(SMALL).bfloat16()(inputs, inputs)
    assert rounded.item() == pytest.approx(expected.item(), rel=0.01)


def test_summed_loss_of_nothing_is_nothing():
    loss_sum, num_tokens = summed_loss(torch.randn(1, 2, 8), torch.full((1, 2), -100))
    assert (loss_sum.item(), int(num_tokens)) == (0.0, 0)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 0}, "DecoderConfig.layers = 0"),
        ({"width": 32, "heads": 5}, "the nearest is 4"),
        ({"width": 30, "heads": 6}, "equal, even parts; the nearest is 5"),
        ({"heads": 6, "kv_heads": 4}, "a divisor of heads = 6; the nearest is 3"),
        ({"tied": 1}, "True or False"),
    ],
)
def test_sizes_that_fit_nothing_are_refused(sizes, said):
    with pytest.raises(ConfigError, match=said.replace("(", "\\(")):
        DecoderConfig(**sizes)


# ---- a local config.json --------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "dtype": "bfloat16",
}


def write(folder, facts):
    path = folder / "config.json"
    path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return path


def test_a_local_config_is_built_with_the_same_contract(tmp_path):
    pytest.importorskip("transformers")
    path = write(tmp_path, LLAMA)
    before = torch.get_rng_state()
    model, again = build_local(path, vocab=256, seed=3), build_local(tmp_path, vocab=256, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    inputs = tokens(2, 6)
    loss_sum, num_tokens = model(inputs, inputs)
    loss_sum.backward()
    assert int(num_tokens) == 12


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("{not json", "is not JSON"),
        ({"hidden_size": 3}, 'has no "model_type"'),
        ("[1]", 'has no "model_type"'),
        ({"model_type": "no-such-model"}, "Unrecognized model identifier: no-such-model"),
        ({"model_type": "vit"}, "can't build a causal language model from it"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"vocab_size": 100}, "vocab_size = 100"),
    ],
)
def test_what_is_no_models_config_is_refused_in_a_line(tmp_path, facts, said):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError) as caught:
        build_local(write(tmp_path, facts), vocab=256, seed=0)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_missing_transformers_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="No such file"):
        build_local(tmp_path / "nothing.json", vocab=256, seed=0)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardbook\[hf\]'"):
        build_local(write(tmp_path, LLAMA), vocab=256, seed=0)
