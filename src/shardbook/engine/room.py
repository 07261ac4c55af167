"""Whether the host has room for what will be offloaded to it, asked before any of it is taken.

Every rank says how much it will hold there; ranks of one host share what that has available. All ranks know the answer, so that either
all go on or all raise.
"""

import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardbook.accounts import Account
from shardbook.engine.context import Context
from shardbook.engine.policy import Types
from shardbook.engine.storage import is_memory_known
from shardbook.errors import ConfigError
from shardbook.tiers import memory

Kept = Callable[[nn.Parameter, torch.dtype], Mapping[str, torch.dtype]]
"""What an optimizer keeps for each element of a parameter whose master has a type."""

Group = tuple[Types, bool, int, Sequence[nn.Parameter]]
"""A flat buffer to be: its types, whether it is trained, elements of this rank's shard, and the parameters in it."""

_TELLS = float(1 << 62)
"""Stands for memory without a known end."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank on the host. ``pinned``: of these, what a device copies from and to by itself."""

    accounts: Mapping[Account, int]

    @property
    def total(self) -> int:
        return sum(self.accounts.values())

    @property
    def pinned(self) -> int:
        return self.total - self.accounts.get(Account.MOMENT, 0)


def need_of(context: Context, groups: Iterable[Group], kept: Kept | None) -> Need:
    """What this rank will hold on the host between reduction and step, which is when it holds most; a disk's slots apart."""
    homes, keeps_both = context.homes, context.config.precision.keep_param_shard
    found = dict.fromkeys((Account.MASTER, Account.MOMENT, Account.GRAD, Account.PARAM), 0)
    for types, trainable, numel, parameters in groups:
        has_master = homes.makes_master(has_master=types.master is not None, trainable=trainable)
        if homes.optimizer_away and trainable:
            master = types.master or types.param
            found[Account.GRAD] += numel * types.grad.itemsize
            if has_master:
                widths = [0] if kept is None else [sum(one.itemsize for one in kept(each, master).values()) for each in parameters]
                found[Account.MASTER] += numel * master.itemsize
                found[Account.MOMENT] += numel * max(widths, default=0)
        is_sharded = not context.residency.full_parameters and homes.makes_shard(makes_master=has_master, keeps_both=keeps_both)
        if homes.params_away and is_sharded:
            found[Account.PARAM] += numel * types.param.itemsize
    return Need({account: nbytes for account, nbytes in found.items() if nbytes})


def check_room(context: Context, need: Need) -> None:
    """All ranks call it.

    Raises:
        ConfigError: the ranks of some host need more than it has available.
    """
    here = torch.empty(0, device=context.storage.device)
    if not is_memory_known(here):
        return
    available = memory.available_nbytes()
    host = zlib.crc32(socket.gethostname().encode())
    mine = [host, need.total, need.pinned, _TELLS if available is None else available]
    told = context.transport.exchange(torch.tensor(mine, dtype=torch.float64, device=here.device), "construction")
    rows = [[int(value) for value in row] for row in told.tolist()]
    for name in dict.fromkeys(row[0] for row in rows):
        ranks = [rank for rank, row in enumerate(rows) if row[0] == name]
        total, pinned = (sum(rows[rank][column] for rank in ranks) for column in (1, 2))
        present = min(rows[rank][3] for rank in ranks)
        if total > present:
            raise ConfigError(_told(context, need, ranks, (total, pinned, present)))


def _told(context: Context, need: Need, ranks: Sequence[int], nbytes: tuple[int, int, int]) -> str:
    total, pinned, present = nbytes
    on_gpu = context.storage.device.type == "cuda"
    kind = f" pinned{'' if pinned == total else f' ({gib(pinned)} of them) and pageable'}" if on_gpu else " of host memory"
    whose = f"the {len(ranks)} ranks of one host together, {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    parts = ", ".join(f"{account} {nbytes:,}" for account, nbytes in need.accounts.items())
    return (
        f"ZeroConfig.offload = {context.config.offload!r}: needs {gib(total)}{kind} of {gib(present)} present ({whose}; bytes of this "
        f"rank: {parts}); spread the ranks over more hosts, keep the optimizer on a disk (Offload(optimizer='disk', path=...)), or "
        f"offload less"
    )


def gib(nbytes: int) -> str:
    """For people who compare with a machine.

    >>> gib(65_498_251_264)
    '61.0 GiB'
    """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
