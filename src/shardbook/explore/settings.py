"""What the notebook's controls are set to, the forecasts that this asks for, and the command line that says the same.

>>> setting = Settings(model="7e9", engine="shardbook", convention="2+2+4+8", micro_batch=None, sequence=None, device="")
>>> setting.command_line
'shardbook forecast 7e9 --ranks 8 --stage 3 --precision bf16 --convention 2+2+4+8'
>>> answer(setting).state
112000000000
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import shardbook as sb
from shardbook.checks import parse_nbytes
from shardbook.config import Precision, Recompute, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.facts import catalog
from shardbook.facts.find import resolve
from shardbook.facts.model import ModelFacts
from shardbook.forecasting.conventions import PRESETS
from shardbook.forecasting.question import ENGINES, STAGES
from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_figures import Case

RANKS = tuple(2**power for power in range(11))
"""Numbers of ranks of the picture of state against N."""

PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16", "2+2+4+8")
RECOMPUTE = ("none", "selective", "full")
TERMS = ("param", "grad", "master", "moment")
"""The convention's terms as an edit of it names them."""

BUDGETS = ("state", "activations", "temporary")
_SIZES = ("micro_batch", "sequence")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One position of every control.

    Args:
        model: a catalog name, a number of parameters, or the path of a ``config.json``.
        ranks, stage, engine, precision, recompute, device: as ``shardbook forecast`` takes them; ``device=""``: none is asked about.
        convention: a preset's name, or bytes as in ``2+2+4+8``; "": the engine's own.
        param, grad, master, moment: bytes per parameter that replace a term of the convention; None leaves it.
        micro_batch, sequence: None: only state is asked about.
        state, activations, temporary: budgets in GiB that replace what would be forecast; None or 0 leaves the forecast.
    """

    model: str = "llama-2-7b"
    ranks: int = 8
    stage: int = 3
    engine: str = "shardbook"
    precision: str = "bf16"
    convention: str = ""
    param: float | None = None
    grad: float | None = None
    master: float | None = None
    moment: float | None = None
    micro_batch: int | None = 1
    sequence: int | None = 2048
    recompute: str = "none"
    device: str = "h100-80gb"
    state: float | None = None
    activations: float | None = None
    temporary: float | None = None

    @property
    def config(self) -> ZeroConfig:
        """What is asked of the engine."""
        stage: Any = self.stage
        policy: Any = self.recompute
        return ZeroConfig(stage=stage, precision=Precision.preset(self.precision), recompute=Recompute(policy=policy))

    @property
    def edited_convention(self) -> str | None:
        """The convention with the terms that replace its own; None: the engine's own, as it is."""
        edits = [f"{term}={value:g}" for term in TERMS if (value := getattr(self, term)) is not None]
        if not edits:
            return self.convention or None
        return ",".join([self.convention or _own_convention(self), *edits])

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Of :func:`shardbook.forecast`, but for the model and the configuration."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        budgets = {name: parse_nbytes(text) for name, text in self._budgets()}
        convention, device = self.edited_convention, self.device or None
        return {"ranks": self.ranks, "engine": self.engine, "convention": convention, "device": device, **sizes, **budgets}

    @property
    def command_line(self) -> str:
        """What to type in a terminal for the same forecast."""
        return shlex.join(["shardbook", "forecast", self.model, *self._options()])

    def _options(self) -> Iterator[str]:
        yield from ("--ranks", f"{self.ranks}", "--stage", f"{self.stage}")
        if self.engine != "shardbook":
            yield from ("--engine", self.engine)
        yield from ("--precision", self.precision)
        said = (
            ("convention", self.edited_convention),
            ("micro-batch", self.micro_batch),
            ("sequence", self.sequence),
            ("device", self.device),
        )
        for name, value in said:
            if value:
                yield from (f"--{name}", f"{value}")
        if self.recompute != "none":
            yield from ("--recompute", self.recompute)
        for name, text in self._budgets():
            yield from (f"--{name}", text)

    def _budgets(self) -> Iterator[tuple[str, str]]:
        for name in BUDGETS:
            if gib := getattr(self, name):
                yield name, f"{gib:.6f}".rstrip("0").rstrip(".") + "GiB"


def models() -> Sequence[str]:
    """The catalog's names, smallest model first."""
    return sorted(catalog.names(), key=lambda name: catalog.facts(name).num_parameters)


def conventions() -> Sequence[str]:
    """Names of conventions."""
    return tuple(PRESETS)


def settled(settings: Settings) -> tuple[Settings, Sequence[str]]:
    """The nearest setting that can be asked about, and what was moved for it, in sentences.

    >>> settled(Settings(engine="ddp"))[1]
    ('ddp has no stage 3: this is stage 0',)
    """
    notes: list[str] = []
    stages = STAGES[settings.engine] if settings.engine in ENGINES else (settings.stage,)
    if settings.stage not in stages:
        nearest = min(stages, key=lambda stage: abs(stage - settings.stage))
        notes.append(f"{settings.engine} has no stage {settings.stage}: this is stage {nearest}")
        settings = replace(settings, stage=nearest)
    given = [name for name in _SIZES if getattr(settings, name)]
    if len(given) == 1:
        notes.append(f"activations need micro-batch and sequence, and only {given[0].replace('_', '-')} is given: this is the state alone")
    if len(given) < len(_SIZES):
        return replace(settings, micro_batch=None, sequence=None), tuple(notes)
    architecture = facts(settings.model).architecture
    longest = architecture.max_seq if architecture else 0
    if longest and (settings.sequence or 0) > longest:
        notes.append(f"{settings.model} has no sequence above {longest:,}: this is {longest:,}")
        settings = replace(settings, sequence=longest)
    return settings, tuple(notes)


@lru_cache(maxsize=32)
def facts(model: str) -> ModelFacts:
    """What is known of a model; read once.

    Raises:
        ConfigError: no such model, with the nearest names.
    """
    return resolve(model)


@lru_cache(maxsize=512)
def answer(settings: Settings) -> Forecast:
    """The forecast; a knob that is turned back costs nothing.

    Raises:
        ConfigError: something in it is not allowed.
    """
    return sb.forecast(facts(settings.model), settings.config, **settings.arguments)


def stages(settings: Settings) -> Sequence[Case]:
    """The four stages beside each other; one that the engine has not says why."""
    return [_case(f"stage {stage}", replace(settings, stage=stage)) for stage in range(4)]


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _case(label: str, settings: Settings) -> Case:
    try:
        return Case(label=label, forecast=answer(settings))
    except ConfigError as error:
        return Case(label=label, forecast=None, why=one_line(error))


def _own_convention(settings: Settings) -> str:
    """The name of what the engine keeps by itself."""
    terms: dict[str, Any] = dict.fromkeys(TERMS)
    return answer(replace(settings, convention="", micro_batch=None, sequence=None, device="", **terms)).convention.name
