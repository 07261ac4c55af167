"""What a forecast is asked, checked: the model's facts, the engine's configuration, the batch, and what the devices share."""

from dataclasses import dataclass
from typing import Any

from shardbook.checks import Check, listed, nearest
from shardbook.config import ZeroConfig
from shardbook.errors import ConfigError
from shardbook.facts.adapters import with_adapters, with_share_trained
from shardbook.facts.find import resolve
from shardbook.facts.hardware import Device
from shardbook.facts.hardware import device as find_device
from shardbook.facts.machine import Machine
from shardbook.facts.model import ModelFacts
from shardbook.forecasting.choices import Choices
from shardbook.forecasting.conventions import Convention
from shardbook.forecasting.deepspeed_knobs import Knobs

ENGINES = ("shardbook", "deepspeed", "fsdp2", "ddp", "megatron")
STAGES = {"shardbook": (0, 1, 2, 3), "deepspeed": (0, 1, 2, 3), "fsdp2": (3,), "ddp": (0,), "megatron": (0, 1)}
_MOST = {"ranks": 10**7, "micro_batch": 10**6, "sequence": 10**9, "tensor": 10**4, "context": 10**4, "expert": 10**4}
_MOST_NBYTES = 10**18


@dataclass(frozen=True, kw_only=True)
class Question:
    """See the file's header. ``shards``: devices over which data-parallel states are partitioned.

    Raises:
        ConfigError: a field outside what is allowed, or fields that contradict each other or the model.
    """

    facts: ModelFacts
    config: ZeroConfig
    choices: Choices
    engine: str
    ranks: int
    micro_batch: int | None = None
    sequence: int | None = None
    convention: Convention | None = None
    device: Device | None = None
    knobs: Knobs | None = None
    tensor: int = 1
    context: int = 1
    expert: int = 1
    state: int | None = None
    activations: int | None = None
    temporary: int | None = None
    budget: int | None = None
    machine: Machine | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        check.choice("engine", ENGINES)
        for name in ("ranks", "tensor", "context", "expert"):
            check.integer(name, least=1, remedy="1 is a single device")
        for name in ("micro_batch", "sequence"):
            check.integer(name, least=1, remedy="leave both out where only state is asked for", optional=True)
        for name in ("state", "activations", "temporary", "budget"):
            check.integer(name, least=0, remedy="give bytes", optional=True)
        _done(check)
        for name, most in {**_MOST, **dict.fromkeys(("state", "activations", "temporary", "budget"), _MOST_NBYTES)}.items():
            if (getattr(self, name) or 0) > most:
                check.add(name, getattr(self, name), f"at most {most:.0e}", "it is taken for a mistake")
        if self.config.stage not in STAGES[self.engine]:
            allowed = " or ".join(map(str, STAGES[self.engine]))
            check.add("stage", self.config.stage, f"{allowed} with engine={self.engine!r}", "choose another engine or stage")
        self._check_degrees(check)
        self._check_batch(check)
        _done(check)

    def _check_degrees(self, check: Check) -> None:
        shared, architecture = self.tensor * self.context, self.facts.architecture
        if self.ranks % shared:
            near = max(1, round(self.ranks / shared)) * shared
            check.add("ranks", self.ranks, f"a multiple of tensor * context = {shared}", f"the nearest is {near}")
        elif self.ranks // self.tensor % self.expert:
            check.add(
                "expert", self.expert, f"a divisor of ranks / tensor = {self.ranks // self.tensor}", "experts lie on data-parallel ranks"
            )
        if architecture is not None:
            if architecture.heads % self.tensor:
                check.add("tensor", self.tensor, f"a divisor of the model's {architecture.heads} heads", "heads are shared evenly")
            experts = architecture.experts
            if self.expert > 1 and (experts is None or experts.count % self.expert):
                allowed = "1: the model has no experts" if experts is None else f"a divisor of the model's {experts.count} experts"
                check.add("expert", self.expert, allowed, "leave it out" if experts is None else "experts are shared evenly")

    def _check_batch(self, check: Check) -> None:
        given = {name: getattr(self, name) is not None for name in ("micro_batch", "sequence")}
        if sum(given.values()) == 1:
            missing, there = sorted(given, key=lambda name: given[name])
            allowed = f"a number beside {there} = {getattr(self, there)}"
            check.add(missing, None, allowed, f"activations need both: give {missing} too")
        most = self.facts.architecture.max_seq if self.facts.architecture else 0
        if self.sequence and most and self.sequence > most:
            check.add("sequence", self.sequence, f"1 to {most}, the model's longest", f"the nearest is {most}")
        if self.sequence and self.sequence % self.context:
            check.add("sequence", self.sequence, f"a multiple of context = {self.context}", "context-parallel devices have equal parts")

    @property
    def shards(self) -> int:
        """Data-parallel devices, context-parallel ones among them: all hold the same parameters but for partitioning."""
        return self.ranks // self.tensor


def ask(model: Any, config: ZeroConfig | None, *, engine: str, convention: Convention | str | None, device: str | None,
        choices: Choices | None, knobs: Knobs | None = None, **numbers: Any) -> Question:  # fmt: skip
    """A question from what people write.

    Raises:
        ConfigError: as :class:`Question`; an unknown model, device or convention, with the nearest names.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine = {engine!r}: allowed is {listed(ENGINES)}; {nearest(engine, ENGINES)}")
    choices = choices or Choices()
    facts = resolve(model)
    if choices.lora_rank:
        facts = with_adapters(facts, choices.lora_rank, choices.lora_targets)
    elif choices.trainable < 1:
        facts = with_share_trained(facts, choices.trainable)
    if config is None:
        config = ZeroConfig(stage=STAGES[engine][-1])  # pyright: ignore[reportArgumentType]
    if not isinstance(config, ZeroConfig):
        raise ConfigError(f"config = {config!r}: allowed is a ZeroConfig or None; build one, or use ZeroConfig.from_toml")
    return Question(
        facts=facts, config=config, choices=choices, engine=engine, knobs=knobs,
        convention=Convention.parse(convention) if isinstance(convention, str) else convention,
        device=None if device is None else find_device(device), **numbers,
    )  # fmt: skip


def _done(check: Check) -> None:
    """Faults speak of what was written, not of the class that holds it."""
    try:
        check.done()
    except ConfigError as error:
        raise ConfigError("; ".join(line.removeprefix("Question.") for line in str(error).splitlines())) from None
