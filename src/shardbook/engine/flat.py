"""One flat buffer of a unit: its memory in each state, and the copies between them.

Six kinds of tensor, all flat. ``full`` holds every parameter of the buffer (the model's parameters are views of it); ``shard`` is
this rank's 1/N in the same type, where it is kept; ``master`` is what the optimizer updates, when that is another type;
``unreduced`` collects the gradients of one micro-batch (or of several, added locally); ``grad`` holds the reduced gradient until
the step; ``leaving``, where that is on the host, what is on its way there. This file knows sizes and copies; when they happen is
`unit`'s, and what the ranks send is `comm`'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.engine import numerics
from shardbook.engine.comm import Channel, Pending
from shardbook.engine.context import Context
from shardbook.engine.disk import Chunk, Form
from shardbook.engine.journal import Kind
from shardbook.engine.layout import FlatLayout, Span
from shardbook.engine.policy import Types
from shardbook.engine.storage import Buffer
from shardbook.errors import UsageError


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of the buffer, with the form it has in the model."""

    name: str
    parameter: nn.Parameter
    number: int  # position among all parameters of the model
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What the optimizer steps on: the part of one parameter that this rank updates, or of that, what one chunk has on the disk."""

    member: Member
    span: Span
    parameter: nn.Parameter
    chunk: Chunk | None = None


class Flat:
    """The parameters of one unit that share their types and are all trainable or all frozen."""

    def __init__(
        self, context: Context, unit: str, number: int, members: Sequence[Member], layout: FlatLayout, types: Types, *, trainable: bool
    ) -> None:
        self.unit, self.members, self.types, self.trainable = unit, tuple(members), types, trainable
        self._residency, self._homes, self._link = context.residency, context.homes, context.link
        self._transport, self._storage = context.transport, context.storage
        self.layout = layout
        self.channel = Channel(number, unit if trainable else f"{unit} (frozen)")
        self._first, self._end = self.layout.bounds(self._transport.rank)
        stays, homes = self._residency.full_parameters, self._homes
        self._is_away = homes.optimizer_away and trainable  # master, moments and reduced gradient
        has_master = homes.makes_master(has_master=types.master is not None, trainable=trainable)
        has_shard = not stays and homes.makes_shard(makes_master=has_master, keeps_both=context.config.precision.keep_param_shard)
        self.full = self._buffer(Account.PARAM if stays else Account.GATHERED, types.param)
        self.shard = self._buffer(Account.PARAM, types.param, sharded=True, away=homes.params_away) if has_shard else None
        self.master = self._make_master(types.master or types.param) if has_master else None
        # a shard that is its own master and rests on the host is stepped on in memory of the device
        self._lifted = self._make_lifted() if trainable and homes.params_away and self.master is None and not stays else None
        self._disk = context.disk
        self.chunks = self._lay_out_on_disk() if homes.optimizer_on_disk and trainable and layout.numel else ()
        self.pieces: tuple[Piece, ...] = self._make_pieces() if trainable else ()
        self.has_gradient = [False] * len(members)  # in this step
        self._versions: list[int] = []
        if trainable:
            self._prepare_gradients(context.adds_locally)

    # ---- parameters ---------------------------------------------------------------------------------------------------

    def adopt(self, source: Tensor) -> None:
        """Take the initial values from a flat tensor in the source type, and make the model's parameters views of ``full``.

        The master is copied from the unrounded values.
        """
        self.full.take().copy_(source)
        if self.shard is not None:
            self.shard.tensor.copy_(source[self._first : self._end])
        if self.master is not None:
            self.master.tensor.copy_(source if self._residency.full_optimizer else source[self._first : self._end])
        for chunk, master in self._masters(reads=False):
            master.copy_(source[self._first + chunk.begin : self._first + chunk.end])
        for member, slot in zip(self.members, self.layout.slots, strict=True):
            self.full.place(member.parameter, slot.offset, member.shape, member.stride)
        self.note_versions()

    @property
    def stays_full(self) -> bool:
        """Whether the full parameters are here between their uses."""
        return self._residency.full_parameters

    @property
    def _resting(self) -> Buffer | None:
        """Where this rank's shard rests while the full parameters are away."""
        return self.master if self.shard is None else self.shard

    def gather(self) -> Pending:
        """Send the own shard and let all of ``full`` be filled."""
        full, resting = self.full.take(), self._resting
        assert resting is not None, "parameters that stay full are never gathered"
        own = self.own(self.full)
        if resting.is_away:
            self._link.up(own, resting.tensor, self.unit)
            return self._transport.gather(full, own, self.channel, "gather")
        if resting.tensor.dtype == own.dtype and self._transport.sends_from_anywhere:
            pending = self._transport.gather(full, resting.tensor, self.channel, "gather")  # under way before the copy
            own.copy_(resting.tensor)
            return pending
        own.copy_(resting.tensor)
        return self._transport.gather(full, own, self.channel, "gather")

    def serve(self, sink: Tensor) -> tuple[Pending, Buffer | None]:
        """Send the own shard to a gather of the others; what they send falls into ``sink`` (bytes), which nobody reads."""
        resting, cast = self._resting, None
        assert resting is not None, "parameters that stay full are never gathered"
        source = resting.tensor
        if resting.is_away or source.dtype != self.types.param or not self._transport.sends_from_anywhere:  # a header is written there
            cast = self._buffer(Account.COMM, self.types.param, sharded=True)
            if resting.is_away:
                self._link.up(cast.tensor, source, self.unit)
            else:
                cast.tensor.copy_(source)
            source = cast.tensor
        full = sink[: self.full.nbytes].view(self.types.param)
        return self._transport.gather(full, source, self.channel, "gather"), cast

    def send_around(self, buffer: Buffer, kind: Kind) -> Pending:
        """Every rank has filled its own part of the buffer: fill the rest."""
        return self._transport.gather(buffer.tensor, self.own(buffer), self.channel, kind)

    def publish(self) -> None:
        """After the optimizer's step: bring the master's new values to wherever parameters rest in their own type."""
        if self.master is None:
            return
        if self._residency.full_parameters:
            self._copy(
                self.full.tensor if self._residency.full_optimizer else self.own(self.full), self.full, self.master.tensor, self.master
            )
        elif self.shard is not None:
            self._copy(self.shard.tensor, self.shard, self.master.tensor, self.master)

    def publish_part(self, chunk: Chunk, master: Tensor) -> None:
        """The same of a chunk, whose new values are in ``master`` on the host."""
        there = self.full if self._residency.full_parameters else self.shard
        assert there is not None, "what is gathered rests as a shard while its master is on a disk"
        target = (self.own(there) if there is self.full else there.tensor)[chunk.begin : chunk.end]
        if there.is_away:
            target.copy_(master)
        else:
            self._link.up(target, master, self.unit)

    def visited(self, *, reads: bool = True) -> Iterator[tuple[Chunk, Tensor]]:
        """Each chunk with the memory that has it, to be changed: it goes back to the disk when the next one is asked for."""
        if self._disk is not None and self.chunks:
            with self._disk.changing("a change of the weights"):
                yield from self._disk.visit(self.chunks, reads=reads)

    def _masters(self, *, reads: bool = True) -> Iterator[tuple[Chunk, Tensor]]:
        for chunk, memory in self.visited(reads=reads):
            yield chunk, chunk.master(memory, chunk.begin, chunk.end - chunk.begin)

    def _copy(self, target: Tensor, there: Buffer, source: Tensor, here: Buffer) -> None:
        """Between two buffers, over the link where they lie in different tiers."""
        if there.is_away == here.is_away:
            target.copy_(source)
        elif there.is_away:
            self._link.down(target, source if source.dtype == target.dtype else source.to(target.dtype), self.unit)
        else:
            self._link.up(target, source, self.unit)

    def note_versions(self) -> None:
        """The values are as the engine left them."""
        if self._residency.full_parameters and (self.master is not None or self._is_away):
            self._versions = [member.parameter._version for member in self.members]

    def check_untouched(self) -> None:
        """Raise where a parameter has other memory than the engine gave it, or was written to although a master will overwrite it."""
        storage = self.full.tensor.untyped_storage()._cdata
        for index, member in enumerate(self.members):
            moved = member.parameter.untyped_storage()._cdata != storage
            if moved or (self._versions and self._versions[index] != member.parameter._version):
                what = (
                    "was given other memory or another type"
                    if moved
                    else "was written to, and its master would overwrite that at the next step"
                )
                raise UsageError(
                    f"parameter {member.name!r} {what}, outside of the engine; change values inside "
                    f"'with engine.gathered(module, write_back=True):', on every rank"
                )

    def write_back(self) -> None:
        """Full values were changed by hand: take them over, leaving a master alone where its rounded value still stands."""
        mine = self.own(self.full)
        if self.shard is not None:
            self.shard.tensor.copy_(mine)
        if self.master is not None:
            _take_over(self.master.tensor, self.full.tensor if self._residency.full_optimizer else mine)
        for chunk, master in self._masters():
            _take_over(master, mine[chunk.begin : chunk.end])

    def own(self, buffer: Buffer) -> Tensor:
        """This rank's part of a buffer that has all shards."""
        return buffer.tensor[self._first : self._end]

    def slot_view(self, buffer: Buffer, index: int) -> Tensor:
        """One parameter inside a buffer that has all shards, in its own shape."""
        slot, member = self.layout.slots[index], self.members[index]
        return buffer.tensor.as_strided(member.shape, member.stride, slot.offset)

    # ---- gradients ----------------------------------------------------------------------------------------------------

    def land(self, index: int, gradient: Tensor, *, add: bool) -> None:
        """A gradient from autograd takes its place in ``unreduced``."""
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self.unreduced.take()
        if add:
            self._gradient_views[index].add_(gradient)
        else:
            self._gradient_views[index].copy_(gradient)
        self.has_gradient[index] = True

    def fill_missing(self, landed: Sequence[bool]) -> None:
        """Parameters without a gradient add nothing to the sum over ranks."""
        self.unreduced.take()
        for view, there in zip(self._gradient_views, landed, strict=True):
            if not there:
                view.fill_(numerics.NOTHING)

    def take_receive(self) -> Tensor:
        return self._receive.take()

    def add_up(self) -> None:
        """The ranks' parts have arrived: add them in rank order into ``grad`` and free what they lay in."""
        parts = self._transport.parts(self.unreduced.tensor, self._receive.tensor)
        if self._is_away:
            self._leave_device(parts)
            return
        again = self.grad.present and not self._shares
        if self._shares:
            self.grad.rebook(Account.GRAD)
        self.grad.take()
        out = self._own_gradient
        in_place_already = self._shares and parts[0] is self.unreduced.tensor  # one rank alone
        if not in_place_already:
            self._add(out, parts, again=again)
        self._receive.give_back()
        if not self._shares:
            self.unreduced.give_back()

    def _leave_device(self, parts: Sequence[Tensor]) -> None:
        """Add the parts to what the host has of this step's gradient: on the device, in the order in which they would be added there."""
        again, leaving = self.grad.present and self._has_left, self._leaving.take()
        self.grad.take()
        if again:
            self._link.up(leaving, self.grad.tensor, self.unit)
        self._add(leaving, parts, again=again)
        self._receive.give_back()
        self.unreduced.give_back()
        self._link.down(self.grad.tensor, leaving, self.unit)
        self._leaving.give_back()
        self._has_left = True

    def _add(self, out: Tensor, parts: Sequence[Tensor], *, again: bool) -> None:
        """Add the parts into ``out``: directly where neither its type, its memory nor what it holds stands in the way."""
        reused_too_early = self._shares and self._transport.num_ranks > 2  # one of the later parts lies in ``out``
        if not again and out.dtype == self.types.reduce and not reused_too_early:
            numerics.add_in_order(out, parts, None, add_to_out=False)
            return
        scratch = self._storage.buffer(Account.WORKSPACE, self.unit, min(numerics.CHUNK_NUMEL, out.numel()), self.types.reduce)
        numerics.add_in_order(out, parts, scratch.tensor, add_to_out=again)
        scratch.give_back()

    def scaled_gradients(self, scale: float, has_gradient: Sequence[bool], chunk: Chunk | None = None) -> Buffer | None:
        """Give every piece (of the chunk) its share of the gradient times ``scale``; returns a buffer to give back after the step, if one
        was needed.
        """
        pieces, first = (self.pieces, 0) if chunk is None else (self.pieces_in(chunk), chunk.begin)
        target = pieces[0].parameter.dtype if pieces else self.types.grad
        source, cast = self._stepped_gradients, None
        if chunk is not None:
            source = source[chunk.begin : chunk.end]
        if target == source.dtype:
            source.mul_(scale)
        else:
            cast = self._stepping_buffer(source.numel(), target)
            if target.itemsize > source.dtype.itemsize:  # one rounding either way: in the wider type, then to the narrower
                cast.tensor.copy_(source).mul_(scale)
            else:
                torch.mul(source, scale, out=cast.tensor)
            source = cast.tensor
        for piece in pieces:
            if has_gradient[piece.span.slot]:
                begin = piece.span.offset - first
                piece.parameter.grad = source[begin : begin + piece.span.numel]
        return cast

    def enter_step(self) -> None:
        """The optimizer is about to step on these pieces: what the device steps on and the host holds comes to the device."""
        if self._lifted is not None and self.shard is not None:
            self._link.up(self._lifted.take(), self.shard.tensor, self.unit)
            self._put_pieces(self._lifted)

    def leave_step(self) -> None:
        """The optimizer has stepped."""
        if self._lifted is not None and self.shard is not None:
            self._link.down(self.shard.tensor, self._lifted.tensor, self.unit)
            self._put_pieces(self.shard)
            self._lifted.give_back()

    def _put_pieces(self, buffer: Buffer) -> None:
        """Let the pieces have their values in this buffer of a shard."""
        for piece in self.pieces:
            piece.parameter.data = buffer.tensor[piece.span.offset : piece.span.offset + piece.span.numel]

    def gradients(self) -> list[tuple[str, Tensor]]:
        """The reduced gradients of all that this rank steps on, by the names of the parameters that they are parts of."""
        source = self._stepped_gradients
        spans = self.layout.whole() if self._residency.full_optimizer else self.layout.spans(self._transport.rank)
        return [(self.members[span.slot].name, source[span.offset : span.offset + span.numel]) for span in spans]

    def gradient_of(self, piece: Piece) -> Tensor:
        """The reduced gradient of one piece."""
        return self._stepped_gradients[piece.span.offset : piece.span.offset + piece.span.numel]

    def own_gradients(self) -> list[tuple[Member, Span, Tensor]]:
        """The reduced gradients in this rank's shard, whether or not it keeps others."""
        grad = self._own_gradient
        spans = self.layout.spans(self._transport.rank)
        return [(self.members[span.slot], span, grad[span.offset : span.offset + span.numel]) for span in spans]

    def give_back(self) -> None:
        """Free all memory: other buffers hold these parameters from now on."""
        for buffer in (self.full, self.shard, self.master, self._lifted):
            if buffer is not None:
                buffer.give_back()

    def leave_gradients(self) -> None:
        """Give up gradients that messages are still reading and writing: those keep the memory, other memory is used from now on."""
        for buffer in (self.unreduced, self._receive, self.grad):
            if buffer.present:
                buffer.leave()
                buffer.give_back()

    def forget_gradients(self) -> None:
        """After the step nothing of the gradients is left."""
        for piece in self.pieces:
            piece.parameter.grad = None
        if self.trainable:
            self.grad.give_back()
            self.unreduced.give_back()
            self._has_left = False
            if self._shares:
                self.grad.rebook(Account.GRAD_FULL)
        self.has_gradient = [False] * len(self.members)

    @property
    def _own_gradient(self) -> Tensor:
        """The reduced gradient of this rank's shard."""
        return self.own(self.grad) if self._residency.full_gradients and not self._is_away else self.grad.tensor

    @property
    def _stepped_gradients(self) -> Tensor:
        """The reduced gradient of all that this rank steps on: its shard, or everything."""
        return self.grad.tensor if self._residency.full_optimizer else self._own_gradient

    # ---- construction -------------------------------------------------------------------------------------------------

    def _buffer(
        self, account: Account, dtype: torch.dtype, *, sharded: bool = False, present: bool = True, away: bool = False
    ) -> Buffer:  # fmt: skip
        numel = self.layout.shard_numel if sharded else self.layout.numel
        used = sum(span.numel for span in self.layout.spans(self._transport.rank)) if sharded else self.layout.numel - self.layout.padding
        make = self._storage.away_buffer if away else self._storage.buffer
        return make(account, self.unit, numel, dtype, padding=numel - used, present=present)

    def _make_master(self, dtype: torch.dtype) -> Buffer:
        return self._buffer(Account.MASTER, dtype, sharded=not self._residency.full_optimizer, away=self._is_away)

    def _make_lifted(self) -> Buffer:
        return self._buffer(Account.WORKSPACE, self.types.param, sharded=True, present=False)

    def _stepping_buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Memory for the step, where the optimizer steps."""
        return (self._storage.away_buffer if self._is_away else self._storage.buffer)(Account.WORKSPACE, self.unit, numel, dtype)

    @property
    def padding(self) -> int:
        """Elements of this rank's shard that belong to no parameter."""
        return self.layout.shard_numel - sum(span.numel for span in self.layout.spans(self._transport.rank))

    def pieces_in(self, chunk: Chunk) -> tuple[Piece, ...]:
        """Those whose state is in the chunk."""
        return tuple(piece for piece in self.pieces if piece.chunk is chunk)

    def _lay_out_on_disk(self) -> tuple[Chunk, ...]:
        assert self._disk is not None, "a disk is there before what is kept on it"
        master = self.types.master or self.types.param
        form = Form.of(master, [self._disk.kept(member.parameter, master) for member in self.members])
        return self._disk.lay_out(self.unit, self.layout.shard_numel, form, self.padding)

    def _make_pieces_on_disk(self) -> tuple[Piece, ...]:
        """Parameters without memory of their own, cut where chunks end."""
        disk, found = self._disk, list[Piece]()
        assert disk is not None
        for chunk in self.chunks:
            for span in self.layout.spans(self._transport.rank):
                part = span.within(chunk.begin, chunk.end)
                if part is not None:
                    nothing = disk.nothing(part.numel, chunk.form.master)
                    found.append(Piece(self.members[span.slot], part, nn.Parameter(nothing), chunk))
        return tuple(found)

    def _make_pieces(self) -> tuple[Piece, ...]:
        """Views of what the optimizer updates, each a parameter of its own."""
        if self.chunks:
            return self._make_pieces_on_disk()
        if self._residency.full_optimizer:
            target, spans, shift = self.master or self.full, self.layout.whole(), 0
        else:
            spans = self.layout.spans(self._transport.rank)
            target = self.master or self.shard or self.full
            shift = self._first if target is self.full else 0
        return tuple(
            Piece(self.members[span.slot], span, nn.Parameter(target.view(shift + span.offset, (span.numel,), (1,)))) for span in spans
        )

    def _make_grad(self, dtype: torch.dtype) -> Buffer:
        sharded = self._is_away or not self._residency.full_gradients
        return self._buffer(Account.GRAD, dtype, sharded=sharded, present=False, away=self._is_away)

    def _prepare_gradients(self, adds_locally: bool) -> None:
        """Make the buffers of gradients, without memory.

        ``adds_locally``: several micro-batches are added before they are reduced, in a type that holds the sum.
        """
        types, full_gradients = self.types, self._residency.full_gradients
        wire = types.param if self._transport.ordered else types.reduce
        if adds_locally:
            wire = torch.promote_types(types.reduce, types.grad)
        self.unreduced = self._buffer(Account.GRAD_FULL, wire)
        self._gradient_views = [
            self.unreduced.view(slot.offset, member.shape, member.stride)
            for slot, member in zip(self.layout.slots, self.members, strict=True)
        ]
        self.unreduced.give_back()
        # where the reduced gradient is kept in full and in the same type, it takes the place of the unreduced one
        self._shares = full_gradients and types.grad == wire and not self._is_away
        self.grad = self.unreduced if self._shares else self._make_grad(types.grad)
        self._leaving = self._buffer(Account.GRAD, types.grad, sharded=True, present=False)
        self._has_left = False  # in this step
        receive_numel = self._transport.receive_numel(self.layout.shard_numel)
        self._receive = self._storage.buffer(Account.COMM, self.unit, receive_numel, wire, present=False)


def _take_over(master: Tensor, changed: Tensor) -> None:
    """New values in the type of the parameters, leaving a master alone where its rounded value still stands."""
    now = changed.to(master.device)
    master.copy_(torch.where(now != master.to(now.dtype), now.to(master.dtype), master))
