"""What a run will keep on the host, against what the host has: known before any rank is started."""

import torch

from shardbook.errors import ConfigError
from shardbook.forecasting.forecast import forecast
from shardbook.models.decoder import Decoder
from shardbook.tiers import memory
from shardbook.train.recipe import Recipe
from shardbook.train.world import World


def check_host_room(recipe: Recipe, world: World | None) -> None:
    """Nothing happens where nothing is offloaded.

    Args:
        recipe: of the run.
        world: the ranks, where somebody has started them; None: all will be of this machine.

    Raises:
        ConfigError: the ranks of this host together need more of its memory than is available.
    """
    offload, recompute = recipe.zero.offload, recipe.zero.recompute
    if offload.optimizer == offload.params == "none" and not recompute.offload:
        return
    available = memory.available_nbytes()
    local = recipe.run.ranks if world is None else world.num_local_ranks
    needed = host_nbytes(recipe)
    if available is not None and local * needed > available:
        pinned = " pinned" if torch.cuda.is_available() else " of host memory"
        raise ConfigError(
            f"zero.offload: needs {_gib(local * needed)}{pinned} of {_gib(available)} present ({local} ranks of {needed:,} bytes); "
            f"offload less, keep the optimizer on a disk (--offload-optimizer disk --offload-path FOLDER), or use more hosts"
        )


def host_nbytes(recipe: Recipe) -> int:
    """Bytes that one rank holds on the host when that is most, by forecast."""
    with torch.device("meta"):
        model = recipe.model_file or Decoder(recipe.model)
    told = forecast(
        model, recipe.zero, ranks=recipe.run.ranks, micro_batch=recipe.batch.micro_batch, sequence=recipe.batch.sequence
    )  # fmt: skip
    return sum(told.host.values())


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
