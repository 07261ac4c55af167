"""The fields of one ``config.json``: what is missing or of the wrong kind is collected, what transformers fills in is noted."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from shardbook.errors import ConfigError

VERSION = "transformers 5.24"
MOST = 10**9
"""Above it a size is taken for a mistake."""
_Value = TypeVar("_Value", int, float, bool)


class Fields:
    """Reads the fields of one model. ``kind`` is its ``model_type``, ``where`` the file's name for messages."""

    def __init__(self, mapping: Mapping[str, Any], kind: str, where: str) -> None:
        self._mapping, self._kind, self._where = mapping, kind, where
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self._filled: list[str] = []
        self.notes: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a field is there and says something."""
        return self._mapping.get(name) is not None

    def is_left_out(self, name: str) -> bool:
        """Whether a field is not there at all; null is there."""
        return name not in self._mapping

    def raw(self, name: str) -> Any:
        """A field of any kind; None: it is not there."""
        return self._mapping.get(name)

    def size(self, names: Sequence[str], default: int | None = None, *, least: int = 1) -> int:
        """A whole number under the first of these names that is there. Without one the field is missing, and 1 stands for it."""
        name = next((each for each in names if self.has(each)), None)
        if name is None:
            if default is None:
                self._missing.append(names[0])
                return 1
            return self._default(names[0], default)
        value = self._mapping[name]
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST:
            return value
        self._wrong.append(f"{name} = {value!r}, where a whole number from {least} to {MOST:.0e} is allowed")
        return max(1, least)

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        value = self._mapping.get(name)
        if value is None:
            return self._default(name, default)
        if not isinstance(value, bool):
            self._wrong.append(f"{name} = {value!r}, where true or false is allowed")
        return value is True

    def share(self, names: Sequence[str], default: float) -> float:
        """A number from 0 to below 1."""
        name = next((each for each in names if self.has(each)), None)
        value = default if name is None else self._mapping[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
        self._wrong.append(f"{name} = {value!r}, where a share from 0 to below 1 is allowed")
        return 0.0

    def text(self, names: Sequence[str], default: str) -> str:
        """A word."""
        name = next((each for each in names if self.has(each)), None)
        value = default if name is None else self._mapping[name]
        if not isinstance(value, str):
            self._wrong.append(f"{name} = {value!r}, where a text is allowed")
        return str(value)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was missing or wrong so far: only then do sizes say something together."""
        return not self._missing and not self._wrong

    def whole_numbers(self, name: str) -> list[int]:
        """A list of numbers; empty where there is none."""
        value = self._mapping.get(name)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(each, int) for each in cast("list[Any]", value)):
            return cast("list[int]", value)
        self._wrong.append(f"{name} = {value!r}, where a list of whole numbers is allowed")
        return []

    def refuse(self, name: str, allowed: Any) -> None:
        """A field of which one value is modelled."""
        value = self._mapping.get(name)
        if value is not None and value != allowed:
            self.wrong(f"{name} = {value!r} is not modelled, only {allowed!r} is")

    def wrong(self, fault: str) -> None:
        """One more fault."""
        self._wrong.append(fault)

    def done(self) -> None:
        """Raises if anything was missing or wrong; else notes what was filled in.

        Raises:
            ConfigError: one line with every fault.
        """
        faults = list(self._faults())
        if faults:
            raise ConfigError(f"{self._where}: {'; '.join(faults)}")
        if self._filled:
            self.notes.append(f"not in the file, so {VERSION}'s own for {self._kind}: {', '.join(self._filled)}")

    def _faults(self) -> Iterator[str]:
        if self._missing:
            plural = "fields are" if len(self._missing) > 1 else "field is"
            yield f"{plural} missing: {', '.join(self._missing)}; a {self._kind} needs {'them' if len(self._missing) > 1 else 'it'}"
        yield from self._wrong

    def _default(self, name: str, value: _Value) -> _Value:
        self._filled.append(f"{name} = {value}")
        return value
