"""Runs that are saved and gone on with, on real ranks; what an engine holds, put together by name without any of the package's help."""

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardbook as sb
from shardbook.engine.state import pieces_of

PRECISIONS: dict[str, sb.Precision] = {
    "fp32": sb.Precision(),
    "bf16": sb.Precision(param="bf16"),
    "fp16": sb.Precision(param="fp16"),
    "bf16-no-master": sb.Precision(param="bf16", master=None),
    "2+2+4+8": sb.Precision(param="bf16", grad="bf16", keep_param_shard=True),
}
MASTERS = {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32", "bf16-no-master": "bf16", "2+2+4+8": "fp32"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """How a run is divided. ``units``: by which modules; None: as found."""

    stage: int = 3
    num_ranks: int = 2
    precision: str = "fp32"
    units: tuple[str, ...] | None = None
    loss_scale: Any = 128.0  # of fp16
    offload: str = "none"  # of the optimizer

    def __str__(self) -> str:
        return (
            f"stage{self.stage}-n{self.num_ranks}-{self.precision}"
            + ("" if self.units is None else "-" + "+".join(self.units))
            + ("" if self.offload == "none" else f"-{self.offload}")
        )

    @property
    def weight(self) -> torch.dtype:
        return DTYPES[MASTERS[self.precision]]

    @property
    def param(self) -> torch.dtype:
        return DTYPES[PRECISIONS[self.precision].param]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 37)
        self.outer = nn.Linear(37, 20)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return inputs + self.scale * self.drop(self.outer(torch.tanh(self.inner(inputs))))


class Net(nn.Module):
    """Tied ends, a frozen parameter, a scalar, one without elements, a buffer that differs between ranks, dropout."""

    def __init__(self, width: int = 20, *, extra: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, width)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 19, bias=False)
        self.head.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.randn(5, width), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, width))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros(4))
        if extra:
            self.added = nn.Parameter(torch.ones(7))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += tokens.float().mean()
        hidden = self.embed(tokens) + self.fixed.sum(0)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), tokens.flatten(), reduction="sum")


def build(setup: Setup, *, seed: int = 3, net: dict[str, Any] | None = None, optimizer: str = "adamw") -> sb.Engine:
    torch.manual_seed(seed)
    model = Net(**(net or {}))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    made = torch.optim.AdamW(groups, lr=0.02) if optimizer == "adamw" else torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    scale = setup.loss_scale if setup.precision == "fp16" else None
    config = sb.ZeroConfig(
        stage=setup.stage, precision=PRECISIONS[setup.precision], clip_grad_norm=1.0, units=setup.units, loss_scale=scale,
        offload=sb.Offload(optimizer=setup.offload, path=tempfile.gettempdir() if setup.offload == "disk" else None),
    )  # fmt: skip
    with mock.patch("shardbook.engine.disk._LEAST_NUMEL", 64):  # a small model has several chunks too
        return sb.Engine(model, made, config, scheduler=torch.optim.lr_scheduler.MultiStepLR(made, [2, 4], gamma=0.5))


def train(engine: sb.Engine, steps: int) -> list[tuple[float | None, float]]:
    """Data follow from the number of the step and the rank."""
    reports = []
    for _ in range(steps):
        torch_state = torch.get_rng_state()
        torch.manual_seed(engine.num_steps * 100 + engine.transport.rank)
        tokens = torch.randint(19, (3, 6))
        torch.set_rng_state(torch_state)
        engine.backward(engine(tokens), weight=tokens.numel())
        report = engine.step()
        reports.append((report.loss, report.grad_norm))
    return reports


def held(engine: sb.Engine) -> dict[str, Any]:
    """All that a run goes on from, of this rank."""
    assert engine.optimizer is not None
    pieces = [
        (piece.member.name, piece.span.start, value.clone(), cloned(state))
        for piece, value, state in pieces_of(engine._context.disk, engine._units, engine.optimizer.state)
    ]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]
    return {
        "pieces": pieces,
        "groups": groups,
        "model": dict(engine.state_dict()),
        "buffers": {name: buffer.clone() for name, buffer in engine.model.named_buffers()},
        "steps": engine.num_steps,
        "rng": torch.get_rng_state(),
        "scheduler": engine._scheduler.state_dict(),
        "scale": (engine._stepper.loss_scale.value, engine._stepper.loss_scale.num_good),
    }


def cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def together(ranks: list[dict[str, Any]], shapes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Of each trained parameter, flat: its weight and its states, from the pieces of all ranks. Every element must be there."""
    found: dict[str, dict[str, Any]] = {}
    for name, start, value, state in itertools.chain.from_iterable(rank["pieces"] for rank in ranks):
        whole = found.setdefault(name, {})
        for key, part in [("weight", value), *state.items()]:
            if key == "step":
                whole.setdefault(key, part)
                assert torch.equal(whole[key], part)
                continue
            tensor = whole.setdefault(key, torch.full((shapes[name],), float("nan"), dtype=part.dtype))
            tensor[start : start + part.numel()] = part
    for name, whole in found.items():
        assert not any(torch.isnan(tensor).any() for tensor in whole.values()), name
    return found


def saved(setups: list[Setup], folder: Path, steps: int = 2) -> list[dict[str, Any]]:
    """A job: train under each setup and save; what it held then."""
    found = []
    for setup in setups:
        engine = build(setup)
        train(engine, steps)
        found.append(held(engine))
        engine.save(folder / str(setup), extra={"setup": str(setup)})
        engine.close()
    return found


def loaded(pairs: list[tuple[Setup, Setup]], folder: Path) -> list[dict[str, Any]]:
    """A job: load what the first setup saved into an engine of the second, begun from other values; what it holds then."""
    found = []
    for source, target in pairs:
        engine = build(target, seed=99)
        if len(found) % 2:
            train(engine, 1)  # state is there already, and other than the checkpoint's
        extra = engine.load(folder / str(source))
        assert extra == {"setup": str(source)}
        found.append(held(engine))
        engine.close()
    return found
