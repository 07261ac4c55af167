"""What the options and the file of ``shardbook forecast`` say of the run's configuration."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardbook.checks import listed
from shardbook.config import Precision, Recompute, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.forecasting.deepspeed_knobs import Knobs, read

_USUAL_STAGE = {"ddp": 0, "megatron": 1}
_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was given; None leaves the file's value, or the default.

    Args:
        engine: who trains. DeepSpeed reads its own file with its own defaults.
        file: a TOML of shardbook, or a JSON of DeepSpeed.
        stage, precision, accumulate, recompute: as the options say.
        ranks: data-parallel ranks, for DeepSpeed's batch numbers.
        hidden: elements of the model's residual stream, for DeepSpeed's ``"auto"``; None where they are not known.
    """

    engine: str
    file: Path | None
    stage: int | None
    precision: str | None
    accumulate: int | None
    recompute: str | None
    ranks: int
    hidden: int | None = None

    def config(self, knobs: Knobs | None) -> ZeroConfig:
        """The file's configuration with the options over it.

        Raises:
            ConfigError: the file can't be read, or something in it or in the options is not allowed.
        """
        if knobs is not None:
            base = replace(ZeroConfig(), **_from_knobs(knobs))
        elif self.file is not None:
            base = read_config(self.file)
        else:
            base = replace(ZeroConfig(), stage=_USUAL_STAGE.get(self.engine, 3))
        return replace(base, **dict(self._given()))

    def knobs(self) -> Knobs | None:
        """DeepSpeed's own settings with the options over them; None where DeepSpeed is not asked about, or has no file.

        Raises:
            ConfigError: the file is none of DeepSpeed's; it and ``precision`` contradict each other.
        """
        if self.engine != "deepspeed" or self.file is None:
            return None
        if self.file.suffix != ".json":
            raise ConfigError(f"--config {self.file}: allowed is DeepSpeed's .json with --engine deepspeed; give that file")
        if self.precision not in (None, *_DTYPES):
            raise ConfigError(f"--precision {self.precision}: allowed is {listed(_DTYPES)} with --engine deepspeed; leave it out")
        found = read(self.file, ranks=self.ranks, hidden=self.hidden, dtype=self.precision)  # pyright: ignore[reportArgumentType]
        if self.precision not in (None, found.dtype):
            raise ConfigError(f"--precision {self.precision}: {self.file} says {found.dtype}; leave --precision out, or change the file")
        _tell(found, self.file)
        given = {"stage": self.stage, "accumulate": self.accumulate}
        return replace(found, **{name: value for name, value in given.items() if value is not None})

    def _given(self) -> Iterator[tuple[str, Any]]:
        for name in ("stage", "accumulate"):
            if (value := getattr(self, name)) is not None:
                yield name, value
        if self.precision is not None:
            yield "precision", Precision.preset(self.precision)
        if self.recompute is not None:
            yield "recompute", replace(Recompute(), policy=self.recompute)


def read_config(path: Path) -> ZeroConfig:
    """The configuration in a TOML file or in a DeepSpeed JSON, as shardbook's engine honours it.

    Raises:
        ConfigError: neither, unreadable, or wrong inside.
    """
    if path.suffix == ".toml":
        return ZeroConfig.from_toml(path)
    if path.suffix == ".json":
        return ZeroConfig.from_deepspeed(path)
    raise ConfigError(f"--config {path}: allowed is a .toml of shardbook or a .json of DeepSpeed; rename it if it is one of them")


def _from_knobs(knobs: Knobs) -> Mapping[str, Any]:
    """What a forecast reads from the configuration and not from the knobs."""
    clip = knobs.gradient_clipping or None
    return {"stage": knobs.stage, "accumulate": knobs.accumulate, "clip_grad_norm": clip, "precision": Precision.preset(knobs.dtype)}


def _tell(knobs: Knobs, path: Path) -> None:
    if knobs.automatic:
        warnings.warn(f'{path}: "auto" where DeepSpeed\'s default is taken: {", ".join(knobs.automatic)}', stacklevel=2)
