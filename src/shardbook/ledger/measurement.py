"""``measure``: books and measurement around any PyTorch loop.

Steps are told apart by themselves: one ends when the model is called again after an optimizer's step (or where ``run.step()`` says so).
In ``full`` mode every operator is seen and every allocation recorded; ``light`` mode looks at optimizer steps alone and costs nothing
per operator. Whatever happens inside, what was seen until then can be had from ``document()``.
"""

import gc
import os
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardbook.accounts import Account, Tier
from shardbook.document import Moved, RunDocument, Shortage, StepMemory
from shardbook.errors import BudgetError, ConfigError, UsageError
from shardbook.events import Booking, Event, LinkName, Mark, Traffic, Transfer
from shardbook.ledger import assemble
from shardbook.ledger.allocator import is_profiling, shown
from shardbook.ledger.counters import counters
from shardbook.ledger.heights import Height, heights
from shardbook.ledger.items import Items
from shardbook.ledger.ledger import Ledger
from shardbook.ledger.memory import REAL, Memory
from shardbook.ledger.owners import Owners
from shardbook.ledger.peers import module_of
from shardbook.ledger.peers_naming import tensors_in
from shardbook.ledger.places import Places
from shardbook.ledger.reconcile import Blocks, StepLog, curve, place_of_peak, reconcile
from shardbook.ledger.shortage import Situation, asked_nbytes, shortage_of
from shardbook.ledger.timeline import Timeline, clock_for
from shardbook.ledger.watcher import Operator, Watcher, is_out_of_memory

Mode = Literal["full", "light"]
_OLDER = "older than the measurement"
_NO_STEP = "the optimizer never stepped: what there is, is of one step that did not end"
_WORTH_A_NOTE_NBYTES = 4096
_LOOKS = 3
"""Optimizer steps that light mode looks at; the accounts that it sees don't change after them."""


def measure(
    model: nn.Module | None = None, optimizer: Optimizer | None = None, *, mode: Mode = "full", budget: int | None = None
) -> "Measurement":
    """Books and measurement of whatever runs inside the ``with``.

    Args:
        model: what is trained, wrapped or not (DDP, FSDP2, DeepSpeed's engine, shardbook's); None: found when it is called.
        optimizer: whose steps end the loop's steps; None: any optimizer's.
        mode: ``full`` sees every operator and every allocation; ``light`` only what models and optimizers hold at their steps.
        budget: bytes that the books may hold of the memory that is measured (on a CPU the host's tier lies in it as well); more raises
            :class:`~shardbook.errors.BudgetError`. None: no limit. Full mode only.

    Raises:
        ConfigError: no such mode, or a budget that can't be kept.
        UsageError: on entering, if a measurement is open already in this process.

    >>> model = nn.Linear(256, 256)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with measure(model, optimizer) as run:
    ...     for _ in range(2):
    ...         model(torch.ones(8, 256)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> document = run.document()
    >>> document.peak["PARAM"], document.peak["UNACCOUNTED"]
    (263168, 0)
    """
    return Measurement(model, optimizer, mode=mode, budget=budget)


class Measurement:
    """What :func:`measure` gives. Open it with ``with``; read it by :meth:`document`, also after an exception.

    ``excluded`` are tensors of somebody else, that are neither measured nor booked; ``first_step`` is the number of the first step;
    ``memory`` says what counts as memory.
    """

    _open_one: "Measurement | None" = None  # the profiler and the stack of dispatch modes are the process's own, so these can't nest
    _num_opened = 0

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer | None,
        *,
        mode: Mode,
        budget: int | None = None,
        excluded: Iterable[Tensor] = (),
        first_step: int = 1,
        memory: Memory = REAL,
    ) -> None:
        _check(mode, budget)
        self.mode, self.budget = mode, budget
        self.ledger = Ledger()
        self.notes: list[str] = []
        self.shortage: Shortage | None = None
        self.num_steps = 0
        self._memory = memory
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._given = model, optimizer
        self._before_first = first_step - 1
        self._rank, self._num_ranks = 0, 1
        self._places, self._items = Places(follows_units=mode == "full"), Items(self._book, memory)
        self._watcher = Watcher(self._items, self._places, self._fail, self._move)
        self._highest: StepLog | None = None  # the step whose peak is highest so far
        self._steps: list[StepMemory] = []
        self._sampled: dict[str, int] = {}
        self._sent = self._sent_in_step = self._sent_in_last_step = self._seconds = 0
        self._moved: dict[LinkName, list[int]] = {}  # in all steps, and in the last one
        self._stepped = self._marked = self._is_open = self._is_observed = self._is_scanned = self._is_lost = False
        self._part: assemble.Part | None = None
        self._stack = ExitStack()

    # ---- what a person calls --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if Measurement._open_one is not None:
            raise UsageError("measure: a measurement is open already, and they can't nest; close it first, or mark steps with its step()")
        if self._part is not None:
            raise UsageError("measure: this measurement has ended; call measure() again for another")
        if self.mode == "full" and is_profiling():
            raise UsageError("measure: a profiler of torch is running, and there can be one; close it first, or use mode='light'")
        Measurement._open_one = self
        Measurement._num_opened += 1
        self._number = Measurement._num_opened
        self._stack.callback(_forget)
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                self._note_end(error)
            with suppress(Exception) if error is not None else nullcontext():  # a model that is half torn down must not hide why
                self._look_once_more()
            self._stop(counts=self._stepped)
        finally:
            self._stack.close()
        if not self.num_steps and not self._marked:
            self.notes.append(_NO_STEP)
        self._part = self._summarise()
        assemble.publish(self._part, self._number)

    @contextmanager
    def step(self) -> Generator[None]:
        """Marks a step; from the first one on, steps are what is marked and nothing else."""
        self._marked = True
        self._stop(counts=False)
        self._start()
        try:
            yield
        finally:
            self._stop(counts=True)
            self._start()

    def document(self) -> RunDocument:
        """What all ranks saw, on every rank that asks; a rank that told nothing is in the notes. No collective: ask after the ``with``.

        Raises:
            UsageError: the measurement has not begun.
        """
        part = self.part()
        if self._part is None:
            return assemble.document_of([part], ["written while the measurement went on: of this rank, and without the step under way"])
        parts, notes = assemble.collect(part, self._number)
        if self._num_ranks > 1 and len(parts) == 1 and not notes:
            notes = [f"of rank {self._rank} alone: the process group of the {self._num_ranks} ranks is gone, or has no store"]
        return assemble.document_of(parts, notes)

    def heights(self, *, finely: bool = False) -> list[Height]:
        """The highest instant of each phase in the step whose peak was highest; ``finely``: of each unit and operator in it."""
        return [] if self._highest is None else heights(self._highest, set(self._items.unclaimed.values()), finely=finely)

    def part(self) -> assemble.Part:
        """What this rank saw, as plain data."""
        if self._part is None and Measurement._open_one is not self:
            raise UsageError("measure: nothing has been measured yet; open it with: with sb.measure(...) as run")
        return self._part or self._summarise()

    # ---- opening and closing ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        model, optimizer = self._given
        self._device = _device_of(model)
        self._timeline = Timeline(clock=clock_for(self._device.type))
        self._find_rank()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._owners = Owners(model, optimizer, self._places, self._enter_root, self._memory)
        self._given = None, None  # from here on they are held by those whose they are
        self._stack.callback(self._owners.unhook)
        self._owners.hook(self._before_step, self._after_step)
        self._observe_engine()
        if self.mode == "full":
            self._take_base()
            self._scan()
            self._stack.enter_context(self._watcher.saving())
            self._stack.enter_context(self._watcher)
        self._start()
        self._stack.callback(self._stop, counts=False)

    def _take_hanging(self) -> None:
        """What hangs on a model is not somebody else's, though it is in no account."""
        with shown():
            for found in self._owners.hanging():
                storage = found if isinstance(found, torch.UntypedStorage) else self._memory.storage_of(found)
                if storage is not None and storage.nbytes() and storage.device.type == self._device.type:
                    if isinstance(found, torch.UntypedStorage):
                        self._items.take_older(torch.empty(0, dtype=torch.uint8).set_(storage), storage, _OLDER)
                    self._items.hang(storage)

    def _find_rank(self) -> None:
        """The process group may come after the measurement has begun, and go before it ends."""
        if dist.is_available() and dist.is_initialized():
            self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        elif self._num_ranks == 1 and "WORLD_SIZE" in os.environ:
            self._rank, self._num_ranks = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
        self._timeline.rank = self._rank

    def _take_base(self) -> None:
        self._records = self._memory.records(self._device)
        gc.collect()  # what is only waiting to be collected is nobody's
        for address, (tensor, storage) in self._memory.live(self._device).items():
            if address not in self._excluded:
                self._items.take_older(tensor, storage, _OLDER)
        self._take_hanging()
        base = {address: item for address, item in self._items.live.items() if self._is_measured(item.tier)}
        self._base = sum(item.nbytes for item in base.values() if not item.is_away)
        unknown = max(0, torch.cuda.memory_allocated(self._device) - self._base) if self._device.type == "cuda" else 0
        self._base += unknown
        self._blocks = Blocks(base, unknown)

    def _observe_engine(self) -> None:
        """An engine of shardbook's own tells of its memory itself."""
        if not self._is_observed and (context := self._owners.observe(self._hear)) is not None:
            self._stack.enter_context(context)
            self._is_observed = True

    def _look_once_more(self) -> None:
        self._scan()
        if changes := self._owners.changes():
            self.notes.append(f"the model changed while it was measured: {changes}")

    def _note_end(self, error: BaseException) -> None:
        first = (str(error).strip() or "no message").splitlines()[0]
        self.notes.append(f"ended by {type(error).__name__}: {first}")
        if self.shortage is None and is_out_of_memory(error):
            self._run_short(Account.UNACCOUNTED, asked_nbytes(str(error)), None)

    # ---- what is heard inside -------------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        """The engine's own words."""
        self._timeline(event)
        if isinstance(event, Mark) and event.name == "step":
            self._places.stepping = event.edge == "begin"
        if isinstance(event, Traffic):
            self._sent += event.sent_nbytes
            self._sent_in_step += event.sent_nbytes
        elif isinstance(event, Transfer):
            moved = self._moved.setdefault(event.link, [0, 0, 0])
            moved[:2] = moved[0] + event.nbytes, moved[1] + event.nbytes
        elif isinstance(event, Booking) and self.mode == "full" and event.address and event.tier is not Tier.DISK:
            self._items.book(event)
        elif isinstance(event, Booking) and event.tier is not Tier.DEVICE:  # a file, or memory that no tensor of torch's own has
            self.ledger.move(event.account, event.tier, event.unit, event.nbytes, event.phase)

    def _is_measured(self, tier: Tier) -> bool:
        """Whether the allocator that is measured gives out memory of this tier: on a CPU it is the host's as well."""
        return tier is Tier.DEVICE or (self._device.type == "cpu" and tier is not Tier.DISK)

    @property
    def _measured_total(self) -> int:
        """Bytes that the books hold of the memory that is measured."""
        return self.ledger.total + (self.ledger.total_of("host") if self._is_measured(Tier.HOST) else 0)

    def _book(self, account: Account, tier: Tier, unit: str, nbytes: int, phase: str) -> None:
        self.ledger.move(account, tier, unit, nbytes, phase)
        if self.budget is None or nbytes <= 0 or (total := self._measured_total) <= self.budget or not self._is_measured(tier):
            return
        if total - self._items.unclaimed_nbytes > self.budget:
            budget, self.budget = self.budget, None  # said once: what goes on after it is somebody's own decision
            self._run_short(account, nbytes, budget)
            raise BudgetError(
                f"budget = {budget:,} bytes: {nbytes:,} more were wanted for {account} in {phase} of "
                f"{unit or 'no unit'}; {total:,} would be held; the levers are in document().shortage"
            )

    def _fail(self, error: RuntimeError, operator: Operator) -> None:
        """An operator got no memory: everything is still held."""
        self._run_short(Account.WORKSPACE, asked_nbytes(str(error)), None)
        self.notes.append(f"out of memory in {operator.name}")

    def _move(self) -> None:
        """Another phase or unit: what an engine did in between without an operator is looked at."""
        self._items.check_gathered()
        if self._owners.engine.startswith("deepspeed"):  # it keeps its buckets, and gathered parameters, for parts of a pass
            self._scan()

    def _run_short(self, account: Account, asked: int, budget: int | None) -> None:
        phase, unit = self._places.now()
        self.shortage = shortage_of(
            Situation(
                engine=self._owners.engine,
                num_ranks=self._num_ranks,
                num_units=self._owners.num_units,
                rank=self._rank,
                step=self._before_first + self.num_steps + 1,
                phase=phase,
                unit=unit,
                account=account,
                asked=asked,
                budget=budget,
                live=self.ledger.held(),
            )
        )

    def _enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepped and not self._marked:
            self._stop(counts=True)
            self._start()
        self._is_called = True
        self._observe_engine()
        if not self._is_scanned:
            self._find_rank()
            self._scan()
            self._is_scanned = bool(self._owners.models)
        if self.mode == "full":
            for tensor in tensors_in((args, kwargs)):
                item = self._items.see(tensor, Account.INPUT, ("between", ""), "input")
                if item is not None and item.account in (Account.WORKSPACE, Account.UNACCOUNTED):
                    self._items.know(item, Account.INPUT, "input")

    def _before_step(self, *_: Any) -> None:
        self._places.stepping = True
        if self._expects_news:
            self._scan()

    def _after_step(self, *_: Any) -> None:
        self._places.stepping = False
        self._stepped = True
        if not self._is_called and not self._marked:  # parts of the model alone: nothing else will tell where the step ends
            self._stop(counts=True)
            self._start()
        if self._expects_news and (self.mode == "full" or self.num_steps == 0):
            self._scan()

    @property
    def _expects_news(self) -> bool:
        """Whether models and optimizers may hold what they did not at the last look, and operators alone don't tell.

        In a plain loop that is so until there is optimizer state: gradients are seen when autograd lays them at their parameters.
        """
        return self.num_steps < _LOOKS or self._owners.engine not in ("plain", "ddp")

    def _scan(self) -> None:
        """Ask models and optimizers what they hold. One that can't be read must not stop the loop that it is part of."""
        try:
            self._ask_owners()
        except BudgetError:
            raise
        except Exception as error:  # noqa: BLE001
            self._say(f"what models and optimizers hold could not be read ({type(error).__name__}: {error})")

    def _ask_owners(self) -> None:
        if self.mode == "full":
            self._owners.scan(self._items)
            self._watcher.serve(self._owners.engine, reduces=self._owners.reduces)
        elif self.num_steps < _LOOKS:
            found = self._owners.sampled()
            if sum(found.values()) >= sum(self._sampled.values()):
                self._sampled = found  # with gradients: what a step holds longest

    # ---- steps ----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._is_open, self._stepped, self._is_called, self._sent_in_step = True, False, False, 0
        for moved in self._moved.values():
            moved[1] = 0
        self._began = time.perf_counter_ns()
        if self.mode == "full" and not self._is_lost:
            self._records.start()

    def _stop(self, *, counts: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        end = time.perf_counter_ns()
        self.num_steps += counts
        self._seconds += (end - self._began) * counts
        if counts:
            self._sent_in_last_step = self._sent_in_step
            for moved in self._moved.values():
                moved[2] = moved[1]
        if self.mode == "full":
            self._log(self._before_first + self.num_steps if counts else 0)
        self._places.turn()

    def _log(self, number: int) -> None:
        recorded, end = self._records.stop(), time.perf_counter_ns()
        if recorded is None:
            self._is_lost = True
        if self._is_lost or recorded is None:
            self._items.turn()
            self._watcher.turn()
            return
        before, items, operators = dict(self._blocks.live), self._items.turn(), self._watcher.turn()
        changes, peak = self._blocks.follow(recorded, end, items)
        log = StepLog(number, self._began, end, before, changes, items, operators, self._blocks.unknown, peak)
        phase, unit = place_of_peak(log)
        if number:
            self._steps.append(StepMemory(rank=self._rank, step=number, peak_allocated=peak.nbytes, phase=phase, unit=unit))
        if self._highest is None or peak.nbytes > self._highest.peak.nbytes:
            self._highest = log

    def _note_apart(self, count: int, nbytes: int) -> None:
        self._say(f"{count} tensors of this process, {nbytes:,} bytes, are older than the measurement and had no part in it: in no figure")

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _summarise(self) -> assemble.Part:
        if self._is_lost:
            self._say("another profiler of torch ran inside: from that step on nothing was recorded")
        for name, why in self._watcher.blind.items():
            self._say(f"what {name} made could not be booked ({why})")
        apart = set(self._items.unclaimed.values())
        apart_nbytes = sum(item.nbytes for item in apart)
        if apart_nbytes >= _WORTH_A_NOTE_NBYTES:
            self._note_apart(len(apart), apart_nbytes)
        highest = self._highest
        peak = None if highest is None else highest.peak.nbytes - apart_nbytes
        found, host = counters(self._device, peak), sum(self.ledger.highest("host").values())
        return assemble.Part(
            rank=self._rank,
            engine=self._owners.engine,
            mode=self.mode,
            allocator=self._memory.counter(self._device)
            if self.mode == "full" or self._device.type == "cuda"
            else "not measured: light mode",
            num_parameters=self._owners.num_parameters,
            seconds=self._seconds / 1e9,
            counters=found,
            sampled=self._sampled,
            reconciliation=None if highest is None else reconcile(highest, self._rank, self._base - apart_nbytes, apart),
            curve=None if highest is None else curve(highest, self._rank, apart),
            steps=tuple(replace(step, peak_allocated=step.peak_allocated - apart_nbytes) for step in self._steps),
            timeline=self._timeline.record() if self._is_observed else None,
            sent_nbytes=self._sent,
            sent_nbytes_per_step=self._sent_in_last_step,
            shortage=self.shortage,
            notes=(*self.notes, *([f"beside it up to {host:,} bytes of host memory were held"] if host else [])),
            tiers=self.ledger.tiers(self._rank),
            moved=tuple(
                Moved(rank=self._rank, link=link, nbytes=total, nbytes_per_step=last) for link, (total, _, last) in self._moved.items()
            ),
        )


def _forget() -> None:
    Measurement._open_one = None


def _check(mode: str, budget: int | None) -> None:
    if mode not in ("full", "light"):
        raise ConfigError(f"mode = {mode!r}: allowed are 'full' (every operator and allocation) and 'light' (optimizer steps alone)")
    if budget is not None and mode == "light":
        raise ConfigError(f"budget = {budget}: light mode sees no allocation that could cross it; use mode='full', or leave it out")
    if budget is not None and budget <= 0:
        raise ConfigError(f"budget = {budget}: it must be a positive number of bytes")


def _device_of(model: Any) -> torch.device:
    first = None if model is None else next(module_of(model).parameters(), None)
    if first is not None and first.device.type == "cuda":
        return first.device
    if model is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
