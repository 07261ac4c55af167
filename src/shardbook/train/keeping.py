"""Checkpoints of a training: when they are saved, and where a run that is started again goes on.

They lie in the run's folder, ``checkpoints/step-00000040``. Beside the training state each holds what the run has told so far, and of
the data all that says which sequence comes next: how many were used, of which text, in which order.
"""

import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardbook.checkpoint.folder import finished
from shardbook.errors import ConfigError
from shardbook.models.local import read_config
from shardbook.train.loop import Training

FOLDER = "checkpoints"


@contextmanager
def asked_to_end(*, saves: bool) -> Generator[Callable[[], bool]]:
    """Whether SIGTERM has come since: inside, it ends nothing by itself, if the run ``saves``.

    A run that can't be saved ends at once, as before; so does one that is still being built.
    """
    seen: list[int] = []
    if not saves or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    wakeup = signal.set_wakeup_fd(-1)  # what ends the process a second later listens there
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(wakeup)


class Keeping:
    """Of one rank; all ranks make the same calls."""

    def __init__(self, training: Training) -> None:
        self._training, self._run = training, training.recipe.run
        self._folder = self._run.out / FOLDER

    def resume(self) -> int:
        """Go on from where the recipe says; the steps that are done already.

        Raises:
            ConfigError: there is no such checkpoint, or the data that it goes on with are not this run's.
        """
        path = self._chosen()
        if path is None:
            return 0
        if self._run.check_baseline:
            raise ConfigError(
                "run.check_baseline: the plain loop begins at the first step, and this run goes on from a later one: leave it out"
            )
        training = self._training
        saved = training.engine.load(path)
        self._check_data(path, saved)
        training.tell_on(saved["told"])
        return int(saved["step"])

    def after(self, step: int, *, ends: bool) -> bool:
        """Save, if a checkpoint is due after this step, or if some rank was asked to end (``ends``); whether the run ends here.

        Raises:
            CheckpointError: it can't be saved, or what was saved in the background meanwhile could not be.
        """
        every = self._run.save_every
        if not every:
            return False
        transport = self._training.engine.transport
        flags = transport.exchange(torch.tensor([float(ends)], dtype=torch.float64, device=self._training.device), "the end of a step")
        ends = bool(flags.any())
        if ends or step % every == 0 or step == self._run.steps:
            extra = {"step": step, "data": self._data(step), "told": self._training.told(), "model": self._model()}
            wait = not self._run.save_async or ends or step == self._run.steps  # nothing goes on beside the last one
            self._training.engine.save(self._folder / f"step-{step:08d}", extra=extra, keep=self._run.keep, wait=wait)
        return ends

    def _chosen(self) -> Path | None:
        if self._run.resume is None:
            return None
        if self._run.resume != "auto":
            return Path(self._run.resume)
        found = finished(self._folder)
        return found[-1].parent if found else None  # the last one in it, as rank 0 sees it

    def _model(self) -> dict[str, Any]:
        """What an export needs to name the weights as transformers does, and to write a ``config.json``."""
        recipe = self._training.recipe
        if recipe.model_file is None:
            return {"decoder": asdict(recipe.model), "sequence": recipe.batch.sequence}
        return {"transformers": read_config(recipe.model_file)}

    def _data(self, step: int) -> dict[str, Any]:
        recipe = self._training.recipe
        return {
            "num_sequences": step * recipe.batch.global_batch,
            "global_batch": recipe.batch.global_batch,
            "sequence": recipe.batch.sequence,
            "seed": recipe.run.seed,
            "validation": recipe.data.validation,
            "sha256": self._training.text.sha256,
        }

    def _check_data(self, path: Path, saved: Mapping[str, Any]) -> None:
        """The next sequence is the one after the last that was used, however many ranks there are now."""
        theirs, mine = saved.get("data"), self._data(saved.get("step", 0))
        if not isinstance(theirs, dict):
            raise ConfigError(f"run.resume: {path} was not saved by shardbook train: it does not say where in the data it is")
        for name, value in mine.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"run.resume: {path} goes on with data of which {name} is {theirs[name]}, and this run's is {value}; "
                    f"give the same text, seed, sequence and global batch"
                )
