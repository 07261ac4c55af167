"""What somebody's functions gave to a simulation, looked at before anything runs.

A model whose tensors are fake already is taken as it is. One that was built before (its parameters are real, or on the meta device)
is copied with fake parameters of the same shapes in place of its own: nobody's model is changed, and no value is copied.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardbook.errors import ConfigError

_DEEPEST = 16
"""Containers within containers of a batch; deeper ones hold themselves."""


def check_functions(*, build_model: Any, build_batch: Any, optimizer: Any, loss: Any) -> None:
    """Raises:
    ConfigError: something made where what makes it is needed.
    """
    for name, value, example in (
        ("build_model", build_model, "lambda: Model(config)"),
        ("build_batch", build_batch, "lambda: (torch.randn(16, 64),)"),
        ("optimizer", optimizer, "lambda parameters: torch.optim.AdamW(parameters)"),
        ("loss", loss, "lambda output: (output.sum(), 16)"),
    ):
        if not callable(value) or (name == "build_model" and isinstance(value, nn.Module)):
            raise ConfigError(f"{name} = {_kind(value)}: allowed is a function that gives it; for example {example}")


def check_loss(found: Any) -> tuple[Tensor, Any]:
    """(loss_sum, weight).

    Raises:
        ConfigError: anything else.
    """
    pair = cast("tuple[Any, ...]", found) if isinstance(found, (tuple, list)) else ()
    if len(pair) != 2:
        told = f"{_kind(found)} of {len(pair)}" if pair else _kind(found)
        raise ConfigError(f"loss(...) returned {told}; it must return (loss_sum, weight); weight=None: loss_sum is a mean")
    if not isinstance(pair[0], Tensor) or pair[0].numel() != 1:
        told = f"a tensor of shape {list(pair[0].shape)}" if isinstance(pair[0], Tensor) else _kind(pair[0])
        raise ConfigError(f"loss(...) returned {told} as loss_sum; it must be a scalar tensor, a sum over what weight counts")
    return pair[0], pair[1]


@contextmanager
def building() -> Generator[None]:
    """Around ``build_model()``: lets ``module.to(dtype)`` and the like convert fake parameters.

    They exchange the old parameter's inside for the new one's, which torch refuses for fake tensors, as their mode keeps weak references
    to some. Nothing looks at those again once the parameter has another inside.
    """
    utils: Any = torch.utils
    original = utils.swap_tensors
    utils.swap_tensors = _swapping(original)
    try:
        yield
    finally:
        utils.swap_tensors = original


def _swapping(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def swap_tensors(one: Any, other: Any) -> None:
        if all(isinstance(tensor, FakeTensor) for tensor in (one, other)):
            one.__dict__, other.__dict__ = other.__dict__, one.__dict__
            torch._C._swap_tensor_impl(one, other)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        else:
            original(one, other)

    return swap_tensors


def check_model(model: Any, mode: FakeTensorMode) -> nn.Module:
    """The model that is simulated: ``model`` itself, or a copy with fake parameters where its own are not.

    Raises:
        ConfigError: no module; a tensor on another device than cpu or meta; tensors of one storage that cannot be told apart; a module
            that cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"build_model() returned {_kind(model)}; it must return an nn.Module")
    strangers = [(name, tensor) for name, tensor in _tensors_of(model) if not _is_ours(tensor, mode)]
    for name, tensor in strangers:
        if tensor.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"build_model(): {name} is on {tensor.device}; a simulation runs on cpu, whatever device= names: build the model without"
                " a device (no .cuda(), no device=)"
            )
    return _copy(model, strangers, mode) if strangers else model


def check_batch(batch: Any, mode: FakeTensorMode) -> None:
    """Raises:
    ConfigError: nothing, or a tensor that is not fake, or not on cpu; names the item.
    """
    if batch is None:
        raise ConfigError("build_batch() returned None; it must return the items that the model is called with, as a tuple")
    for path, tensor in _items(batch, "", 0):
        if not _is_ours(tensor, mode):
            raise ConfigError(f"build_batch() returned {_what(tensor)} as item {path or '0'}{_why(tensor)}")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raises:
    ConfigError: no torch optimizer, or one that steps on parameters that are not the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer(...) returned {_kind(optimizer)}; it must return a torch.optim.Optimizer over the parameters it got")
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                shape = list(parameter.shape)
                raise ConfigError(
                    f"optimizer(...): parameter {index} of group {number}, of shape {shape}, is not one of the model that build_model()"
                    " returned; make the optimizer from the argument that it is called with"
                )


def _copy(model: nn.Module, strangers: list[tuple[str, Tensor]], mode: FakeTensorMode) -> nn.Module:
    owners: dict[int, str] = {}
    swapped: dict[int, Any] = {}
    for name, tensor in strangers:
        _claim(owners, name, tensor, swapped)
        swapped[id(tensor)] = _fake_of(tensor, mode)
    for _, tensor in _tensors_of(model):
        swapped.setdefault(id(tensor), tensor)
    try:
        return copy.deepcopy(model, swapped)
    except Exception as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"build_model() returned a model whose {strangers[0][0]} is a real tensor, and it can't be copied without its values"
            f" ({type(error).__name__}: {words}); build it inside the function"
        ) from error


def _claim(owners: dict[int, str], name: str, tensor: Tensor, swapped: Mapping[int, Any]) -> None:
    """One storage, one tensor: how several share it would be lost."""
    if id(tensor) in swapped or tensor.device.type == "meta" or not tensor.numel():
        return
    other = owners.setdefault(tensor.untyped_storage()._cdata, name)
    if other != name:
        raise ConfigError(
            f"build_model(): {name} and {other} are different tensors on one storage, in a model that was built before; build it inside the"
            " function, or tie them by making them one parameter"
        )


def _fake_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Same shape, strides and type, on cpu. An operator makes it, so that the simulation's allocator sees it."""
    with mode, torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that hang on modules as plain attributes; each object once, by name."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{prefix}.{name}" if prefix else name, value


def _items(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth > _DEEPEST:
        raise ConfigError(f"build_batch(): containers within containers, more than {_DEEPEST} deep, at item {path}; return a flat tuple")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _items(item, f"{path}[{key!r}]" if path else repr(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(cast("list[Any]", value)):
            yield from _items(item, f"{path}[{index}]" if path else f"{index}", depth + 1)


def _is_ours(tensor: Tensor, mode: FakeTensorMode) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and tensor.device.type == "cpu"


def _what(tensor: Tensor) -> str:
    if tensor.device.type not in ("cpu", "meta"):
        return f"a tensor on {tensor.device}"
    kind = "meta" if tensor.device.type == "meta" else "fake" if isinstance(tensor, FakeTensor) else "real"
    return f"a {kind} tensor of shape {list(tensor.shape)}"


def _why(tensor: Tensor) -> str:
    if tensor.device.type != "cpu":
        return "; a simulation runs on cpu, whatever device= names: leave the device out"
    if isinstance(tensor, FakeTensor):
        return ", of another simulation or mode; make it anew inside the function at every call"
    nbytes = tensor.numel() * tensor.element_size()
    return f" ({nbytes:,} real bytes); make it inside the function, where torch.randint, torch.zeros or torch.tensor make fake ones"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
