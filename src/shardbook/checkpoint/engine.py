"""The engine that people are given: the one of ``engine/``, and its checkpoints."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shardbook.checkpoint import import_weights, load, save
from shardbook.checkpoint.agree import Ranks
from shardbook.checkpoint.background import Background
from shardbook.checkpoint.compare import Allowed
from shardbook.checkpoint.foreign_names import Asked as AskedOfWeights
from shardbook.checkpoint.plan import Asked
from shardbook.engine import engine
from shardbook.engine.report import StepReport


class Engine(engine.Engine):
    """Trains a model under ZeRO, and keeps what it has reached: :class:`shardbook.engine.engine.Engine` says what it takes.

    >>> import tempfile, torch, shardbook as sb
    >>> model = torch.nn.Linear(4, 2)
    >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(stage=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = engine.save(Path(folder) / "step-0", extra={"position": 7})
    ...     engine.load(path)
    {'position': 7}
    >>> engine.close()
    """

    def save(
        self, path: Path, *, extra: Mapping[str, Any] | None = None, schedulers: Sequence[Any] = (), keep: int | None = None,
        wait: bool = True,
    ) -> Path:  # fmt: skip
        """Write a checkpoint: a folder at ``path``, which is there in full or not at all. All ranks call it, between two steps.

        Args:
            path: of the checkpoint, the same on all ranks, on a file system they share. A checkpoint that is there is replaced.
            extra: plain data of your own (the position in your data, say), given back by :meth:`load`; rank 0's is kept.
            schedulers: those that the engine was not given; with ``state_dict()``.
            keep: of the checkpoints beside it whose names differ from its name in digits only, leave the last so many (itself included).
            wait: whether the checkpoint is there on return. False: what it holds is copied to host memory (this rank's part of weights
                and optimizer state, and the module buffers), and a thread writes that while the training goes on. One save goes on
                at a time: the next one waits for it, as do :meth:`wait_saved`, :meth:`load` and :meth:`close`, and each of them raises
                if it has failed.

        Raises:
            CheckpointError: what was given can't be kept, or the folder can't be written; the last checkpoint is as it was. Or the save
                before this one, which went on in the background, has failed: nothing was begun, and the next call begins anew.
            UsageError: in the middle of a step.
        """
        with self._doing("save"):
            save.check_between_steps(self)
            self._background.wait(self._ranks)
            given = save.Given(extra={} if extra is None else extra, schedulers=schedulers, keep=keep)
            return save.save(self, Path(path), given) if wait else self._background.begin(self, Path(path), given)

    def wait_saved(self) -> Path | None:
        """Wait for the save that goes on in the background. All ranks call it; returns its path, None if there was none.

        Raises:
            CheckpointError: it has failed, on all ranks alike; the last checkpoint is as it was.
        """
        with self._doing("save"):
            return self._background.wait(self._ranks)

    def load(
        self, path: Path, *, schedulers: Sequence[Any] = (), allow_missing: Sequence[str] = (), allow_unexpected: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Take over a checkpoint, saved at any stage, N, unit layout and precision; returns its ``extra``. All ranks call it.

        Args:
            path: of a checkpoint, or of a folder of checkpoints, whose last one is meant.
            schedulers: those that the engine was not given, in the order in which they were saved.
            allow_missing: patterns of names of parameters and buffers that may be missing in it and keep their values; "optimizer" and
                "schedulers" for a checkpoint without them.
            allow_unexpected: patterns of names that may be in it and are left out; "optimizer" and "schedulers" leave these out, and
                those here begin anew. What both lists name may have another shape here, and keeps its value.

        Raises:
            CheckpointError: it is damaged, incomplete or of another model; nothing was changed.
            UsageError: in the middle of a step, or inside ``engine.gathered``.
        """
        with self._doing("load"):
            self._background.wait(self._ranks)
            allowed = Allowed(missing=allow_missing, unexpected=allow_unexpected)
            return load.load(self, Path(path), Asked(allowed=allowed, schedulers=schedulers))

    def load_weights(
        self,
        path: Path,
        *,
        rename: Mapping[str, str] | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
    ) -> None:
        """Begin from weights that others wrote, as safetensors. All ranks call it, between two steps.

        As ``model.load_state_dict`` in a plain loop: values are cast, to the type of what the optimizer updates; the optimizer's state,
        schedulers and steps stay as they are.

        Args:
            path: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its files, or one file.
            rename: beginnings of names in the files, and what stands in their place here: ``{"": "transformer."}`` puts it before all.
            allow_missing: patterns of names of parameters and buffers that may be missing in it and keep their values.
            allow_unexpected: patterns of names that may be in it and are left out.

        Raises:
            CheckpointError: it can't be read, or is of another model; nothing was changed.
            UsageError: in the middle of a step, or inside ``engine.gathered``.
        """
        with self._doing("load"):
            allowed = Allowed(missing=allow_missing, unexpected=allow_unexpected)
            import_weights.import_weights(self, Path(path), AskedOfWeights(allowed=allowed, rename=rename or {}))

    def step(self) -> StepReport:
        report = super().step()
        self._background.tidy()
        return report

    step.__doc__ = engine.Engine.step.__doc__

    def close(self) -> None:
        """Wait for the save that goes on in the background; give back the process group and the watchdog, and take the hooks off the model.

        Raises:
            CheckpointError: that save has failed; everything was given back.
        """
        try:
            self._background.wait(None)
        finally:
            super().close()

    @cached_property
    def _background(self) -> Background:
        return Background()

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.transport, self._context.storage.device)
