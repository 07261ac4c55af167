"""A plain loop of one unit, for models that no process can hold whole: what goes into it and the gradient that reaches it are the run's.

While the run goes on, `Capture` writes down, on each rank and for each micro-batch, what the unit is called with, the state of the random
generators, and the gradient of its output. `UnitLoop` then does what the plain loop does, with the unit's forward and backward in the
place of the model's, and the step's weight and norm, which are of the whole model, from what the engine reported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.models.decoder import Decoder, init_weights
from shardbook.recording.record import Recorder
from shardbook.train.baseline import Part, PlainLoop
from shardbook.train.initial import fill_initial
from shardbook.train.optimizer import build_optimizer, build_scheduler
from shardbook.train.prepare import build_model
from shardbook.train.recipe import Recipe

_PLAIN_VALUES = (type(None), bool, int, float, str)


def check_unit(model: nn.Module, name: str) -> nn.Module:
    """The module of that name.

    Raises:
        ConfigError: there is none, it has no parameters, it is the model itself, or it shares a parameter with another part.
    """
    modules = dict(model.named_modules())
    if not name or name not in modules:
        some = [path for path, module in modules.items() if path and any(True for _ in module.parameters())]
        raise ConfigError(f"units = {name!r}: the model has no such module; it has {', '.join(some[:6])}{', ...' if len(some) > 6 else ''}")
    own = {id(parameter) for parameter in modules[name].parameters()}
    if not own:
        raise ConfigError(f"units = {name!r}: this module has no parameters to compare; name one that has, such as a block")
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and not path.startswith(f"{name}."):
            raise ConfigError(
                f"units = {name!r}: its parameters are also {path}, from where gradients come that this unit alone doesn't make; "
                f"choose a unit that shares none"
            )
    return modules[name]


class Capture:
    """What one unit is given on this rank, a file for each micro-batch."""

    def __init__(self, model: nn.Module, name: str, folder: Path, rank: int) -> None:
        module = check_unit(model, name)
        self._name, self._folder, self._rank = name, folder, rank
        self._called: dict[str, Any] | None = None
        self._is_used = False
        self._gradients: list[Tensor | None] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def write(self, step: int, micro: int) -> None:
        """The micro-batch's backward is over."""
        torch.save({"called": self._called, "gradients": self._gradients}, file_of(self._folder, step, self._rank, micro))
        self._called, self._gradients = None, []

    def close(self) -> None:
        """Take the hooks off.

        Raises:
            ConfigError: the unit was never called.
        """
        for handle in self._handles:
            handle.remove()
        if not self._is_used:
            raise ConfigError(
                f"units = {self._name!r}: it is never called itself, as a list of modules isn't; choose what is in it, or around it"
            )

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if self._called is not None:
            raise ConfigError(f"units = {self._name!r}: it is called twice in a micro-batch; choose a unit that is called once")
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._called = {"args": self._copied(args), "kwargs": self._copied(kwargs), "rng": torch.get_rng_state(), "cuda": cuda}
        self._is_used = True
        self._called["needs"] = [tensor.requires_grad for tensor in tensors_of((args, kwargs))]

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._copied(output)  # refuses what has no gradient to write down
        outputs = tensors_of(output)
        self._gradients = [None] * len(outputs)
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._keeping(self._gradients, place))

    def _keeping(self, gradients: list[Tensor | None], place: int) -> Any:
        def keep(gradient: Tensor) -> None:
            gradients[place] = gradient.detach().clone()

        return keep

    def _copied(self, value: Any) -> Any:
        """Tensors apart from their graph, in tuples, lists and dicts; what a file can hold."""
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, _PLAIN_VALUES):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._copied(item) for item in value)
        if type(value) is dict:
            return {key: self._copied(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(
            f"units = {self._name!r}: it takes or gives a {type(value).__name__}, of which nothing can be written down; "
            f"choose a unit that is called with tensors and numbers and gives tensors"
        )


class UnitLoop(PlainLoop):
    """The plain loop of one unit. ``step`` is given the engine's report and what the ranks wrote down."""

    def __init__(self, recipe: Recipe, name: str, device: torch.device) -> None:
        self._report: Mapping[str, Any] = {}
        self._device = device
        super().__init__(
            _build_unit(recipe, name, device),
            recipe.zero,
            lambda named: build_optimizer(named, recipe.optimizer),
            lambda optimizer: build_scheduler(optimizer, recipe.optimizer, recipe.run.steps),
        )
        self.names = [f"{name}.{own}" for own in self.names]

    def reported(self, report: Mapping[str, Any]) -> Self:
        """``report``: loss, weight, grad_norm of the step to come, over the whole model."""
        self._report = report
        return self

    def _totals(self, losses: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
        return self._report["loss"] * self._report["weight"], self._report["weight"]

    def _norm(self, gradients: Part, divisor: float) -> float:
        return self._report["grad_norm"]

    def _part(self, batch: Sequence[Any], loss_scale: float) -> tuple[float, float, Part]:
        """Gradients of one micro-batch: from a gradient that bears the loss scale already."""
        written = torch.load(batch[0], map_location="cpu", weights_only=True)
        if written["called"] is not None:
            outputs = self._again(written["called"])
            gradients = moved(written["gradients"], self._device)
            pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return 0.0, 0.0, self._take_gradients()

    def _again(self, called: Mapping[str, Any]) -> list[Tensor]:
        """The unit's outputs, from what it was called with and the random numbers that it had."""
        args, kwargs = (moved(called[name], self._device) for name in ("args", "kwargs"))
        for tensor, needs in zip(tensors_of((args, kwargs)), called["needs"], strict=True):
            tensor.requires_grad_(needs)
        torch.set_rng_state(called["rng"])
        if called["cuda"] is not None:
            torch.cuda.set_rng_state(called["cuda"])
        return tensors_of(self.model(*args, **kwargs))

    def _record(
        self, recorder: Recorder, gradients: Part, loss: float, weight: float, loss_scale: float, given: list[Sequence[Any]] | None
    ) -> None:
        super()._record(recorder, gradients, loss, weight, loss_scale, None)


def captured(folder: Path, step: int, num_ranks: int, num_micro: int) -> list[list[tuple[Path]]]:
    """``[rank][micro]``: the files that :class:`Capture` wrote for a step; each is read when its turn comes."""
    return [[(file_of(folder, step, rank, micro),) for micro in range(num_micro)] for rank in range(num_ranks)]


def file_of(folder: Path, step: int, rank: int, micro: int) -> Path:
    return folder / f"step-{step:06d}-rank-{rank:05d}-micro-{micro:04d}.pt"


def moved(value: Any, device: torch.device) -> Any:
    """The same with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return type(value)(moved(item, device) for item in value) if isinstance(value, (tuple, list)) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def tensors_of(value: Any) -> list[Tensor]:
    """In tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, (tuple, list)) else []  # pyright: ignore[reportUnknownVariableType]


def _build_unit(recipe: Recipe, name: str, device: torch.device) -> nn.Module:
    """With the weights that it has in the whole model; of shardbook's decoder nothing else is ever built."""
    if recipe.model_file is not None:
        return check_unit(build_model(recipe, device), name)
    with torch.device("meta"):
        unit = check_unit(Decoder(recipe.model, recipe.run.seed), name)
    unit.to_empty(device=device)
    init_weights(unit)
    fill_initial(unit, recipe, under=f"{name}.")
    return unit
