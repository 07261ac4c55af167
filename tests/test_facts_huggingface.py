"""Facts from ``config.json``: equal to what transformers builds, family by family; and what a wrong file is told."""

import pytest

from shardbook.facts import huggingface
from shardbook.facts.families import FAMILIES
from shardbook.facts.parameters import units_of

LLAMA = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320}
GQA = {**LLAMA, "num_key_value_heads": 2}
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320}
MOE = {**GQA, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6}
DEEPSEEK = {**LLAMA, **LATENT, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320, "word_embed_proj_dim": 64}
MPT = {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 320}
FALCON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 320}
BLOOM = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 320}

CASES = [
    ("bloom", BLOOM),
    ("cohere", GQA),
    ("cohere", {**GQA, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": 20, "n_shared_experts": 2, "attention_bias": True}),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 20, "n_shared_experts": 1, "first_k_dense_replace": 2}),
    ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 20, "n_shared_experts": 1, "first_k_dense_replace": 3}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "parallel_attn": False, "bias": True, "alibi": True, "multi_query": False, "ffn_hidden_size": 80}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("gemma", {**GQA, "head_dim": 24}),
    ("gemma2", {**GQA, "head_dim": 24}),
    ("gemma2", {**GQA, "num_hidden_layers": 1, "attention_bias": True, "tie_word_embeddings": False}),
    ("gemma3_text", {**GQA, "head_dim": 24}),
    ("gpt2", OLD),
    ("gpt2", {**OLD, "n_inner": 80, "n_positions": 48, "tie_word_embeddings": False}),
    ("gpt_neox", {**LLAMA}),
    ("gpt_neox", {**LLAMA, "attention_bias": False, "use_parallel_residual": False}),
    ("gpt_oss", {**GQA, "num_local_experts": 6, "num_experts_per_tok": 2}),
    ("gpt_oss", {**GQA, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 12, "attention_bias": False}),
    ("gptj", {**OLD, "rotary_dim": 8}),
    ("granite", {**GQA, "attention_bias": True, "mlp_bias": True}),
    ("llama", LLAMA),
    ("llama", {**GQA, "head_dim": 24, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {**LLAMA, "num_attention_heads": 8}),
    ("mistral", {**GQA, "head_dim": 24}),
    ("mixtral", {**GQA, "num_local_experts": 6, "num_experts_per_tok": 2}),
    ("mpt", MPT),
    ("olmo", LLAMA),
    ("olmo", {**GQA, "attention_bias": True}),
    ("olmo2", GQA),
    ("olmoe", {**GQA, "num_experts": 6, "num_experts_per_tok": 2}),
    ("opt", OPT),
    ("opt", {**OPT, "enable_bias": False, "max_position_embeddings": 30}),
    ("phi", GQA),
    ("phi3", {**GQA, "pad_token_id": 0}),
    ("qwen2", GQA),
    ("qwen2_moe", {**MOE, "num_experts": 6, "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {**MOE, "num_experts": 6, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "qkv_bias": False}),
    ("qwen3", GQA),
    ("qwen3", {**GQA, "head_dim": 24, "attention_bias": True}),
    ("qwen3_moe", {**MOE, "num_experts": 6}),
    ("qwen3_moe", {**MOE, "num_experts": 6, "mlp_only_layers": [0, 1], "head_dim": 24}),
    ("smollm3", {**GQA, "tie_word_embeddings": False, "pad_token_id": 0}),
    ("stablelm", GQA),
    ("stablelm", {**GQA, "use_qkv_bias": True, "use_parallel_residual": True}),
    ("starcoder2", GQA),
    ("starcoder2", {**GQA, "use_bias": False, "tie_word_embeddings": False}),
]


def built(kind, fields):
    """The model that transformers builds on the meta device."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def largest_block(model):
    """Elements of the largest child of the longest list of modules."""
    lists = [module for module in model.modules() if type(module).__name__ == "ModuleList" and len(module) > 0]
    blocks = max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
    return max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)


def test_every_family_has_a_case():
    assert {kind for kind, _ in CASES} == set(FAMILIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "fields"), CASES, ids=[f"{kind}-{index}" for index, (kind, _) in enumerate(CASES)])
def test_facts_equal_what_transformers_builds(kind, fields):
    model = built(kind, fields)
    parameters = list(model.parameters())
    facts = huggingface.facts_of({"model_type": kind, **fields}, kind)
    assert facts.num_parameters == sum(parameter.numel() for parameter in parameters)
    blocks = [unit for unit in units_of(facts.architecture, large=0) if unit.name.startswith("blocks.")]
    assert max(unit.numel for unit in blocks) == largest_block(model)
    assert facts.largest_tensor.numel == max(parameter.numel() for parameter in parameters)
    assert len(blocks) == facts.architecture.layers
    # the whole configuration, as saved by transformers, says the same as the few fields
    saved = huggingface.facts_of(model.config.to_dict(), kind)
    assert saved.architecture == facts.architecture
    assert saved.units == facts.units
