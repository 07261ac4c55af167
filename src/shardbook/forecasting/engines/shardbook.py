"""shardbook's own engine: its rules of residence (docs/how-it-works.md), a second time and without its code."""

from collections.abc import Callable, Mapping

from shardbook.accounts import Account, Tier
from shardbook.config import ZeroConfig
from shardbook.forecasting.buffers import FlatForm, adds_locally, flat_form
from shardbook.forecasting.closed_form import Moments, between, slots, squares_nbytes
from shardbook.forecasting.disk import plan
from shardbook.forecasting.engines.optimizers import step_temporaries
from shardbook.forecasting.graph import Value, Weight
from shardbook.forecasting.homes import homes, is_lifted
from shardbook.forecasting.tape import Entry, Tape
from shardbook.structure import Structure

CHUNK_NUMEL = 1 << 17
"""Elements of the scratch in which parts of another type are added up."""


class _Unit:
    """One unit's buffers: which of them are here now."""

    def __init__(self, index: int, name: str, forms: list[FlatForm], around: frozenset[int]) -> None:
        self.index, self.name, self.forms, self.around = index, name, forms, around
        self.trained = [form for form in forms if form.trainable]
        self.is_frozen_in_part = len(self.trained) < len(forms)
        self.full: Entry | None = None
        self.unreduced: Entry | None = None
        self.received: Entry | None = None
        self.reduced: Entry | None = None
        self.in_backward = False
        self.missing = 0

    @property
    def full_nbytes(self) -> int:
        return sum(form.full_numel * form.param_nbytes for form in self.forms)


class Shardbook:
    """See the file's header. ``steady``: a step after the first, whose moments exist from its beginning."""

    def __init__(
        self,
        tape: Tape,
        structure: Structure,
        config: ZeroConfig,
        moments: Moments,
        num_weights: Mapping[str, int],
        *,
        kernel: str = "fused",
        steady: bool = True,
    ) -> None:
        assert structure.orders is not None
        self._tape, self._config, self._structure = tape, config, structure
        self._orders, self._group = structure.orders, structure.group
        self._units = [
            _Unit(index, unit.name, [flat_form(flat, config, structure.group) for flat in unit.flats], frozenset(unit.around))
            for index, unit in enumerate(structure.units)
        ]
        self._by_name = {unit.name: unit for unit in self._units}
        self._by_name["root"] = self._units[0]
        self._num_weights, self._kernel = num_weights, kernel
        self._adds_locally, self._sharded = adds_locally(config), config.stage == 3
        self._reducing: _Unit | None = None
        self._ready: set[int] = set()
        self._next = 0
        self._micro_batch = 0
        self._position = {"forward": -1, "backward": -1}
        self.on_backward: Callable[[str], None] | None = None  # told of each unit that backward comes to
        self._steady, self._homes, self._per_element = steady, homes(config), moments.per_element
        self._longest = None
        if self._homes.master is Tier.DISK:
            self._longest = plan(structure, config, moments.per_element, moments.quantised_nbytes).longest
        tape.at("between", "")
        held = between(structure, config, moments)
        self._moments = {tier: held.get(tier, {}).get(Account.MOMENT, 0) for tier in (Tier.DEVICE, Tier.HOST)}
        for account, label in ((Account.PARAM, "parameters"), (Account.MASTER, "masters")):
            for tier in (Tier.DEVICE, Tier.HOST):
                self._take(tier, account, held.get(tier, {}).get(account, 0), label)
        self._take(Tier.HOST, Account.WORKSPACE, slots(structure, config, moments), "slots of the disk")
        if steady:
            self._take_moments()
        self._begin_micro_batch()

    def _take(self, tier: Tier, account: Account, nbytes: int, label: str) -> Entry:
        return self._tape.take(account, nbytes, label) if tier is Tier.DEVICE else self._tape.take_on_host(account, nbytes, label)

    def _take_moments(self) -> None:
        for tier, nbytes in self._moments.items():
            self._take(tier, Account.MOMENT, nbytes, "moments")

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: str) -> None:
        """Gather the unit, and look ahead."""
        entered = self._by_name[unit]
        self._fetch(entered)
        self._look_ahead("forward", self._orders.forward, entered)

    def leave_forward(self, unit: str) -> None:
        """Free it, unless it stays."""
        self._release(self._by_name[unit])

    def enter_backward(self, unit: str) -> None:
        """Gather the unit; free those that backward is past; look ahead."""
        entered = self._by_name[unit]
        if entered.in_backward and (entered.full is not None or not self._sharded):
            return
        self._fetch(entered)
        if self.on_backward is not None:
            self.on_backward(entered.name)
        for other in self._units:
            if other.in_backward and not self._are_related(other, entered):
                self._release(other)
                other.in_backward = False
        entered.in_backward = True
        self._look_ahead("backward", self._orders.backward, entered)

    def back_in_root(self) -> None:
        """The root is here already."""

    def _fetch(self, unit: _Unit) -> None:
        if self._sharded and unit.full is None:
            unit.full = self._tape.take(Account.GATHERED, unit.full_nbytes, f"parameters of {unit.name}")

    def _release(self, unit: _Unit) -> None:
        if unit.full is not None:
            self._tape.give(unit.full)
            unit.full = None

    def _look_ahead(self, which: str, order: tuple[int, ...], entered: _Unit) -> None:
        if not self._sharded or not self._steady:  # no order is agreed before the first step
            return
        self._position[which] += 1
        following = dict.fromkeys(number for number in order[self._position[which] + 1 :] if number != entered.index)
        for number in list(following)[: self._config.prefetch.ahead]:
            unit, limit = self._units[number], self._config.prefetch.limit
            here = sum(other.full.nbytes for other in self._units if other.full is not None)
            if limit is not None and unit.full is None and here + unit.full_nbytes > limit:
                break
            self._fetch(unit)

    @staticmethod
    def _are_related(one: _Unit, other: _Unit) -> bool:
        return 0 in (one.index, other.index) or one is other or one.index in other.around or other.index in one.around

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def land(self, weight: Weight, gradient: Value) -> None:
        """A gradient takes its place in the flat buffer; the last one of a unit starts its reduction."""
        unit = self._by_name[weight.unit]
        if unit.unreduced is None:
            nbytes = sum(form.full_numel * form.wire_nbytes for form in unit.trained)
            unit.unreduced = self._tape.take(Account.GRAD_FULL, nbytes, f"gradients of {unit.name}")
        unit.missing -= 1
        if unit.missing == 0:
            self._complete(unit)

    def end_backward(self) -> None:
        """Reduce what waits."""
        for unit in self._units:
            self._release(unit)
        if self._reduces_now:
            for number in self._orders.reduce[self._next :]:
                self._launch(self._units[number])
            self._finish_launched()
        self._micro_batch += 1
        self._begin_micro_batch()

    @property
    def _reduces_now(self) -> bool:
        return self._config.stage >= 2 or self._micro_batch + 1 == self._config.accumulate

    def _begin_micro_batch(self) -> None:
        self._ready, self._next = set(), 0
        self._position = {"forward": -1, "backward": -1}
        for unit in self._units:
            unit.in_backward = False
            unit.missing = self._num_weights.get(unit.name, 0)

    def _complete(self, unit: _Unit) -> None:
        if not unit.is_frozen_in_part:
            self._release(unit)
        if not self._reduces_now:
            return
        self._ready.add(unit.index)
        while self._next < len(self._orders.reduce) and self._orders.reduce[self._next] in self._ready:
            self._launch(self._units[self._orders.reduce[self._next]])
            self._next += 1

    def _launch(self, unit: _Unit) -> None:
        self._finish_launched()
        shards = self._group.receive_shards
        nbytes = sum(shards * form.shard_numel * form.wire_nbytes for form in unit.trained)
        unit.received = self._tape.take(Account.COMM, nbytes, f"received of {unit.name}")
        self._reducing = unit

    def _finish_launched(self) -> None:
        unit, self._reducing = self._reducing, None
        if unit is None or unit.unreduced is None or unit.received is None:
            return
        if self._homes.grad is Tier.HOST:
            self._leave_device(unit, unit.unreduced, unit.received)
            return
        form = unit.trained[0]
        shares = self._config.stage <= 1 and form.grad_nbytes == form.wire_nbytes
        again = unit.reduced is not None
        if shares:  # the same bytes, from now on for another purpose
            self._tape.give(unit.unreduced)
            unit.reduced = self._tape.take(Account.GRAD, unit.unreduced.nbytes, f"reduced gradients of {unit.name}")
        elif not again:
            numels = [form.full_numel if self._config.stage <= 1 else form.shard_numel for form in unit.trained]
            nbytes = sum(numel * form.grad_nbytes for numel, form in zip(numels, unit.trained, strict=True))
            unit.reduced = self._tape.take(Account.GRAD, nbytes, f"reduced gradients of {unit.name}")
        self._scratch_of_adding(unit, again=again, shares=shares)
        self._tape.give(unit.received)
        if not shares:
            self._tape.give(unit.unreduced)
        unit.unreduced = unit.received = None

    def _leave_device(self, unit: _Unit, unreduced: Entry, received: Entry) -> None:
        """Added up on the device, where an earlier sum comes back for it, and then to the host: a flat buffer at a time."""
        again = unit.reduced is not None
        nbytes = [form.shard_numel * form.grad_nbytes for form in unit.trained]
        leaving = self._tape.take(Account.GRAD, max(nbytes), f"gradients of {unit.name} on their way to the host")
        if not again:
            unit.reduced = self._tape.take_on_host(Account.GRAD, sum(nbytes), f"reduced gradients of {unit.name}")
        self._scratch_of_adding(unit, again=again, shares=False)
        self._tape.give(received)
        self._tape.give(unreduced)
        self._tape.give(leaving)
        unit.unreduced = unit.received = None

    def _scratch_of_adding(self, unit: _Unit, *, again: bool, shares: bool) -> None:
        """A chunk where the sum cannot be formed in its place, and one more where what arrives has another type than the sum."""
        num_ranks, reduce = self._group.num_ranks, _NBYTES[self._config.precision.reduce]
        form = unit.trained[0]
        if shares and num_ranks == 1:
            return
        in_place = not again and form.grad_nbytes == reduce and not (shares and num_ranks > 2)
        num_chunks = (not in_place) + (form.wire_nbytes != reduce and num_ranks > 1)
        self._tape.give(self._tape.take(Account.WORKSPACE, num_chunks * min(CHUNK_NUMEL, form.shard_numel) * reduce, "chunk of a sum"))

    # ---- step ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Squares, then the gradients in the type of what is stepped on, then the optimizer, then nothing of them is left."""
        self._tape.give(self._take(self._homes.steps, Account.WORKSPACE, squares_nbytes(self._homes.steps), "squares of the norm"))
        if not self._homes.are_device:
            self._step_in_parts()
            return
        casts: list[Entry] = []
        for unit in self._units:
            for form in unit.trained:
                if form.stepped_nbytes != form.grad_nbytes:
                    numel = form.shard_numel if self._config.stage else form.full_numel
                    casts.append(self._tape.take(Account.WORKSPACE, numel * form.stepped_nbytes, "gradients cast for the step"))
        if not self._steady:
            self._take_moments()
        self._step_of_optimizer()
        for entry in casts:
            self._tape.give(entry)
        for unit in self._units:
            if unit.reduced is not None:
                self._tape.give(unit.reduced)
                unit.reduced = None
        self._micro_batch = 0

    def _step_in_parts(self) -> None:
        """The same, a flat buffer (or a chunk on the disk) at a time, in the memory where the optimizer steps."""
        if not self._steady:
            self._take_moments()
        for unit in self._units:
            for form in unit.trained:
                self._step_on(form)
            if unit.reduced is not None:
                self._tape.give(unit.reduced)
                unit.reduced = None
            for form in unit.trained:  # new values leave for the host in the type in which they rest there
                if self._homes.param is Tier.HOST and self._homes.steps is Tier.DEVICE and form.master_nbytes and self._config.stage == 3:
                    nbytes = form.shard_numel * form.param_nbytes
                    self._tape.give(self._tape.take(Account.WORKSPACE, nbytes, "new values on their way to the host"))
        self._micro_batch = 0

    def _step_on(self, form: FlatForm) -> None:
        where, taken = self._homes.steps, list[Entry]()
        numel = form.shard_numel if self._longest is None else min(self._longest, form.shard_numel)
        if is_lifted(form, self._config):
            taken.append(self._tape.take(Account.WORKSPACE, form.shard_numel * form.param_nbytes, "shard on the device for its step"))
        if form.stepped_nbytes != form.grad_nbytes:
            taken.append(self._take(where, Account.WORKSPACE, numel * form.stepped_nbytes, "gradients cast for the step"))
        pieces = [min(numel, piece) * form.stepped_nbytes for piece in form.pieces]
        nbytes = step_temporaries(self._kernel, pieces)
        if self._longest is not None and not self._steady:  # made by the optimizer, and then copied into the slot
            nbytes += self._per_element * numel * form.stepped_nbytes
        taken.append(self._take(where, Account.WORKSPACE, nbytes, f"temporaries of a {self._kernel} optimizer"))
        for entry in taken:
            self._tape.give(entry)

    def _step_of_optimizer(self) -> None:
        """What torch's optimizer takes while it steps on the pieces: nothing where it is fused."""
        pieces = [(numel * form.stepped_nbytes) for unit in self._units for form in unit.trained for numel in form.pieces]
        nbytes = step_temporaries(self._kernel, pieces)
        self._tape.give(self._tape.take(Account.WORKSPACE, nbytes, f"temporaries of a {self._kernel} optimizer"))


_NBYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
