"""What a forecast says, as plain data: the one thing that the command, the pictures and the notebook read.

Forecast
├── convention     bytes per parameter, always printed with the rest
├── accounts       at the forecast peak, on the rank that holds most
├── phases         the highest instant of each phase of a step, first step and later ones
├── above          what comes on top of the allocator, each line an interval with its source
└── bottleneck     which account is largest now, what would shrink it, and which is largest then
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardbook.document import Curve, Item
from shardbook.forecasting.conventions import Convention, Holding

NOT_A_PEAK = "not a peak: activations, gathers, buffers and allocator come on top"
"""Stands wherever only persistent bytes are shown."""

Verdict = Literal["fits", "too close to call", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The highest instant of one phase of a step. ``where`` names the unit; ``first`` says it is only so in the first step."""

    phase: str
    where: str
    accounts: Mapping[str, int]
    first: bool = False

    @property
    def nbytes(self) -> int:
        return sum(self.accounts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """Bytes above what the allocator gives out, between ``low`` and ``high``; ``validated`` once a GPU check has held it."""

    name: str
    low: int
    high: int
    source: str
    validated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One line of ``--explain``: what was computed for an account, and by what."""

    account: str
    nbytes: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForward:
    """The cheapest lever on the largest account: what a person would turn, and what is held after it."""

    lever: str
    account: str
    freed: int
    accounts_after: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a model of the caching allocator makes of a simulated run: bytes at most, and how they lie at that instant.

    Args:
        settings: as in ``PYTORCH_CUDA_ALLOC_CONF``; "" for torch's defaults.
        reserved, allocated: at most, each by itself.
        fragmented: share of the reserved bytes that no tensor has, when most is reserved.
        series: (place in the trace from 0 to 1, allocated, reserved), at most some hundreds.
    """

    settings: str
    reserved: int
    allocated: int
    fragmented: float
    series: tuple[tuple[float, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation knows beyond a forecast.

    Args:
        rank: which rank it was.
        code: whose code ran.
        first_peak, later_peak: bytes at the peak of the first step, and of those after it.
        first_accounts: account to bytes at the first step's peak.
        operator: that ran at the peak.
        items: the largest storages then.
        curve: accounts over the step whose peak it is.
        assumptions: what was taken for granted where values would have decided, in sentences.
        replayed: the caching allocator; None on a CPU.
        seconds: that the simulation took.
        blocks: how many of the model's repeated blocks ran; None: all of them.
    """

    rank: int
    code: str
    first_peak: int
    later_peak: int
    first_accounts: Mapping[str, int]
    operator: str
    items: tuple[Item, ...]
    curve: Curve | None
    assumptions: tuple[str, ...]
    replayed: Replayed | None = None
    seconds: float = 0.0
    blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A plan with or without recomputation and offload.

    Args:
        name: of it, in words.
        seconds: of a step.
        lanes: what they consist of (:class:`shardbook.forecasting.time.StepSeconds`).
        cost: what it takes longer than the plan with neither, as a share of that.
        needed: bytes that are held against the budget or the device.
        freed: bytes of live tensors that it takes off the device's peak, beside the plan with neither.
        host, disk: bytes of one rank in host memory and on a disk.
        fits: whether it fits; "" where nothing says what there is.
        is_asked: whether it is the plan that was asked about.
        why_not: why it can't run here whether it fits or not; "" if it can.
    """

    name: str
    seconds: float
    lanes: Mapping[str, float]
    cost: float
    needed: int
    freed: int
    host: int
    disk: int
    fits: Literal["fits", "too close to call", "does not fit", ""]
    is_asked: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about memory and time.

    Args:
        ways: that there are, the plan with neither recomputation nor offload first.
        asked, recommended: names of ways; ``recommended`` is None where none fits.
        words: the advice in sentences.
    """

    ways: tuple[Way, ...]
    asked: str
    recommended: str | None
    words: tuple[str, ...]

    def way(self, name: str) -> Way:
        """By its name."""
        return next(way for way in self.ways if way.name == name)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on the rank that holds most; a simulation's on the one that it was, ``simulated.rank``.

    Args:
        model, num_parameters, source: what was asked about, and where its facts come from.
        engine, ranks, stage: who trains, on how many devices, and what is partitioned.
        convention: bytes per parameter in each account.
        accounts: account to bytes at the forecast peak.
        persistent: bytes between steps, from the second step on; under a bare convention reduced gradients count as well.
        peak_allocated: bytes of live tensors at the peak; equal to ``persistent`` where nothing else is modelled.
        peak_reserved: interval of what a caching allocator holds then; None on a CPU and where no peak is known.
        peak_phase, peak_where: the phase and unit that own the peak; "" where only persistent bytes are known.
        dominant, next_dominant: the largest account now, and after the cheapest lever on it.
        not_modelled: what this forecast leaves out, in sentences with the remedy.
        host: account to bytes in host memory, pinned or not, when that holds most.
        disk: account to bytes on this rank's disk.
        between: tier (``device``, ``host``, ``disk``) to account to bytes between steps; empty where only totals are known.
        moved: link (``host to device`` and the others) to bytes moved per rank and step.
        sent: bytes sent per rank and step.
        holdings: the persistent accounts, partitioned or replicated.
        phases: the highest instant of each phase.
        above: what comes on top of ``peak_allocated``.
        step_forward: the lever behind ``next_dominant``; None where nothing is left to turn.
        terms: formula and value of everything above.
        largest_unit, largest_tensor: name and elements; None where only a count is known.
        weights: bytes of the parameters alone, whole; what people compare a device with.
        state: bytes of the whole training state under the convention, unpartitioned.
        inputs: what the forecast was asked, for reports: micro_batch, sequence, degrees, budgets.
        warnings: what a person must know about the figures, for example another version of a peer.
        step_seconds: of a step, by a calibration of the machine; None without one, and where it can't be said.
        advice: what recomputation and offload would free and cost; None as above.
        witness: ``"closed form"``, or ``"simulation"``, which has ``simulated`` besides.
    """

    model: str
    num_parameters: int
    source: str
    engine: str
    ranks: int
    stage: int
    convention: Convention
    accounts: Mapping[str, int]
    persistent: int
    peak_allocated: int
    peak_phase: str
    dominant: str
    next_dominant: str
    peak_reserved: tuple[int, int] | None = None
    peak_where: str = ""
    not_modelled: tuple[str, ...] = ()
    host: Mapping[str, int] = field(default_factory=dict[str, int])
    disk: Mapping[str, int] = field(default_factory=dict[str, int])
    between: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    moved: Mapping[str, int] = field(default_factory=dict[str, int])
    sent: int = 0
    holdings: tuple[Holding, ...] = ()
    phases: tuple[PhasePeak, ...] = ()
    above: tuple[Above, ...] = ()
    step_forward: StepForward | None = None
    terms: tuple[Term, ...] = ()
    largest_unit: tuple[str, int] | None = None
    largest_tensor: tuple[str, int] | None = None
    weights: int = 0
    state: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    warnings: tuple[str, ...] = ()
    step_seconds: float | None = None
    advice: Advice | None = None
    witness: Literal["closed form", "simulation"] = "closed form"
    simulated: Simulated | None = None

    @property
    def is_peak(self) -> bool:
        """Whether ``peak_allocated`` is a peak, not only what persists."""
        return self.peak_phase != ""

    @property
    def needed(self) -> tuple[int, int]:
        """Least and most bytes of device memory that the run needs, everything above the allocator included.

        The intervals have causes of their own (holes, the driver, communicators), so their widths are added as independent
        errors are: the root of the sum of squares.
        """
        low, high = self.peak_reserved or (self.peak_allocated, self.peak_allocated)
        beyond = [line for line in self.above if line.name != "reserved"]
        least = low + sum(line.low for line in beyond)
        return least, least + math.isqrt((high - low) ** 2 + sum((line.high - line.low) ** 2 for line in beyond))

    def fits(self, device_memory: int) -> Verdict:
        """Whether the run fits into so many bytes: certainly, certainly not, or within the interval of what is not known."""
        low, high = self.needed
        if low > device_memory:
            return "does not fit"
        if high <= device_memory and self.is_peak:
            return "fits"
        return "too close to call"

    def to_json(self) -> str:
        """Every field, as JSON."""
        return json.dumps(asdict(self), indent=2)
