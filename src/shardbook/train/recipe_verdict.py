"""A recipe's run against its own plain loop, or against plain loops of chosen units: started on ranks, recorded, judged."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardbook.errors import ConfigError
from shardbook.recording.read import Record, Step
from shardbook.train.launch import LaunchError, launch
from shardbook.train.recipe import Recipe
from shardbook.train.recorded import AGAIN, DOUBLE, PLAIN, RUN, folder_of
from shardbook.train.world import find_world
from shardbook.verifying.callables import RERUNS, first_difference
from shardbook.verifying.judge import judge
from shardbook.verifying.verdict import Verdict

_IN_DOUBLE = (
    "the baseline computes in fp64 but for what the model itself casts to fp32 (shardbook's decoder: norms, rotary tables, the loss)"
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How two runs are to be compared; see :func:`shardbook.verify`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    steps: int
    precision: Literal["fp64"] | None = None
    units: tuple[str, ...] = ()
    unfinished: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"verify: steps = {self.steps!r}: allowed is a whole number from 1 up; 5 is usual")
        if self.precision not in (None, DOUBLE):
            raise ConfigError(f"verify: precision = {self.precision!r}: allowed is {DOUBLE!r}, or None for the run's own types")

    @property
    def variant(self) -> str:
        """Which plain loop is the baseline."""
        return self.precision or PLAIN


def against_its_plain_loop(recipe: Recipe, asked: Asked, place: Path) -> Verdict:
    """The run and its plain loop; further plain loops, for a bound on rounding, only where bits differ."""
    steps = min(asked.steps, recipe.run.steps)
    job = Job(recipe=recipe, place=place, steps=steps)
    reports = job.start(run=True, variants=(asked.variant,))
    run, plain = Record.open(place / RUN), Record.open(place / asked.variant)
    notes = (_IN_DOUBLE,) if asked.precision else ()
    verdict = judge(run, plain, steps=steps, notes=notes)
    if verdict.kind != "identical":
        others = other_variants(asked)
        job.start(variants=others, reports=reports)
        reruns = {variant: Record.open(place / variant) for variant in others}
        verdict = judge(run, plain, steps=steps, reruns=list(reruns.values()), notes=(*notes, *_not_repeatable(reruns, plain)))
    return replace(verdict, candidate=run_of(recipe), baseline=plain_of(recipe, asked))


def against_plain_units(recipe: Recipe, asked: Asked, place: Path) -> Verdict:
    """The run, and a plain loop for each chosen unit: the worst of their verdicts."""
    steps = min(asked.steps, recipe.run.steps)
    job = Job(recipe=recipe, place=place, steps=steps, units=asked.units)
    reports = job.start(run=True, variants=(PLAIN,))
    run = Record.open(place / RUN)
    verdicts: list[Verdict] = []
    for index, unit in enumerate(asked.units):
        mine, plain = OfUnit(run, unit), OfUnit(Record.open(folder_of(place, index) / PLAIN), unit)
        verdict = judge(mine, plain, steps=steps)
        if verdict.kind != "identical":
            others = other_variants(asked)
            if not (folder_of(place, index) / others[0]).exists():
                job.start(variants=others, reports=reports)
            again = {variant: OfUnit(Record.open(folder_of(place, index) / variant), unit) for variant in others}
            verdict = judge(mine, plain, steps=steps, reruns=list(again.values()), notes=_not_repeatable(again, plain))
        verdicts.append(verdict)
    worst = max(verdicts, key=lambda one: ("identical", "within_rounding", "different").index(one.kind))
    numels = [sum(one.numel for one in record.parameters.values()) for record in (run, *(OfUnit(run, unit) for unit in asked.units))]
    note = (
        f"only {', '.join(asked.units)} computed again, {sum(numels[1:]):,} of {numels[0]:,} parameters; what goes into a unit, the "
        f"gradient that reaches it, and the step's weight and norm are the run's own"
    )
    notes = tuple(one for one in worst.notes if not one.startswith("data:"))
    # losses are the run's own on both sides
    phases = sorted((phase for one in verdicts for phase in one.phases if phase.phase != "forward"), key=lambda phase: phase.step)
    name = f"{_title(recipe)}: plain loops of {', '.join(asked.units)}"
    return replace(worst, candidate=run_of(recipe), baseline=name, notes=(note, *notes), losses=(), phases=tuple(phases))


class OfUnit(Record):
    """A record of one unit's parameters: without what is of the whole model, its data and the forwards that were made."""

    def __init__(self, record: Record, unit: str) -> None:
        super().__init__(record.folder, record.manifest, ended=record.ended, num_steps=record.num_steps)
        self._unit = f"{unit}."
        self.parameters = {name: one for name, one in self.parameters.items() if name.startswith(self._unit)}

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            phases = {phase: self._mine(by_name) for phase, by_name in step.phases.items() if phase != "buffer"}
            parts = {phase: self._mine(by_name) for phase, by_name in step.parts.items() if phase != "buffer"}
            yield replace(
                step, phases=phases, parts=parts, batches=tuple(() for _ in step.batches), given=(), micro_batches=(), rng=(),
                rng_before=(), rng_forward=(),
                disagreements=[one for one in step.disagreements if one.parameter in self.parameters],
                missing=[one for one in step.missing if one[1] in self.parameters],
                groups=tuple([self._group(group) for group in groups] for groups in step.groups),
            )  # fmt: skip

    def _mine(self, by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in by_name.items() if name in self.parameters}

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "parameters": [name for name in group["parameters"] if name in self.parameters]}


def other_variants(asked: Asked) -> tuple[str, ...]:
    """The baseline's plain loop again, as it is and with other rounding."""
    return (PLAIN if asked.precision else AGAIN, *(name for name, _ in RERUNS))


def _not_repeatable(reruns: Mapping[str, Record], plain: Record) -> tuple[str, ...]:
    """A note where the plain loop run twice has different bits: nothing else can then have the same."""
    found = first_difference(plain, reruns[AGAIN]) if AGAIN in reruns else None
    if found is None:
        return ()
    step, phase, name = found
    return (
        f"the plain loop run twice doesn't give the same bits: its kernels are not deterministic; first in step {step}, {phase} of {name}",
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks record of a recipe."""

    recipe: Recipe
    place: Path
    steps: int
    units: tuple[str, ...] = ()

    def start(self, *, run: bool = False, variants: Sequence[str] = (), reports: Sequence[Any] = ()) -> Sequence[Any]:
        """Ranks for it, and what the engine reported; a plain loop alone needs one.

        Raises:
            ConfigError: the ranks refuse it.
            LaunchError: a rank failed.
        """
        world = find_world(os.environ)
        if world is not None and world.num_ranks > 1:
            raise ConfigError(f"verify: {world.started_by} has started {world.num_ranks} ranks, but a recipe's ranks are started here: "
                              f"run it in one process of its own")  # fmt: skip
        job = {"task": "record", "recipe": self.recipe.request(), "folder": str(self.place.resolve()), "steps": self.steps,
               "units": list(self.units), "run": run, "variants": list(variants), "reports": list(reports)}  # fmt: skip
        try:
            return launch(job, ranks=self.recipe.run.ranks if run else 1, port=self.recipe.run.port)
        except LaunchError as error:
            if error.exit_code == 2:
                raise ConfigError(str(error)) from error
            raise


def run_of(recipe: Recipe) -> str:
    return f"{_title(recipe)}: shardbook, stage {recipe.zero.stage}, {_ranks(recipe)}"


def plain_of(recipe: Recipe, asked: Asked) -> str:
    what = "plain loop in fp64" if asked.precision else "plain loop"
    return f"{_title(recipe)}: {what}, one process, the micro-batches of {_ranks(recipe)}"


def _ranks(recipe: Recipe) -> str:
    return "1 rank" if recipe.run.ranks == 1 else f"{recipe.run.ranks} ranks"


def _title(recipe: Recipe) -> str:
    """The file that it came from."""
    files = sorted({one.origin for one in recipe.given.values() if one.origin.endswith(".toml")})
    return files[0] if files else "recipe"
