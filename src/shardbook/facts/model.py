"""Facts of one model: its parameters by unit, and its architecture as far as it is known.

There are four sources (``catalog.py``, ``huggingface.py``, ``module.py``, a bare count); all give this record.

>>> facts = ModelFacts.of_count(7_000_000_000)
>>> facts.num_parameters, facts.largest_unit
(7000000000, None)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

from shardbook.errors import ConfigError
from shardbook.facts.architecture import Architecture

MOST_PARAMETERS = 10**15
"""Above it a count is taken for a mistake: a thousand times the largest model there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter. ``dtype`` is what the module has it in; a precision policy decides what it is trained in."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitParameters:
    """The parameters that are gathered together, in the order in which they lie in the unit's flat buffer.

    ``around``: numbers of the units that it lies in, outermost first, without the root.
    """

    name: str
    parameters: tuple[ParameterFacts, ...]
    around: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model.

    Args:
        name: as the person called it.
        source: where the facts come from, in words.
        num_parameters: Ψ; shared parameters count once.
        units: ``units[0]`` is the root, the others in the order of registration; empty where only a count is known.
        architecture: None where only parameters are known: then activations are not modelled.
        notes: what a person should know about the facts, for example what was left out.
        num_frozen: elements that are not trained, where there are no units to say so.
    """

    name: str
    source: str
    num_parameters: int
    units: tuple[UnitParameters, ...] = ()
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()
    num_frozen: int = 0

    @classmethod
    def of_count(cls, count: float) -> Self:
        """A model of which nothing is known but the number of its parameters.

        Raises:
            ConfigError: not a whole number from 1 to :data:`MOST_PARAMETERS`.
        """
        if not 1 <= count <= MOST_PARAMETERS or count != int(count):
            raise ConfigError(
                f"model = {count!r}: allowed is a whole number of parameters from 1 to {MOST_PARAMETERS:.0e}; write 7e9 for seven billion"
            )
        return cls(name=f"{count:g} parameters", source="a parameter count", num_parameters=int(count))

    def parameters(self) -> Iterator[ParameterFacts]:
        """Every parameter once, unit by unit."""
        for unit in self.units:
            yield from unit.parameters

    @cached_property
    def num_trainable(self) -> int:
        """Elements of the parameters that are trained."""
        if not self.units:
            return self.num_parameters - self.num_frozen
        return sum(parameter.numel for parameter in self.parameters() if parameter.trainable)

    @cached_property
    def largest_unit(self) -> UnitParameters | None:
        """The unit of most elements."""
        return max(self.units, key=lambda unit: unit.numel, default=None)

    @cached_property
    def largest_tensor(self) -> ParameterFacts | None:
        """The parameter of most elements."""
        return max(self.parameters(), key=lambda parameter: parameter.numel, default=None)
