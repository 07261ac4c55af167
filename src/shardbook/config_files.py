"""From plain data to a :class:`~shardbook.config.ZeroConfig`: nested mappings, and TOML files that hold them.

Everything wrong is gathered before anything is raised, and every fault says where it stands.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args

from shardbook.config import Offload, Precision, Prefetch, Recompute, ZeroConfig
from shardbook.errors import ConfigError

_SUBCONFIGS: Mapping[str, type[Any]] = {"precision": Precision, "prefetch": Prefetch, "recompute": Recompute, "offload": Offload}
_TABLE = "zero"

ConfigT = TypeVar("ConfigT", bound=ZeroConfig)
_T = TypeVar("_T")


def build_from_mapping(kind: type[ConfigT], values: Mapping[str, Any], where: str) -> ConfigT:
    """``kind`` from nested mappings; raises one ConfigError with every fault, each behind its place."""
    return _build(kind, values, [where] if where else [])


def read_toml(kind: type[ConfigT], path: Path) -> ConfigT:
    """``kind`` from the ``[zero]`` table of a TOML file, or from its top level."""
    document = load_toml(path)
    if _TABLE not in document:
        return _build(kind, document, [str(path)], also=(_TABLE,))
    _refuse_strays(kind, document, path)
    return _build(kind, document[_TABLE], [str(path), f"[{_TABLE}]"])


def load_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; what stands in the way is a ConfigError with the file's name."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); TOML files are UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error


def unknown_key(name: str, valid: Iterable[str]) -> str:
    """The line for a key nobody knows: the nearest valid one, and all of them."""
    valid = list(valid)
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f'the nearest is "{close[0]}"; ' if close else ""
    return f'unknown key "{name}": {hint}known are {", ".join(valid)}'


def _build(kind: type[_T], values: object, place: list[str], *, also: tuple[str, ...] = ()) -> _T:
    if not isinstance(values, Mapping):
        raise ConfigError(_at(place, f"expected a table of {kind.__name__}'s keys, not {values!r}"))
    known = {field.name: field for field in fields(cast("Any", kind))}
    arguments: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in cast("Mapping[Any, Any]", values).items():
        if name not in known:
            faults.append(_at(place, unknown_key(str(name), [*known, *also])))
            continue
        try:
            arguments[name] = _value(name, value, known[name].type, place)
        except ConfigError as error:
            faults.append(str(error))
            arguments[name] = _harmless(name)
    try:
        built = kind(**arguments)
    except ConfigError as error:
        faults += [_at(place, line) for line in str(error).splitlines()]
        raise ConfigError("\n".join(faults)) from error
    if faults:
        raise ConfigError("\n".join(faults))
    return built


def _value(name: str, value: object, annotation: object, place: list[str]) -> object:
    """TOML has no null, so that "none" means None where None is allowed; a table becomes its data class."""
    if value == "none" and NoneType in get_args(annotation):
        return None
    sub = _SUBCONFIGS.get(name)
    if sub is None or annotation is not sub or is_dataclass(value):  # Recompute has an "offload" too, and that is a flag
        return value
    if sub is Precision and isinstance(value, str):
        try:
            return Precision.preset(value)
        except ConfigError as error:
            raise ConfigError(_at(place, str(error))) from error
    return _build(sub, value, [*place, f"[{name}]"])


def _harmless(name: str) -> object:
    """Stands in for a sub-configuration that is wrong, so that no other field is blamed for contradicting it."""
    return Precision(param="fp16") if name == "precision" else _SUBCONFIGS[name]()


def _refuse_strays(kind: type[Any], document: Mapping[str, Any], path: Path) -> None:
    """Beside [zero], a key that looks as if it had been meant for it would otherwise be ignored in silence."""
    own = [field.name for field in fields(kind)]
    faults: list[str] = []
    for name in document:
        close = get_close_matches(name, [*own, _TABLE], n=1, cutoff=0.8)
        if name != _TABLE and close:
            faults.append(f'{path}: "{name}" beside [{_TABLE}] would be ignored: move it into [{_TABLE}] as "{close[0]}", or rename it')
    if faults:
        raise ConfigError("\n".join(faults))


def _at(place: list[str], message: str) -> str:
    return f"{' '.join(place)}: {message}" if place else message
