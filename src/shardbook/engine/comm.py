"""Everything that goes between ranks, behind one signature: gather, reduce, exchange, broadcast.

Three transports. :class:`PointToPoint` (gloo) moves every byte once, straight from and into place, and its messages carry
their label as a tag, so that two units can never be taken for each other. :class:`Collectives` (NCCL; any backend above 64
ranks) uses the library's own collectives; their label travels as a header in the padding. :class:`Alone` is one rank.
Names of collectives that change between versions of torch live in this file alone.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.engine.journal import Journal, Kind
from shardbook.engine.storage import is_memory_known
from shardbook.engine.watch import Label, Watch

_KINDS: tuple[Kind, ...] = ("gather", "reduce", "refresh", "return", "step", "init")
_PATIENCE = timedelta(days=7)  # a slow rank is never ended: deadlock and death are found by `watch`, not by a timeout

_DRAIN_SECONDS = 60.0  # what a rank that ends gives to messages under way, so that the others are not cut off in their last step
_DRAIN_SECONDS_AFTER_FAILURE = 0.5

_names: Any = dist  # torch 2.13 names them *_single and deprecates the older names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or _names.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or _names.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Channel:
    """One flat buffer as the transports see it: its number (the same on all ranks) and its unit's name."""

    number: int
    name: str


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when it is complete here: what was to come has come, what was sent may be changed."""
        ...


class Transport(Protocol):
    """What the engine needs of a process group. ``full`` is always a flat buffer of N equal shards."""

    rank: int
    num_ranks: int
    header_numel: int
    ordered: bool
    tagged: bool  # whether messages find their operation whatever the order in which ranks come to it
    sends_from_anywhere: bool  # whether a gather may leave the own place of ``full`` alone

    def gather(self, full: Tensor, own: Tensor, channel: Channel, kind: Kind) -> Pending:
        """Send the shard ``own`` to all; their shards arrive in their places of ``full``. The own place is the caller's to fill."""
        ...

    def reduce(self, full: Tensor, receive: Tensor, channel: Channel) -> Pending:
        """Send every rank its shard of ``full``; the parts for the own shard arrive in ``receive``."""
        ...

    def parts(self, full: Tensor, receive: Tensor) -> list[Tensor]:
        """After :meth:`reduce`: what is to be added for the own shard, in rank order."""
        ...

    def receive_numel(self, shard_numel: int) -> int:
        """Elements that :meth:`reduce` needs in ``receive``."""
        ...

    def exchange(self, vector: Tensor, name: str) -> Tensor:
        """Every rank's float64 vector, as (N, numel), complete on return."""
        ...

    def broadcast(self, tensor: Tensor, name: str) -> None:
        """Rank 0's values everywhere, complete on return."""
        ...

    def free(self) -> None:
        """Make waits that are blocked fail; called from the watchdog's thread."""
        ...

    def close(self) -> None:
        """Give the process group back."""
        ...


class _Done:
    def wait(self) -> None:
        pass


class Alone:
    """One rank, no process group."""

    rank = 0
    num_ranks = 1
    header_numel = 0
    ordered = tagged = sends_from_anywhere = True

    def gather(self, full: Tensor, own: Tensor, channel: Channel, kind: Kind) -> Pending:
        return _Done()

    def reduce(self, full: Tensor, receive: Tensor, channel: Channel) -> Pending:
        return _Done()

    def parts(self, full: Tensor, receive: Tensor) -> list[Tensor]:
        return [full]

    def receive_numel(self, shard_numel: int) -> int:
        return 0

    def exchange(self, vector: Tensor, name: str) -> Tensor:
        return vector.unsqueeze(0)

    def broadcast(self, tensor: Tensor, name: str) -> None:
        pass

    def free(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Messages:
    """Point-to-point works of one collective, each with the rank it meets. ``open_ones`` is where it stands until it is complete."""

    __slots__ = ("_after", "_label", "_open_ones", "_watch", "_works")

    def __init__(
        self, watch: Watch, label: Label, works: list[tuple[int, Any]], after: Callable[[], None] | None, open_ones: "set[_Messages]"
    ) -> None:
        self._watch, self._label, self._works, self._after, self._open_ones = watch, label, works, after, open_ones
        open_ones.add(self)

    def wait(self) -> None:
        for peer, work in self._works:
            self._watch.wait(self._label, peer, work)
        self._works = []
        self._open_ones.discard(self)
        if self._after is not None:
            self._after()
            self._after = None

    def drain(self, deadline: float) -> None:
        """Before the group ends: let what is on its way arrive, here and at the others, but not for ever."""
        for _, work in self._works:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
        self._works = []


class PointToPoint:
    """Gloo: tagged sends and receives. CUDA tensors travel through host memory, which gloo needs."""

    header_numel = 0
    ordered = tagged = sends_from_anywhere = True

    def __init__(self, group: Any, rank: int, num_ranks: int, watch: Watch, journal: Journal) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._group: Any = group
        self._bait = torch.empty(1)
        self._open: set[_Messages] = set()
        self._watch, self._journal = watch, journal

    def gather(self, full: Tensor, own: Tensor, channel: Channel, kind: Kind) -> Pending:
        return self._start(kind, channel, [own] * self.num_ranks, list(full.view(self.num_ranks, -1).unbind()))

    def reduce(self, full: Tensor, receive: Tensor, channel: Channel) -> Pending:
        return self._start("reduce", channel, list(full.view(self.num_ranks, -1).unbind()), self.parts(full, receive))

    def parts(self, full: Tensor, receive: Tensor) -> list[Tensor]:
        own = full.view(self.num_ranks, -1)[self.rank]
        others = list(receive.view(self.num_ranks - 1, -1).unbind())
        return [*others[: self.rank], own, *others[self.rank :]]

    def receive_numel(self, shard_numel: int) -> int:
        return shard_numel * (self.num_ranks - 1)

    def exchange(self, vector: Tensor, name: str) -> Tensor:
        gathered = vector.new_empty((self.num_ranks, vector.numel()))
        gathered[self.rank].copy_(vector)
        self._start("step", Channel(0, name), [gathered[self.rank]] * self.num_ranks, list(gathered.unbind())).wait()
        return gathered

    def broadcast(self, tensor: Tensor, name: str) -> None:
        if tensor.numel():
            others: list[Tensor | None] = [None] * self.num_ranks
            sends = [tensor if self.rank == 0 and peer else None for peer in range(self.num_ranks)]
            receives = [tensor, *others[1:]] if self.rank else others
            self._start("init", Channel(0, name), sends, receives).wait()

    def free(self) -> None:
        _close_pairs(self._group, self.num_ranks, self._bait)

    def close(self) -> None:
        deadline = time.monotonic() + (_DRAIN_SECONDS if self._watch.is_well else _DRAIN_SECONDS_AFTER_FAILURE)
        for messages in tuple(self._open):
            messages.drain(deadline)
        self._open.clear()
        _give_back_group(self._group)
        self._group = None

    def _start(self, kind: Kind, channel: Channel, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Pending:
        """Post all receives and sends of one collective, nearest higher rank first, so that no rank is everyone's first."""
        label = self._watch.post(kind, channel.number, channel.name)
        tag = _tag(label)
        works: list[tuple[int, Any]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        sent_nbytes = 0
        peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        for peer in reversed(peers):
            target = receives[peer]
            if target is not None and target.numel():
                landing = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu", pin_memory=True)
                if landing is not target:
                    copies.append((target, landing))
                works.append((peer, self._guarded(label, peer, self._group.recv, [landing], peer, tag)))
        for peer in peers:
            source = sends[peer]
            if source is not None and source.numel():
                host = source if source.device.type == "cpu" else source.to("cpu")
                works.append((peer, self._guarded(label, peer, self._group.send, [host], peer, tag)))
                sent_nbytes += source.numel() * source.element_size()
        self._journal.traffic(kind, channel.name, label.sequence, sent_nbytes)

        def land() -> None:
            for target, landing in copies:
                target.copy_(landing, non_blocking=True)

        return _Messages(self._watch, label, works, land if copies else None, self._open)

    def _guarded(self, label: Label, peer: int, post: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return post(*arguments)
        except RuntimeError as error:  # the pair is closed: the peer has gone
            raise self._watch.failure(label, peer, error) from error


class FakePointToPoint(PointToPoint):
    """A fake group that stands for gloo: the same buffers and bytes, one call of the group for each collective.

    Tensors without values are not even cut into shards: at 64 ranks that would take longer than everything else.
    """

    def gather(self, full: Tensor, own: Tensor, channel: Channel, kind: Kind) -> Pending:
        if is_memory_known(full):
            return super().gather(full, own, channel, kind)
        return self._pretend(kind, channel, own.numel() * own.element_size())

    def reduce(self, full: Tensor, receive: Tensor, channel: Channel) -> Pending:
        if is_memory_known(full):
            return super().reduce(full, receive, channel)
        return self._pretend("reduce", channel, full.numel() // self.num_ranks * full.element_size())

    def parts(self, full: Tensor, receive: Tensor) -> list[Tensor]:
        return super().parts(full, receive) if is_memory_known(full) else [receive, full]

    def _pretend(self, kind: Kind, channel: Channel, shard_nbytes: int) -> Pending:
        label = self._watch.post(kind, channel.number, channel.name)
        self._journal.traffic(kind, channel.name, label.sequence, shard_nbytes * (self.num_ranks - 1))
        return _Done()

    def _start(self, kind: Kind, channel: Channel, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Pending:
        label = self._watch.post(kind, channel.number, channel.name)
        sent = [source for peer, source in enumerate(sends) if source is not None and peer != self.rank]
        landed = [target for peer, target in enumerate(receives) if target is not None and peer != self.rank]
        if sent and landed:
            nothing = sent[0].new_empty(0)  # real tensors go through a check of the lists' length
            lists = [[nothing if one is None or peer == self.rank else one for peer, one in enumerate(many)] for many in (receives, sends)]
            dist.all_to_all(lists[0], lists[1], group=self._group)
            if is_memory_known(nothing):  # nobody has sent anything: what is there must be numbers all the same
                for target in landed:
                    target.zero_()
        self._journal.traffic(kind, channel.name, label.sequence, sum(source.numel() * source.element_size() for source in sent))
        return _Done()

    def exchange(self, vector: Tensor, name: str) -> Tensor:
        """Nobody answers: the others are taken to say what this rank says."""
        mine = super().exchange(vector, name)
        return mine if not is_memory_known(mine) else mine.copy_(vector.expand_as(mine))

    def close(self) -> None:
        pass  # the group is the caller's


class _Work:
    __slots__ = ("_after", "_label", "_watch", "_work")

    def __init__(self, watch: Watch, label: Label, work: Any, after: Callable[[], None] | None) -> None:
        self._watch, self._label, self._work, self._after = watch, label, work, after

    def wait(self) -> None:
        if self._work is not None:
            self._watch.wait(self._label, None, self._work)
            self._work = None
            if self._after is not None:
                self._after()


class Collectives:
    """One collective of the backend a call: all-gather, and all-to-all (ordered) or reduce-scatter (native).

    ``header_numel`` elements at the end of the last shard carry the label of the last rank's operation; every rank compares it
    with its own and the result travels with the step's exchange, so a mix-up is found before anything is applied.
    """

    def __init__(self, group: Any, reducing: Any, watch: Watch, journal: Journal, *, ordered: bool, headers: bool = True) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.ordered, self.tagged, self.sends_from_anywhere = ordered, False, False
        self.header_numel = 64 if headers else 0
        # reductions have a communicator of their own: a rank that lacks a gradient reduces later, between other gathers
        self._group: Any = group
        self._reducing: Any = reducing
        self._watch, self._journal = watch, journal
        self._bait = torch.empty(1)
        self.mismatch: Tensor | None = None

    def gather(self, full: Tensor, own: Tensor, channel: Channel, kind: Kind) -> Pending:
        label = self._watch.post(kind, channel.number, channel.name)
        self._write_header(own, label)
        work = _all_gather(full, own, group=self._group, async_op=True)
        self._journal.traffic(kind, channel.name, label.sequence, own.numel() * own.element_size() * (self.num_ranks - 1))
        only_served = own.untyped_storage()._cdata != full.untyped_storage()._cdata  # what arrives is shared by several gathers
        return _Work(self._watch, label, work, None if only_served else lambda: self._check_headers(full, label))

    def reduce(self, full: Tensor, receive: Tensor, channel: Channel) -> Pending:
        label = self._watch.post("reduce", channel.number, channel.name)
        if self.ordered:
            self._write_header(full.view(self.num_ranks, -1)[-1], label)
            work = dist.all_to_all_single(receive, full, group=self._reducing, async_op=True)
        else:
            work = _reduce_scatter(receive, full, group=self._reducing, async_op=True)
        shard_nbytes = full.numel() // self.num_ranks * full.element_size()
        self._journal.traffic("reduce", channel.name, label.sequence, shard_nbytes * (self.num_ranks - 1))
        return _Work(self._watch, label, work, lambda: self._check_headers(receive, label))

    def parts(self, full: Tensor, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.num_ranks, -1).unbind()) if self.ordered else [receive]

    def receive_numel(self, shard_numel: int) -> int:
        return shard_numel * (self.num_ranks if self.ordered else 1)

    def exchange(self, vector: Tensor, name: str) -> Tensor:
        label = self._watch.post("step", 0, name)
        gathered = vector.new_empty(self.num_ranks * vector.numel())
        work = _all_gather(gathered, vector, group=self._group, async_op=True)
        self._journal.traffic("step", name, label.sequence, vector.numel() * 8 * (self.num_ranks - 1))
        _Work(self._watch, label, work, None).wait()
        return gathered.view(self.num_ranks, -1)

    def broadcast(self, tensor: Tensor, name: str) -> None:
        if tensor.numel():
            label = self._watch.post("init", 0, name)
            work: Any = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
            _Work(self._watch, label, work, None).wait()

    def free(self) -> None:
        for group in {id(group): group for group in (self._group, self._reducing)}.values():
            if dist.get_backend(group) == "gloo":
                _close_pairs(group, self.num_ranks, self._bait)
            else:
                group.abort()

    def close(self) -> None:
        if self._reducing is not self._group:  # the other one is the caller's
            _give_back_group(self._reducing)
        self._group = self._reducing = None

    def _write_header(self, shard: Tensor, label: Label) -> None:
        """Into the last shard, whose end is padding; the others end in the middle of parameters."""
        if self.header_numel and (label.kind == "reduce" or self.rank == self.num_ranks - 1):
            shard[-self.header_numel :].view(torch.uint8)[:8].view(torch.int64).fill_(_tag(label))

    def _check_headers(self, shards: Tensor, label: Label) -> None:
        """Compare the labels in shards that end in padding with this rank's own, on the device."""
        is_last = self.rank == self.num_ranks - 1
        if not self.header_numel or (label.kind == "reduce" and not (is_last and self.ordered)):
            return
        rows = shards.view(self.num_ranks, -1) if label.kind == "reduce" else shards.view(self.num_ranks, -1)[-1:]
        found = rows[:, -self.header_numel :].contiguous().view(torch.uint8).view(len(rows), -1)[:, :8].contiguous().view(torch.int64)
        wrong = (found != _tag(label)).any()
        self.mismatch = wrong if self.mismatch is None else self.mismatch | wrong


def connect(group: Any, watch: Watch, journal: Journal, reduction: Literal["auto", "ordered", "native"], device: torch.device) -> Transport:
    """The transport for a process group (None: one rank alone) and a choice of reduction."""
    if group is None:
        return Alone()
    num_ranks = dist.get_world_size(group)
    ordered = reduction == "ordered" or (reduction == "auto" and num_ranks <= 64)
    backend = dist.get_backend(group)
    if num_ranks == 1:
        return Alone()
    if backend == "gloo" and ordered:
        # a group of its own: tags that nobody else uses, no timeout, and pairs that may be closed without harm to others
        ranks = dist.get_process_group_ranks(group)
        own = _new_group(ranks, timeout=_PATIENCE, backend="gloo")
        return PointToPoint(own, dist.get_rank(group), num_ranks, watch, journal)
    if backend == "fake" and ordered and device.type != "cuda":
        return FakePointToPoint(group, dist.get_rank(group), num_ranks, watch, journal)
    ranks = dist.get_process_group_ranks(group)
    reducing = group if backend == "fake" else _new_group(ranks)
    return Collectives(group, reducing, watch, journal, ordered=ordered, headers=backend != "fake")


def _new_group(ranks: list[int], **settings: Any) -> Any:
    """A group of these ranks, made by them alone where they aren't all that there are."""
    is_part = len(ranks) < dist.get_world_size()
    if is_part:
        gc.collect()  # torch puts the number of a process's groups into the name: one that a dead engine left here would part the ranks
    return dist.new_group(ranks, use_local_synchronization=is_part, **settings)


def _tag(label: Label) -> int:
    """Kind, channel and sequence in 31 bits."""
    return _KINDS.index(label.kind) << 28 | (label.channel & 0x1FFF) << 15 | label.sequence & 0x7FFF


def _close_pairs(group: Any, num_ranks: int, bait: Tensor) -> None:
    """On gloo a blocked wait is freed by closing its pair: a receive with a tiny timeout does that, where ``abort`` does not."""
    for peer in range(num_ranks):
        if group is not None and peer != dist.get_rank(group):
            with suppress(RuntimeError, ValueError):
                group.recv([bait], peer, 0x7FFFFFFF).wait(timedelta(milliseconds=1))


def _give_back_group(group: Any) -> None:
    with suppress(ValueError, RuntimeError, AssertionError):  # the caller may have destroyed all groups already
        dist.destroy_process_group(group)
