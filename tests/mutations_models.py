"""The models and the data that the mutation suite trains: a few thousand elements each, ragged tokens, ignored targets."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import GPT, SMALL

VOCAB, WIDTH, LENGTH = 61, 32, 12
FEATURES, CLASSES = 10, 5
IGNORED = -100

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A right run, whatever trains it: the baseline of every mutation that names it.

    Args:
        num_ranks, num_micro: whose data, and micro-batches of each; one process goes over all of them.
        padding: targets to be ignored: "none", "one" in a step, or "many" of every row.
        objective: "tokens", the sum over all tokens divided by their number; "mean", the mean of the micro-batches' means.
        precision: of the model; below fp32 the optimizer steps on fp32 masters.
        seeding: of dropout: "micro" seeds before each micro-batch, so that any loop draws the same; "once" at the start.
        evaluates: batches to evaluate on after each step.
        tells: the recorder "all", loss and weight as sums and the batch, or only the "mean" of what this rank has.
    """

    model: str = "words"
    seed: int = 0
    num_ranks: int = 2
    num_micro: int = 2
    rows: int = 4
    padding: str = "many"
    objective: str = "tokens"
    precision: str = "fp32"
    optimizer: str = "adamw"
    lr: float = 1e-2
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 0.5
    warm_up: int = 4
    loss_scale: float = 1.0
    frozen: tuple[str, ...] = ()
    recompute: bool = False
    seeding: str = "micro"
    evaluates: int = 0
    tells: str = "all"
    steps: int = 3


class Block(nn.Module):
    """Attention and MLP on normalised copies of the stream."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(self.first(x)).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Words(nn.Module):
    """A decoder. ``keeps_masks``: per block, whether its recomputation draws the dropout masks of its forward; None, no recomputation."""

    def __init__(self, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.keeps_masks: list[bool | None] = [None, None]

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block, keeps in zip(self.blocks, self.keeps_masks, strict=True):
            recomputes = keeps is not None and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=keeps) if recomputes else block(x)
        return self.head(self.norm(x))


class Rows(nn.Sequential):
    """A classifier with batch norm, and dropout where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Linear(FEATURES, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, CLASSES),
        )  # fmt: skip


class Gpt(GPT):
    """The suite's GPT, with logits instead of a loss."""

    def __init__(self) -> None:
        super().__init__(SMALL)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS: dict[str, Any] = {
    "words": Words,
    "dropout": lambda: Words(dropout=0.1),
    "heavy dropout": lambda: Words(dropout=0.5),
    "tied": lambda: Words(tied=True),
    "rows": Rows,
    "rows with dropout": lambda: Rows(0.2),
    "gpt": Gpt,
}


def build(setting: Setting, *, seed: int = 0) -> nn.Module:
    """The model, on every rank alike unless the seed is moved."""
    torch.manual_seed(1000 + setting.seed + seed)
    model = MODELS[setting.model]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(frozen) for frozen in setting.frozen))
    if setting.recompute:
        model.keeps_masks = [True, True]
    return model


def batch(setting: Setting, rank: int, step: int, micro: int) -> Batch:
    """Inputs and targets of one micro-batch."""
    generator = torch.Generator().manual_seed(setting.seed + 10_007 * step + 101 * rank + micro)
    if setting.model.startswith("rows"):
        inputs = torch.randn(2 * setting.rows, FEATURES, generator=generator)
        return inputs, torch.randint(CLASSES, (2 * setting.rows,), generator=generator)
    tokens = torch.randint(1, VOCAB, (setting.rows, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    ends = torch.full((setting.rows,), LENGTH)
    if setting.padding == "one" and rank == micro == 0:
        ends[0] = LENGTH - 1
    elif setting.padding == "many":
        ends = torch.randint(LENGTH // 4, LENGTH + 1, (setting.rows,), generator=generator)
    absent = torch.arange(LENGTH) >= ends[:, None]
    return inputs.masked_fill_(absent, 0), targets.masked_fill_(absent, IGNORED)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all targets that count."""
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum")


def num_counted(targets: Tensor) -> int:
    return int((targets != IGNORED).sum())
