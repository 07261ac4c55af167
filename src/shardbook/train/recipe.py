"""A recipe: everything a training run is asked for, and where each value came from.

    [model]      sizes of shardbook's decoder (DecoderConfig), or config = "config.json"
    [data]       DataSettings
    [optimizer]  OptimizerSettings
    [batch]      BatchSettings
    [zero]       ZeroConfig, with its sub-tables
    [run]        RunSettings

A value is addressed by its dotted name, ``zero.precision.param``. It comes from the command line, else from the file, else
it is derived, else it is the default. Nothing here imports torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardbook.config import ZeroConfig
from shardbook.config_files import load_toml
from shardbook.errors import ConfigError
from shardbook.models.config import DecoderConfig
from shardbook.train.batch_numbers import BatchNumbers, batch_numbers
from shardbook.train.settings import BatchSettings, DataSettings, OptimizerSettings, RunSettings

COMMAND_LINE = "command line"
DEFAULT = "default"
DERIVED = "derived"

_MODEL_FILE = "model.config"
_TABLES: Mapping[str, type[Any]] = {
    "model": DecoderConfig,
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "batch": BatchSettings,
    "zero": ZeroConfig,
    "run": RunSettings,
}
_NUMBERS: Mapping[str, str] = {
    "micro_batch": "batch.micro_batch",
    "accumulate": "zero.accumulate",
    "ranks": "run.ranks",
    "global_batch": "batch.global_batch",
}
"""The four numbers of a step, and where a recipe has them."""


@dataclass(frozen=True, kw_only=True)
class Sourced:
    """A value somebody gave, and who: the command line, a file, or what started the ranks."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is in force. ``model_file`` is a ``config.json`` to build instead of ``model``."""

    model: DecoderConfig
    model_file: Path | None
    data: DataSettings
    optimizer: OptimizerSettings
    batch: BatchSettings
    zero: ZeroConfig
    run: RunSettings
    given: Mapping[str, Sourced]
    derived: tuple[str, ...]

    def origin(self, name: str) -> str:
        """Where the value of a dotted name came from. A sub-table that was given as one word is the origin of its fields."""
        for known in (name, name.rpartition(".")[0]):
            if known in self.given:
                return self.given[known].origin
        return DERIVED if name in self.derived else DEFAULT

    def values(self) -> dict[str, Any]:
        """Every value in force by its dotted name, as plain data."""
        found: dict[str, Any] = {_MODEL_FILE: _plain(self.model_file)} if self.model_file else {}
        for table in _TABLES:
            if not (table == "model" and self.model_file):
                _flatten(table, getattr(self, table), found)
        return found

    def dump(self) -> dict[str, dict[str, Any]]:
        """``{name: {"value": ..., "origin": ...}}`` of everything in force: what ``run.json`` keeps."""
        return {name: {"value": value, "origin": self.origin(name)} for name, value in self.values().items()}

    def request(self) -> dict[str, dict[str, Any]]:
        """What was given, as JSON can carry it to another process; :func:`build_recipe` makes the same recipe of it."""
        return {name: {"value": _plain(sourced.value), "origin": sourced.origin} for name, sourced in self.given.items()}


def read_recipe(path: Path) -> dict[str, Sourced]:
    """The values of a TOML recipe by dotted name.

    Raises:
        ConfigError: the file can't be read or is not TOML; an unknown key, with the nearest valid one. All faults at once.
    """
    known, faults, found = known_names(), list[str](), dict[str, Sourced]()
    for name, value in _leaves("", load_toml(path)):
        if name in known:
            found[name] = Sourced(value=value, origin=str(path))
        else:
            faults.append(f"{path}: {_unknown(name, known)}")
    if faults:
        raise ConfigError("\n".join(faults))
    return found


def build_recipe(file: Mapping[str, Sourced], options: Mapping[str, Sourced]) -> Recipe:
    """The recipe of a file's values and the options that override them.

    Raises:
        ConfigError: wrong types and values, each with its origin; batch numbers that contradict each other; sizes beside a
            ``config.json``. All faults of the single tables at once.
    """
    given = {name: value for name, value in file.items() if not _overridden(name, options)} | dict(options)
    _check_model(given)
    faults: list[str] = []
    built = {table: _build(table, given, faults) for table in _TABLES if table not in ("batch", "zero")}
    zero, _ = _build("zero", given, faults), _build("batch", given, faults)
    if faults:
        raise ConfigError("\n".join(faults))
    numbers = _numbers(given, built["run"].ranks, zero)
    completed = given | {home: Sourced(value=getattr(numbers, name), origin=DERIVED) for name, home in _NUMBERS.items() if name != "ranks"}
    built |= {table: _build(table, completed, faults) for table in ("batch", "zero")}
    if faults:
        raise ConfigError("\n".join(faults))
    _check_replicas(given, built["run"], built["zero"])
    model_file = Path(given[_MODEL_FILE].value) if _MODEL_FILE in given else None
    return Recipe(model_file=model_file, given=given, derived=tuple(_NUMBERS[name] for name in numbers.derived), **built)


def known_names() -> tuple[str, ...]:
    """Every dotted name a recipe may have; a sub-table of ``[zero]`` counts as a whole too, as it may be one word."""
    names = [_MODEL_FILE]
    for table, kind in _TABLES.items():
        default = kind()
        for field in fields(kind):
            value = getattr(default, field.name)
            names.append(f"{table}.{field.name}")
            if is_dataclass(value):
                names += [f"{table}.{field.name}.{inner.name}" for inner in fields(value)]
    return tuple(names)


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Dotted names and values; a table is entered where the recipe has a table, and is a value elsewhere (``keep``)."""
    known = known_names()
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in known):
            yield from _leaves(f"{name}.", value)
        else:
            yield name, value


def _unknown(name: str, known: tuple[str, ...]) -> str:
    head, _, leaf = name.rpartition(".")
    if not head:
        close = [leaf] if leaf in _TABLES else get_close_matches(leaf, _TABLES, n=1, cutoff=0.6)
        if close:
            return f'"{name}" is no table of a recipe; write [{close[0]}] and its keys below it'
    same = [other for other in known if other.rpartition(".")[2] == leaf]
    leaves = {other.rpartition(".")[2]: other for other in known}
    close = get_close_matches(name, known, n=1, cutoff=0.75) or [leaves[near] for near in get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    hint = (same or close or [""])[0]
    return f'unknown key "{name}"' + (f'; the nearest is "{hint}"' if hint else f"; tables are {', '.join(_TABLES)}")


def _overridden(name: str, options: Mapping[str, Sourced]) -> bool:
    """An option replaces the same name, and everything below it: ``--precision`` replaces ``[zero.precision]``."""
    return any(name == option or name.startswith(f"{option}.") or option.startswith(f"{name}.") for option in options)


def _build(table: str, given: Mapping[str, Sourced], faults: list[str]) -> Any:
    """One table's data class; its faults are appended, each with the dotted name and the origin of its value."""
    mine = {name.removeprefix(f"{table}."): sourced.value for name, sourced in given.items() if name.startswith(f"{table}.")}
    mine.pop("config", None)
    try:
        if table != "zero":
            return _TABLES[table](**mine)
        nested: dict[str, Any] = {}
        for name, value in mine.items():
            head, _, inner = name.partition(".")
            if inner:
                nested.setdefault(head, {})[inner] = value
            else:
                nested[head] = value
        return ZeroConfig.from_mapping(nested)
    except ConfigError as error:
        faults += [_placed(table, line, given) for line in str(error).splitlines()]


def _placed(table: str, line: str, given: Mapping[str, Sourced]) -> str:
    """``ZeroConfig.stage = 4: ...`` becomes ``zero.stage = 4 (command line): ...``."""
    found = re.match(r"(?:\[(\w+)\]: )?\w+\.([\w.]+)( = .*?)?: (.*)", line)
    if found is None:
        return f"[{table}] {line}"
    inner, name, value, rest = found.groups()
    dotted = ".".join(part for part in (table, inner, name) if part)
    sourced = given.get(dotted) or given.get(dotted.rpartition(".")[0])
    return f"{dotted}{value or ''} ({sourced.origin if sourced else DEFAULT}): {rest}"


def _check_model(given: Mapping[str, Sourced]) -> None:
    sizes = [f"{name} ({sourced.origin})" for name, sourced in given.items() if name.startswith("model.") and name != _MODEL_FILE]
    if _MODEL_FILE not in given:
        return
    if not isinstance(given[_MODEL_FILE].value, (str, Path)):
        raise ConfigError(
            f"{_MODEL_FILE} = {given[_MODEL_FILE].value!r} ({given[_MODEL_FILE].origin}): allowed is the path of a config.json"
        )
    if sizes:
        raise ConfigError(
            f"{', '.join(sizes)}: no effect beside {_MODEL_FILE} ({given[_MODEL_FILE].origin}), which has its own sizes; leave one out"
        )


def _check_replicas(given: Mapping[str, Sourced], run: RunSettings, zero: ZeroConfig) -> None:
    """A comparison of replicas where there are none would find nothing for ever."""
    if not run.check_replicas or (zero.stage < 3 and run.ranks > 1):
        return
    why = "stage 3 leaves no parameter on two ranks" if zero.stage == 3 else "one rank has no replicas"
    remedy = "use --stage 2, or leave it out" if zero.stage == 3 else "leave it out"
    origin = given["run.check_replicas"].origin
    raise ConfigError(f"run.check_replicas = {run.check_replicas} ({origin}): no effect, as {why}; {remedy}")


def _numbers(given: Mapping[str, Sourced], ranks: int, zero: ZeroConfig) -> BatchNumbers:
    origins = {name: given[home].origin if home in given else DEFAULT for name, home in _NUMBERS.items()}
    asked = {name: given[_NUMBERS[name]].value if _NUMBERS[name] in given else None for name in ("micro_batch", "global_batch")}
    accumulate = zero.accumulate if _NUMBERS["accumulate"] in given else None
    usual = BatchSettings().micro_batch
    return batch_numbers(ranks=ranks, accumulate=accumulate, usual_micro_batch=usual, origins=origins, **asked)


def _flatten(prefix: str, value: Any, found: dict[str, Any]) -> None:
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            _flatten(f"{prefix}.{field.name}", inner, found)
        else:
            found[f"{prefix}.{field.name}"] = _plain(inner)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
