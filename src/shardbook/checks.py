"""How a data class checks its own fields: one fault, one line, and all faults in one error.

A fault's line says field, value, what is allowed and the remedy. Dtypes are recognised by name, so that nothing here
imports torch.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeGuard, cast

from shardbook.errors import ConfigError

DTYPE_NBYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""The types a setting may name, with the bytes of one element."""

_TORCH_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Check:
    """Looks at the fields of one frozen instance, normalises what may be normalised, and collects every fault."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._faults: list[str] = []

    def add(self, name: str, value: object, allowed: str, remedy: str) -> None:
        self._faults.append(f"{type(self._owner).__name__}.{name} = {value!r}: allowed is {allowed}; {remedy}")

    def done(self) -> None:
        """Raises if anything was found so far."""
        if self._faults:
            raise ConfigError("\n".join(self._faults))

    def _get(self, name: str) -> Any:
        return getattr(self._owner, name)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self._owner, name, value)

    def dtype(self, name: str, *, optional: bool = False) -> None:
        value = self._get(name)
        if optional and value is None:
            return
        if (short := short_dtype(value)) is None:
            self.add(name, value, _dtypes_allowed(optional), _nearest_dtype(value))
        else:
            self._set(name, short)

    def patterns(self, name: str) -> None:
        value = self._get(name)
        if not isinstance(value, Mapping):
            self.add(name, value, "a mapping of name pattern to type", 'for example {"*.norm.*": "fp32"}')
            return
        kept: dict[str, str] = {}
        for pattern, dtype in cast("Mapping[Any, Any]", value).items():
            short = short_dtype(dtype)
            if not isinstance(pattern, str) or not pattern:
                self.add(name, pattern, "a non-empty name pattern as key", 'for example "*.norm.*"')
            elif short is None:
                self.add(f"{name}[{pattern!r}]", dtype, _dtypes_allowed(False), _nearest_dtype(dtype))
            else:
                kept[pattern] = short
        self._set(name, kept)

    def flag(self, name: str) -> None:
        if not isinstance(value := self._get(name), bool):
            self.add(name, value, "True or False", f"a {type(value).__name__} was given")

    def integer(self, name: str, *, least: int, remedy: str, optional: bool = False) -> None:
        value = self._get(name)
        if optional and value is None:
            return
        if not _is_int(value) or value < least:
            self.add(name, value, f"an integer from {least} up" + (", or None" if optional else ""), remedy)

    def positive(self, name: str, *, remedy: str, optional: bool = False) -> None:
        value = self._get(name)
        if optional and value is None:
            return
        if not _is_positive(value):
            self.add(name, value, "a finite number above 0" + (", or None" if optional else ""), remedy)
        else:
            self._set(name, float(value))

    def choice(self, name: str, allowed: Sequence[str]) -> None:
        value = self._get(name)
        if not isinstance(value, str) or value not in allowed:
            self.add(name, value, listed(allowed), nearest(value, allowed))

    def path(self, name: str, *, optional: bool = False) -> None:
        value = self._get(name)
        if optional and value is None:
            return
        if isinstance(value, (str, Path)) and str(value):
            self._set(name, Path(value))
        else:
            self.add(name, value, "the path of a folder", "give a str or a Path")

    def instance(self, name: str, kind: type) -> None:
        if not isinstance(value := self._get(name), kind):
            self.add(name, value, f"a {kind.__name__}", f"write {name}={kind.__name__}(...)")

    def stage(self, name: str) -> None:
        value = self._get(name)
        if _is_int(value) and 0 <= value <= 3:
            return
        finite = _is_int(value) or (isinstance(value, float) and not math.isnan(value))
        nearest_stage = f"the nearest is {round(min(max(value, 0), 3))}" if finite else "give an integer"
        self.add(name, value, "0, 1, 2 or 3", nearest_stage)

    def units(self, name: str) -> None:
        value = self._get(name)
        if value is None:
            return
        allowed = "None, or a non-empty sequence of module classes and names"
        if isinstance(value, (str, type)):
            self.add(name, value, allowed, "put it in a tuple: units=(...,)")
        elif not isinstance(value, Sequence) or not value:
            self.add(name, value, allowed, "None finds the repeated blocks")
        else:
            entries = cast("tuple[Any, ...]", tuple(value))
            for entry in entries:
                if not (isinstance(entry, type) or (isinstance(entry, str) and entry)):
                    self.add(name, entry, "a module class or a non-empty name as each entry", "give type(module), not the module")
            self._set(name, entries)

    def loss_scale(self, name: str) -> None:
        value = self._get(name)
        if value is None or value == "dynamic":
            return
        if _is_positive(value):
            if math.frexp(value)[0] == 0.5:
                self._set(name, float(value))
            else:
                power = math.ldexp(0.5, math.frexp(value)[1])
                remedy = f"the nearest below is {power:g}; another factor would round gradients"
                self.add(name, value, 'a power of two, "dynamic" or None', remedy)
        else:
            self.add(name, value, 'a power of two above 0, "dynamic" or None', 'None means "dynamic" with fp16')


def short_dtype(value: object) -> str | None:
    """``"fp32"`` for ``"fp32"`` or ``torch.float32``; ``None`` for what is no floating-point type of shardbook."""
    if isinstance(value, str):
        return value if value in DTYPE_NBYTES else None
    name = str(value)
    return _TORCH_NAMES.get(name.removeprefix("torch.")) if name.startswith("torch.") else None


def _dtypes_allowed(optional: bool) -> str:
    return f"{listed(('fp32', 'bf16', 'fp16', 'fp64'))}, their torch dtype" + (", or None" if optional else "")


def _nearest_dtype(value: object) -> str:
    name = str(value).removeprefix("torch.")
    known = _TORCH_NAMES.get(name)
    return f'write "{known}"' if known else nearest(value, [*DTYPE_NBYTES, *_TORCH_NAMES])


def nearest(value: object, allowed: Sequence[str] | Mapping[str, Any]) -> str:
    """A remedy for a name that is not allowed: the nearest one that is."""
    if not isinstance(value, str):
        return f"a {type(value).__name__} was given"
    close = get_close_matches(value.lower(), list(allowed), n=1, cutoff=0.4)
    return f'the nearest is "{_TORCH_NAMES.get(close[0], close[0])}"' if close else "choose one of them"


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Two or more names, quoted, for a sentence."""
    quoted = [f'"{name}"' for name in names]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}"


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_positive(value: object) -> TypeGuard[int | float]:
    """Above 0 and finite as a float."""
    return _is_number(value) and 0 < value <= sys.float_info.max


def refuse(what: str, allowed: str, remedy: str) -> NoReturn:
    """Raises the one fault there is."""
    raise ConfigError(f"{what}: allowed is {allowed}; {remedy}")


SIZE_EXAMPLE = "8GiB"
SIZE_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_nbytes(text: str) -> int | None:
    """Bytes of a size as people write it; ``None``: it is none, or does not say which power it means.

    >>> parse_nbytes("8GiB"), parse_nbytes("1.5 MB"), parse_nbytes("7G"), parse_nbytes("0B")
    (8589934592, 1500000, None, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if found is None or found[2] not in SIZE_UNITS:
        return None
    return int(float(found[1]) * SIZE_UNITS[found[2]]) or None
