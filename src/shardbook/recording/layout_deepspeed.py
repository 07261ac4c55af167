"""DeepSpeed's ZeRO, read from its attributes as of 0.19: partitions of flat groups, found through each parameter's own mapping.

Stages 1 and 2 leave on every parameter where its part of this rank's partition lies (``_hp_mapping``); stage 3 says where each
parameter's shard lies in the flat groups (``grad_position``). The inner optimizer steps once per group.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.ledger.peers_naming import Tree
from shardbook.recording.fragments import Fragment


class PartitionLayout:
    """Stages 1 and 2."""

    def __init__(self, module: nn.Module, zero: Any) -> None:
        self._zero = zero
        self._named = [(name, parameter) for name, parameter in Tree(module).parameters if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in Tree(module).parameters if not parameter.requires_grad]
        if not any(getattr(parameter, "_hp_mapping", None) is not None for _, parameter in self._named):
            raise ConfigError(
                f"record: {type(zero).__name__} leaves no mapping from parameters to its partition (_hp_mapping) in this version "
                f"of DeepSpeed; versions from 0.10 on do"
            )

    def _mapped(self) -> Iterator[tuple[str, Any, Any]]:
        for name, parameter in self._named:
            mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
            if mapping is not None:  # else another rank has it
                yield name, parameter, mapping

    def weights(self) -> list[Fragment]:
        found = [Fragment(name, mapping.lp_fragment_address.start, mapping.hp_fragment.detach()) for name, _, mapping in self._mapped()]
        return found + [Fragment(name, 0, parameter.detach().reshape(-1)) for name, parameter in self._frozen]

    def model(self) -> list[Fragment]:
        return [Fragment(name, 0, parameter.detach().reshape(-1)) for name, parameter in self._named]

    def gradients(self) -> list[Fragment]:
        found: list[Fragment] = []
        for name, parameter, mapping in self._mapped():
            try:
                gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
            except (ValueError, IndexError):  # no gradients are there now
                continue
            if gradient is not None:
                found.append(Fragment(name, mapping.lp_fragment_address.start, _part(gradient.reshape(-1), mapping.lp_fragment_address)))
        return found

    def stepped(self) -> list[Fragment]:
        """Of the groups that are being stepped on."""
        found: list[Fragment] = []
        partitions = self._zero.single_partition_of_fp32_groups if hasattr(self._zero, "single_partition_of_fp32_groups") else ()
        for name, _, mapping in self._mapped():
            flat = partitions[mapping.param_group_index] if partitions else None
            if flat is not None and flat.grad is not None:
                found.append(Fragment(name, mapping.lp_fragment_address.start, _part(flat.grad, mapping.hp_fragment_address)))
        return found

    def states(self) -> Mapping[str, list[Fragment]]:
        found: dict[str, list[Fragment]] = {}
        state = self._zero.optimizer.state
        partitions = getattr(self._zero, "single_partition_of_fp32_groups", ())
        for name, _, mapping in self._mapped():
            flat = partitions[mapping.param_group_index] if partitions else None
            for key, value in state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == getattr(flat, "shape", None):
                    part = _part(value, mapping.hp_fragment_address)
                    found.setdefault(key, []).append(Fragment(name, mapping.lp_fragment_address.start, part))
        return found

    def groups(self) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
        names: dict[int, list[str]] = {}
        for name, _, mapping in self._mapped():
            names.setdefault(mapping.param_group_index, []).append(name)
        return [(group, tuple(names.get(number, ()))) for number, group in enumerate(self._zero.optimizer.param_groups)]


class ShardLayout:
    """Stage 3."""

    def __init__(self, module: nn.Module, zero: Any, rank: int) -> None:
        self._zero, self._rank = zero, rank
        self._named = Tree(module).parameters

    def _trained(self) -> Iterator[tuple[str, Any, int, int, int, int]]:
        """(name, parameter, flat group, offset in it, first element, elements in use)"""
        for name, parameter in self._named:
            if not parameter.requires_grad:
                continue
            group, offset, numel = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = self._rank * numel
            used = max(0, min(numel, parameter.ds_numel - start))  # pyright: ignore[reportAttributeAccessIssue]
            if used:
                yield name, parameter, group, offset, start, used

    def weights(self) -> list[Fragment]:
        flats = self._zero.fp32_partitioned_groups_flat
        found = [Fragment(name, start, flats[g].detach()[at : at + used]) for name, _, g, at, start, used in self._trained()]
        for name, parameter in self._named:
            if not parameter.requires_grad:
                found += self._shard(name, parameter)
        return found

    def _shard(self, name: str, parameter: Any) -> list[Fragment]:
        start = self._rank * parameter.ds_tensor.ds_numel
        used = max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
        return [Fragment(name, start, parameter.ds_tensor.detach()[:used])] if used else []

    def model(self) -> list[Fragment]:
        return [part for name, parameter in self._named if parameter.requires_grad for part in self._shard(name, parameter)]

    def gradients(self) -> list[Fragment]:
        averaged = self._zero.averaged_gradients
        found: list[Fragment] = []
        for name, parameter, group, _, start, used in self._trained():
            own = averaged.get(group)
            if own is None:
                continue
            place = next(place for place, one in enumerate(self._zero.fp16_groups[group]) if one is parameter)
            found.append(Fragment(name, start, own[place].reshape(-1)[:used]))
        return found

    def stepped(self) -> list[Fragment]:
        flats = self._zero.fp32_partitioned_groups_flat
        return [
            Fragment(name, start, flats[group].grad[offset : offset + used])
            for name, _, group, offset, start, used in self._trained()
            if flats[group].grad is not None
        ]

    def states(self) -> Mapping[str, list[Fragment]]:
        found: dict[str, list[Fragment]] = {}
        flats, state = self._zero.fp32_partitioned_groups_flat, self._zero.optimizer.state
        for name, _, group, offset, start, used in self._trained():
            for key, value in state.get(flats[group], {}).items():
                if isinstance(value, Tensor) and value.shape == flats[group].shape:
                    found.setdefault(key, []).append(Fragment(name, start, value[offset : offset + used]))
        return found

    def groups(self) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
        return [(group, ()) for group in self._zero.optimizer.param_groups]


def _part(flat: Tensor, address: Any) -> Tensor:
    """What the address names, of a tensor that is it already or has more."""
    return flat if flat.numel() == address.numel else flat[address.start : address.start + address.numel]
