"""The run and the plain loop, step by step: the first bit in which they differ."""

from collections.abc import Sequence
from typing import Any

from shardbook import Engine, StepReport
from shardbook.document import Baseline
from shardbook.train.baseline import PlainLoop
from shardbook.train.seeding import Seeding, unseeded


class Comparison:
    """Compares the first ``steps`` steps. Rank 0 holds the plain loop; the others take part, as reading parameters gathers.

    Two bits that differ make all later ones differ too, so that only the first difference is kept.
    """

    def __init__(self, engine: Engine, steps: int, plain: PlainLoop | None) -> None:
        self._engine, self._steps = engine, steps
        self.plain = plain
        self._num_compared = 0
        self.difference: str | None = None

    def start(self) -> None:
        """Compares the weights before the first step."""
        if self._steps:
            self._compare_parameters(0)

    def after(self, step: int, batches: Sequence[Sequence[Sequence[Any]]], report: StepReport, seed: Seeding = unseeded) -> None:
        """Compares step ``step``, counted from 1, once the engine has done it; ``batches[rank][micro]`` is what it was given."""
        if step > self._steps:
            return
        if self.plain is not None:
            mine = self.plain.step(batches, report.loss_scale, seed)
            self.difference = self.difference or self.plain.report_difference(step, mine, report)
        self._compare_parameters(step)
        self._num_compared = step
        if step == self._steps:
            self.plain = None  # its memory is not the run's

    def verdict(self) -> Baseline | None:
        """What was found, on rank 0; ``None`` if nothing was to be compared."""
        if not self._steps:
            return None
        return Baseline(steps=self._num_compared, identical=self.difference is None, difference=self.difference)

    def _compare_parameters(self, step: int) -> None:
        parameters = self._engine.full_parameters()
        if self.plain is not None:
            found = self.plain.first_difference(step, parameters)
            self.difference = self.difference or found
        else:
            for _ in parameters:
                pass
