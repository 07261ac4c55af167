"""What a rank has of each parameter: where to find it in an engine's memory, and which elements of the parameter it is.

An element's number in its parameter is its place in the parameter's memory, which for a contiguous one is the usual row-major order.
A `Layout` knows one engine; it is asked anew in every step, since gradients and state come and go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardbook.ledger.peers_naming import local

_USUAL = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements of parameter ``name`` from number ``start`` on: a flat view of an engine's memory, which keeps it alive.

    ``version`` is that of a distributed tensor around it, whose writes leave its part's own counter alone.
    """

    name: str
    start: int
    tensor: Tensor
    version: int = 0


@dataclass(frozen=True, slots=True)
class Described:
    """A parameter of the model, as the manifest lists it. ``aliases`` are its other names, where it is tied."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()


class Layout(Protocol):
    """One engine's, read between steps and within them. Lists have a fragment for whatever this rank has, and may be empty."""

    def weights(self) -> list[Fragment]:
        """What the optimizer updates (the master where there is one), and frozen parameters."""
        ...

    def model(self) -> list[Fragment]:
        """Parameters as forward uses them, where that is other memory than the weights."""
        ...

    def gradients(self) -> list[Fragment]:
        """Reduced gradients after backward, before clipping."""
        ...

    def stepped(self) -> list[Fragment]:
        """Gradients as the optimizer finds them."""
        ...

    def states(self) -> Mapping[str, list[Fragment]]:
        """The optimizer's state with a value per element, by its key."""
        ...

    def groups(self) -> list[tuple[Mapping[str, Any], tuple[str, ...]]]:
        """Settings of each parameter group, and the names of its parameters."""
        ...


def flat(tensor: Tensor) -> Tensor:
    """All elements in the order of memory, as a view where the tensor has no gaps; complex numbers as pairs."""
    tensor = local(tensor).detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_contiguous() and _is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def flat_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the order of its parameter's memory."""
    if _is_usual(gradient) and _is_usual(parameter):  # most are: the rest of this takes several times as long
        return gradient.detach().view(-1)
    gradient, parameter = local(gradient), local(parameter)
    if gradient.layout == torch.strided and gradient.stride() != parameter.stride() and not parameter.is_contiguous():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return flat(gradient)


def describe(model: nn.Module) -> list[Described]:
    """Every parameter of a module once, under its first name."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [_described(parameters[key], own) for key, own in names.items()]


def _described(parameter: nn.Parameter, names: Sequence[str]) -> Described:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's stage 3 empties parameters
    stride = parameter.stride() if len(shape) == parameter.dim() and shape == parameter.shape else ()
    return Described(
        names[0], tuple(shape), tuple(stride), str(parameter.dtype).removeprefix("torch."), parameter.requires_grad, tuple(names[1:])
    )


def _is_usual(tensor: Tensor) -> bool:
    """In row-major order, real, and no subclass."""
    return type(tensor) in _USUAL and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order of dimensions."""
    expected = 1
    for length, stride in sorted(((n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1), key=lambda pair: pair[1]):
        if stride != expected:
            return False
        expected *= length
    return True
