"""The models of the forecast's grid: GPTs of plain torch modules, shardbook's decoder, and two of transformers."""

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks import models
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder


def _gpt(**sizes: int) -> Callable[[int], nn.Module]:
    return lambda sequence: models.GPT(models.GPTConfig(sequence=sequence, **sizes))


def _decoder(**sizes: Any) -> Callable[[int], nn.Module]:
    return lambda _: Decoder(DecoderConfig(**sizes))


def _llama(sequence: int) -> nn.Module:
    from transformers import LlamaConfig

    return _local(LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=sequence, tie_word_embeddings=False,
    ))  # fmt: skip


def _gpt2(sequence: int) -> nn.Module:
    from transformers import GPT2Config

    return _local(GPT2Config(
        vocab_size=4096, n_embd=256, n_layer=4, n_head=8, n_positions=sequence, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def _local(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from shardbook.models.local import LocalModel

    return LocalModel(AutoModelForCausalLM.from_config(config))


SHAPES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "gpt": (_gpt(layers=6, width=384, heads=6, vocab=4096), 4096),
    "gpt wide": (_gpt(layers=2, width=768, heads=12, vocab=1000), 1000),
    "gpt vocabulary": (_gpt(layers=3, width=192, heads=3, vocab=32768), 32768),
    "decoder": (_decoder(layers=6, width=384, heads=6, kv_heads=2, ffn=1024, vocab=4096), 4096),
    "decoder tied": (_decoder(layers=4, width=320, heads=5, kv_heads=5, ffn=864, vocab=8192, tied=True), 8192),
    "decoder vocabulary": (_decoder(layers=2, width=256, heads=4, kv_heads=1, ffn=700, vocab=40000), 40000),
    "decoder 1 layer": (_decoder(layers=1, width=512, heads=8, kv_heads=4, ffn=1536, vocab=2048), 2048),
    "decoder 12 layers": (_decoder(layers=12, width=256, heads=4, kv_heads=2, ffn=688, vocab=2048), 2048),
    "decoder odd": (_decoder(layers=3, width=330, heads=11, kv_heads=1, ffn=777, vocab=5003), 5003),
    "transformers llama": (_llama, 4096),
    "transformers gpt2": (_gpt2, 4096),
}
"""A model by the longest sequence, and its vocabulary."""

SMALL_SHAPES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "small gpt": (_gpt(layers=3, width=64, heads=2, vocab=512), 512),
    "small decoder": (_decoder(layers=3, width=64, heads=4, kv_heads=2, ffn=176, vocab=512), 512),
    "small decoder tied": (_decoder(layers=2, width=64, heads=4, kv_heads=1, ffn=176, vocab=512, tied=True), 512),
    "decoder long": (_decoder(layers=6, width=256, heads=4, kv_heads=4, ffn=680, vocab=12288, tied=True), 12288),
}
"""For checks of equality in seconds; not in the grid."""
