"""DeepSpeed's runs for `evidence_verify`, recorded in an environment that has it; the plain loops they are held to, in any.

    .venv-peers/bin/python -m benchmarks.verify_peers FOLDER      records "0 fp32", "0 default", "0 bf16", "1 fp32" ... in FOLDER

All train one GPT on two ranks with AdamW at the same settings. ``fp32`` has clipping turned off; ``default`` leaves the clipping of
DeepSpeed's configuration as it is by default; ``bf16`` has clipping turned off and its ``bf16`` section on.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardbook as sb
from benchmarks import engines, ranks
from benchmarks.models import GPT, SMALL, batch, build

STEPS = 3
NUM_RANKS = 2
RUNS = tuple((stage, variant) for variant in ("fp32", "default", "bf16") for stage in (0, 1, 2, 3) if stage or variant != "bf16")
"""Stage and variant. Stage 0 in bf16 has an optimizer whose step can't be watched."""


def model() -> GPT:
    """Its head is larger than usual, so that the gradient's norm is above 1, where clipping begins by default."""
    made = build(SMALL)
    with torch.no_grad():
        made.head.weight.mul_(20)
    return made


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def given(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return batch(SMALL, 2, rank=rank, step=step)


def name_of(stage: int, variant: str) -> str:
    return f"{stage} {variant}"


def deepspeed(folder: str, stage: int, variant: str) -> None:
    """One run, on this rank."""
    made = model()
    dtype: Any = "bf16" if variant == "bf16" else "fp32"
    config = engines.deepspeed_config(f"deepspeed-{stage}", dtype, {})
    if variant == "default":
        del config["gradient_clipping"]
    engine, optimizer, *_ = engines.import_deepspeed().initialize(model=made, optimizer=adamw(made.parameters()), config=config)
    with sb.record(engine, optimizer, Path(folder) / name_of(stage, variant)) as recorder:
        for step in range(STEPS):
            inputs, targets = given(dist.get_rank(), step)
            loss = engine(inputs, targets)
            engine.backward(loss)
            recorder.step(loss=loss, batch=(inputs, targets))
            engine.step()


def plain(path: Path, dtype: str) -> None:
    """The same in one process: the mean of the ranks' gradients, masters of the unrounded weights, no clipping."""
    made = model()
    masters = [nn.Parameter(one.detach().clone()) for one in made.parameters()] if dtype == "bf16" else list(made.parameters())
    if dtype == "bf16":
        made.bfloat16()
    optimizer = adamw(masters)
    with sb.record(made, optimizer, path) as recorder:
        for step in range(STEPS):
            batches = [given(rank, step) for rank in range(NUM_RANKS)]
            losses: list[Tensor] = []
            gradients: list[list[Tensor]] = []
            for inputs, targets in batches:
                losses.append(made(inputs, targets))
                gradients.append([one.float() for one in torch.autograd.grad(losses[-1], list(made.parameters()))])
            for master, *each in zip(masters, *gradients, strict=True):
                master.grad = torch.stack(each).mean(0)
            recorder.step(loss=sum(loss.item() for loss in losses), weight=NUM_RANKS, batch=batches)
            optimizer.step()
            if dtype == "bf16":
                with torch.no_grad():
                    for parameter, master in zip(made.parameters(), masters, strict=True):
                        parameter.copy_(master)


def _some(folder: str, stages: tuple[int, ...]) -> None:
    for stage, variant in RUNS:
        if stage in stages:
            deepspeed(folder, stage, variant)


def main(folder: str) -> None:
    for stages in ((0, 1, 2), (3,)):  # stage 3 changes torch's functions for its process
        ranks.run(NUM_RANKS, _some, folder, stages)


if __name__ == "__main__":
    main(sys.argv[1])
