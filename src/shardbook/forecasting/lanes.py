"""What the engine itself does in a step, in seconds: it sends, copies, adds up and steps, unit by unit.

The same life of a parameter as in docs/how-it-works.md, a line for each thing that is done to a flat buffer of P elements, of which a
rank has s, in N ranks and k micro-batches.
"""

from dataclasses import dataclass

from shardbook.accounts import Tier
from shardbook.config import ZeroConfig
from shardbook.facts.machine import Machine
from shardbook.forecasting.buffers import FlatForm, adds_locally, flat_form
from shardbook.forecasting.choices import Choices
from shardbook.forecasting.closed_form import Moments
from shardbook.forecasting.disk import NUM_SLOTS, plan
from shardbook.forecasting.homes import homes, is_lifted, keeps_shard
from shardbook.structure import Structure

_LEAST_MESSAGE = 4096
"""Bytes of a message whose time is all latency: that is counted with the unit."""


@dataclass(slots=True)
class Lanes:
    """Seconds of one step; ``disk`` goes on beside ``step``."""

    link: float = 0.0
    device: float = 0.0
    host: float = 0.0
    step: float = 0.0
    disk: float = 0.0


def lanes_of(structure: Structure, config: ZeroConfig, choices: Choices, moments: Moments, machine: Machine) -> Lanes:
    """Of one rank.

    Raises:
        ConfigError: the calibration lacks something.
    """
    maker = _Maker(config, choices, machine, structure.group.num_ranks)
    for unit in structure.units:
        forms = [flat_form(flat, config, structure.group) for flat in unit.flats]
        if forms:
            maker.unit()
        for form in forms:
            maker.parameters(form)
            if form.trainable:
                maker.gradients(form)
                maker.step(form)
    if homes(config).master is Tier.DISK:
        maker.disk(structure, moments)
    return maker.lanes


class _Maker:
    """Adds up the lanes."""

    def __init__(self, config: ZeroConfig, choices: Choices, machine: Machine, num_ranks: int) -> None:
        self.lanes = Lanes()
        self._config, self._choices, self._machine, self._others = config, choices, machine, num_ranks - 1
        self._micro = config.accumulate
        self._reductions = self._micro if config.stage >= 2 else 1
        self._homes, self._pinned = homes(config), host_kind(machine)
        self._beside = machine.numbers.get("link.beside", 1.0)

    def unit(self) -> None:
        """What a unit costs beside its bytes: hooks, calls, the latency of its messages."""
        kind = "gathered" if self._config.stage == 3 else "stay"
        numbers, times = self._machine.numbers, self._micro
        self.lanes.device += times * (numbers[f"unit.forward.{kind}"] + numbers[f"unit.backward.{kind}"]) + numbers[f"unit.step.{kind}"]
        if self._homes.master is Tier.HOST:
            self.lanes.host += numbers.get("unit.step.host", 0.0)

    def parameters(self, form: FlatForm) -> None:
        """Gathered in forward and backward, or sent around after the step."""
        shard = form.shard_numel * form.param_nbytes
        if self._config.stage == 3:
            copies = 2 * self._micro
            self._send(shard, copies)
            self.lanes.device += copies * self._copy(shard)  # the own shard into its place, from wherever it rests
        elif form.trainable and self._config.stage:
            self._send(shard, 1)

    def gradients(self, form: FlatForm) -> None:
        """Landed, reduced, and added up in rank order; away where the optimizer is."""
        full, shard = form.full_numel * form.wire_nbytes, form.shard_numel * form.wire_nbytes
        adds = adds_locally(self._config)
        self.lanes.device += self._copy(full) + (self._micro - 1) * (self._pass(3 * full) if adds else self._copy(full))
        again = self._reductions - 1
        self._send(shard, self._reductions)
        if self._others:
            self.lanes.device += self._others * self._reductions * self._seconds("add", form.shard_numel)
        self.lanes.device += again * self._pass(3 * form.shard_numel * form.grad_nbytes)
        if self._config.stage == 0:
            self._send(form.shard_numel * form.grad_nbytes, 1)
        if self._homes.grad is Tier.HOST:
            self.lanes.host += self._reductions * self._down(form.shard_numel * form.grad_nbytes)
            self.lanes.host += again * self._up(form.shard_numel * form.grad_nbytes)

    def step(self, form: FlatForm) -> None:
        """Norm, scale, the optimizer, and the way of the new values to where they rest."""
        numel = form.shard_numel if self._config.stage else form.full_numel
        stepped = form.stepped_nbytes
        lane = self._seconds("squares", form.shard_numel)
        lane += self._copy(numel * form.grad_nbytes)  # scaled in place
        lane += sum(self._optimizer(piece, stepped) for piece in form.pieces)
        self.lanes.step += lane
        self._publish(form, numel)

    def _publish(self, form: FlatForm, numel: int) -> None:
        """New values go to where parameters rest, if that is not where they were stepped on."""
        rests_apart = self._config.stage < 3 or keeps_shard(form, self._config)
        published = numel * form.param_nbytes
        if self._homes.steps is Tier.HOST:
            self.lanes.host += self._up(published) if rests_apart else 0.0
        elif self._homes.param is Tier.HOST:
            self.lanes.host += self._down(published) + (self._up(published) if is_lifted(form, self._config) else 0.0)
        elif form.master_nbytes and rests_apart:
            self.lanes.step += self._pass(numel * (form.stepped_nbytes + form.param_nbytes))

    def disk(self, structure: Structure, moments: Moments) -> None:
        """States come and go beside the step, but for what was read before it begins, and what is written after it ends."""
        chunks = plan(structure, self._config, moments.per_element, moments.quantised_nbytes)
        waited = chunks.chunk_nbytes[NUM_SLOTS:] or chunks.chunk_nbytes[-1:]
        self.lanes.disk = sum(self._machine.seconds("disk.both", "", nbytes) for nbytes in waited)
        self.lanes.disk += chunks.num_pieces * self._machine.numbers.get("disk.piece", 0.0)

    # ---- rates -----------------------------------------------------------------------------------------------------------

    def _send(self, nbytes: int, times: int) -> None:
        """To each other rank, and as much from each; behind a computation but for a share that is waited for."""
        if self._others and self._machine.knows("link"):
            took = self._machine.seconds("link", "", nbytes) - self._machine.seconds("link", "", _LEAST_MESSAGE)
            scale = self._others / max(1, self._machine.ranks - 1)
            self.lanes.link += max(0.0, took) * scale * times * self._beside

    def _optimizer(self, numel: int, width: int) -> float:
        name = self._choices.optimizer if self._choices.optimizer.startswith("sgd") else f"adamw-{self._choices.kernel}"
        dtype = "bf16" if width == 2 and name == "adamw-fused" else "fp32"
        away = f"host.optimizer.{name}"
        what = away if self._homes.steps is Tier.HOST and self._machine.knows(away, dtype) else f"optimizer.{name}"
        return self._machine.seconds(what, dtype, numel)

    def _seconds(self, what: str, numel: int) -> float:
        return self._machine.seconds(what, "fp32", numel)

    def _copy(self, nbytes: int) -> float:
        """Read and written once, into memory that is there."""
        return self._down(nbytes) if self._machine.device == "cpu" else self._pass(2 * nbytes)

    def _pass(self, nbytes: int) -> float:
        return self._machine.seconds("pass", "fp32", nbytes)

    def _down(self, nbytes: int) -> float:
        return self._machine.seconds("copy.down", self._pinned, nbytes)

    def _up(self, nbytes: int) -> float:
        return self._machine.seconds("copy.up", self._pinned, nbytes)


def host_kind(machine: Machine) -> str:
    """The host's memory that copies cross the link from and to: pinned, where that makes a difference."""
    return "pinned" if machine.knows("copy.down", "pinned") else "pageable"
