"""What ``shardbook forecast`` was asked, and the calls of the library that answer it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardbook.checks import SIZE_EXAMPLE, SIZE_UNITS, listed, nearest, parse_nbytes
from shardbook.config import ZeroConfig
from shardbook.errors import ConfigError
from shardbook.forecasting.choices import Choices
from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_figures import Case

SWEPT = ("ranks", "micro_batch", "sequence", "stage", "accumulate", "tensor", "context", "expert")
"""What ``--sweep`` can vary."""

MOST_VALUES = 64
_STAGES = (0, 1, 2, 3)
CONFIGURED = ("stage", "accumulate")
"""Those of them that are a configuration's."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One call of :func:`shardbook.forecast`, and its neighbours.

    Args:
        model: as :func:`shardbook.forecast` takes it.
        config: of the run.
        arguments: all the others, by name.
    """

    model: Any
    config: ZeroConfig
    arguments: dict[str, Any]

    def answer(self) -> Forecast:
        """The forecast.

        Raises:
            ConfigError: anything in the question is outside what is allowed.
        """
        from shardbook.forecasting.forecast import forecast

        return forecast(self.model, self.config, **self.arguments)

    def with_value(self, name: str, value: int) -> "Question":
        """The same with one of :data:`SWEPT` set."""
        if name in CONFIGURED:
            knobs = self.arguments.get("knobs")
            arguments = self.arguments if knobs is None else {**self.arguments, "knobs": replace(knobs, **{name: value})}
            return replace(self, config=replace(self.config, **{name: value}), arguments=arguments)
        return replace(self, arguments={**self.arguments, name: value})

    def persistent_only(self) -> "Question":
        """The same without the step: what is held and sent can be said at once."""
        left_out = dict.fromkeys(("micro_batch", "sequence", "state", "activations", "temporary", "budget", "device", "machine"))
        return replace(self, arguments={**self.arguments, **left_out})

    def stages(self, asked: Forecast) -> list[Case]:
        """The four stages; one that the engine has not is refused with its reason. The stage of ``asked`` is known already."""
        own = asked.stage
        return [Case(label=f"{own}", forecast=asked) if stage == own else self._case("stage", stage) for stage in _STAGES]

    def sweep(self, name: str, values: Sequence[int]) -> list[Case]:
        """One case for each value."""
        return [self._case(name, value) for value in values]

    def _case(self, name: str, value: int) -> Case:
        try:
            return Case(label=f"{value}", forecast=self.with_value(name, value).answer())
        except ConfigError as error:
            return Case(label=f"{value}", forecast=None, why=one_line(error))


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Name and values of ``--sweep``.

    >>> parse_sweep("ranks=1,8,64"), parse_sweep("micro-batch=1,2")
    (('ranks', [1, 8, 64]), ('micro_batch', [1, 2]))

    Raises:
        ConfigError: no name of :data:`SWEPT`; a value that is no whole number; none or too many.
    """
    key, equals, values = text.partition("=")
    name = key.strip().replace("-", "_")
    if name not in SWEPT or not equals:
        remedy = nearest(name, SWEPT) if equals else "for example ranks=1,8,64"
        raise ConfigError(f"--sweep {text}: allowed is one of {listed(SWEPT)}, an equals sign and values; {remedy}")
    found = [parse_count(part, f"--sweep {name}") for part in values.split(",")]
    if len(found) > MOST_VALUES:
        raise ConfigError(f"--sweep {name}: {len(found)} values; allowed are up to {MOST_VALUES}; leave some out")
    return name, found


def parse_count(text: str, option: str) -> int:
    """A whole number as people write it.

    >>> parse_count("16_384", "--ranks"), parse_count("1e3", "--ranks")
    (16384, 1000)

    Raises:
        ConfigError: it is none.
    """
    plain = text.strip().replace(",", "")
    try:
        return int(plain)
    except ValueError:
        pass
    try:
        value = float(plain)
        if value == int(value):
            return int(value)
    except (ValueError, OverflowError):  # the latter: infinity
        pass
    raise ConfigError(f"{option} {text!r}: allowed is a whole number; for example 8")


def parse_size(text: str | None, option: str) -> int | None:
    """Bytes of a budget.

    >>> parse_size("60GiB", "--state")
    64424509440

    Raises:
        ConfigError: no number, no unit, or one that does not say which power it means.
    """
    if text is None:
        return None
    if (nbytes := parse_nbytes(text)) is None:
        raise ConfigError(
            f"{option} {text!r}: allowed is a number above 0 with one of {', '.join(SIZE_UNITS)} behind it, as in {SIZE_EXAMPLE}"
        )
    return nbytes


def parse_choices(**given: Any) -> Choices:
    """The details of a run that were said; None is left at its default.

    Raises:
        ConfigError: one outside what is allowed.
    """
    return Choices(**{name: value for name, value in given.items() if value is not None})
