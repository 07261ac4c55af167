"""``shardbook forecast``: will it fit, account by account, before anything runs.

Needs no torch, except for a model from a file, and to simulate.
"""

import json as jsonlib
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from shardbook.cli.forecast_question import (
    Question,
    one_line,
    parse_choices,
    parse_count,
    parse_size,
    parse_sweep,
)
from shardbook.cli.forecast_settings import Settings
from shardbook.cli.meta_model import Builder, is_builder, load
from shardbook.cli.simulate import Simulation
from shardbook.errors import ConfigError
from shardbook.facts.find import resolve
from shardbook.facts.machine import Machine, read_machine, usual_path
from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_console import explained, show, show_sweep
from shardbook.report.forecast_figures import Case, cases_json, forecast_json, verdict
from shardbook.report.forecast_files import check, save


def _option(text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """What is not said has the default of the engine or of the library; the convention in force is always printed."""

    model: Annotated[str, tyro.conf.Positional, _option("catalog name, config.json, parameters (7e9, 7B), or file.py:build", "MODEL")]
    ranks: Annotated[str, _option("devices, all degrees of parallelism together (default: 1)", "N")] = "1"
    stage: Annotated[str | None, _option("partitioned: 0 nothing, 1 optimizer state, 2 gradients too, 3 all (default: 3)", "0-3")] = None
    micro_batch: Annotated[str | None, _option("sequences in one forward of one rank; needs --sequence", "N")] = None
    sequence: Annotated[str | None, _option("tokens in a sequence; needs --micro-batch", "N")] = None
    tensor: Annotated[str, _option("tensor-parallel degree (default: 1)", "N")] = "1"
    context: Annotated[str, _option("context-parallel degree (default: 1)", "N")] = "1"
    expert: Annotated[str, _option("expert-parallel degree (default: 1)", "N")] = "1"
    engine: Annotated[str, _option("shardbook, deepspeed, fsdp2, ddp or megatron (default: shardbook)", "NAME")] = "shardbook"
    precision: Annotated[str | None, _option("fp32, bf16, fp16, pure-bf16 or 2+2+4+8 (default: fp32)", "NAME")] = None
    convention: Annotated[str | None, _option("bytes per parameter: a name, 2+2+4+8, or edited as in 2+2+4+8,grad=4", "TEXT")] = None
    config: Annotated[Path | None, _option("config.toml of shardbook or ds_config.json of DeepSpeed; options override it", "FILE")] = None
    accumulate: Annotated[str | None, _option("micro-batches of one rank in a step (default: 1)", "N")] = None
    recompute: Annotated[str | None, _option("none, full or selective (default: none)", "POLICY")] = None
    device: Annotated[str | None, _option("will it fit here: h100-80gb, 24GiB (default: not asked)", "NAME")] = None
    budget: Annotated[str | None, _option("most bytes of live tensors on a device, for the advice of --machine", "2GiB")] = None
    machine: Annotated[str | None, _option("times the step: FILE of shardbook doctor --calibrate, or usual", "FILE")] = None
    state: Annotated[str | None, _option("your own figure for parameters, gradients and optimizer state", "60GiB")] = None
    activations: Annotated[str | None, _option("your own figure for activations", "20GiB")] = None
    temporary: Annotated[str | None, _option("your own figure for everything else in a step", "2GiB")] = None
    attention: Annotated[str | None, _option("auto, flash, efficient or eager (default: auto)", "KIND")] = None
    loss: Annotated[str | None, _option("full, chunked or fused (default: full)", "KIND")] = None
    optimizer: Annotated[str | None, _option("adamw, adamw-8bit, sgd or sgd-momentum (default: adamw)", "NAME")] = None
    kernel: Annotated[str | None, _option("how the optimizer steps: fused, foreach or for-loop (default: fused)", "KIND")] = None
    implementation: Annotated[str | None, _option("whose code the blocks are, for example transformers", "NAME")] = None
    no_reshard: Annotated[bool, _option("FSDP2: parameters stay gathered between forward and backward", "")] = False
    lora_rank: Annotated[str | None, _option("rank of adapters; the rest is frozen", "R")] = None
    compare_stages: Annotated[bool, _option("the four stages side by side", "")] = False
    sweep: Annotated[str | None, _option("one row for each value of ranks, micro_batch, sequence, stage, ...", "ranks=1,8,64")] = None
    explain: Annotated[bool, _option("every term with formula and source", "")] = False
    simulate: Annotated[bool, _option("run the engine itself on tensors without values, beside the closed form; needs torch", "")] = False
    rank: Annotated[str | None, _option("with --simulate: which rank to be (default: 0)", "N")] = None
    allocator: Annotated[str | None, _option("with --simulate and --device: as PYTORCH_CUDA_ALLOC_CONF", "TEXT")] = None
    save: Annotated[Path | None, _option("write the picture: .svg, .png or .html", "FILE")] = None
    json: Annotated[bool, _option("print everything as JSON", "")] = False

    def check(self) -> None:
        """What can be known to be wrong before anything is computed."""
        beside = [name for name, given in (("--compare-stages", self.compare_stages), ("--explain", self.explain)) if given]
        if self.sweep is not None and beside:
            raise ConfigError(f"--sweep {self.sweep} with {beside[0]}: a sweep has one row for each value; leave one of them out")
        self._check_simulation()
        if self.save is not None:
            check(self.save)

    def _check_simulation(self) -> None:
        if self.simulate:
            for name, given in (("--sweep", self.sweep), ("--compare-stages", self.compare_stages)):
                if given:
                    raise ConfigError(f"{name} with --simulate: one setting is simulated at a time; leave one of them out")
        else:
            for name in ("rank", "allocator"):
                if (value := getattr(self, name)) is not None:
                    raise ConfigError(f"--{name} {value}: allowed is it with --simulate, which looks at one rank; add --simulate")

    def simulation(self, question: Question, builder: Builder | None) -> Simulation:
        """The same question for the engine itself."""
        rank = _count(self.rank, "--rank") or 0
        return Simulation(question=question, model=self.model, builder=builder, rank=rank, allocator=self.allocator)

    def question(self, builder: Builder | None = None) -> Question:
        """The call of the library that these options mean. The model's facts are found once, for all the questions."""
        model = resolve(self.model if builder is None else builder.on_meta())
        arguments = self._arguments()
        settings = Settings(
            engine=self.engine,
            file=self.config,
            stage=_count(self.stage, "--stage"),
            precision=self.precision,
            accumulate=_count(self.accumulate, "--accumulate"),
            recompute=self.recompute,
            ranks=max(1, arguments["ranks"] // max(1, arguments["tensor"] * arguments["context"])),
            hidden=model.architecture.hidden if model.architecture else None,
        )
        if (knobs := settings.knobs()) is not None:
            arguments["knobs"] = knobs
            if arguments["sequence"] is not None and arguments["micro_batch"] is None:
                arguments["micro_batch"] = knobs.micro_batch
        return Question(model=model, config=settings.config(knobs), arguments=arguments)

    def _arguments(self) -> dict[str, Any]:
        counts = ("ranks", "micro_batch", "sequence", "tensor", "context", "expert")
        return {
            **{name: _count(getattr(self, name), f"--{name.replace('_', '-')}") for name in counts},
            **{name: parse_size(getattr(self, name), f"--{name}") for name in ("state", "activations", "temporary", "budget")},
            "machine": self._machine(),
            "convention": self.convention,
            "engine": self.engine,
            "device": self.device,
            "choices": self._choices(),
        }

    def _machine(self) -> Machine | None:
        if self.machine is None:
            return None
        return read_machine(usual_path() if self.machine == "usual" else Path(self.machine))

    def _choices(self) -> Any:
        return parse_choices(
            optimizer=self.optimizer,
            kernel=self.kernel,
            attention=self.attention,
            loss=self.loss,
            implementation=self.implementation,
            reshard=False if self.no_reshard else None,
            lora_rank=_count(self.lora_rank, "--lora-rank"),
        )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Everything that was computed. ``swept`` is what was varied, and ``cases`` its values.

    ``closed_form`` is the other witness where ``forecast`` is a simulation's.
    """

    forecast: Forecast
    stages: Sequence[Case]
    swept: str = ""
    cases: Sequence[Case] = ()
    closed_form: Forecast | None = None

    @property
    def code(self) -> int:
        """0 where it fits for every value that was asked about, or no device was."""
        asked = [case.forecast for case in self.cases if case.forecast is not None] or [self.forecast]
        return int(any(verdict(one) not in ("", "fits") for one in asked))


def forecast(options: Annotated[ForecastOptions, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Will it fit: every byte on a rank by account, before anything runs; for shardbook and for other engines.

    Exit code 0: it fits, or no device was asked about. 1: it does not fit, or is too close to call. 2: wrong usage.
    """
    try:
        options.check()
        with _warnings_told():
            answer = _answer(options)
        if options.save is not None:
            _save(options.save, answer)
    except ConfigError as error:
        raise ConfigError(one_line(error)) from error
    if options.json:
        print(jsonlib.dumps(_json(answer), indent=2))
    else:
        _show(answer, options)
    return answer.code


def _answer(options: ForecastOptions) -> _Answer:
    builder = load(options.model) if is_builder(options.model) else None
    question = options.question(builder)
    if options.simulate:
        closed_form = question.answer()
        told = options.simulation(question, builder).answer()
        return _Answer(forecast=_with_lever(told, closed_form), stages=(), closed_form=closed_form)
    swept, values = parse_sweep(options.sweep) if options.sweep is not None else ("", [])
    if swept:  # the first value stands for the rest, so that what is wrong with the question itself is said once
        question = question.with_value(swept, values[0])
    found = question.answer()
    compared = question if options.compare_stages or options.save is not None else question.persistent_only()
    return _Answer(forecast=found, stages=compared.stages(found), swept=swept, cases=question.sweep(swept, values) if swept else ())


def _with_lever(simulated: Forecast, closed_form: Forecast) -> Forecast:
    """What to turn next: arithmetic knows more of it than a run does, as long as both see the same bottleneck."""
    if not closed_form.is_peak or simulated.dominant != closed_form.dominant:
        return simulated
    return replace(simulated, step_forward=closed_form.step_forward, next_dominant=closed_form.next_dominant)


def _show(answer: _Answer, options: ForecastOptions) -> None:
    if isinstance(sys.stdout, TextIOWrapper):  # an encoding without block characters prints something else for them
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    if answer.cases:
        show_sweep(answer.swept, answer.cases, answer.forecast, console)
        return
    show(answer.forecast, console, answer.stages, compare=options.compare_stages, beside=answer.closed_form)
    if options.explain:
        console.print(explained(answer.closed_form or answer.forecast))


def _json(answer: _Answer) -> dict[str, Any]:
    swept = {"sweep": {"name": answer.swept, "cases": cases_json(answer.cases)}} if answer.cases else {}
    beside = {} if answer.closed_form is None else {"closed_form": forecast_json(answer.closed_form)}
    return {**forecast_json(answer.forecast), "stages": cases_json(answer.stages), **swept, **beside}


def _save(path: Path, answer: _Answer) -> None:
    """The values of the sweep, or the two witnesses, or else the four stages."""
    if answer.closed_form is not None:
        witnesses = [Case(label=one.witness, forecast=one) for one in (answer.closed_form, answer.forecast)]
        save(path, answer.forecast, witnesses, "witness")
        print(f"written to {path}", file=sys.stderr)
        return
    name = answer.swept.replace("_", "-") or "stage"
    cases = [replace(case, label=f"{name} {case.label}") for case in answer.cases or answer.stages]
    save(path, answer.forecast, cases, name)
    print(f"written to {path}", file=sys.stderr)


@contextmanager
def _warnings_told() -> Generator[None]:
    """What the library warns of, in a line each on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in caught):
        print(f"note: {text}", file=sys.stderr)


def _count(text: str | None, option: str) -> int | None:
    return None if text is None else parse_count(text, option)
