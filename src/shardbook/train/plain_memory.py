"""What the plain loop needs, whole in one process, against what is there: known before any of it is built."""

from dataclasses import dataclass

import torch

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.config import Precision, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.forecasting.forecast import forecast
from shardbook.models.decoder import Decoder
from shardbook.tiers.memory import available_nbytes
from shardbook.train.recipe import Recipe

_IN_A_STEP = (Account.ACTIVATION, Account.WORKSPACE, Account.INPUT)


@dataclass(frozen=True, kw_only=True)
class PlainNeed:
    """Bytes of the plain loop at its peak.

    Args:
        parameters: the model in its own type.
        masters: what the optimizer updates, where it is another copy.
        moments: two for each element that the optimizer updates.
        gradients: autograd's of one micro-batch, and three sums: all so far, one rank's or micro-batch's, and the one being made.
        activations: of one micro-batch; None where the model's architecture is not known.
    """

    parameters: int
    masters: int
    moments: int
    gradients: int
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.masters + self.moments + self.gradients + (self.activations or 0)

    def __str__(self) -> str:
        activations = "activations unknown" if self.activations is None else f"activations {_gib(self.activations)}"
        return (
            f"parameters {_gib(self.parameters)}, masters {_gib(self.masters)}, moments {_gib(self.moments)}, "
            f"gradients {_gib(self.gradients)}, {activations}"
        )


def plain_need(recipe: Recipe, precision: Precision | None = None) -> PlainNeed:
    """What :class:`shardbook.train.baseline.PlainLoop` needs for a recipe; ``precision`` where it is not the run's."""
    types = precision or recipe.zero.precision
    with torch.device("meta"):
        model = recipe.model_file or Decoder(recipe.model)
    told = forecast(
        model, ZeroConfig(stage=0, precision=types), ranks=1, micro_batch=recipe.batch.micro_batch, sequence=recipe.batch.sequence
    )
    numel, param, reduce = told.num_parameters, DTYPE_NBYTES[types.param], DTYPE_NBYTES[types.reduce]
    held = DTYPE_NBYTES[types.master_dtype]
    step = [sum(phase.accounts.get(account, 0) for account in _IN_A_STEP) for phase in told.phases]
    return PlainNeed(
        parameters=numel * param,
        masters=numel * held if types.has_master else 0,
        moments=2 * numel * held,
        gradients=numel * (param + 3 * reduce),
        activations=max(step, default=None),
    )


def check_plain_fits(recipe: Recipe, device: torch.device, *, remedy: str, precision: Precision | None = None) -> None:
    """Raises ConfigError where the plain loop needs more than is free on ``device``: how much of what, and the remedy."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_nbytes()
    need = plain_need(recipe, precision)
    if free is not None and need.total > free:
        where = f"on {device}" if device.type == "cuda" else "in the memory of this machine"
        raise ConfigError(f"the plain loop needs {_gib(need.total)} ({need}), and {_gib(free)} are free {where}: {remedy}")


def _gib(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 2**30:.1f} GiB)" if nbytes >= 2**30 else f"{nbytes:,} bytes"
