"""AdamW and its schedule, built before the engine exists: the engine and the plain loop are each given one of their own."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from shardbook.train.settings import OptimizerSettings


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Fused AdamW with two groups: matrices decay, norms and biases (fewer than two dimensions) don't."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def build_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of :func:`learning_rate_factor`, one step of it for each applied optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings, steps))


def learning_rate_factor(step: int, settings: OptimizerSettings, steps: int) -> float:
    """What multiplies the learning rate in ``step`` (from 0): a line up to 1, then half a cosine down to ``final``.

    >>> learning_rate_factor(0, OptimizerSettings(warmup=4), 100)
    0.25
    >>> learning_rate_factor(99, OptimizerSettings(warmup=4, final=0.1), 100)
    0.1
    """
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    last = max(steps - 1 - settings.warmup, 1)
    done = min((step - settings.warmup) / last, 1.0)
    return settings.final + (1.0 - settings.final) * 0.5 * (1.0 + math.cos(math.pi * done))
