"""Inputs of recomputed blocks that rest on the host from forward to backward.

A block's inputs that require a gradient (and are no leaves) are copied to the host while the block's forward runs, and let go when it is
over. When backward comes to a block, its inputs are fetched if they are not here yet, and so are those of the block that backward comes to
next. They live as long as the graph needs them: whatever ends it, an exception included, frees both copies.

On CUDA copies run on a stream of their own, ordered with the kernels by events in both directions; pinned memory is kept for the next
pass, as pinning takes longer than copying.
"""

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardbook.accounts import Account
from shardbook.engine.journal import Journal
from shardbook.engine.storage import Buffer, Storage, is_memory_known
from shardbook.events import LinkName


class RestingInputs:
    """Of all blocks of one engine."""

    def __init__(self, storage: Storage, journal: Journal) -> None:
        self._calls: list[weakref.ref[_Resting]] = []  # in the order of forward
        self._copier = _Copier(storage, journal)

    @contextmanager
    def leaving(self, unit: str, leaves: Sequence[Any]) -> Generator[list[Any]]:
        """While the block's forward runs on what is yielded, its inputs go to the host; after it they are nowhere else."""
        chosen = {id(leaf): leaf for leaf in leaves if _may_rest(leaf)}
        if not chosen:
            yield list(leaves)
            return
        resting = _Resting(unit, list(chosen.values()), self._copier)
        places = {key: number for number, key in enumerate(chosen)}
        self._calls.append(weakref.ref(resting))
        try:
            yield [Slot(resting, places[id(leaf)]) if id(leaf) in places else leaf for leaf in leaves]
        finally:
            resting.leave()

    def look_ahead(self, unit: str) -> None:
        """Backward has come to ``unit``: fetch its inputs, and those of the call before it."""
        alive = [call for reference in self._calls if (call := reference()) is not None and not call.is_used]
        self._calls = [weakref.ref(call) for call in alive]
        last = next((number for number in reversed(range(len(alive))) if alive[number].unit == unit), None)
        if last is not None:
            for call in reversed(alive[max(0, last - 1) : last + 1]):
                call.fetch()


class Slot:
    """Stands for one input in a call's arguments."""

    __slots__ = ("_number", "_resting")

    def __init__(self, resting: "_Resting", number: int) -> None:
        self._resting, self._number = resting, number

    def get(self) -> Tensor:
        """The tensor itself in the first run, a copy of it in a later one."""
        return self._resting.get(self._number)

    def used(self) -> None:
        """A later run is over."""
        self._resting.used()


class _Resting:
    """The inputs of one call of a block."""

    def __init__(self, unit: str, tensors: Sequence[Tensor], copier: "_Copier") -> None:
        self.unit, self._copier = unit, copier
        self._originals: list[Tensor] = list(tensors)
        self._shapes = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors]
        self._types = [(tensor.dtype, _extent(tensor)) for tensor in tensors]
        self._fetched: list[Tensor] = []
        self._arrived: Any = None
        self.is_used = False
        with torch.no_grad():
            self._hosts, self._left = copier.down(unit, [_span(tensor) for tensor in tensors])

    def leave(self) -> None:
        """The first run is over."""
        self._copier.wait(self._left)
        self._originals, self._left = [], None

    def fetch(self) -> None:
        """Begin to copy the inputs to the device; nothing happens if they are here or under way."""
        if not self._fetched and not self._originals:
            with torch.no_grad():
                self._fetched, self._arrived = self._copier.up(self.unit, self._hosts, self._types)

    def get(self, number: int) -> Tensor:
        if self._originals:
            return self._originals[number]
        self.fetch()
        self._copier.wait(self._arrived)
        self._arrived = None
        with torch.no_grad():
            tensor = self._fetched[number].as_strided(*self._shapes[number])
        return tensor.requires_grad_()

    def used(self) -> None:
        """A later run is over: autograd has what it needs of the copies."""
        self.is_used, self._fetched = True, []

    def __del__(self) -> None:
        self._copier.wait(self._left)
        self._copier.wait(self._arrived)
        self._copier.give_back(self._hosts)


class _Copier:
    """Copies both ways, and the host memory for it."""

    def __init__(self, storage: Storage, journal: Journal) -> None:
        self._storage, self._journal = storage, journal
        self._stream: Any = torch.cuda.Stream(storage.device) if storage.device.type == "cuda" else None
        self._pinned: list[Buffer] = []  # free

    def down(self, unit: str, sources: Sequence[Tensor]) -> tuple[list[Buffer], Any]:
        """Copy to the host; returns where, and an event."""
        hosts = [self._take(unit, source.numel() * source.element_size()) for source in sources]
        targets = [_as(host, source.dtype, source.numel()) for host, source in zip(hosts, sources, strict=True)]
        return hosts, self._copy("device to host", unit, targets, sources)

    def up(self, unit: str, hosts: Sequence[Buffer], kinds: Sequence[tuple[torch.dtype, int]]) -> tuple[list[Tensor], Any]:
        """Copy to new memory of the device; ``kinds`` are types and numbers of elements."""
        targets = [self._storage.fresh(Account.ACTIVATION, unit, numel, dtype) for dtype, numel in kinds]
        sources = [_as(host, dtype, numel) for host, (dtype, numel) in zip(hosts, kinds, strict=True)]
        return targets, self._copy("host to device", unit, targets, sources)

    def wait(self, event: Any) -> None:
        """What the device does from now on comes after the copy."""
        if event is not None:
            torch.cuda.current_stream(self._storage.device).wait_event(event)

    def give_back(self, hosts: Sequence[Buffer]) -> None:
        """Free host memory, or keep it for the next pass where it is pinned. Copies from it are in order with those to it."""
        for host in hosts:
            host.give_back()
            if host.present:
                self._pinned.append(host)

    def _take(self, unit: str, nbytes: int) -> Buffer:
        fitting = [host for host in self._pinned if host.unit == unit and host.nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda host: host.nbytes)
            self._pinned.remove(found)
            return found
        for host in [host for host in self._pinned if host.unit == unit]:  # all too small, and so they will be
            self._stream.synchronize()
            self._pinned.remove(host)
            host.drop()
        return self._storage.away_buffer(Account.ACTIVATION, unit, nbytes, torch.uint8)

    def _copy(self, link: LinkName, unit: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        self._journal.transfer(link, unit, sum(source.numel() * source.element_size() for source in sources))
        if self._stream is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._storage.device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()


def _may_rest(value: Any) -> bool:
    """A result of the graph, in memory that a flat copy can take the place of."""
    is_plain = type(value) is Tensor or (isinstance(value, Tensor) and not is_memory_known(value))
    return is_plain and value.requires_grad and value.grad_fn is not None and value.layout == torch.strided and value.numel() > 0


def _extent(tensor: Tensor) -> int:
    """Elements of its memory from the first to the last that it uses."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(tensor: Tensor) -> Tensor:
    """The tensor's memory, gaps included, without an end of its own: strides are kept, as they may decide how a kernel adds."""
    return tensor.detach().as_strided((_extent(tensor),), (1,))


def _as(host: Buffer, dtype: torch.dtype, numel: int) -> Tensor:
    return host.tensor[: numel * dtype.itemsize].view(dtype)
