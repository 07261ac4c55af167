"""Plain loops, DDP and FSDP2: the optimizer steps on the model's own parameters, or on copies of them that it was given in their order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.ledger import peers_fsdp2
from shardbook.ledger.peers_naming import Tree, local
from shardbook.recording.fragments import Fragment, flat_like


class TorchLayout:
    """Reads ``parameter``, ``parameter.grad`` and ``optimizer.state[parameter]``."""

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        tree = Tree(module)
        self._module_parameters = tree.parameters
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in tree.parameters} | peers_fsdp2.Sharded(tree).names
        self._masters = self._name_masters()
        self._starts: dict[int, int] = {}

    def _name_masters(self) -> bool:
        """Give names to what the optimizer holds that is not the model's: copies, one per trainable parameter and in their order."""
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if id(parameter) not in self._names]
        if not foreign:
            return False
        trainable = [(name, parameter) for name, parameter in self._module_parameters if parameter.requires_grad]
        shapes = [tuple(parameter.shape) for _, parameter in trainable]
        if len(foreign) == len(held) == len(trainable) and [tuple(parameter.shape) for parameter in foreign] != shapes:
            trainable = _by_values(trainable, foreign)  # groups may order them in another way than the model does
            shapes = [tuple(parameter.shape) for _, parameter in trainable]
        if len(foreign) != len(held) or [tuple(parameter.shape) for parameter in foreign] != shapes:
            raise ConfigError(
                f"record: the optimizer holds a parameter of shape {tuple(foreign[0].shape)} that is not one of the model's, and its "
                f"parameters are no copies of the model's trainable ones in their order; pass the model that the optimizer was built on"
            )
        _check_copies(trainable, foreign)
        self._names |= {id(master): name for (name, _), master in zip(trainable, foreign, strict=True)}
        return True

    def _held(self) -> Iterator[tuple[str, Any]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names.get(id(parameter), ""), parameter

    def weights(self) -> list[Fragment]:
        held = list(self._held())
        known = {name for name, _ in held}
        frozen = [(name, parameter) for name, parameter in self._module_parameters if name not in known]
        return [self._fragment(name, parameter, parameter) for name, parameter in [*held, *frozen]]

    def model(self) -> list[Fragment]:
        return [self._fragment(name, parameter, parameter) for name, parameter in self._module_parameters] if self._masters else []

    def gradients(self) -> list[Fragment]:
        """The model's own where only those are there: masters get theirs later."""
        mine = self.stepped()
        if mine or not self._masters:
            return mine
        return self._gradients_of(self._module_parameters)

    def stepped(self) -> list[Fragment]:
        return self._gradients_of(self._held())

    def _gradients_of(self, named: Any) -> list[Fragment]:
        return [self._fragment(name, parameter, parameter.grad) for name, parameter in named if parameter.grad is not None]

    def states(self) -> Mapping[str, list[Fragment]]:
        found: dict[str, list[Fragment]] = {}
        for name, parameter in self._held():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and (value.dim() or key != "step"):
                    found.setdefault(key, []).append(self._fragment(name, parameter, value))
        return found

    def groups(self) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
        return [
            (group, tuple(self._names.get(id(parameter), "") for parameter in group["params"])) for group in self._optimizer.param_groups
        ]

    def _fragment(self, name: str, parameter: Any, tensor: Tensor) -> Fragment:
        key = id(parameter)
        if key not in self._starts:
            self._starts[key] = first_element(name, parameter)
        return Fragment(name, self._starts[key], flat_like(tensor, parameter), tensor._version)


def _by_values(trainable: Sequence[tuple[str, Any]], masters: Sequence[Any]) -> list[tuple[str, Any]]:
    """The model's parameters in the masters' order: of each the first one left of its shape that has its values, once rounded."""
    left, found = list(trainable), list[tuple[str, Any]]()
    for master in masters:
        values = local(master).detach()
        fits = [one for one in left if one[1].shape == master.shape and bool((values.to(one[1].dtype) == local(one[1]).detach()).all())]
        if not fits:
            return list(trainable)
        found.append(fits[0])
        left = [one for one in left if one[1] is not fits[0][1]]
    return found


def _check_copies(trainable: Sequence[tuple[str, Any]], masters: Sequence[Any]) -> None:
    """Raises ConfigError where no master has its parameter's values, even about: an optimizer of another model of the same shapes."""
    parameters = [local(parameter).detach().double() for _, parameter in trainable]
    far = [
        bool((local(master).detach().double() - parameter).norm() > 0.5 * parameter.norm())
        for parameter, master in zip(parameters, masters, strict=True)
        if local(master).shape == parameter.shape
    ]
    if far and all(far):
        raise ConfigError(
            "record: the optimizer holds other parameters than the model's, of the same shapes and with other values; build the "
            "optimizer on this model's parameters, or on copies of them"
        )


def first_element(name: str, parameter: Any) -> int:
    """Number of the first element that this rank has; 0 where nothing is distributed.

    Raises:
        ConfigError: what a rank has is no run of elements: cut along another dimension than the first, or still to be summed.
    """
    placements: Sequence[Any] | None = getattr(parameter, "placements", None)
    if placements is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    whole = tuple(parameter.shape)
    if any(placement.is_partial() for placement in placements) or tuple(shape)[1:] != whole[1:] or not local(parameter).is_contiguous():
        raise ConfigError(
            f"record: parameter {name!r} is distributed as {tuple(placements)} of shape {whole}; only shards along the first dimension, "
            f"and replicas, can be told apart by their elements: record with fully_shard's own placement"
        )
    return offset[0] * (parameter.numel() // max(1, whole[0])) if whole else 0
