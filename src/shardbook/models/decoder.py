"""A Llama-style decoder: RMSNorm, rotary positions, grouped queries, SwiGLU.

    Decoder
    ├── embedding             tokens to the residual stream
    ├── blocks: ModuleList    Block: norm, Attention, norm, FeedForward
    ├── norm
    └── head                  the residual stream to logits; may share the embedding's matrix

There are no buffers: rotary tables are computed where they are used, in fp32, from the positions alone. So a model on the
meta device is whole once its parameters are, and no type policy can round the tables.

Every weight comes from a generator of its own, seeded by (seed, name of the module). So the weights depend neither on the
order in which modules are initialised nor on who initialises them: :func:`init_weights` gives a block, wherever it is built,
the values that it has in the whole model.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook.models.config import DecoderConfig

IGNORED = -100
"""The target that doesn't count, as in torch."""


class SeededLinear(nn.Linear):
    """A linear layer without bias. Its weight is normal with ``std``, from the generator of ``key``."""

    def __init__(self, in_features: int, out_features: int, *, std: float, key: str) -> None:
        self.std, self.key = std, key
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draws the weight; nothing happens on the meta device, where there is nothing to fill."""
        _draw(self.weight, self.key, self.std)


class SeededEmbedding(nn.Embedding):
    """An embedding whose table is drawn as :class:`SeededLinear` draws its weight."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float, key: str) -> None:
        self.std, self.key = std, key
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draws the table; nothing happens on the meta device."""
        _draw(self.weight, self.key, self.std)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight``, in fp32 whatever the type of ``x``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal attention; ``heads / kv_heads`` query heads share one key and value head."""

    def __init__(self, config: DecoderConfig, key: str = "attention") -> None:
        super().__init__()
        self.config = config
        std, inner, shared = config.width**-0.5, config.heads * config.head_width, config.kv_heads * config.head_width
        self.query = SeededLinear(config.width, inner, std=std, key=f"{key}.query")
        self.key = SeededLinear(config.width, shared, std=std, key=f"{key}.key")
        self.value = SeededLinear(config.width, shared, std=std, key=f"{key}.value")
        self.out = SeededLinear(inner, config.width, std=_residual_std(config, inner), key=f"{key}.out")

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        heads = (batch, sequence, -1, self.config.head_width)
        cos, sin = rotary_table(sequence, self.config.head_width, self.config.rope_base, x.device)
        query = rotate(self.query(x).view(heads), cos, sin).transpose(1, 2)
        key = rotate(self.key(x).view(heads), cos, sin).transpose(1, 2)
        value = self.value(x).view(heads).transpose(1, 2)
        grouped = self.config.heads != self.config.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DecoderConfig, key: str = "feed_forward") -> None:
        super().__init__()
        std = config.width**-0.5
        self.gate = SeededLinear(config.width, config.ffn, std=std, key=f"{key}.gate")
        self.up = SeededLinear(config.width, config.ffn, std=std, key=f"{key}.up")
        self.down = SeededLinear(config.ffn, config.width, std=_residual_std(config, config.ffn), key=f"{key}.down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One residual block: attention, then feed-forward, each behind its norm."""

    def __init__(self, config: DecoderConfig, key: str = "block") -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, f"{key}.attention")
        self.feed_forward_norm = RMSNorm(config.width, config.norm_eps)
        self.feed_forward = FeedForward(config, f"{key}.feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The whole model. On a real device its weights are drawn at once; on the meta device by :func:`init_weights`, later.

    Args:
        config: sizes.
        seed: what the weights are drawn from, together with the names of the modules.

    >>> tokens = torch.arange(8).view(2, 4)
    >>> loss_sum, num_tokens = Decoder(DecoderConfig(layers=1, width=16, heads=2, kv_heads=1, ffn=32))(tokens, tokens)
    >>> int(num_tokens)
    8
    """

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = SeededEmbedding(config.vocab, config.width, std=0.02, key=f"{seed}.embedding")
        self.blocks = nn.ModuleList(Block(config, f"{seed}.blocks.{index}") for index in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        # A tied head draws what the embedding draws, so that it doesn't matter which of the two is initialised last.
        self.head = SeededLinear(config.width, config.vocab, std=0.02, key=self.embedding.key if config.tied else f"{seed}.head")
        if config.tied:
            self.head.weight = self.embedding.weight

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, sequence, vocab]`` of the token after each position."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy in fp32, and how many targets count (those that aren't ``-100``)."""
        return summed_loss(self.logits(inputs), targets)


def summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in fp32, summed over the targets that aren't ``-100``, and the number of those."""
    loss_sum = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()


def init_weights(module: nn.Module) -> None:
    """Fills every parameter below ``module`` in place: what an engine calls for one unit of a model on the meta device.

    The values depend on the decoder's seed and the modules' names only, not on which modules are filled together, nor on the
    number of ranks. (They depend on the kind of device: torch's generators differ between CPU and CUDA.)
    """
    for child in module.modules():
        if isinstance(child, (SeededLinear, SeededEmbedding, RMSNorm)):
            child.reset_parameters()


def rotary_table(sequence: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[sequence, 1, head_width / 2]`` in fp32 of ``position / base^(2i / head_width)``."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(sequence, device=device, dtype=torch.float32), base**-exponents)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + head_width/2) of ``[batch, sequence, heads, head_width]`` by the angle of their position."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def _residual_std(config: DecoderConfig, inner: int) -> float:
    """Keeps the residual stream's variance about 1 at the start, however many blocks add to it."""
    return (inner * 2 * config.layers) ** -0.5


@torch.no_grad()
def _draw(weight: Tensor, key: str, std: float) -> None:
    if weight.is_meta:
        return
    generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(key.encode()))
    weight.normal_(0.0, std, generator=generator)
