"""Plain data as JSON and back, exactly: what may stand in a checkpoint beside its tensors.

None, booleans, integers, floats, strings, bytes, lists, tuples, dictionaries, counters and small tensors come back as what they were.
Whatever JSON has no form for becomes an object with one name that begins with ``$``. Nothing that is read is ever called or imported.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from shardbook.checkpoint.dtypes import CODES, TYPES
from shardbook.checkpoint.errors import CheckpointError

MAX_TENSOR_NBYTES = 1 << 20
"""Of a tensor among plain data: what is larger belongs in a file of tensors."""


_MAX_DEPTH = 100
_MAX_BITS = 14_000  # Python reads no decimal number of more than 4,300 digits


def encoded(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` in the form that JSON keeps.

    Args:
        value: plain data.
        where: what it is part of, as an error would say it ("extra").
        depth: in how many others it is.

    Raises:
        CheckpointError: something in it is no plain data; the message says where and what it is.

    >>> encoded({"betas": (0.9, 0.95)}, "extra")
    {'betas': {'$tuple': [0.9, 0.95]}}
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}...: more than {_MAX_DEPTH} deep, or in itself; flatter data are kept")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return _encoded_integer(value, where)
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is list:
        return [encoded(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(cast(list[Any], value))]
    if type(value) is tuple:
        return {"$tuple": [encoded(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(cast(tuple[Any, ...], value))]}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return _encoded_mapping(cast(dict[Any, Any], value), where, depth + 1)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"$tensor": _encoded_tensor(value, where)}
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} is no plain data; None, bool, int, float, str, bytes, list, "
        f"tuple, dict and small tensors are kept: give what it is made of (its state_dict(), say)"
    )


def _encoded_integer(value: int, where: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise CheckpointError(f"{where}: an integer of {value.bit_length()} bits; up to {_MAX_BITS} are kept: give it as bytes")
    return value


def _encoded_mapping(value: dict[Any, Any], where: str, depth: int) -> Any:
    is_counter = type(value) is Counter
    if all(type(key) is str and not key.startswith("$") for key in value) and not is_counter:
        return {key: encoded(item, f"{where}[{key!r}]", depth) for key, item in value.items()}
    pairs = [[encoded(key, f"a key of {where}", depth), encoded(item, f"{where}[{key!r}]", depth)] for key, item in value.items()]
    return {"$counter" if is_counter else "$dict": pairs}


def _encoded_tensor(tensor: Tensor, where: str) -> list[Any]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > MAX_TENSOR_NBYTES or tensor.dtype not in CODES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise CheckpointError(
            f"{where}: a tensor of {nbytes} bytes of {tensor.dtype} ({tensor.layout}, {tensor.device}); among plain data up to "
            f"{MAX_TENSOR_NBYTES} bytes of {', '.join(sorted(CODES.values()))} are kept: make it a buffer of the model, or "
            f"write it to a file of its own"
        )
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return [CODES[tensor.dtype], list(tensor.shape), base64.b64encode(bytes(data.tolist())).decode()]


def decoded(value: Any) -> Any:
    """The inverse of :func:`encoded`.

    Raises:
        CheckpointError: a form that it doesn't make.
    """
    if isinstance(value, list):
        return [decoded(item) for item in cast(list[Any], value)]
    if not isinstance(value, Mapping):
        return value
    table = cast(Mapping[str, Any], value)
    marks = [key for key in table if key.startswith("$")]
    if not marks:
        return {key: decoded(item) for key, item in table.items()}
    if len(table) != 1 or marks[0] not in _FORMS:
        raise CheckpointError(f"plain data: {marks[0]!r} is a form of no known kind ({', '.join(sorted(_FORMS))}): damaged")
    try:
        return _FORMS[marks[0]](table[marks[0]])
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"plain data: {marks[0]} does not hold what it says ({error}): damaged") from error


def _decoded_dict(pairs: Any) -> dict[Any, Any]:
    return {decoded(key): decoded(item) for key, item in pairs}


def _decoded_tensor(parts: Any) -> Tensor:
    code, shape, text = parts
    data = bytearray(base64.b64decode(text, validate=True))
    dtype = TYPES[code]
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype).reshape(shape)


_FORMS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(decoded(item) for item in items),
    "$dict": _decoded_dict,
    "$counter": lambda pairs: Counter(_decoded_dict(pairs)),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tensor": _decoded_tensor,
}
