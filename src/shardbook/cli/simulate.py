"""``shardbook forecast --simulate``: the same question, put to the engine itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardbook.cli.forecast_question import Question, one_line
from shardbook.cli.meta_model import Builder
from shardbook.config import ZeroConfig
from shardbook.errors import ConfigError, ShardbookError
from shardbook.facts.catalog import rows
from shardbook.facts.find import parse_count
from shardbook.forecasting.choices import Choices
from shardbook.forecasting.result import Forecast

if TYPE_CHECKING:
    from shardbook.simulation.build import Parts

ENGINES = ("shardbook", "fsdp2", "ddp")
NO_TORCH = "--simulate runs the engine, which needs torch, and it is not here: pip install 'shardbook[train]'; the closed form needs none"
_LEARNING_RATE = 1e-4
"""No byte depends on it."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A question for the engine.

    Args:
        question: as it is put to the closed form.
        model: as the person wrote it.
        builder: the function that it names; None: the model is known by its facts.
        rank: which rank to be.
        allocator: settings of the device's caching allocator; None: torch's defaults.
    """

    question: Question
    model: str
    builder: Builder | None
    rank: int = 0
    allocator: str | None = None

    def answer(self) -> Forecast:
        """The forecast of the simulated run, under the name that the closed form has for the model.

        Raises:
            ConfigError: something that a simulation cannot do, or a model that cannot be run without values.
        """
        if (fault := next(self._faults(), None)) is not None:
            raise ConfigError(fault)
        if find_spec("torch") is None:
            raise ConfigError(NO_TORCH)
        parts, facts = self._parts(), self.question.model
        told = self._run(parts)
        unit, batch = facts.largest_unit, {name: self.question.arguments[name] for name in ("micro_batch", "sequence")}
        return replace(
            told,
            model=facts.name,
            stage=self.question.config.stage,
            source=f"{told.source}; the model: {parts.code}",
            largest_unit=None if unit is None else (unit.name, unit.numel),
            inputs={**told.inputs, **batch},
            warnings=(*facts.notes, *told.warnings),
        )

    def _run(self, parts: "Parts") -> Forecast:
        from shardbook.simulation.simulate import simulate

        arguments = self.question.arguments
        try:
            return simulate(
                parts.build_model,
                parts.build_batch,
                self._config,
                ranks=arguments["ranks"],
                optimizer=optimizer_of(arguments["choices"]),
                engine=arguments["engine"],
                rank=self.rank,
                device=arguments["device"],
                allocator=self.allocator,
            )
        except ShardbookError as error:
            raise ConfigError(one_line(error)) from error
        except Exception as error:  # whatever somebody's code raises
            if self.builder is None:
                raise
            raise self._broken(self.builder, error) from error

    def _broken(self, builder: Builder, error: Exception) -> ConfigError:
        from shardbook.simulation.refusals import place

        return builder.broken(f"simulated, the code {place(error)}", error)

    @property
    def _config(self) -> ZeroConfig:
        """FSDP2 that keeps its units gathered is stage 2 to the engine's table: parameters are never freed before backward."""
        config, keeps = self.question.config, not self.question.arguments["choices"].reshard
        return replace(config, stage=2) if keeps else config

    def _parts(self) -> "Parts":
        from shardbook.simulation.build import Parts, parts_of, tokens

        arguments, builder = self.question.arguments, self.builder
        sizes = {name: arguments[name] for name in ("micro_batch", "sequence")}
        if builder is None:
            return parts_of(self.question.model, **sizes, path=self._path, implementation=arguments["choices"].implementation)
        batch = builder.batch
        build_batch = tokens(**sizes) if batch is None else lambda: batch(*sizes.values())
        return Parts(build_model=builder.function, build_batch=build_batch, code=self.model)

    @property
    def _path(self) -> Path | None:
        """The ``config.json``, or its folder, that was named."""
        text = self.model.strip()
        return None if text.lower() in rows() or parse_count(text) is not None else Path(text)

    def _faults(self) -> Iterator[str]:
        arguments = self.question.arguments
        if (engine := arguments["engine"]) not in ENGINES:
            yield f"--engine {engine} with --simulate: allowed is {' or '.join(ENGINES)}, whose code is here; leave --simulate out"
        for name in ("tensor", "context", "expert"):
            if arguments[name] != 1:
                yield f"--{name} {arguments[name]} with --simulate: allowed is 1, as no engine here has more; leave one of them out"
        for name in ("convention", "state", "activations", "temporary"):
            if arguments[name] is not None:
                yield f"--{name} with --simulate: the engine itself says what it holds; leave one of them out"
        for name in ("micro_batch", "sequence"):
            if arguments[name] is None:
                yield f"--simulate without --{name.replace('_', '-')}: a step needs a batch; give both --micro-batch and --sequence"
        if not arguments["choices"].reshard and engine != "fsdp2":
            yield f"--no-reshard with --engine {engine}: allowed is fsdp2 with --simulate; leave it out"
        yield from _faults_of_choices(arguments["choices"])


def _faults_of_choices(choices: Choices) -> Iterator[str]:
    """Details that the code which runs does not have."""
    allowed: dict[str, tuple[str, ...]] = {"attention": ("auto", "flash"), "loss": ("full",), "optimizer": ("adamw", "sgd", "sgd-momentum")}
    for name, values in allowed.items():
        if (value := getattr(choices, name)) not in values:
            yield f"--{name} {value} with --simulate: allowed is {' or '.join(values)}; for another one, give file.py:build and sb.simulate"
    if choices.lora_rank:
        yield f"--lora-rank {choices.lora_rank} with --simulate: the models here have no adapters; give file.py:build of one that has"


def optimizer_of(choices: Choices) -> Callable[[Any], Any]:
    """What makes torch's optimizer that was chosen."""
    import torch

    how: dict[str, Any] = {"fused": choices.kernel == "fused", "foreach": choices.kernel == "foreach", "lr": _LEARNING_RATE}
    if choices.optimizer == "adamw":
        return lambda parameters: torch.optim.AdamW(parameters, **how)
    momentum = 0.9 if choices.optimizer == "sgd-momentum" else 0.0
    return lambda parameters: torch.optim.SGD(parameters, momentum=momentum, **how)
