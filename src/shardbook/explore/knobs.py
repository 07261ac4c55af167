"""What a person wrote into the notebook's fields."""

from collections.abc import Mapping
from pathlib import Path

from shardbook.checks import SIZE_EXAMPLE, SIZE_UNITS, parse_nbytes
from shardbook.errors import ConfigError
from shardbook.forecasting.conventions import MOST_NBYTES

GIB = 2.0**30


def terms(texts: Mapping[str, str]) -> dict[str, float | None]:
    """Bytes per parameter of each term; None: the convention's own.

    >>> terms({"grad": "4", "moment": " "})
    {'grad': 4.0, 'moment': None}

    Raises:
        ConfigError: no number from 0 to :data:`MOST_NBYTES`.
    """
    return {name: _term(name, text.strip()) for name, text in texts.items()}


def budgets(texts: Mapping[str, str]) -> dict[str, float | None]:
    """GiB of each budget; None: as forecast. A number without a unit is GiB.

    >>> budgets({"state": "60", "activations": "20GiB", "temporary": ""})
    {'state': 60.0, 'activations': 20.0, 'temporary': None}

    Raises:
        ConfigError: neither a number nor a size.
    """
    return {name: _budget(name, text.strip()) for name, text in texts.items()}


def as_path(text: str) -> Path:
    """A file, perhaps under ``~``."""
    return Path(text.strip()).expanduser()


def _term(name: str, text: str) -> float | None:
    if not text:
        return None
    value = _number(text)
    if value is None or not 0 <= value <= MOST_NBYTES:
        raise ConfigError(f"{name} = {text!r}: allowed is 0 to {MOST_NBYTES} bytes per parameter; empty keeps the convention's")
    return value


def _budget(name: str, text: str) -> float | None:
    if not text:
        return None
    value = _number(text)
    if value is None:
        nbytes = parse_nbytes(text)
        value = None if nbytes is None else nbytes / GIB
    if value is None or not 0 < value < 1e9:
        units = ", ".join(SIZE_UNITS)
        raise ConfigError(
            f"{name} = {text!r}: allowed is a number of GiB, or one with {units} as in {SIZE_EXAMPLE}; empty keeps the forecast"
        )
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
