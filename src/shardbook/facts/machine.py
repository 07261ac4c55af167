"""What a machine was measured to do: written by ``shardbook doctor --calibrate``, read by forecasts of time.

Plain, versioned data. Everything was measured on all ranks at once, each with its own core or device, so that what they share
(memory, links, disks) is shared in the figures too.

    product.forward, .input, .weight    [rows, in, out]    x @ W.T, g @ W, g.T @ x
    pass                                [bytes]            read and written by an element-wise operator, its result in new memory
    activation.forward, .backward       [elements]         SiLU
    attention.forward, .backward        [sequence, head]   scaled_dot_product_attention of one head, causal
    loss.forward, .backward             [rows, vocabulary] cross-entropy in fp32
    embedding.forward, .backward        [rows, columns]    of a small table
    optimizer.NAME, host.optimizer.NAME [elements]         one step on one tensor, where the ranks compute and on their host
    add, squares                        [elements]         two parts of a gradient added; squares of one in fp64
    link                                [bytes]            to each other rank, and as many from it
    copy.down, copy.up                  [bytes]            device to host and back; dtype says "pinned" or "pageable"
    pass.short                          [bytes]            the same with a short row again and again: a table of positions, say
    disk.read, disk.write, disk.both    [bytes]            one of many pieces, by direct I/O of each rank; both: each way at once
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from shardbook.checks import nearest
from shardbook.errors import ConfigError
from shardbook.facts.curves import Curve

VERSION = 1
_FORMAT = "shardbook calibration"
_REMEDY = "write it again with shardbook doctor --calibrate"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """See the file's header.

    Args:
        made: when, as ISO 8601.
        processor: name of the processor, as the system tells it.
        device: ``"cpu"``, or the accelerator's name.
        ranks: processes that were measured at once; links and disks are theirs.
        cores: that they had together.
        torch: its version.
        took: seconds.
        curves: see the file's header.
        numbers: seconds of ``operator.forward`` and ``operator.backward`` (on next to nothing), of ``unit.forward``, ``unit.backward`` and
            ``unit.step`` (each ``.stay`` or ``.gathered``: what a unit costs the engine beside its bytes; ``unit.step.host``: how much
            more where it is stepped on by itself on the host), of ``recompute.full`` and ``recompute.selective`` (of a block, beside its
            operators), of ``disk.piece`` (of a piece that is lent to the optimizer for its step), and of a whole step of a small model,
            ``step.fp32`` and ``step.bf16``; ``whole.fp32`` and ``whole.bf16``, that step by the sum of its parts; ``link.beside``, the
            share of a link's time that is left to wait for when something is computed beside it; ``host.nbytes``, the host's memory.
        notes: what could not be measured, in sentences.
    """

    made: str
    processor: str
    device: str
    ranks: int
    cores: int
    torch: str
    took: float
    curves: tuple[Curve, ...]
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()

    def seconds(self, what: str, dtype: str, *sizes: float) -> float:
        """Of one call, interpolated.

        Raises:
            ConfigError: it was not measured.
        """
        curve = self._by_name.get((what, dtype))
        if curve is None:
            raise ConfigError(f"calibration of {self.made}: {what} in {dtype or 'bytes'} was not measured; {_REMEDY}")
        return curve.at(*sizes)

    def knows(self, what: str, dtype: str = "") -> bool:
        """Whether it was measured."""
        return (what, dtype) in self._by_name

    @property
    def shares_cores(self) -> bool:
        """Whether what a link or a disk needs of a processor is taken from the ranks' own computing."""
        return self.device == "cpu" and self.cores <= self.ranks

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str], Curve]:
        return {(curve.what, curve.dtype): curve for curve in self.curves}

    def to_json(self) -> str:
        """With format and version."""
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "calibration") -> Self:
        """Strict: what is missing, unknown or of another version is named.

        Raises:
            ConfigError: it is none, or another version's.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: is no JSON ({error}); {_REMEDY}") from None
        if not isinstance(found, dict) or cast("dict[str, Any]", found).pop("format", None) != _FORMAT:
            raise ConfigError(f"{where}: is no calibration; {_REMEDY}")
        values = cast("dict[str, Any]", found)
        if (version := values.pop("version", None)) != VERSION:
            raise ConfigError(f"{where}: has version {version!r}; allowed is {VERSION}; {_REMEDY}")
        if wrong := set(values) ^ set(cls.__dataclass_fields__):
            name = sorted(wrong)[0]
            said = "is missing" if name in cls.__dataclass_fields__ else f"is unknown; {nearest(name, list(cls.__dataclass_fields__))}"
            raise ConfigError(f"{where}: {name} {said}; {_REMEDY}")
        try:
            curves = tuple(_curve(one) for one in values.pop("curves"))
            return cls(curves=curves, notes=tuple(values.pop("notes")), **values)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where}: can't be read ({error}); {_REMEDY}") from None


def _curve(found: Mapping[str, Any]) -> Curve:
    powers = found["powers"]
    return Curve(
        what=found["what"],
        dtype=found["dtype"],
        axes=tuple(tuple(axis) for axis in found["axes"]),
        seconds=tuple(found["seconds"]),
        powers=None if powers is None else tuple(powers),
    )


def usual_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where a calibration lies unless something else is said: ``shardbook/calibration.json`` in the user's cache."""
    found = os.environ if environment is None else environment
    base = found.get("XDG_CACHE_HOME") or ""
    return (Path(base) if base else Path.home() / ".cache") / "shardbook" / "calibration.json"


def read_machine(path: Path) -> Machine:
    """The calibration in a file.

    Raises:
        ConfigError: no file, or none of a calibration.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--machine {path}: can't be read ({error.strerror}); {_REMEDY}") from None
    except ValueError as error:
        raise ConfigError(f"--machine {path}: is no text ({error}); {_REMEDY}") from None
    return Machine.from_json(text, str(path))
