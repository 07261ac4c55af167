"""The lesson's small decoder: the one that its pictures forecast and that its *run* buttons train on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import shardbook as sb
from shardbook.config import Precision, Recompute, ZeroConfig
from shardbook.facts.configured import of_decoder
from shardbook.facts.model import ModelFacts
from shardbook.facts.parameters import model_facts
from shardbook.forecasting.result import Forecast
from shardbook.models.config import DecoderConfig
from shardbook.report.forecast_figures import Case

NOT_A_BENCHMARK = "teaching examples are not production benchmarks"

DECODER = DecoderConfig()
NUM_STEPS = 3
"""Of a small run: the second one has the peak that later ones have, as the moments are there from the first on."""

EXAMPLE_LOAD: Mapping[str, int] = {"vocab": 512, "layers": 4, "width": 192, "micro_batch": 2, "sequence": 64}
"""Sizes of ``examples/does_the_peak_divide.py`` when the notebook runs it."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """A run that a laptop finishes in seconds.

    Args:
        ranks, stage, precision, accumulate: as ``shardbook train`` takes them.
        micro_batch, sequence: of one rank.
        recompute: of the forecast only; ``shardbook train`` has no such option yet.
    """

    ranks: int = 2
    stage: int = 3
    precision: str = "fp32"
    accumulate: int = 1
    micro_batch: int = 2
    sequence: int = 128
    recompute: str = "none"

    @property
    def options(self) -> Sequence[str]:
        """Of ``shardbook train``."""
        names = ("ranks", "stage", "precision", "accumulate", "micro_batch", "sequence")
        given = [part for name in names for part in (f"--{name.replace('_', '-')}", f"{getattr(self, name)}")]
        return [*given, "--steps", f"{NUM_STEPS}"]


@cache
def decoder_facts(config: DecoderConfig = DECODER) -> ModelFacts:
    """What is known of one of shardbook's own decoders."""
    source = f"shardbook's decoder, {config.layers} blocks of width {config.width}"
    return model_facts(of_decoder(config), name="decoder", source=source)


@cache
def small(setting: Small) -> Forecast:
    """The forecast of a small run.

    >>> small(Small(stage=0)).peak_allocated > small(Small(stage=3)).peak_allocated
    True
    """
    stage: Any = setting.stage
    policy: Any = setting.recompute
    precision, recompute = Precision.preset(setting.precision), Recompute(policy=policy)
    config = ZeroConfig(stage=stage, accumulate=setting.accumulate, precision=precision, recompute=recompute)
    return sb.forecast(decoder_facts(), config, ranks=setting.ranks, micro_batch=setting.micro_batch, sequence=setting.sequence)


def small_stages(setting: Small) -> Sequence[Case]:
    """The four stages of a small run."""
    return [Case(label=f"stage {stage}", forecast=small(replace(setting, stage=stage))) for stage in range(4)]


def small_ranks(setting: Small, ranks: Sequence[int]) -> Sequence[Case]:
    """The same on several numbers of ranks."""
    return [Case(label=f"N = {count}", forecast=small(replace(setting, ranks=count))) for count in ranks]


def small_recomputed(setting: Small) -> Sequence[Case]:
    """The same with all activations kept, and with the blocks' inputs alone."""
    return [Case(label=f"recompute {policy}", forecast=small(replace(setting, recompute=policy))) for policy in ("none", "full")]


def weights_and_state(billions: float, convention: str) -> Forecast:
    """Parameters of which nothing else is known: the bytes of a convention on one rank.

    >>> told = weights_and_state(7, "2+2+4+8")
    >>> told.weights, told.state
    (14000000000, 112000000000)
    """
    return sb.forecast(billions * 1e9, ZeroConfig(stage=0), ranks=1, convention=convention)
