"""How long a step takes, lane by lane, before it runs.

    compute     operators of the walk (`work`), at the rates of a calibration: forward, backward, what recomputation adds
    link        what ranks send each other, as far as it is waited for
    device      the engine's own copies and sums of gradients and parameters
    host        what offload copies between device and host
    step        norm, scale, optimizer
    disk        states read and written, beside the optimizer's step

On a CPU all lanes but the disk's are the ranks' own cores, one after the other, and in a step each takes somewhat longer than by itself:
how much, a calibration measures with a whole step of a small model. What a link hides behind a computation is measured as well.
Seconds of each lane are those of the slowest rank where shards are alike: rank 0.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from shardbook.checks import DTYPE_NBYTES
from shardbook.facts.machine import Machine
from shardbook.forecasting.blocks.decoder import Decoder
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.lanes import Lanes, host_kind, lanes_of
from shardbook.forecasting.peak import choice_of, no_collection, recomputed_of, setting_of
from shardbook.forecasting.question import Question
from shardbook.forecasting.state import State, moments_of, state_of
from shardbook.forecasting.tape import Tape
from shardbook.forecasting.walk import Walk
from shardbook.forecasting.work import Deed, Working


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of one step on one rank, by lane; see the file's header. ``disk`` is what stays of it beside the step."""

    forward: float
    backward: float
    recompute: float
    link: float
    device: float
    host: float
    step: float
    disk: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(getattr(self, one.name) for one in fields(self))

    def scaled(self, factor: float) -> "StepSeconds":
        """All lanes but the disk's take ``factor`` times as long."""
        return replace(self, **{one.name: factor * getattr(self, one.name) for one in fields(self) if one.name != "disk"})

    def cost_beside(self, other: "StepSeconds") -> float:
        """How much longer this step takes, as a share of the other.

        >>> short = StepSeconds(forward=1, backward=2, recompute=0, link=0, device=0, host=0, step=1, disk=0)
        >>> replace(short, recompute=1).cost_beside(short)
        0.25
        """
        return self.total / other.total - 1


def can_tell(question: Question) -> bool:
    """Whether the seconds of a step can be said: shardbook's own engine, an architecture and a batch, one degree of parallelism."""
    alone = question.tensor == question.context == question.expert == 1
    return question.engine == "shardbook" and alone and question.micro_batch is not None and question.facts.architecture is not None


def seconds_of(question: Question, machine: Machine) -> StepSeconds | None:
    """Of one step after the first; None where :func:`can_tell` says that it can't be said, or the model's units are not known.

    Raises:
        ConfigError: the calibration lacks something.
    """
    state = state_of(question)
    if not can_tell(question) or state.placement is None or not state.placement.weights:
        return None
    deeds, nodes = _walked(question, state)
    times = question.config.accumulate
    phases: defaultdict[str, float] = defaultdict(float)
    for deed, count in deeds.items():
        phases[deed.phase] += times * count * machine.seconds(deed.what, deed.dtype, *deed.sizes)
    behind = max(0.0, machine.numbers["operator.backward"] - machine.numbers["operator.forward"])
    lanes = lanes_of(state.placement.structure, question.config, question.choices, moments_of(question), machine)
    again = times * len(recomputed_of(question)) * machine.numbers.get(f"recompute.{question.config.recompute.policy}", 0.0)
    lanes.host += _rested(question, machine)
    found = _assembled(phases, times * nodes * behind, lanes, again)
    if machine.device != "cpu":
        return replace(found, host=max(0.0, found.host - found.backward))
    kind = "bf16" if DTYPE_NBYTES[question.config.precision.param] == 2 else "fp32"
    return found.scaled(machine.numbers.get(f"whole.{kind}", 1.0))


def _rested(question: Question, machine: Machine) -> float:
    """Inputs of blocks that are computed again go to the host and come back."""
    facts, recompute = question.facts.architecture, question.config.recompute
    if not recompute.offload or facts is None or question.micro_batch is None or question.sequence is None:
        return 0.0
    nbytes = question.micro_batch * question.sequence * facts.hidden * DTYPE_NBYTES[question.config.precision.param]
    each = sum(machine.seconds(f"copy.{way}", host_kind(machine), nbytes) for way in ("down", "up"))
    return question.config.accumulate * len(recomputed_of(question)) * each


def _assembled(phases: Mapping[str, float], nodes: float, lanes: Lanes, again: float) -> StepSeconds:
    return StepSeconds(
        forward=phases.get("forward", 0.0),
        backward=phases.get("backward", 0.0) + nodes,
        recompute=phases.get("recompute", 0.0) + again,
        link=lanes.link,
        device=lanes.device,
        host=lanes.host,
        step=lanes.step,
        disk=max(0.0, lanes.disk - lanes.step),
    )


def _walked(question: Question, state: State) -> tuple[Counter[Deed], int]:
    """What one micro-batch's operators do, and how many nodes its backward comes to."""
    placement, tape = state.placement, Tape()
    assert placement is not None
    nothing = _Nothing()
    walk = Walk(tape, nothing, Working)
    ops = walk.ops
    assert isinstance(ops, Working)
    model = Decoder(setting_of(question), placement.weights, recomputed=recomputed_of(question), choose=choice_of(question))
    with no_collection():
        walk.micro_batch(lambda: model.loss(walk))
    return ops.deeds, ops.nodes


class _Nothing:
    """An engine that keeps nothing: what it does is `lanes`' business."""

    def enter_forward(self, unit: str) -> None: ...
    def leave_forward(self, unit: str) -> None: ...
    def enter_backward(self, unit: str) -> None: ...
    def back_in_root(self) -> None: ...
    def land(self, weight: Weight, gradient: Value) -> None: ...
    def end_backward(self) -> None: ...
    def step(self) -> None: ...
