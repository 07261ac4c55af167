"""What a stage means: which of the three states stays full, and which lives as one shard per rank.

This table is the only place that knows a stage by its number. Everything else asks a :class:`Residency`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """Which states a rank keeps in full between their uses."""

    full_parameters: bool  # parameters stay full after use; else released, and gathered before the next use
    full_gradients: bool  # gradients stay full until the step, reduced once; else a shard is kept after every micro-batch
    full_optimizer: bool  # every rank steps on every parameter; else only on its own shard

    @property
    def refreshes(self) -> bool:
        """Whether the ranks send each other the new parameters after a step."""
        return self.full_parameters and not self.full_optimizer


RESIDENCY: dict[int, Residency] = {
    0: Residency(full_parameters=True, full_gradients=True, full_optimizer=True),
    1: Residency(full_parameters=True, full_gradients=True, full_optimizer=False),
    2: Residency(full_parameters=True, full_gradients=False, full_optimizer=False),
    3: Residency(full_parameters=False, full_gradients=False, full_optimizer=False),
}


def residency_of(stage: int) -> Residency:
    """The row of the table."""
    return RESIDENCY[stage]
