"""DeepSpeed stage 3's parameters: what is fetched, fetched ahead, and let go, module by module.

The order of modules in a step is known after the first one. Entering a module fetches its own parameters, then, in that order, as many
as the prefetch bucket holds (the last one whole), unless more are here than may live. Several are fetched into one flat buffer, from
which each gets memory of its own as soon as the first is needed; the flat buffer goes when the last of them is. A parameter stays when
its module is left if it comes again within the reuse distance, or if looking ahead has passed over a later use of it. Small ones are
never partitioned. Source: DeepSpeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py and partition_parameters.py.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from shardbook.accounts import Account
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.forecasting.graph import Weight
from shardbook.forecasting.tape import Entry, Tape

Modules = Mapping[str, Sequence[Weight]]


def module_of(weight: Weight) -> str:
    """The module that owns a parameter. A table of positions is read by the model itself."""
    return "root" if weight.name == "positions.weight" else weight.name.rpartition(".")[0]


class _Fetch:
    """Parameters on their way together. ``flat``: what several arrive in; one arrives where it stays."""

    def __init__(self, weights: Sequence[Weight], flat: Entry | None) -> None:
        self.weights, self.flat = weights, flat
        self.waited = False
        self.not_yet_used = {weight.name for weight in weights}


class Fetcher:
    """See the file's header. ``order``: modules as a step enters them; empty: not known yet."""

    def __init__(self, tape: Tape, knobs: Knobs, modules: Modules, order: Sequence[str], *, ranks: int, width: int, on_cuda: bool) -> None:
        self._tape, self._knobs, self._modules = tape, knobs, modules
        self._ranks, self._width, self._on_cuda = ranks, width, on_cuda
        self._order = order
        sizes = {name: sum(weight.numel for weight in weights) for name, weights in modules.items()}
        self._passed = [0, *accumulate(sizes.get(name, 0) for name in order)]
        self._uses: dict[str, list[int]] = {}
        for step, name in enumerate(order):
            self._uses.setdefault(name, []).append(step)
        self._small = _small(modules, knobs)
        self._small_entry: Entry | None = None
        self._full: dict[str, Entry] = {}
        self._coming: dict[str, _Fetch] = {}
        self._live = 0
        self.begin()
        self.keep_small()

    def begin(self) -> None:
        """A micro-batch begins."""
        self._step = 0
        self._ahead = deque((step, weight) for step, name in enumerate(self._order) for weight in self._modules.get(name, ()))
        self._last_seen: dict[str, int] = {}

    def keep_small(self) -> None:
        """What is never partitioned is here, but for the step."""
        nbytes = sum(weight.numel for weights in self._modules.values() for weight in weights if weight.name in self._small) * self._width
        self._small_entry = self._tape.take(Account.GATHERED, nbytes if self._ranks > 1 else 0, "small parameters")

    def let_all_go(self) -> None:
        """The step begins: everything is partitioned."""
        for weights in self._modules.values():
            for weight in weights:
                self._let_go(weight)
        if self._small_entry is not None:
            self._tape.give(self._small_entry)
            self._small_entry = None

    # ---- modules -------------------------------------------------------------------------------------------------------

    def enter(self, module: str) -> None:
        """Forward or backward comes to a module."""
        weights = self._modules.get(module, ())
        self._fetch([weight for weight in weights if self._is_away(weight)])
        for weight in weights:
            self._use(weight)
        uses = self._uses.get(module, [])
        at = bisect_left(uses, self._step)
        if at < len(uses):
            self._look_ahead(uses[at])

    def leave(self, module: str) -> None:
        """It is over; what has no use soon goes."""
        for weight in self._modules.get(module, ()):
            if not self._comes_again(module, weight):
                self._let_go(weight)

    def _look_ahead(self, step: int) -> None:
        self._step = step + 1
        while self._ahead and self._ahead[0][0] <= step:
            found, weight = self._ahead.popleft()
            self._last_seen[weight.name] = found
        most = min(self._knobs.max_live_parameters - self._live, self._knobs.prefetch_bucket_size)
        chosen: dict[str, Weight] = {}
        numel = 0
        while self._ahead and numel < most:
            found, weight = self._ahead.popleft()
            self._last_seen[weight.name] = max(found, self._last_seen.get(weight.name, found))
            if self._is_away(weight) and weight.name not in chosen:
                chosen[weight.name] = weight
                numel += weight.numel
        self._fetch(list(chosen.values()))

    def _comes_again(self, module: str, weight: Weight) -> bool:
        if not self._order:
            return False
        if self._last_seen.get(weight.name, -1) > self._step:
            return True
        uses = self._uses.get(module, [])
        at = bisect_left(uses, self._step)
        return at < len(uses) and self._passed[uses[at]] - self._passed[self._step] < self._knobs.max_reuse_distance

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def _is_away(self, weight: Weight) -> bool:
        return weight.name not in self._small and weight.name not in self._full and weight.name not in self._coming

    def _fetch(self, weights: Sequence[Weight]) -> None:
        if not weights or self._ranks == 1:
            return
        self._live += sum(weight.numel for weight in weights)
        nbytes = sum(-(-weight.numel // self._ranks) * self._ranks for weight in weights) * self._width
        flat = None
        if len(weights) == 1:
            self._full[weights[0].name] = self._tape.take(Account.GATHERED, nbytes, f"parameter {weights[0].name}")
        else:
            flat = self._tape.take(Account.COMM, nbytes, "all-gather of parameters")
        fetch = _Fetch(weights, flat)
        self._coming.update((weight.name, fetch) for weight in weights)
        if not self._on_cuda:  # gloo has its output twice, for as long as it takes
            self._tape.give(self._tape.take(Account.COMM, nbytes, "inside an all-gather"))

    def _use(self, weight: Weight) -> None:
        fetch = self._coming.pop(weight.name, None)
        if fetch is None or fetch.flat is None:
            return
        if not fetch.waited:
            fetch.waited = True
            for each in fetch.weights:
                self._full[each.name] = self._tape.take(Account.GATHERED, each.numel * self._width, f"parameter {each.name}")
        fetch.not_yet_used.discard(weight.name)
        if not fetch.not_yet_used:
            self._tape.give(fetch.flat)

    def _let_go(self, weight: Weight) -> None:
        self._use(weight)
        entry = self._full.pop(weight.name, None)
        if entry is not None:
            self._tape.give(entry)
            self._live -= weight.numel


def _small(modules: Modules, knobs: Knobs) -> frozenset[str]:
    """Below the threshold, as many as may be kept in all."""
    found: set[str] = set()
    total = 0
    for weights in modules.values():
        for weight in weights:
            if weight.numel <= knobs.param_persistence_threshold and total + weight.numel <= knobs.model_persistence_threshold:
                found.add(weight.name)
                total += weight.numel
    return frozenset(found)
