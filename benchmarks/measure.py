"""What the CPU allocator did, by the profiler's record of every allocation and free.

    with AllocationRecords() as records:        # before the model is built: what is older stays unseen
        model = build()
        for step in range(3):
            with records.span(f"step {step}"):
                train(model)
    records.peak("step 2").nbytes               # highest sum of live bytes inside that span
    records.live_at_end("step 2")               # what was still live when it ended

Operators' own temporaries and resized storages are in it; blocks older than the start and other threads are not. Autograd runs a
CPU graph on the thread that calls it, but a collective's staging buffer may be freed by a thread of the backend, unseen. So when
the records end, a block that was never seen to be freed and that no tensor reaches is left out altogether: then figures are lower
bounds, and ``records.unseen_nbytes`` says how much was left out. ``python -m benchmarks.measure`` tries all of this on
allocations of known length.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20
_MARK = "span:"


@dataclass(frozen=True, slots=True)
class Change:
    """``nbytes`` allocated (or, negative, freed) at ``address``, inside the operators ``inside``, outermost first."""

    order: int
    address: int
    nbytes: int
    inside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest sum of live bytes in a span, and the blocks live at that instant, largest first."""

    nbytes: int
    inside: tuple[str, ...]
    blocks: tuple[Change, ...]


class AllocationRecords:
    """See the file's header."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._changes: list[Change] = []
        self._spans: dict[str, tuple[int, int]] = {}
        self.unseen_nbytes = 0

    def __enter__(self) -> "AllocationRecords":
        gc.collect()
        self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.stop()
        reachable = _reachable_addresses()
        profiler: Any = self._profile.profiler
        found: list[tuple[int, int, Any, tuple[str, ...]]] = []
        for root in profiler.kineto_results.experimental_event_tree():
            _walk(root, (), found)
        self._read(sorted(found, key=lambda entry: (entry[0], entry[1])))
        del self._profile
        self._leave_out_unseen(reachable)

    @contextmanager
    def span(self, name: str) -> Generator[None]:
        """Name a stretch of the run."""
        with record_function(f"{_MARK}begin:{name}"):
            pass
        yield
        with record_function(f"{_MARK}end:{name}"):
            pass

    def peak(self, name: str) -> Peak:
        """The highest sum inside the span."""
        begin, end = self._spans[name]
        live: dict[int, Change] = {}
        best = running = sum(change.nbytes for change in self._changes if change.order < begin)
        best_order = begin
        for change in self._changes:
            if begin < change.order < end:
                running += change.nbytes
                if running > best:
                    best, best_order = running, change.order
        inside: tuple[str, ...] = ()
        for change in self._changes:
            if change.order > best_order:
                break
            inside = change.inside
            if change.nbytes > 0:
                live[change.address] = change
            else:
                live.pop(change.address, None)
        return Peak(best, inside, tuple(sorted(live.values(), key=lambda change: -change.nbytes)))

    def live_at_end(self, name: str) -> int:
        """Live bytes when the span ended."""
        _, end = self._spans[name]
        return sum(change.nbytes for change in self._changes if change.order < end)

    def _read(self, entries: list[tuple[int, int, Any, tuple[str, ...]]]) -> None:
        begun: dict[str, int] = {}
        for order, (_, _, event, inside) in enumerate(entries):
            if event.name == "[memory]":
                fields = event.typed[1]
                self._changes.append(Change(order, fields.ptr, fields.alloc_size, inside))
            elif event.name.startswith(f"{_MARK}begin:"):
                begun[event.name.removeprefix(f"{_MARK}begin:")] = order
            else:
                name = event.name.removeprefix(f"{_MARK}end:")
                self._spans[name] = (begun[name], order)

    def _leave_out_unseen(self, reachable: set[int]) -> None:
        """See the file's header. A block whose address is allocated again must have been freed, so it counts as unseen as well."""
        live: dict[int, Change] = {}
        unseen: set[int] = set()
        for change in self._changes:
            before = live.pop(change.address, None)
            if change.nbytes > 0:
                live[change.address] = change
                if before is not None:
                    unseen.add(before.order)
        unseen.update(change.order for change in live.values() if change.address not in reachable)
        self.unseen_nbytes = sum(change.nbytes for change in self._changes if change.order in unseen)
        self._changes = [change for change in self._changes if change.order not in unseen]


def _reachable_addresses() -> set[int]:
    """Where the storages of all tensors lie that Python still reaches."""
    found: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter's guard would refuse
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor):
                try:
                    found.add(candidate.untyped_storage().data_ptr())
                except (NotImplementedError, RuntimeError):
                    continue  # a wrapper without a storage: the tensor inside is found by itself
    return found


def _walk(event: Any, inside: tuple[str, ...], found: list[tuple[int, int, Any, tuple[str, ...]]]) -> None:
    if event.name == "[memory]" or event.name.startswith(_MARK):
        found.append((event.start_time_ns, len(found), event, inside))
    for child in event.children:
        _walk(child, (*inside, event.name), found)


def check() -> None:
    """Allocations of known length, in every way that the engines allocate: raises where a record is missing."""
    older = torch.empty(MIB)
    with AllocationRecords() as records:
        with records.span("by hand"):
            kept = torch.zeros(MIB, dtype=torch.uint8)
            passing = torch.empty(5 * MIB, dtype=torch.uint8)
            passing.untyped_storage().resize_(0)
            passing.untyped_storage().resize_(2 * MIB)
            del passing
        with records.span("autograd"):
            x = torch.ones(MIB, requires_grad=True)
            (x * x).sum().backward()
        with records.span("freed"):
            x.grad = None
            del kept
        del older
    if records.unseen_nbytes:
        raise RuntimeError(f"allocation records: {records.unseen_nbytes} bytes were not seen to be freed; all were freed on this thread")
    expected = {"by hand": (6, 1), "autograd": (13, 9), "freed": (9, 4)}
    for name, (peak, live) in expected.items():
        found = (records.peak(name).nbytes // MIB, records.live_at_end(name) // MIB)
        if found != (peak, live):
            raise RuntimeError(f"allocation records of {name!r}: peak and live are {found} MiB; {(peak, live)} were made")
    print("allocation records agree with allocations made by hand")


if __name__ == "__main__":
    check()
