"""Random right configurations, drawn from a number: model, batches, objective and optimizer follow from it alone.

    case = draw(17)                              always the same
    build(case), batch(case, rank, step, micro)  its model, and what each rank is given

`verify_loops` trains a case under an engine and in a plain loop.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3
IGNORED = -100
MARKS = ("grouped", "tied", "frozen", "recompute", "padded", "short", "empty", "sync_last")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    Args:
        number: what it was drawn from.
        kernel: of the optimizer, in the plain loop and under shardbook; other engines draw another.
        rows, length: of a micro-batch.
        padded: some targets are to be ignored.
        short: the last rank's last micro-batch has one row.
        empty: it has none.
        sync_last: DDP and FSDP2 reduce in the last micro-batch only.
    """

    number: int
    engine: str
    num_ranks: int
    stage: int
    dtype: str
    accumulate: int
    clip: float | None
    objective: str
    optimizer: str
    kernel: str
    grouped: bool
    model: str
    width: int
    layers: int
    vocab: int
    rows: int
    length: int
    tied: bool
    frozen: bool
    dropout: float
    recompute: bool
    padded: bool
    short: bool
    empty: bool
    sync_last: bool
    learning_rate: float
    warm_up: int

    def __str__(self) -> str:
        stage = f"-{self.stage}" if self.engine == "shardbook" else ""
        marks = [name for name in MARKS if getattr(self, name)]
        marks += [f"dropout {self.dropout}"] if self.dropout else []
        clip = "" if self.clip is None else f", clip {self.clip}"
        sizes = f"{self.model} {self.layers} x {self.width}, {self.rows} x {self.length}"
        return (
            f"{self.number}: {self.engine}{stage} on {self.num_ranks}, {self.dtype}, {self.accumulate} micro-batches, {self.objective}, "
            f"{self.optimizer} {self.kernel} {self.learning_rate}{clip}; {sizes}; {', '.join(marks)}"
        )


def draw(number: int) -> Case:
    """The configuration of a number."""
    r = random.Random(number)
    engine = r.choice(("shardbook", "shardbook", "ddp", "fsdp2"))
    num_ranks = r.randint(1 if engine == "shardbook" else 2, 4)
    model = r.choice(("decoder", "decoder", "rows", "pictures"))
    is_decoder, padded = model == "decoder", r.random() < 0.5
    ragged = r.choice(("", "", "short", "empty" if engine == "shardbook" and num_ranks > 1 else "short"))
    optimizer = r.choice(("adamw", "adamw", "sgd"))
    return Case(
        number=number,
        engine=engine,
        num_ranks=num_ranks,
        stage=r.randint(0, 3),
        dtype=r.choice(("fp32", "fp32", "bf16")),
        accumulate=r.randint(1, 4),
        clip=r.choice((None, None, 0.01, 0.3, 10.0)),
        objective=r.choice(("mean", "tokens")),
        optimizer=optimizer,
        kernel=r.choice(("foreach", "single", "fused")),
        grouped=r.random() < 0.5,
        model=model,
        width=r.choice((8, 12, 20, 36, 64)),
        layers=r.randint(1, 3),
        vocab=r.choice((17, 64, 101)),
        rows=r.randint(1, 4),
        length=r.randint(3, 14),
        tied=is_decoder and r.random() < 0.3,
        frozen=r.random() < 0.2,
        dropout=r.choice((0.0, 0.0, 0.1)),
        recompute=is_decoder and r.random() < 0.3,
        padded=is_decoder and padded,
        short=ragged == "short",
        empty=ragged == "empty",
        sync_last=r.random() < 0.5,
        learning_rate=r.choice((1e-4, 1e-3, 1e-2)) * (10 if optimizer == "sgd" else 1),
        warm_up=r.choice((0, 3)),
    )


# ---- models and batches -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and MLP; heads of four features."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.width
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down, self.dropout = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), nn.Dropout(case.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(self.first(x)).unflatten(-1, (3, -1, 4)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Decoder(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(case.vocab, case.width), nn.Embedding(case.length, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.tokens.weight
        self.recompute = case.recompute

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Of a stack: widen, normalise, narrow, add."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(case.width, 50), nn.LayerNorm(50), nn.Linear(50, case.width)
        self.dropout = nn.Dropout(case.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.silu(self.norm(self.up(x)))))


class Stack(nn.Module):
    """For rows of numbers; pictures become rows by two convolutions."""

    def __init__(self, case: Case, *, pictures: bool) -> None:
        super().__init__()
        self.tokens = nn.Sequential(
            *(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2), nn.Flatten()),
            nn.Linear(8 * 3 * 3, case.width),
        ) if pictures else nn.Linear(case.length, case.width)  # fmt: skip
        self.blocks = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.head = nn.Linear(case.width, case.vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(case: Case) -> nn.Module:
    torch.manual_seed(case.number)
    model = Decoder(case) if case.model == "decoder" else Stack(case, pictures=case.model == "pictures")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (case.frozen and name.startswith(("blocks.0", "positions"))))
    return model


Batch = tuple[Tensor, Tensor]


def batch(case: Case, rank: int, step: int, micro: int) -> Batch | None:
    """Of one micro-batch; None where it is empty."""
    last = (rank, micro) == (case.num_ranks - 1, case.accumulate - 1)
    if case.empty and last:
        return None
    generator = torch.Generator().manual_seed(10_007 * case.number + 1009 * step + 31 * rank + micro)
    rows = 1 if case.short and last else case.rows
    if case.model != "decoder":
        shape = (rows, 3, 8, 8) if case.model == "pictures" else (rows, case.length)
        return torch.randn(shape, generator=generator), torch.randint(case.vocab, (rows,), generator=generator)
    tokens = torch.randint(case.vocab, (rows, case.length + 1), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if case.padded:
        ends = torch.randint(1, case.length + 1, (rows,), generator=generator)
        targets[torch.arange(case.length) >= ends[:, None]] = IGNORED
    return inputs, targets


def forward(case: Case, model: Callable[..., Tensor], one: Batch, place: tuple[int, int, int]) -> tuple[Tensor, float]:
    """(a micro-batch's loss, what it counts): a sum over its targets, or their mean, which counts 1. ``place``: step, rank, micro-batch."""
    torch.manual_seed(1 + case.number + 1009 * place[0] + 31 * place[1] + place[2])
    inputs, targets = one
    logits = model(inputs).float()
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
    counted = float((targets != IGNORED).sum())
    return (loss, counted) if case.objective == "tokens" else (loss / counted, 1.0)


def optimizer_of(case: Case, named: Iterable[tuple[str, nn.Parameter]], kernel: str) -> torch.optim.Optimizer:
    """Matrices decay, the rest doesn't, where there are groups: in bf16 there are none, as the order of the masters tells their names."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [parameter for _, parameter in trained], "weight_decay": 0.1}]
    if case.grouped and case.dtype == "fp32":
        matrices = [parameter for _, parameter in trained if parameter.ndim > 1]
        others = [parameter for _, parameter in trained if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    kinds: dict[str, Any] = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=case.learning_rate, momentum=0.9, **kinds[kernel])
    return torch.optim.AdamW(groups, lr=case.learning_rate, betas=(0.9, 0.95), **kinds[kernel])


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (case.warm_up + 1)))
