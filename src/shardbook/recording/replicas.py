"""Whether ranks that should hold the same parameters do: every parameter hashed, the hashes compared in one small exchange."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.errors import ConfigError, ShardbookError
from shardbook.ledger import peers, peers_shardbook
from shardbook.recording.fingerprint import Extent, Plan
from shardbook.recording.fragments import flat

_SHARDED = "the parameters of this model are sharded, so that no two ranks hold the same ones"


class ReplicaError(ShardbookError, RuntimeError):
    """Ranks hold different values of a parameter that they replicate.

    Args:
        step: as it was passed to the check.
        parameter: the first, in the model's order, that differs.
        ranks: those that hold other values than most do; where no value has a majority, all ranks.
    """

    def __init__(self, message: str, *, step: int | None = None, parameter: str | None = None, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step, self.parameter, self.ranks = step, parameter, ranks


def check_replicas(model: Any, *, step: int | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Compare the parameters that every rank holds in full, bit for bit. All ranks call it, between two steps.

    A rank sends 8 bytes for each parameter. Buffers are each rank's own and not compared.

    Args:
        model: a module, what wraps it, or an engine.
        step: for the message.
        group: of the ranks that are replicas; None: all.

    Raises:
        ReplicaError: on every rank, where one of them has drifted.
        ConfigError: no parameter is replicated, as under ZeRO's third stage.

    >>> check_replicas(nn.Linear(2, 2), step=1)  # a rank alone
    """
    Replicas(model, group=group).check(step)


class Replicas:
    """The same for a check that is made again and again: what can be laid out once is.

    Raises:
        ConfigError: no parameter is replicated.
    """

    def __init__(self, model: Any, *, group: dist.ProcessGroup | None = None) -> None:
        passes = peers_shardbook.passes_of(model) or peers_shardbook.passes_of(peers.module_of(model))
        if passes is not None and peers_shardbook.stage_of(passes) == 3:
            raise ConfigError(f"check_replicas: {_SHARDED} under stage 3; leave the check out, or use stage 0, 1 or 2")
        self._module, self._group = peers.module_of(model), group
        self._plans: dict[Any, Plan] = {}
        self._names = [name for name, parameter in self._module.named_parameters() if _is_replicated(parameter)]
        if not self._names:
            raise ConfigError(f"check_replicas: {_SHARDED}; leave the check out")

    def check(self, step: int | None = None) -> None:
        """Raises ReplicaError, on every rank, where one has drifted."""
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return
        hashes = self._hashes()
        rows = [torch.empty_like(hashes) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, hashes, group=self._group)
        _raise_if_different(self._names, torch.stack(rows).tolist(), step)

    @torch.no_grad()
    def _hashes(self) -> Tensor:
        """One for each parameter, on the first one's device. Reading a parameter awaits new values that are under way to it."""
        wanted = set(self._names)
        tensors = [flat(parameter) for name, parameter in self._module.named_parameters() if name in wanted]
        found = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
        for places, plan in self._planned(tensors):
            hashes = plan.prints([tensors[place] for place in places], brief=True).hash
            assert hashes is not None
            found[places] = hashes.to(found.device)
        return found

    def _planned(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Plan]]:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
        for (dtype, device), places in kinds.items():
            extents = tuple(Extent(0, tensors[place].numel()) for place in places)
            if (extents, dtype, device) not in self._plans:
                self._plans[extents, dtype, device] = Plan(extents, dtype, device)
            yield places, self._plans[extents, dtype, device]


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Whether all of it is on this rank: no part of a distributed tensor, and nothing that a sharding engine has taken away."""
    return parameter.numel() > 0 and not hasattr(parameter, "placements") and not hasattr(parameter, "ds_id")


def _raise_if_different(names: Sequence[str], rows: Sequence[Sequence[int]], step: int | None) -> None:
    different = [place for place, hashes in enumerate(zip(*rows, strict=True)) if len(set(hashes)) > 1]
    if not different:
        return
    hashes = [row[different[0]] for row in rows]
    name, ranks = names[different[0]], _odd_ones(hashes)
    at = "" if step is None else f"step {step}: "
    more = f"; so do {len(different) - 1} further parameters of {len(names)}" if len(different) > 1 else ""
    why = "Something wrote to it on one rank alone, or that rank's arithmetic differs"
    message = f"{at}replicas of {name!r} have drifted apart: {_who(hashes, ranks)}{more}. {why}"
    raise ReplicaError(message, step=step, parameter=name, ranks=ranks)


def _odd_ones(hashes: Sequence[int]) -> tuple[int, ...]:
    """Ranks that are not of the majority; all where there is none.

    >>> _odd_ones([7, 7, 3, 7]), _odd_ones([1, 2])
    ((2,), (0, 1))
    """
    most = max(hashes, key=hashes.count)
    if 2 * hashes.count(most) <= len(hashes):
        return tuple(range(len(hashes)))
    return tuple(rank for rank, one in enumerate(hashes) if one != most)


def _who(hashes: Sequence[int], ranks: tuple[int, ...]) -> str:
    if len(hashes) == 2:
        return "ranks 0 and 1 hold different bits (of two, none is the odd one)"
    if len(ranks) == len(hashes):
        return f"its {len(hashes)} ranks hold {len(set(hashes))} different values, none of them a majority"
    odd = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    return f"{odd} other bits than the other {len(hashes) - len(ranks)}"
