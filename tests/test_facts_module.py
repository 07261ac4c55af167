"""Facts of modules: the engine's own units and orders, and the architecture where it can be told."""

import pytest
import torch
from torch import nn

from benchmarks.models import GPT, SMALL
from shardbook.config import ZeroConfig
from shardbook.engine.engine import Engine
from shardbook.engine.partition import partition
from shardbook.errors import ConfigError
from shardbook.facts import module
from shardbook.facts.parameters import units_of
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.models.local import LocalModel
from tests.equality import built
from tests.zoo import ZOO

DECODERS = {
    "small": DecoderConfig(layers=3, width=36, heads=6, kv_heads=2, ffn=50, vocab=47),
    "tied": DecoderConfig(layers=3, width=36, heads=6, kv_heads=2, ffn=50, vocab=47, tied=True),
    "deep": DecoderConfig(layers=40, width=32, heads=2, kv_heads=1, ffn=64, vocab=40),
    "deep tied": DecoderConfig(layers=40, width=32, heads=2, kv_heads=1, ffn=64, vocab=40, tied=True),
    "one block": DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, ffn=64, vocab=40),
    "one tied": DecoderConfig(layers=1, width=32, heads=2, kv_heads=1, ffn=64, vocab=40, tied=True),
}
SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def in_words(units):
    return [(unit.name, unit.around, [(each.name, each.shape, each.trainable) for each in unit.parameters]) for unit in units]


def of_engine(model):
    return [
        (
            part.name,
            tuple(index for index in part.ancestors if index),
            [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in part.parameters],
        )
        for part in partition(model, None)
    ]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_units_are_the_engines(name):
    model = built(ZOO[name], 0)
    facts = module.facts(model)
    assert in_words(facts.units) == of_engine(model)
    assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.num_trainable == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {each.name: SHORT.get(each.dtype, getattr(torch, each.dtype, None)) for each in facts.parameters()} == types


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_a_decoders_units_follow_from_its_sizes(name):
    model = Decoder(DECODERS[name])
    facts = module.facts(model)
    assert facts.architecture.implementation == "shardbook"
    assert in_words(units_of(facts.architecture)) == in_words(facts.units) == of_engine(model)
    assert facts.notes == ()


@pytest.mark.parametrize("name", ["small", "deep tied", "one block"])
def test_units_are_those_of_a_live_engine(name):
    model = Decoder(DECODERS[name])
    expected = [(unit.name, [each.shape for each in unit.parameters]) for unit in module.facts(model).units]
    engine = Engine(model, torch.optim.AdamW(model.parameters()), ZeroConfig(stage=3))
    units = engine.structure().units
    numels = [[numel for flat in unit.flats for numel in flat.numels] for unit in units]
    assert [unit.name for unit in units] == [unit for unit, _ in expected]
    assert numels == [[torch.Size(shape).numel() for shape in shapes] for _, shapes in expected]
    engine.close()


def test_the_meta_device_is_enough():
    with torch.device("meta"):
        model = Decoder(DECODERS["small"])
    assert module.facts(model) == module.facts(Decoder(DECODERS["small"]))


def test_a_gpt_is_recognised():
    model = GPT(SMALL)
    facts = module.facts(model)
    found = facts.architecture
    assert (found.implementation, found.norm, found.gated, found.fused_qkv) == ("gpt", "layer", False, True)
    assert (found.layers, found.hidden, found.heads, found.kv_heads, found.ffn) == (3, 64, 2, 2, 256)
    assert (found.vocab, found.learned_positions, found.max_seq, found.tied) == (192, 32, 32, False)
    assert sum(unit.numel for unit in units_of(found)) == facts.num_parameters == SMALL.num_parameters
    assert any("recognised" in note and "assumed" in note for note in facts.notes)


class Gated(nn.Module):
    """A block in other names: separate queries, keys and values, and a feed-forward that registers its way down second."""

    def __init__(self, bias=False):
        super().__init__()
        self.n_heads, self.n_kv_heads = 4, 2
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, out, bias=bias) for out in (32, 16, 16, 32))
        self.w1, self.w2, self.w3 = nn.Linear(32, 80, bias=bias), nn.Linear(80, 32, bias=bias), nn.Linear(32, 80, bias=bias)
        self.norm_1, self.norm_2 = nn.RMSNorm(32), nn.RMSNorm(32)


class Other(nn.Module):
    def __init__(self, block=Gated, extra=None, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.RMSNorm(32)
        self.output = nn.Linear(32, 50, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        self.extra = extra


@pytest.mark.parametrize("tied", [False, True])
def test_separate_matrices_are_recognised(tied):
    found = module.facts(Other(tied=tied)).architecture
    assert (found.heads, found.kv_heads, found.head_dim, found.ffn, found.gated) == (4, 2, 8, 80, True)
    assert (found.norm, found.positions, found.tied, found.implementation) == ("rms", "rope", tied, "shardbook")


class NanoBlock(nn.Module):
    """nanoGPT's shape: attention and feed-forward in modules of their own, dropout, a norm without bias."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(32, bias=False), nn.LayerNorm(32, bias=False)
        self.attn = nn.Module()
        self.attn.c_attn, self.attn.c_proj, self.attn.n_head = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False), 4
        self.mlp = nn.Sequential(nn.Linear(32, 128, bias=False), nn.GELU(), nn.Linear(128, 32, bias=False), nn.Dropout(0.2))


class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = nn.ModuleList(NanoBlock() for _ in range(2))
        norm = nn.LayerNorm(32, bias=False)
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, 32), "wpe": nn.Embedding(16, 32), "h": blocks, "ln_f": norm})
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.transformer.wte.weight = self.lm_head.weight


def test_a_nano_gpt_is_recognised():
    found = module.facts(Nano()).architecture
    assert (found.heads, found.ffn, found.tied, found.learned_positions, found.dropout) == (4, 128, True, 16, 0.2)
    assert (found.fused_qkv, found.qkv_bias, found.norm_bias, found.implementation) == (True, False, False, "gpt")


class WithoutHeads(Gated):
    def __init__(self):
        super().__init__()
        del self.n_heads


class WithConvolution(Gated):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(32, 32, 3)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Other(WithoutHeads), "no attribute says how many heads"),
        (lambda: Other(WithConvolution), "Conv1d in a block"),
        (lambda: Other(extra=nn.Linear(32, 8)), "2 linear layers"),
        (lambda: Other(extra=nn.LayerNorm(32)), "what was found has"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "0 lists of equal blocks"),
    ],
)
def test_what_does_not_fit_is_not_modelled(model, said):
    facts = module.facts(model())
    assert facts.architecture is None
    assert said in " ".join(facts.notes)
    assert any(note.startswith("activations not modelled") for note in facts.notes)


def test_a_lazy_layer_is_refused():
    with pytest.raises(ConfigError, match=r"parameter '0\.weight' of Sequential has no shape yet"):
        module.facts(nn.Sequential(nn.LazyLinear(3)))


def test_a_class_is_no_module():
    assert not module.is_module(nn.Linear)
    assert module.is_module(nn.Linear(2, 2))


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        module.facts(nn.ReLU())


# ---- transformers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.filterwarnings("ignore")
def test_a_transformers_model_is_read_by_its_configuration(llama):
    for model, prefix in ((llama, ""), (LocalModel(llama), "model.")):
        facts = module.facts(model)
        assert (facts.architecture.implementation, facts.architecture.kv_heads) == ("transformers", 2)
        assert facts.num_parameters == sum(parameter.numel() for parameter in model.parameters())
        assert [unit.name for unit in facts.units][:3] == ["root", f"{prefix}model.embed_tokens", f"{prefix}model.layers.0"]


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_more_than_its_configuration_says_so(llama):
    llama.adapter = nn.Linear(4, 4, device="meta")
    facts = module.facts(llama)
    assert facts.architecture is not None
    assert "its config describes" in " ".join(facts.notes)
