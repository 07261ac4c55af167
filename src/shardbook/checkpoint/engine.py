"""The engine that people are given: the one of ``engine/``, and its checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardbook.checkpoint import load, save
from shardbook.checkpoint.compare import Allowed
from shardbook.checkpoint.plan import Asked
from shardbook.engine import engine


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

    def save(self, path: Path, *, extra: Mapping[str, Any] | None = None, schedulers: Sequence[Any] = (), keep: int | None = None) -> Path:
        """Write a checkpoint: a folder at ``path``, which is there in full or not at all. All ranks call it, between two steps.

        Args:
            path: of the checkpoint, the same on all ranks, on a file system they share. A checkpoint that is there is replaced.
            extra: plain data of your own (the position in your data, say), given back by :meth:`load`; rank 0's is kept.
            schedulers: those that the engine was not given; with ``state_dict()``.
            keep: of the checkpoints beside it whose names differ from its name in digits only, leave the last so many (itself included).

        Raises:
            CheckpointError: what was given can't be kept, or the folder can't be written; the last checkpoint is as it was.
            UsageError: in the middle of a step.
        """
        with self._doing("save"):
            return save.save(self, Path(path), save.Given(extra={} if extra is None else extra, schedulers=schedulers, keep=keep))

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
            allowed = Allowed(missing=allow_missing, unexpected=allow_unexpected)
            return load.load(self, Path(path), Asked(allowed=allowed, schedulers=schedulers))
