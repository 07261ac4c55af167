"""The GPT that every comparison here trains: 29,545,472 parameters at its default sizes.

    GPT
    ├── tokens, positions     learned embeddings
    ├── blocks: ModuleList    Block: LayerNorm, attention, LayerNorm, MLP of four times the width
    ├── norm
    └── head                  no bias, not tied to the embedding

Every linear layer but the head has a bias, every LayerNorm weight and bias, so a block holds ``12·width² + 13·width`` elements and
the model ``layers·(12·width² + 13·width) + (2·vocab + sequence)·width + 2·width``.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes.

    >>> GPTConfig().num_parameters
    29545472
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocab: int = 4096
    sequence: int = 256

    @property
    def num_parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * self.vocab + self.sequence) * self.width + 2 * self.width


SMALL = GPTConfig(layers=3, width=64, heads=2, vocab=192, sequence=32)
"""For checks of equality rather than of speed."""


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        mixed = self.mixed(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in mixed)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """See the file's header. ``forward`` gives the mean cross-entropy, computed in fp32 whatever the parameters' type."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(config: GPTConfig | None = None, seed: int = 0) -> GPT:
    """The model with the same weights in every process: the generator is seeded, and put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config or GPTConfig())
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if "down" not in name and "out" not in name else 0.005)
    return model


def batch(config: GPTConfig, micro_batch: int, *, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank in one step: a sequence that can be learned, so that losses fall and differ by step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    start = torch.randint(config.vocab, (micro_batch, 1), generator=generator)
    stride = torch.randint(1, 8, (micro_batch, 1), generator=generator)
    tokens = (start + stride * torch.arange(config.sequence + 1)) % config.vocab
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
