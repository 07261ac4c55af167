"""Takes over an optimizer that was built on the model: its groups and state go on, on pieces instead of parameters.

Only an element-wise optimizer can step on pieces. Whether one is element-wise is not read off its name: it is tried, on a few
small tensors, whole against cut in two.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardbook.accounts import Account, Tier
from shardbook.engine.flat import Flat, Piece
from shardbook.engine.journal import Journal
from shardbook.engine.storage import address_of, is_memory_known
from shardbook.errors import ConfigError, UsageError


class PieceOptimizer:
    """The user's optimizer, stepping on this rank's pieces when the engine says so."""

    def __init__(self, optimizer: Optimizer, flats: Sequence[Flat], journal: Journal, tier: Tier = Tier.DEVICE) -> None:
        self._optimizer, self._journal, self._tier = optimizer, journal, tier
        self._stepping = False
        self._parts: Iterator[Sequence[Piece]] | None = None  # of the step that is being made, where it is made in parts
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []  # gradients, while the parts are made
        self._booked: list[tuple[str, int, int]] = []  # unit, address, nbytes of each tensor of the state
        self._num_states = -1
        self._units: dict[int, str] = {}
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        state: dict[Any, Any] = optimizer.state
        old_state = dict(state)
        state.clear()
        for group in optimizer.param_groups:
            group["params"] = []
        self.add(flats, old_state)
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)
        self._book()

    def add(self, flats: Sequence[Flat], state: Mapping[Any, Any]) -> None:
        """Step on the pieces of these flat buffers as well, each in its parameter's group, going on from ``state``."""
        order = {key: position for position, key in enumerate(self._groups)}
        pieces = [(piece, flat.unit) for flat in flats for piece in flat.pieces]
        for piece, unit in sorted(pieces, key=lambda pair: order[id(pair[0].member.parameter)]):
            self._units[id(piece.parameter)] = unit
            self._groups[id(piece.member.parameter)]["params"].append(piece.parameter)
            if piece.member.parameter in state:
                self._optimizer.state[piece.parameter] = _cut_state(state[piece.member.parameter], piece)

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer was built on the parameter, trained or not."""
        return id(parameter) in self._groups

    def group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        """The names of each group's parameters, frozen ones too, by the ids of the model's parameters."""
        numbers = {id(group): number for number, group in enumerate(self._optimizer.param_groups)}
        found: list[list[str]] = [[] for _ in numbers]
        for key, group in self._groups.items():
            if key in names:
                found[numbers[id(group)]].append(names[key])
        return found

    def take_state(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Go on from these states of pieces; a piece without one begins anew."""
        state: dict[Any, Any] = self._optimizer.state
        state.clear()
        state |= states
        self.settle()

    def reserve(self, piece: Piece, value: Tensor) -> None:
        """Book memory that is to be a state of the piece: :meth:`take_state` gets it, or it is freed before :meth:`settle`."""
        entry = (self._units.get(id(piece.parameter), "root"), address_of(value), value.numel() * value.element_size())
        self._journal.book(Account.MOMENT, self._tier, entry[0], entry[2], address=entry[1])
        self._booked.append(entry)

    def settle(self) -> None:
        """Book the state that there is, and nothing that was reserved."""
        self._num_states = -1
        self._book()

    def step(self) -> None:
        """One step on all pieces that have a gradient."""
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False
        self._book()

    def step_in_parts(self, parts: Iterable[Sequence[Piece]]) -> None:
        """One step, pieces after pieces, each made when ``parts`` gives it: it prepares a part before, and takes it away after.

        To who watches the optimizer it is one step: hooks of its own and wrappers of schedulers run once, around all parts.
        """
        optimizer: Any = self._optimizer
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)
        self._parts = iter(parts)
        try:
            self.step()
        finally:
            self._parts, self._set_aside = None, []

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group.get("lr", 0.0)) for group in self._optimizer.param_groups)

    def close(self) -> None:
        self._before.remove()
        self._after.remove()

    def _before_step(self, *_: Any) -> None:
        self._refuse_direct_step()
        if self._parts is not None:  # the optimizer finds no gradient, and does nothing; the parts follow it
            pieces = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            self._set_aside = [(parameter, parameter.grad) for parameter in pieces if parameter.grad is not None]
            for piece, _gradient in self._set_aside:
                piece.grad = None

    def _after_step(self, *_: Any) -> None:
        if self._parts is None:
            return
        for piece, gradient in self._set_aside:
            piece.grad = gradient
        groups = self._optimizer.param_groups
        whole: list[list[nn.Parameter]] = [group["params"] for group in groups]
        try:
            for part in self._parts:
                chosen = {id(piece.parameter) for piece in part}
                for group, parameters in zip(groups, whole, strict=True):
                    group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
                _unwatched_step(self._optimizer)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _refuse_direct_step(self) -> None:
        if not self._stepping:
            raise UsageError(
                "this optimizer belongs to an engine: call engine.step() instead of optimizer.step(); "
                "it reduces, scales, clips and then steps"
            )

    def _book(self) -> None:
        """Adopt optimizer state that has appeared since the last step."""
        state: dict[Any, dict[str, Any]] = self._optimizer.state
        if len(state) == self._num_states:
            return
        self._num_states = len(state)
        found = [
            (self._units.get(id(parameter), "root"), address_of(value), value.numel() * value.element_size())
            for parameter, values in state.items()
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        known = Counter(self._booked)
        for unit, address, nbytes in (known - Counter(found)).elements():
            self._journal.book(Account.MOMENT, self._tier, unit, -nbytes, address=address)
        for entry in found:
            if known[entry]:
                known[entry] -= 1
            else:
                unit, address, nbytes = entry
                self._journal.book(Account.MOMENT, self._tier, unit, nbytes, address=address)
        self._booked = found


def _unwatched_step(optimizer: Optimizer) -> None:
    """The optimizer's own code, without the hooks that torch wraps around it."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def check_groups(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Every parameter of the optimizer is the model's, and every trainable one of the model is in a group.

    Raises:
        ConfigError: the first that is not, by name or shape.
    """
    grouped = {id(parameter): (number, parameter) for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    known = {id(parameter) for parameter in named.values()}
    for key, (number, parameter) in grouped.items():
        if key not in known:
            raise ConfigError(
                f"optimizer: group {number} holds a parameter of shape {tuple(parameter.shape)} that is not a parameter of this model; "
                f"build the optimizer on the model that the engine gets, before the engine: torch.optim.AdamW(model.parameters())"
            )
    for name, parameter in named.items():
        if parameter.requires_grad and id(parameter) not in grouped:
            raise ConfigError(
                f"optimizer: parameter {name!r} requires a gradient and is in no parameter group, so it would never be updated; "
                f"add it to a group, or freeze it with requires_grad_(False)"
            )


def check_elementwise(optimizer: Optimizer, device: torch.device) -> None:
    """Try the optimizer on small tensors: a parameter stepped in two parts must come out as the same parameter stepped whole.

    Raises:
        ConfigError: it does not, or can't be stepped without a closure.
    """
    if not is_memory_known(torch.empty(0, device=device)):
        return  # no values to compare; a real run of the same configuration is checked
    name = type(optimizer).__name__
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = torch.randn(2, 192).to(device)
        gradients = [torch.randn(2, 192).to(device) for _ in range(3)]
    for number, group in enumerate(optimizer.param_groups):
        try:
            whole = _stepped(optimizer, group, [start], [[gradient] for gradient in gradients])[0]
            parts = _stepped(
                optimizer, group, list(start.view(-1).split(256)), [list(gradient.view(-1).split(256)) for gradient in gradients]
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"optimizer: {name} can't step on parts of a parameter ({reason}); use an element-wise optimizer such as torch.optim.AdamW"
            ) from error
        if not torch.equal(whole.view(-1), torch.cat(parts)):
            raise ConfigError(
                f"optimizer: {name} (group {number}) is not element-wise: a parameter stepped in two parts comes out different from one "
                f"stepped whole, so its update would depend on the number of ranks; use an element-wise optimizer such as torch.optim.AdamW"
            )


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Step copies of ``values`` with a twin of the optimizer that has the group's settings, no state and no hooks."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    twin = _twin(optimizer, group, parameters)
    if not float(group.get("lr", 1.0)):
        twin.param_groups[0]["lr"] = 0.01  # a schedule's warm-up may begin at 0, where every optimizer looks element-wise
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(twin)
    return [parameter.detach() for parameter in parameters]


def _twin(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> Optimizer:
    """The same optimizer with the settings of one group, for other parameters."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    twin.__dict__.update({key: OrderedDict() for key in twin.__dict__ if key.endswith("_hooks")})
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
    twin.param_groups = [{**settings, "params": list(parameters)}]
    twin.state = defaultdict(dict)
    return twin


class StateKinds:
    """What an optimizer keeps for each element of a parameter, by name and type: tried once for each group and type.

    Args:
        optimizer: as the engine gets it.
        device: where it is going to step.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._groups = {id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
        self._found: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}

    def __call__(self, parameter: nn.Parameter, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """Of a parameter whose master has this type."""
        key = (self._groups[id(parameter)], dtype)
        if key not in self._found:
            self._found[key] = self._tried(self._optimizer.param_groups[key[0]], dtype)
        return self._found[key]

    def _tried(self, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
        tried = nn.Parameter(torch.zeros(192, dtype=dtype, device=self._device))
        twin = _twin(self._optimizer, group, [tried])
        for _ in range(2):
            tried.grad = torch.ones_like(tried)
            type(self._optimizer).step(twin)
        state: dict[str, Any] = twin.state[tried]
        return {
            name: value.dtype
            for name, value in state.items()
            if name != "step" and isinstance(value, Tensor) and value.shape == tried.shape
        }


def _cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """The part of a parameter's optimizer state that belongs to a piece.

    What has one value per element is cut, and takes the piece's type as ``load_state_dict`` would give it; the rest is kept as it is.
    """
    cut: dict[str, Any] = {}
    dtype = piece.parameter.dtype
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and tuple(value.shape) == piece.member.shape:
            dense = torch.empty_strided(piece.member.shape, piece.member.stride, dtype=value.dtype, device=value.device).copy_(value)
            part = dense.as_strided((value.numel(),), (1,))[piece.span.start : piece.span.stop]
            cut[key] = part.to(device=piece.parameter.device, dtype=dtype if value.is_floating_point() else None, copy=True)
        else:
            cut[key] = value.clone() if isinstance(value, Tensor) else value
    return cut
