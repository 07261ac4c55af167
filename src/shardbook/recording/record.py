"""``sb.record``: what a training loop does, written down so that it can be compared with another run.

    with sb.record(model, optimizer, "runs/a.rec") as recorder:
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            recorder.step(loss=loss, batch=batch)     # after backward and reduction, before clipping
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

A step is *complete* in the first :data:`COMPLETE_FIRST` steps and in every :data:`COMPLETE_EVERY`-th after them: all phases, with sums
and projections. In between it is *brief*: hashes and norms of gradients and weights. The phases, in the order in which they are taken:

``before``      weights at ``Recorder.step``: in complete steps, and where they changed since the step before
``model``       parameters as forward used them, where the optimizer has others (complete steps)
``buffer``      this rank's module buffers (complete steps)
``gradient``    at ``Recorder.step``
``stepped``     gradients as the optimizer finds them, clipped, say (in brief steps their norms only)
``weight``      after the optimizer's step
``state.key``   the optimizer's state after its step (complete steps; hash and norm, in step 2 sums and projections too)

Besides, every step has its *micro-batches*: the forwards that the outermost module made for it, as `forwards` sees them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardbook.errors import ConfigError, UsageError
from shardbook.recording.batches import batch_of
from shardbook.recording.begun import note_begun
from shardbook.recording.format import VERSION
from shardbook.recording.forwards import Watch
from shardbook.recording.fragments import Fragment, flat
from shardbook.recording.keys import NUM_PROJECTIONS, ROW_NUMEL, SCHEME
from shardbook.recording.layouts import Recorded, recorded
from shardbook.recording.surroundings import check_numbers, compute_of, dropout_of, generators, kept, numbers_of, version_of
from shardbook.recording.taking import Detail, Taker, state_of
from shardbook.recording.tensors import TensorFiles
from shardbook.recording.writer import Rows, StepEntry, Writer

COMPLETE_FIRST = 5
COMPLETE_EVERY = 16
COMPLETE_STATES = 2
"""The step whose optimizer states are taken with sums and projections: the first that was made from states of the step before."""

FLUSH_EVERY = 16
"""Steps. What a killed run loses at most."""


@contextmanager
def record(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path | str, *, full: bool = False, complete_every: int = COMPLETE_EVERY
) -> Generator["Recorder"]:
    """Record a loop over any engine: plain, DDP, FSDP2, DeepSpeed, shardbook, and trainers around them.

    Args:
        model: the module, or what wraps it; built, sharded and on its device.
        optimizer: what updates it.
        path: a folder for the record; every rank passes the same. Nothing is written over.
        full: also keep the tensors of complete steps, as safetensors files beside the rank's.
        complete_every: steps from one complete step to the next, after the first five; 1: every step is.

    Raises:
        ConfigError: nothing to record, a layout that can't be read, or a path where a record is.

    >>> import tempfile
    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder, record(model, optimizer, Path(folder) / "a") as recorder:
    ...     loss = model(torch.ones(4, 3)).sum()
    ...     loss.backward()
    ...     recorder.step(loss=loss, weight=8)
    ...     optimizer.step()
    """
    if isinstance(complete_every, bool) or complete_every < 1:
        raise ConfigError(f"record: complete_every = {complete_every}: steps from one complete step to the next, at least 1")
    recorder = Recorder(model, optimizer, Path(path), full=full, complete_every=complete_every)
    ended = False
    try:
        yield recorder
        ended = True
    finally:
        recorder.close(ended=ended)


class Recorder:
    """Made by :func:`record`."""

    def __init__(self, model: Any, optimizer: Any, folder: Path, *, full: bool, complete_every: int) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._run: Recorded = recorded(model, optimizer, self._rank)
        self._layout = self._run.layout
        self._every = complete_every
        self._taker = Taker()
        self._number = 0
        self._open: StepEntry | None = None
        self._unannounced = False  # the optimizer stepped without Recorder.step
        self._weights: Rows | None = None  # as last fingerprinted
        self._after: dict[str, tuple[int, int, int]] = {}  # weights as last fingerprinted: address and version
        self._is_after_complete = True
        self._groups: Any = None
        about = {"rank": self._rank, "ranks": self._num_ranks, "engine": self._run.engine}
        self._writer = Writer(folder, self._rank, self._manifest(), about)
        note_begun(folder)
        self._tensors = TensorFiles(folder, self._rank) if full else None
        start = StepEntry(0, True, {"groups": self._settings()})
        self._take_weights(start)
        self._take(start, "buffer", self._buffers())
        self._writer.add(start)
        self._forwards = Watch(self._run, lambda: self._is_complete(self._number + 1))
        self._handles = [
            self._run.stepper.register_step_pre_hook(self._before_optimizer),
            self._run.stepper.register_step_post_hook(self._after_optimizer),
        ]

    # ---- what a loop calls ----------------------------------------------------------------------------------------------

    def step(self, *, loss: Any, weight: Any = 1.0, batch: Any = None) -> None:
        """Once a step, after backward and reduction, before clipping.

        Args:
            loss: this rank's, over its micro-batches: a number or a tensor with one element, or a list with one for each micro-batch,
                which are added up.
            weight: what the loss is a sum over; 1 for a mean. A list is added up as well.
            batch: the tensors that this rank was given (one, or a tuple or mapping of them), a list of those where there are several
                micro-batches. Only hashes are kept.

        Raises:
            UsageError: there are no gradients, the optimizer has stepped already, or the record is closed.
            ConfigError: ``loss`` or ``weight`` is no number.
        """
        if not self._handles:
            raise UsageError("recorder.step: the record is closed, as its `with` has ended; call it inside")
        check_numbers("loss", loss)
        check_numbers("weight", weight)
        self._finish(applied=False)
        if self._unannounced:
            self._unannounced = False
            raise UsageError(
                "recorder.step: the optimizer has stepped since the last call, so gradients are those of no step to come; "
                "call recorder.step once a step, between backward and clipping, before optimizer.step()"
            )
        gradients = self._layout.gradients()
        if not gradients and not self._may_be_without_any:
            raise UsageError(
                "recorder.step: no parameter has a gradient; call it after backward (and reduction) and before gradients are cleared"
            )
        self._number += 1
        complete = self._is_complete(self._number)
        entry = self._open = StepEntry(self._number, complete, {"loss": kept(loss), "weight": kept(weight)})
        self._take_given(entry, batch)
        self._take_before(entry)
        if complete:
            self._take(entry, "model", self._layout.model())
            self._take(entry, "buffer", self._buffers())
        self._take(entry, "gradient", gradients)

    def close(self, *, ended: bool) -> None:
        """Write what is left and let go of the optimizer. ``ended`` is False where the loop was left by an exception."""
        self._forwards.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if ended:
            self._finish(applied=False)
        self._writer.close(ended=ended)

    # ---- what is seen by itself ------------------------------------------------------------------------------------------

    def _before_optimizer(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the optimizer's step, or, where gradients are made inside of it, as Lightning does, after its closure."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._about_to_step()
            return None

        def watched() -> Any:
            loss = closure()
            self._about_to_step()
            return loss

        return (args[0], watched, *args[2:]) if len(args) > 1 else args, kwargs | ({} if len(args) > 1 else {"closure": watched})

    def _about_to_step(self) -> None:
        entry = self._open
        if entry is None:
            self._unannounced = True
            return
        if (settings := self._settings()) is not None:
            entry.scalars["groups"] = settings
        self._take(entry, "stepped", self._layout.stepped(), "complete" if entry.complete else "norm")
        entry.scalars["applied"] = True
        entry.scalars["divided_by"] = self._run.divided_by()

    def _after_optimizer(self, *_: Any) -> None:
        if not self._run.steps_in_parts:  # else the last part is known by the next step
            self._finish(applied=True)

    def _finish(self, *, applied: bool) -> None:
        """The step is over: take what it left."""
        entry, self._open = self._open, None
        if entry is None:
            return
        applied = entry.scalars.setdefault("applied", applied)
        if applied:
            self._take_weights(entry)
            if entry.complete:
                for key, parts in self._layout.states().items():
                    self._take(entry, f"state.{key}", parts, "complete" if entry.number == COMPLETE_STATES else "brief")
        self._writer.add(entry)
        if self._number % FLUSH_EVERY == 0 or self._number <= 2:
            self._writer.flush()

    # ---- taking fingerprints ---------------------------------------------------------------------------------------------

    def _take_given(self, entry: StepEntry, batch: Any) -> None:
        """What the step was made from: the batch as it was passed, the forwards as they were seen, generators, the engine's divisor."""
        if batch is not None:
            found = batch_of(batch)
            given = [[facts.row() for facts in micro_batch] for micro_batch in found.given]
            entry.scalars |= {"batch_rows": found.num_rows, "batch": found.hashes, "given": given}
        forwards = self._forwards.take()
        entry.scalars |= {
            "forwards": [forward.scalars() for forward in forwards.each],
            "rng": generators(),
            "rng_before": forwards.generators,
            "rng_forward": forwards.generators_after,
            "divisor": kept(self._run.divisor()),
        }
        entry.rows += forwards.rows()

    def _take_before(self, entry: StepEntry) -> None:
        """Weights before the step.

        In a complete step they are hashed although no counter moved: a write to ``parameter.data`` moves none.
        """
        weights = self._layout.weights()
        changed = state_of(weights) != self._after
        if entry.complete or changed:
            knows = self._is_after_complete and not changed
            taken = self._taker.rows("before", weights, "complete" if entry.complete and not knows else "brief")
            if knows and self._weights is not None and not taken.same_hashes(self._weights):
                taken = self._taker.rows("before", weights, "complete")
            self._add(entry, taken, weights)

    def _take_weights(self, entry: StepEntry) -> None:
        weights = self._layout.weights()
        self._take(entry, "weight", weights)
        self._weights = entry.rows[-1] if weights else None
        self._after, self._is_after_complete = state_of(weights), entry.complete

    def _take(self, entry: StepEntry, phase: str, parts: list[Fragment], detail: Detail | None = None) -> None:
        """``detail``: how much; None: all in a complete step, hash and norm in a brief one."""
        if parts:
            self._add(entry, self._taker.rows(phase, parts, detail or ("complete" if entry.complete else "brief")), parts)

    def _add(self, entry: StepEntry, rows: Rows, parts: list[Fragment]) -> None:
        entry.rows.append(rows)
        if self._tensors is not None and entry.complete:
            self._tensors.write(entry.number, rows.phase, parts)

    def _buffers(self) -> list[Fragment]:
        return [Fragment(name, 0, flat(buffer)) for name, buffer in self._run.module.named_buffers()]

    def _is_complete(self, number: int) -> bool:
        return number <= COMPLETE_FIRST or number % self._every == 0

    @property
    def _may_be_without_any(self) -> bool:
        """Where ranks hold parts, one may have no part of what was trained in this step."""
        return self._num_ranks > 1 and self._run.engine not in ("plain", "ddp")

    def _settings(self) -> Any:
        """Settings of the parameter groups where they are not what was last written, else None."""
        groups = [numbers_of(group) | {"parameters": list(names)} for group, names in self._layout.groups()]
        if groups == self._groups:
            return None
        self._groups = groups
        return groups

    def _manifest(self) -> dict[str, Any]:
        run = self._run
        return {
            "version": VERSION,
            "scheme": SCHEME,
            "row_numel": ROW_NUMEL,
            "projections": NUM_PROJECTIONS,
            "shardbook": version_of("shardbook"),
            "torch": str(torch.__version__),
            "engine": run.engine,
            "ranks": self._num_ranks,
            "gradients": "sum" if run.sums else "as found",
            "optimizer": type(run.stepper).__name__,
            "complete_first": COMPLETE_FIRST,
            "complete_every": self._every,
            "dropout": dropout_of(run.module),
            "compute": compute_of(run.module),
            "parameters": [asdict(one) for one in run.parameters],
        }
