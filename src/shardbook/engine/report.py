"""What a step tells about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step, over all ranks and micro-batches.

    ``grad_norm`` is the norm of the objective's gradient, before clipping. ``nonfinite`` is the first parameter, in the model's
    order, with a non-finite gradient on any rank (or ``"loss"``, where only the loss is not finite).
    """

    applied: bool
    loss: float | None
    weight: float
    grad_norm: float
    clip_factor: float
    learning_rates: tuple[float, ...]
    loss_scale: float
    nonfinite: str | None
