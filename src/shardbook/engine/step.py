"""The step: one exchange between the ranks, one scale, one call of the optimizer, and new values where parameters rest."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardbook.accounts import Account
from shardbook.engine import numerics
from shardbook.engine.comm import Collectives
from shardbook.engine.context import Context
from shardbook.engine.disk_step import DiskStep
from shardbook.engine.exchange import Totals, add_up, assumed, pack, to_fp32
from shardbook.engine.flat import Flat, Piece
from shardbook.engine.host_step import host_threads, planned_threads
from shardbook.engine.link import Link
from shardbook.engine.optimizer import PieceOptimizer
from shardbook.engine.passes import Passes
from shardbook.engine.report import StepReport
from shardbook.engine.schedule import digest
from shardbook.engine.storage import is_memory_known
from shardbook.engine.unit import Unit
from shardbook.errors import DivergenceError

_log = logging.getLogger("shardbook")


class Stepper:
    """Makes the step out of what the passes have left: reduced gradients, a tally, and orders to agree on."""

    def __init__(
        self, context: Context, names: Sequence[str], units: Sequence[Unit], pieces: PieceOptimizer, passes: Passes,
        disk_step: DiskStep | None = None,
    ) -> None:  # fmt: skip
        self._disk, self._disk_step = context.disk, disk_step
        self._config, self._residency, self._homes = context.config, context.residency, context.homes
        self._link: Link = context.link
        steps_beside_gpu = context.homes.optimizer_away and context.storage.device.type == "cuda"
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count() or 1)) if steps_beside_gpu else 1
        self._num_threads = planned_threads(local_ranks) if steps_beside_gpu else 0  # 0: as it is
        self._transport, self._storage, self._journal = context.transport, context.storage, context.journal
        self._names, self._units, self._pieces, self._passes = tuple(names), tuple(units), pieces, passes
        scale: Any = context.config.effective_loss_scale
        self.loss_scale = LossScale(2.0**16, dynamic=True) if scale == "dynamic" else LossScale(float(scale), dynamic=False)
        passes.loss_scale = self.loss_scale.value

    def step(self) -> StepReport:
        """Exchange, then scale, step and publish; or skip, on every rank alike, where something is not finite."""
        if self._disk is not None:
            self._disk.check_whole()
        self._journal.mark("step", "", "begin")
        try:
            report = self._make_step()
        except BaseException:
            self._journal.mark("abandoned", "", "begin")
            self._journal.mark("abandoned", "", "end")
            raise
        self._journal.mark("step", "", "end")
        return report

    def _make_step(self) -> StepReport:
        totals = self._exchange()
        loss_scale, rates = self.loss_scale.value, self._pieces.learning_rates
        norm, clip_factor, scale = scale_of(totals.raw_norm, totals.weight, loss_scale, self._config.clip_grad_norm)
        nonfinite = None
        if not totals.is_finite:
            nonfinite = "loss" if totals.first_nonfinite is None else self._names[totals.first_nonfinite]
            _log.warning("step not applied: non-finite %s", nonfinite if nonfinite == "loss" else f"gradient of {nonfinite!r}")
        report = StepReport(applied=totals.is_finite, loss=totals.loss, weight=totals.weight, grad_norm=norm, clip_factor=clip_factor,
                            learning_rates=rates, loss_scale=loss_scale, nonfinite=nonfinite)  # fmt: skip
        self._passes.report = report  # there while the optimizer steps: whoever watches that sees what its gradients were divided by
        if totals.is_finite:
            self._step_pieces(scale, totals.has_gradient)
        self.loss_scale.update(applied=totals.is_finite)
        self._passes.loss_scale = self.loss_scale.value
        return report

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats if flat.trainable]

    def _exchange(self) -> Totals:
        """The step's one exchange between ranks, and its one read from the device."""
        passes, orders = self._passes, (self._passes.forward_order, self._passes.backward_order, self._passes.reduce_order)
        numbers, squares = self._sum_squares()
        has_gradient = [False] * len(self._names)
        for flat in self._flats:
            for member, flag in zip(flat.members, flat.has_gradient, strict=True):
                has_gradient[member.number] = flag
        mismatch = self._transport.mismatch if isinstance(self._transport, Collectives) else None
        entries = [passes.entered[name, unit.index] for name in ("forward", "backward") for unit in self._units]
        digests = [*(order.digest() for order in orders), digest(entries)]
        vector = pack(passes.tally, squares, mismatch, numbers, digests, has_gradient)
        self._journal.mark("exchange", "", "begin")
        gathered = self._transport.exchange(vector, "the step")
        self._journal.mark("exchange", "", "end")
        if is_memory_known(gathered):
            totals = add_up(gathered.tolist(), len(self._names), len(digests))
        else:
            totals = assumed(passes.tally, has_gradient, self._transport.num_ranks, len(digests))
        if totals.mismatch:
            raise DivergenceError(
                "ranks took part in one collective with different operations (the headers differ); "
                "all ranks must enter the same units in each step"
            )
        if not self._residency.full_parameters and not totals.digests_agree[-1]:
            self._raise_different_entries(entries)
        for order, agreed in zip(orders, totals.digests_agree[:-1], strict=True):
            order.settle(agreed=agreed)
        return totals

    def _raise_different_entries(self, entries: Sequence[int]) -> None:
        """Where units are gathered, all ranks must enter the same ones: name the first that some rank did not."""
        rows = self._transport.exchange(torch.tensor(entries, dtype=torch.float64, device=self._storage.device), "the step").tolist()
        for index, counts in enumerate(zip(*rows, strict=True)):
            if len(set(counts)) > 1:
                unit, which = self._units[index % len(self._units)].name, "forward" if index < len(self._units) else "backward"
                each = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(counts))
                raise DivergenceError(
                    f"the ranks did not enter the same units in this step: {which} entered unit {unit!r} not equally often ({each}); "
                    f"where parameters are sharded every rank must enter each unit that another enters. The step was not applied"
                )

    def _sum_squares(self) -> tuple[list[int], Tensor]:
        """Numbers of the parameters that lie in this rank's shards, and the sums of their squared gradients there, in float64."""
        self._link.settle()
        make = self._storage.away_buffer if self._homes.optimizer_away else self._storage.buffer
        scratch = make(Account.WORKSPACE, "root", numerics.BLOCK_NUMEL, torch.float64)
        numbers: list[int] = []
        sums: list[Tensor] = []
        for flat in self._flats:
            for member, span, gradient in flat.own_gradients():
                numbers.append(member.number)
                sums.append(numerics.sum_of_squares(gradient, span.start, scratch.tensor))
        scratch.give_back()
        squares = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=self._storage.device)
        return numbers, squares.to(self._storage.device)

    def _step_pieces(self, scale: float, has_gradient: Sequence[bool]) -> None:
        """Scale the gradients, step on the pieces, and bring the new values to wherever parameters rest."""
        if self._homes.optimizer_away or self._homes.params_away:
            with host_threads(self._num_threads) if self._num_threads else nullcontext():
                if self._disk_step is not None:
                    self._pieces.step_in_parts(self._disk_step.parts(self._units, scale, has_gradient, self._settle))
                else:
                    self._pieces.step_in_parts(self._parts(scale, has_gradient))
            return
        temporary = [
            flat.scaled_gradients(scale, [has_gradient[member.number] for member in flat.members])
            for flat in self._flats
            if flat.layout.numel
        ]
        self._pieces.step()
        for buffer in temporary:
            if buffer is not None:
                buffer.give_back()
        for unit in self._units:
            self._settle(unit)

    def _parts(self, scale: float, has_gradient: Sequence[bool]) -> Iterator[Sequence[Piece]]:
        """The step, a flat buffer at a time.

        What is kept elsewhere comes and goes, and a unit's new values leave before the next unit is stepped on.
        """
        for unit in self._units:
            for flat in unit.stepped:
                flat.enter_step()
                cast = flat.scaled_gradients(scale, [has_gradient[member.number] for member in flat.members])
                yield flat.pieces
                if cast is not None:
                    cast.give_back()
                flat.leave_step()
            self._settle(unit)

    def _settle(self, unit: Unit) -> None:
        """The optimizer is done with the unit: its gradients go, and its new values are sent to wherever they are needed."""
        unit.forget_gradients()
        if unit.is_trainable:
            unit.publish()
            unit.changed()
            if self._residency.refreshes:
                unit.refresh()


@dataclass(slots=True)
class LossScale:
    """The factor on fp16 losses. Dynamic: halved when a step overflows, doubled after 2,000 good steps in a row."""

    value: float
    dynamic: bool
    num_good: int = 0

    def update(self, *, applied: bool) -> None:
        if not self.dynamic:
            return
        if not applied:
            self.value, self.num_good = max(self.value / 2, 2.0**-24), 0
            return
        self.num_good += 1
        if self.num_good == 2000:
            self.value, self.num_good = min(self.value * 2, 2.0**24), 0


def scale_of(raw_norm: float, weight: float, loss_scale: float, clip: float | None) -> tuple[float, float, float]:
    """(gradient norm of the objective, clip factor, the one factor on the summed gradients, rounded to fp32), from float64 arithmetic."""
    divisor = weight * loss_scale
    norm = raw_norm / divisor
    clip_factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return norm, clip_factor, to_fp32(clip_factor / divisor)
