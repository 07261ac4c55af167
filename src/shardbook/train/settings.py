"""The tables of a recipe that are not the model's and not ZeRO's. Each checks its own fields when it is built."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardbook.checks import SIZE_EXAMPLE, Check, parse_nbytes

RUN_FILE = "run.json"
"""What a run writes into its folder: the document, and"""
TRACE_FILE = "trace.json"
"""the timeline of its last steps, as Chrome and Perfetto open it."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """``[data]``: which text, and how much of it is kept for validation.

    Args:
        text: a file or a folder of text; ``None`` is the Python standard library's own sources.
        limit_nbytes: how many bytes are read at most.
        validation: fraction of the bytes, taken from the end, that is never trained on.
        validation_batches: micro-batches per rank, at most, that the validation loss is taken over.
    """

    text: Path | None = None
    limit_nbytes: int = 8 * 2**20
    validation: float = 0.05
    validation_batches: int = 8

    def __post_init__(self) -> None:
        check = Check(self)
        if self.text is not None and not (isinstance(self.text, (str, Path)) and str(self.text)):
            check.add("text", self.text, "the path of a file or folder of text", "leave it out for the standard library's sources")
        elif self.text is not None:
            object.__setattr__(self, "text", Path(self.text))
        check.integer("limit_nbytes", least=1, remedy="8388608 is the default")
        check.integer("validation_batches", least=1, remedy="8 is the default")
        _fraction(check, "validation", self.validation, below_one=True)
        check.done()


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """``[optimizer]``: AdamW, with a linear warmup and a cosine down to a fraction of the learning rate.

    Args:
        learning_rate: at the end of the warmup.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: on matrices only; norms and biases have none.
        warmup: steps in which the learning rate rises linearly.
        final: fraction of ``learning_rate`` that the last step has.
    """

    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 10
    final: float = 0.1

    def __post_init__(self) -> None:
        check = Check(self)
        check.positive("learning_rate", remedy="0.003 suits a small model")
        check.positive("eps", remedy="1e-8 is usual")
        check.integer("warmup", least=0, remedy="0 starts at the full learning rate")
        _fraction(check, "beta1", self.beta1, below_one=True)
        _fraction(check, "beta2", self.beta2, below_one=True)
        _fraction(check, "final", self.final, below_one=False)
        if not _is_number(self.weight_decay) or self.weight_decay < 0:
            check.add("weight_decay", self.weight_decay, "a finite number from 0 up", "0 turns it off")
        check.done()


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """``[batch]``: ``global_batch = micro_batch * zero.accumulate * run.ranks`` sequences make a step.

    Args:
        micro_batch: sequences in one forward of one rank.
        sequence: tokens in a sequence.
        global_batch: sequences in a step over all ranks.
    """

    micro_batch: int = 4
    sequence: int = 256
    global_batch: int = 8

    def __post_init__(self) -> None:
        check = Check(self)
        for name in ("micro_batch", "sequence", "global_batch"):
            check.integer(name, least=1, remedy="give a positive number")
        check.done()


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """``[run]``: how long, on how many ranks, from which seed, and where the books go.

    Args:
        steps: optimizer steps.
        ranks: data-parallel ranks; under torchrun or SLURM their number is what was started.
        seed: of the initial weights and of the order of the data.
        check_baseline: first steps in which the plain loop is trained beside the engine.
        check_replicas: steps from one comparison of all ranks' full parameters to the next; a rank that has drifted ends the run. 0: none.
        out: folder for ``run.json``.
        port: of the rendezvous on this machine; ``None`` is a free one.
        device: ``"auto"`` is CUDA where every local rank has a device of its own, else the CPU.
        save_every: steps from one checkpoint to the next, and one after the last step; 0: none.
        save_async: whether checkpoints are written while the training goes on, from a copy in host memory; the last one is not.
        keep: checkpoints that are kept, the last ones.
        resume: a checkpoint to go on from; ``"auto"``: the last one in ``out``, if there is one. ``None``: begin.
        init_from: weights to begin from, as safetensors: a folder or a file. ``None``: drawn from ``seed``.
        budget: bytes that a rank's books may hold, as a number or as ``"8GiB"``; more ends the run and says why. ``None``: no limit.
    """

    steps: int = 60
    ranks: int = 2
    seed: int = 0
    check_baseline: int = 0
    check_replicas: int = 0
    out: Path = Path("runs/train")
    port: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    budget: int | None = None
    save_every: int = 0
    save_async: bool = False
    keep: int = 2
    resume: str | None = None
    init_from: Path | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("steps", least=1, remedy="give at least one step")
        check.integer("ranks", least=1, remedy="1 trains on this process alone")
        check.integer("seed", least=0, remedy="0 is the default")
        check.integer("check_baseline", least=0, remedy="0 turns the comparison off")
        check.integer("check_replicas", least=0, remedy="0 turns the comparison off")
        check.integer("port", least=1, remedy="leave it out for a free port", optional=True)
        check.integer("save_every", least=0, remedy="0 saves no checkpoints")
        check.flag("save_async")
        if self.save_async is True and self.save_every == 0:
            check.add("save_async", True, "no effect, as save_every is 0: no checkpoints", "set save_every, or leave it out")
        check.integer("keep", least=1, remedy="2 is the default")
        check.path("out")
        if self.resume is not None and not isinstance(self.resume, (str, Path)):
            check.add("resume", self.resume, 'the path of a checkpoint, or "auto"', "leave it out to begin")
        if self.init_from is not None:
            check.path("init_from")
            if self.resume not in (None, "auto"):
                check.add(
                    "init_from", str(self.init_from), "no other beginning beside it", "run.resume goes on from a checkpoint: leave one out"
                )
        check.choice("device", ("auto", "cpu", "cuda"))
        if isinstance(self.budget, str) and (nbytes := parse_nbytes(self.budget)) is not None:
            object.__setattr__(self, "budget", nbytes)
        elif self.budget is not None and (not isinstance(self.budget, int) or self.budget < 1):
            check.add("budget", self.budget, f"a number of bytes, or a size such as {SIZE_EXAMPLE}", "leave it out for no limit")
        check.done()
        if self.port is not None and self.port > 65535:
            check.add("port", self.port, "a port from 1 to 65535", "leave it out for a free port")
        check.done()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fraction(check: Check, name: str, value: Any, *, below_one: bool) -> None:
    most = "below 1" if below_one else "to 1"
    if not _is_number(value) or not 0 <= value <= 1 or (below_one and value == 1):
        check.add(name, value, f"a number from 0 {most}", "give a fraction")
