"""Capacity or throughput: what recomputation and offload would free, and cost, and whether either is worth it.

Every way is a configuration of its own, forecast and timed as the plan itself is. The plainest is the plan without any of them. Where
that fits, nothing else is advised, whatever was asked for; where it does not, the fastest that fits is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from shardbook.config import Offload, Recompute, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.facts.machine import Machine
from shardbook.forecasting.question import Question
from shardbook.forecasting.result import Advice, Forecast, Way
from shardbook.forecasting.time import StepSeconds, seconds_of

Fit = Literal["fits", "too close to call", "does not fit", ""]

PLAIN = "neither"
"""The plan without recomputation and offload."""

CLOSE = 0.03
"""A cost within so much of the step is said to be next to nothing: forecasts of time are no better."""

_UNKNOWN_FOLDER = Path("offload")


def advise(question: Question, machine: Machine, answer: Callable[[Question], Forecast]) -> Advice | None:
    """What to do; None where the seconds of this plan can't be said.

    Args:
        question: the plan, whose ``budget`` or device says what there is.
        machine: its calibration.
        answer: a forecast of a plan like it, without advice.

    Raises:
        ConfigError: the calibration lacks something.
    """
    if seconds_of(question, machine) is None:
        return None
    ways = list(_ways(question, machine, answer))
    plain, asked = ways[0], next(way for way in ways if way.is_asked)
    fitting = [way for way in ways if way.fits == "fits" and not way.why_not]
    if plain.fits in ("fits", ""):
        best: Way | None = plain
    else:
        best = min(fitting, key=lambda way: way.seconds, default=None)
    return Advice(ways=tuple(ways), asked=asked.name, recommended=None if best is None else best.name, words=_words(plain, asked, best))


def _ways(question: Question, machine: Machine, answer: Callable[[Question], Forecast]) -> Iterator[Way]:
    asked = question.config
    configs = dict(configs_of(asked, disk=machine.knows("disk.both")))
    own = next((name for name, config in configs.items() if config == asked), None)
    if own is None:
        configs[own := "as asked"] = asked
    first: tuple[Forecast, StepSeconds] | None = None
    for name, config in configs.items():
        here = replace(question, config=config)
        found, seconds = answer(here), seconds_of(here, machine)
        assert seconds is not None
        first = first or (found, seconds)
        yield Way(
            name=name,
            seconds=seconds.total,
            lanes=asdict(seconds),
            cost=seconds.cost_beside(first[1]),
            needed=_needed(here, found),
            freed=first[0].peak_allocated - found.peak_allocated,
            host=sum(found.host.values()),
            disk=sum(found.disk.values()),
            fits=fit_of(here, found),
            is_asked=name == own,
            why_not=_why_not(found, machine, config),
        )


def configs_of(asked: ZeroConfig, *, disk: bool = True) -> Mapping[str, ZeroConfig]:
    """Every way there is, by name, from the plainest on. What the stage does not allow is left out, and the ``disk`` if asked."""
    return dict(_configs(asked, disk=disk))


def _configs(asked: ZeroConfig, *, disk: bool) -> Iterator[tuple[str, ZeroConfig]]:
    plain = replace(asked, recompute=Recompute(), offload=Offload())
    recomputes = {"": Recompute(), "selective recompute": Recompute(policy="selective"), "full recompute": Recompute(policy="full")}
    path = asked.offload.path or _UNKNOWN_FOLDER
    offloads = {
        "": Offload(),
        "optimizer on the host": Offload(optimizer="host"),
        "optimizer and parameters on the host": Offload(optimizer="host", params="host"),
        "optimizer on a disk": Offload(optimizer="disk", path=path),
        "optimizer on a disk, parameters on the host": Offload(optimizer="disk", params="host", path=path),
    }
    for other, offload in offloads.items():
        for name, recompute in recomputes.items():
            if (offload.optimizer == "disk" and not disk) or (other and recompute.policy == "selective"):
                continue
            try:
                config = replace(plain, recompute=recompute, offload=offload)
            except ConfigError:  # at this stage
                continue
            yield ", ".join(filter(None, (name, other))) or PLAIN, config


def _needed(question: Question, found: Forecast) -> int:
    """Bytes that are held against what there is: of live tensors against a budget, at most of all against a device."""
    return found.peak_allocated if question.budget is not None or question.device is None else found.needed[1]


def fit_of(question: Question, found: Forecast) -> Fit:
    """Against the budget, else the device; "" where there is neither."""
    if question.budget is not None:
        return "fits" if found.peak_allocated <= question.budget else "does not fit"
    return "" if question.device is None else found.fits(question.device.memory)


def _why_not(found: Forecast, machine: Machine, config: ZeroConfig) -> str:
    """Why a way is none here, whatever fits on the device."""
    host = sum(found.host.values()) * machine.ranks
    there = int(machine.numbers.get("host.nbytes", 0))
    if config.offload != Offload() and there and host > there:
        return f"needs {_gb(host)} of host memory for {machine.ranks} ranks, of which there are {_gb(there)}"
    return ""


def _words(plain: Way, asked: Way, best: Way | None) -> tuple[str, ...]:
    return tuple(_sentences(plain, asked, best))


def _sentences(plain: Way, asked: Way, best: Way | None) -> Iterator[str]:
    if best is None:
        yield "none of these fits: a higher stage, more ranks or a smaller micro-batch is needed"
        return
    if best.name == plain.name and asked.name != plain.name:
        why = "it fits without" if plain.fits else "nothing says that it does not fit without"
        yield f"advised against: {asked.name}, which costs {cost_words(asked)}; {why}"
    elif best.name == plain.name:
        yield "advised: neither recomputation nor offload; it fits as it is" if plain.fits else _UNASKED
    else:
        yield f"advised: {best.name}, which costs {cost_words(best)}: without, it {_WORDS[plain.fits]}"
    if asked.name not in (plain.name, best.name) and best.name != plain.name:
        does = "does not fit" if asked.fits == "does not fit" else f"costs {cost_words(asked)}"
        yield f"advised against: {asked.name}, which {does}"


_WORDS = {"does not fit": "does not fit", "too close to call": "is too close to call", "fits": "fits", "": ""}
_UNASKED = "neither recomputation nor offload is advised: no budget or device says that memory is short"


def cost_words(way: Way) -> str:
    """In per cent of the plainest plan's step.

    >>> way = Way(name="", seconds=1.25, lanes={}, cost=0.25, needed=0, freed=0, host=0, disk=0, fits="", is_asked=True)
    >>> cost_words(way), cost_words(replace(way, cost=-0.008))
    ('25% of the step', 'next to nothing (-0.8% of the step)')
    """
    if abs(way.cost) <= CLOSE:
        return f"next to nothing ({way.cost:+.1%} of the step)"
    return f"{way.cost:.0%} of the step"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
