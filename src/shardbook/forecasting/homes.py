"""Where a state rests between its uses: the table of docs/tiers.md, a second time and without the engine's code.

>>> from shardbook.config import Offload, ZeroConfig
>>> config = ZeroConfig(stage=3, offload=Offload(optimizer="host"))
>>> homes(config).master, homes(config).param
(<Tier.HOST: 'host'>, <Tier.DEVICE: 'device'>)
"""

from dataclasses import dataclass

from shardbook.accounts import Tier
from shardbook.config import ZeroConfig
from shardbook.forecasting.buffers import FlatForm

_OPTIMIZERS = {"none": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}


@dataclass(frozen=True, slots=True)
class Homes:
    """The tier of each state of a trained buffer. ``steps``: where the optimizer steps; ``HOST`` is pinned beside a GPU where it must be.

    ``param`` is of shards at stage 3, frozen ones too; parameters that stay full are on the device whatever else is elsewhere.
    """

    param: Tier
    master: Tier
    moment: Tier
    grad: Tier
    steps: Tier

    @property
    def are_device(self) -> bool:
        """Whether nothing is offloaded."""
        return {self.param, self.master} == {Tier.DEVICE}


def homes(config: ZeroConfig) -> Homes:
    """The row of the table."""
    state = _OPTIMIZERS[config.offload.optimizer]
    steps = Tier.DEVICE if state is Tier.DEVICE else Tier.HOST
    return Homes(
        param=Tier.DEVICE if config.offload.params == "none" else Tier.HOST, master=state, moment=state, grad=steps, steps=steps
    )  # fmt: skip


def keeps_shard(form: FlatForm, config: ZeroConfig) -> bool:
    """Whether a buffer's parameters rest as a shard in their own type at stage 3: where no master in memory stands for it, or beside it."""
    has_master = form.master_nbytes > 0 and config.offload.optimizer != "disk"
    return not has_master or config.precision.keep_param_shard or (config.offload.params == "host" and config.offload.optimizer == "none")


def rests_on_host(form: FlatForm, config: ZeroConfig) -> bool:
    """Whether what a gather of this buffer reads lies on the host."""
    if config.stage < 3:
        return False
    found = homes(config)
    return (found.param if keeps_shard(form, config) else found.master) is Tier.HOST


def is_lifted(form: FlatForm, config: ZeroConfig) -> bool:
    """Whether a shard that is its own master comes to the device to be stepped on."""
    found = homes(config)
    return form.trainable and not form.master_nbytes and found.param is Tier.HOST and found.steps is Tier.DEVICE
