"""A unit: the parameters that are gathered and released together, and the gradients that are reduced together.

Two small state machines, drawn here with what each state costs on a rank (P: the unit's parameters in bytes).

    parameters   AWAY ──fetch──▶ ARRIVING ──wait──▶ HERE ──release──▶ AWAY
                 shard only       P + shard          P + shard

    Where parameters stay full there is no AWAY: HERE ──refresh──▶ ARRIVING ──wait──▶ HERE, at P throughout.

    gradients    NONE ──land──▶ LANDING ──launch──▶ REDUCING ──finish──▶ REDUCED
                 0              unreduced            + receive            grad

A transition does its copies (`flat`) and messages (`comm`); when it happens is decided by the engine and `schedule`.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Literal

from torch import Tensor, nn

from shardbook.engine.comm import Pending
from shardbook.engine.context import Context
from shardbook.engine.flat import Flat, Member
from shardbook.engine.guard import Guard
from shardbook.engine.journal import Journal
from shardbook.engine.storage import Buffer
from shardbook.errors import UsageError
from shardbook.events import MarkName


class Presence(Enum):
    """Where the values of the parameters are."""

    AWAY = auto()
    ARRIVING = auto()
    HERE = auto()


class Served:
    """A gather that this rank only serves: its messages, and the buffers they are sent from."""

    def __init__(self, works: Sequence[tuple[Pending, Buffer | None]], journal: Journal, unit: str) -> None:
        self._works, self._journal, self._unit = works, journal, unit

    def wait(self) -> None:
        if self._works:
            self._journal.mark("serve.wait", self._unit, "begin")
        for pending, buffer in self._works:
            pending.wait()
            if buffer is not None:
                buffer.give_back()
        if self._works:
            self._journal.mark("serve.wait", self._unit, "end")


class Unit:
    """See the file's header. ``modules`` are those whose forward needs the unit; ``ancestors`` the units around it."""

    def __init__(
        self, context: Context, index: int, name: str, modules: Sequence[nn.Module], flats: Sequence[Flat], ancestors: Sequence[int]
    ) -> None:
        self.index, self.name, self.modules, self.ancestors = index, name, tuple(modules), frozenset(ancestors)
        self._residency, self._transport, self._journal = context.residency, context.transport, context.journal
        self._arriving: list[Pending] = []
        self._reducing: list[Pending] = []
        self._returning: list[Pending] = []
        self.presence = Presence.HERE
        self.pins = 0  # gathered by hand: not released until unpinned
        self.in_use = 0  # forwards that have been entered and not left
        self.in_backward = False
        self.reduced = False  # in this micro-batch
        self.is_closed = False  # in this micro-batch: no further gradient will come
        self.num_calls = 0  # forwards since the last backward that a backward can come back to
        self.num_returns = 0  # of them, those it has come back to
        self.hold(flats)

    def hold(self, flats: Sequence[Flat]) -> None:
        """Take these flat buffers, whose parameters are HERE."""
        self.flats = tuple(flats)
        self._trainable = tuple(flat for flat in flats if flat.trainable)
        guarded = [(member.name, member.parameter, flat.trainable) for flat in flats for member in flat.members]
        self._guard = Guard(self.name, guarded, self._complete_on_read)
        self._landed = [[False] * len(flat.members) for flat in self._trainable]  # in this micro-batch
        self._num_missing = self._num_members = sum(len(flat.members) for flat in self._trainable)

    @property
    def full_nbytes(self) -> int:
        return sum(flat.full.nbytes for flat in self.flats)

    @property
    def is_trainable(self) -> bool:
        return bool(self._trainable)

    @property
    def is_frozen_in_part(self) -> bool:
        return len(self._trainable) < len(self.flats)

    def is_related_to(self, other: "Unit") -> bool:
        """Whether one lies inside the other, or they are the same."""
        return self is other or self.index in other.ancestors or other.index in self.ancestors

    @property
    def members(self) -> list[tuple[Flat, int, Member]]:
        return [(flat, index, member) for flat in self.flats for index, member in enumerate(flat.members)]

    # ---- parameters ---------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """AWAY → ARRIVING: memory for the full parameters, own shard in place, messages under way."""
        if self.presence is not Presence.AWAY:
            return
        self._mark("gather", "begin")
        self._arriving = [flat.gather() for flat in self.flats if flat.layout.numel]
        self.presence = Presence.ARRIVING
        self._mark("gather", "end")

    def refresh(self) -> None:
        """HERE → ARRIVING: every rank has new values in its own shard of the full parameters; send them around."""
        self._guard.close()
        self._journal.mark("refresh", self.name, "begin")
        self._arriving = [flat.send_around(flat.full, "refresh") for flat in self._trainable if flat.layout.numel]
        self.presence = Presence.ARRIVING
        self._journal.mark("refresh", self.name, "end")

    def wait(self) -> None:
        """→ HERE, whatever the state."""
        self.fetch()
        if self.presence is Presence.ARRIVING:
            mark: MarkName = "refresh.wait" if self._residency.full_parameters else "gather.wait"
            self._mark(mark, "begin")
            while self._arriving:
                self._arriving[0].wait()
                self._arriving.pop(0)
            self._guard.open()
            self.presence = Presence.HERE
            self._mark(mark, "end")

    def _mark(self, name: MarkName, edge: Literal["begin", "end"]) -> None:
        """Tell of a collective, which a unit without parameters has none of (a root whose children hold all)."""
        if self.flats:
            self._journal.mark(name, self.name, edge)

    def release(self) -> None:
        """HERE → AWAY: free the full parameters, unless they stay."""
        if self._residency.full_parameters or self.pins or self.in_use or self.presence is Presence.AWAY:
            return
        self.wait()
        self._guard.close()
        for flat in self.flats:
            flat.full.give_back()
        self.presence = Presence.AWAY

    def serve(self, sink: Tensor) -> "Served":
        """Take part in one gather of the other ranks without keeping what arrives: this rank has no data."""
        self._mark("serve", "begin")
        works = [flat.serve(sink) for flat in self.flats if flat.layout.numel]
        self._mark("serve", "end")
        return Served(works, self._journal, self.name)

    def abandon_gather(self) -> list[Pending]:
        """Give up a gather under way, as :meth:`abandon_reduction`."""
        if self.presence is not Presence.ARRIVING or self._residency.full_parameters:
            return []
        left, self._arriving, self.presence = self._arriving, [], Presence.AWAY
        for flat in self.flats:
            flat.full.leave()
            flat.full.give_back()
        return left

    def leave(self) -> None:
        """Release, but let whoever took a view of the full parameters keep what it saw."""
        if not self._residency.full_parameters and not self.pins and not self.in_use and self.presence is Presence.HERE:
            self._guard.close()
            for flat in self.flats:
                flat.full.leave()
                flat.full.give_back()
            self.presence = Presence.AWAY

    def changed(self) -> None:
        """The step (or a person, through the engine) has changed the values: older graphs must not use them."""
        self._guard.bump()
        for flat in self.flats:
            flat.note_versions()

    def check_untouched(self) -> None:
        """Parameters that stay full can be written to, or given other memory, where the engine does not see it: say so."""
        if self._residency.full_parameters and self.presence is Presence.HERE:
            for flat in self.flats:
                flat.check_untouched()

    @property
    def stepped(self) -> tuple[Flat, ...]:
        """What the optimizer steps on."""
        return tuple(flat for flat in self._trainable if flat.layout.numel)

    def publish(self) -> None:
        """The optimizer has stepped: its new values go to wherever the parameters rest."""
        for flat in self._trainable:
            flat.publish()

    def _complete_on_read(self, name: str) -> bool:
        """A read outside forward: what is under way to this rank may be awaited, but nothing may be asked of other ranks."""
        if self._num_members and self.is_complete:
            raise UsageError(f"parameter {name!r} is used after {self._two_passes}")
        if not self._residency.full_parameters:
            return False
        self.wait()
        return True

    @property
    def _two_passes(self) -> str:
        return (
            f"all gradients of unit {self.name!r} had arrived in this micro-batch: the unit takes part in two backward passes (reentrant "
            f"checkpoints do that); use torch.utils.checkpoint with use_reentrant=False, or one checkpoint around the unit"
        )

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def land(self, flat_index: int, index: int, gradient: Tensor, *, adds_locally: bool) -> bool:
        """Take one gradient; returns whether it was the last that the unit waits for in this micro-batch."""
        flat, landed = self._trainable[flat_index], self._landed[flat_index]
        if self.reduced:
            raise UsageError(f"a gradient for {flat.members[index].name!r} arrived after {self._two_passes}")
        again = landed[index] or (adds_locally and flat.has_gradient[index])
        flat.land(index, gradient, add=again)
        if not landed[index]:
            landed[index] = True
            self._num_missing -= 1
        return self._num_missing == 0

    @property
    def is_complete(self) -> bool:
        """Every trainable parameter has its gradient of this micro-batch."""
        return self._num_missing == 0

    def launch(self) -> None:
        """LANDING → REDUCING: send every rank its part."""
        self._journal.mark("reduce", self.name, "begin")
        for flat, landed in zip(self._trainable, self._landed, strict=True):
            flat.fill_missing(landed if not self._residency.full_gradients else flat.has_gradient)
            if flat.layout.numel:
                self._reducing.append(self._transport.reduce(flat.unreduced.tensor, flat.take_receive(), flat.channel))
        self.reduced = True
        self._journal.mark("reduce", self.name, "end")

    def finish(self) -> None:
        """REDUCING → REDUCED: the own shard is added up; where gradients stay full everywhere, it is sent around."""
        self._journal.mark("reduce.wait", self.name, "begin")
        for pending in self._reducing:
            pending.wait()
        self._reducing = []
        self._journal.mark("reduce.wait", self.name, "end")  # adding up is work, not waiting
        for flat in self._trainable:
            if flat.layout.numel:
                flat.add_up()
        if self._residency.full_optimizer:
            self._journal.mark("return", self.name, "begin")
            self._returning += [flat.send_around(flat.grad, "return") for flat in self._trainable if flat.layout.numel]
            self._journal.mark("return", self.name, "end")

    def finish_return(self) -> None:
        """The reduced gradients of all shards are here, where every rank steps on all of them."""
        if self._returning:
            self._journal.mark("return.wait", self.name, "begin")
            for pending in self._returning:
                pending.wait()
            self._returning = []
            self._journal.mark("return.wait", self.name, "end")

    def forget_gradients(self) -> None:
        """Nothing of the step's gradients is left."""
        for flat in self.flats:
            flat.forget_gradients()

    def abandon_reduction(self) -> list[Pending]:
        """Give up a reduction under way, without waiting for ranks that may never send; returns what must be kept until the group ends."""
        left = [*self._reducing, *self._returning]
        if left:
            for flat in self._trainable:
                flat.leave_gradients()
        self._reducing, self._returning = [], []
        return left

    def end_micro_batch(self) -> None:
        """Nothing has landed yet in the next micro-batch."""
        self.reduced = self.is_closed = self.in_backward = False
        self.num_calls = self.num_returns = 0
        self._landed = [[False] * len(flat.members) for flat in self._trainable]
        self._num_missing = self._num_members
