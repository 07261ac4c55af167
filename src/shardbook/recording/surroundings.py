"""What a step's numbers depend on besides weights and data: generators, dropout, types, settings of parameter groups."""

import hashlib
import itertools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.errors import ConfigError
from shardbook.ledger.peers_naming import attribute
from shardbook.recording.taking import type_name


def generators() -> int:
    """64-bit hash of the state of torch's generators: the host's, and that of the CUDA device in use. Nothing waits for the device."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def dropout_of(module: nn.Module) -> float:
    """The largest probability of a dropout module, or of another module's own setting whose name says so (``attention_dropout``).

    >>> dropout_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25)))
    0.25
    """
    found = [0.0]
    for inner in module.modules():
        own = {"drop": inner.p} if isinstance(inner, nn.modules.dropout._DropoutNd) else vars(inner)
        found += [value for name, value in own.items() if "drop" in name and isinstance(value, float)]
    return max(value for value in found if value <= 1)


def compute_of(module: nn.Module) -> str:
    """The narrowest floating type that parameters are used in, by the length of the mantissa; what autocast does is said by forwards."""
    types = {parameter.dtype for parameter in module.parameters()}
    for inner in module.modules():  # FSDP2 gathers parameters in another type than it keeps
        getter = getattr(inner, "_get_fsdp_state", None)
        policy = attribute(getter(), "_mp_policy", "param_dtype") if getter is not None else None
        if policy is not None:
            types.add(policy)
    floating = [dtype for dtype in types if dtype.is_floating_point]
    return type_name(max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32))


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings that are numbers, as they are now."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif isinstance(value, (bool, int, float)):
            found[key] = value
        elif isinstance(value, (list, tuple)) and key != "params":
            found[key] = [float(item) for item in itertools.islice(value, 8) if isinstance(item, (int, float, Tensor))]  # pyright: ignore[reportUnknownVariableType]
    return found


def check_numbers(name: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a real number, a tensor with one, or a list of those."""
    for one in value if isinstance(value, (list, tuple)) else [value]:  # pyright: ignore[reportUnknownVariableType]
        tensor = isinstance(one, Tensor) and one.numel() == 1 and not one.is_complex()
        if not tensor and not (isinstance(one, (int, float)) and not isinstance(one, bool)):
            shown = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else f"{type(one).__name__}"  # pyright: ignore[reportUnknownArgumentType]
            raise ConfigError(f"recorder.step: {name} is {shown}; give a number, a tensor with one element, or a list of those")


def kept(value: Any) -> Any:
    """A copy that later steps leave alone, without waiting for the device. Of a list, its items'."""
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value.detach().clone() if isinstance(value, Tensor) else value


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
