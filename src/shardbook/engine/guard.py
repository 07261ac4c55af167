"""Parameters whose values are not here: they keep shape, dtype and name, and refuse to be read.

While its memory is away a parameter's class is flipped to a small subclass of ``nn.Parameter`` that sees every torch function
(0.04 µs a flip; the object, its hooks and its place in the module stay). What only asks about shape or type passes; everything
else is a read, and a read either completes what is under way (stages 1 and 2, whose new parameters are still arriving) or
raises with the parameter's name and the remedy.

Autograd is kept away by version counters: a graph that saved the parameter expects the version it saw, so a counter moved far
away makes its backward raise instead of reading freed memory. The counter is put back when the values are.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.errors import ShardedReadError

_AWAY = 1 << 30  # added to the version counter while the memory is away


_PROPERTIES = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "names", "_version", "output_nr",
    "nbytes", "itemsize", "retains_grad", "name", "_base", "_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr",
    "is_quantized", "is_mkldnn", "is_mps", "is_xla", "is_xpu", "is_nested", "is_ipu", "is_vulkan", "is_mtia", "is_maia", "is_hpu",
    "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "dim_order", "is_same_size", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided", "__hash__", "__len__",
)  # fmt: skip
_FUNCTIONS = (
    "numel", "is_floating_point", "is_complex", "is_signed", "is_same_size", "empty_like", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "randint_like", "result_type", "can_cast",
)  # fmt: skip


def _metadata_functions() -> frozenset[Any]:
    """Torch functions that need no value: getters of metadata, and factories that copy only shape and type."""
    descriptors: list[Any] = [getattr(torch.Tensor, name, None) for name in _PROPERTIES]
    found: set[Any] = {getattr(descriptor, access, None) for descriptor in descriptors for access in ("__get__", "__set__", "__delete__")}
    found.update(getattr(torch.Tensor, name, None) for name in _METHODS)
    found.update(getattr(torch, name, None) for name in _FUNCTIONS)
    return frozenset(found - {None})


_METADATA = _metadata_functions()


class _Guarded(nn.Parameter):
    """Base of the guards: an instance is a user's parameter, with its class flipped for a while."""

    _describe: Callable[[nn.Parameter], str]
    _on_read: Callable[[nn.Parameter, str], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return cls._describe(args[0])
        for value in _tensors_in((args, kwargs or {})):
            if isinstance(value, _Guarded):
                type(value)._on_read(value, getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self)._on_read(self, "deepcopy")
        return type(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self)._on_read(self, "pickle")
        return type(self).__reduce_ex__(self, protocol)


def _kinds_of_fakes(parameters: Sequence[nn.Parameter]) -> tuple[type, ...]:
    """A fake tensor must stay one for its mode, which is asked for its device."""
    return tuple(dict.fromkeys(type(parameter) for parameter in parameters if type(parameter).__name__ == "FakeTensor"))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in _tensors_in(item)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in _tensors_in(item)]  # pyright: ignore[reportUnknownVariableType]
    return []


class Guard:
    """Takes the parameters of one unit out of reach, and back.

    ``parameters`` are (name, parameter, whether steps change it). ``complete`` is a method that is called on a read, with the name:
    it brings the values and returns True, or returns False where that would need the other ranks. It is held weakly, as the
    parameters outlive it.
    """

    def __init__(self, unit: str, parameters: Sequence[tuple[str, nn.Parameter, bool]], complete: Callable[[str], bool]) -> None:
        completing = weakref.WeakMethod(complete)
        self._parameters = tuple(parameter for _, parameter, _ in parameters)
        self._steps = tuple(int(trainable) for _, _, trainable in parameters)
        self._classes: tuple[type, ...] = ()
        self._versions: tuple[int, ...] = ()
        names = {id(parameter): name for name, parameter, _ in parameters}

        def describe(parameter: nn.Parameter) -> str:
            with torch._C.DisableTorchFunctionSubclass():
                shape, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
            name = names.get(id(parameter), "?")
            return f"ShardedParameter(name={name!r}, shape={shape}, dtype={dtype}, device={device}, values not gathered)"

        def on_read(parameter: nn.Parameter, what: str) -> None:
            method, name = completing(), names.get(id(parameter), "?")
            if method is None or not method(name):
                raise ShardedReadError(
                    f"parameter {name!r} of unit {unit!r} is sharded and its values are not on this rank: {what} can't read them; "
                    f"read inside 'with engine.gathered(module):', or take them from engine.full_parameters() or engine.state_dict(). "
                    f"A forward that uses it outside of its unit needs ZeroConfig(units=...) that leaves it to the unit around both"
                )

        bases = (_Guarded, *_kinds_of_fakes(self._parameters))
        self._class = type("ShardedParameter", bases, {"_describe": staticmethod(describe), "_on_read": staticmethod(on_read)})

    @property
    def closed(self) -> bool:
        return bool(self._classes)

    def close(self) -> None:
        """From here on the values cannot be read, by people or by autograd."""
        if self._classes or not self._parameters:
            return
        self._versions = tuple(parameter._version for parameter in self._parameters)
        self._classes = tuple(type(parameter) for parameter in self._parameters)
        _set_versions(self._parameters, tuple(version + _AWAY for version in self._versions))
        for parameter in self._parameters:
            parameter.__class__ = self._class

    def open(self) -> None:
        """The values are here again."""
        if not self._classes:
            return
        for parameter, original in zip(self._parameters, self._classes, strict=True):
            parameter.__class__ = original
        _set_versions(self._parameters, self._versions)
        self._classes = ()

    def bump(self) -> None:
        """The values changed: a backward through older ones must raise, as in plain torch."""
        if self._classes:
            self._versions = tuple(version + step for version, step in zip(self._versions, self._steps, strict=True))
        elif any(self._steps):
            changed = [parameter for parameter, step in zip(self._parameters, self._steps, strict=True) if step]
            torch.autograd.graph.increment_version(changed)


def _set_versions(parameters: tuple[nn.Parameter, ...], versions: tuple[int, ...]) -> None:
    torch._C._autograd._unsafe_set_version_counter(parameters, versions)  # pyright: ignore[reportAttributeAccessIssue]


def is_guarded(parameter: nn.Parameter) -> bool:
    """Whether an engine has taken the parameter's values out of reach."""
    return isinstance(parameter, _Guarded)
