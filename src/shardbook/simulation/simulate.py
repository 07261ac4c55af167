"""``sb.simulate``: the engine itself, on tensors without values, in a process group without others.

asked, given, refusals      what it is asked and given, and in words what can't be done here
group, memory, workspaces   a fake process group, the allocator of fake tensors, what kernels take inside
trainers, peers             shardbook's engine; FSDP2's and DDP's own code
run, observe                two steps under the ledger
extrapolate, likeness       a deep model from three shallow ones, where its blocks are seen to do the same
caching                     the run through a model of a device's caching allocator
answer                      all of it as a forecast
build                       models from facts, for the command
"""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from shardbook.config import ZeroConfig
from shardbook.forecasting.result import Forecast
from shardbook.simulation.answer import answer
from shardbook.simulation.asked import Asked
from shardbook.simulation.extrapolate import WORTHWHILE, chain_of, extrapolated
from shardbook.simulation.given import check_functions, check_loss
from shardbook.simulation.run import Functions, Model, built, run
from shardbook.simulation.trainers import Loss, OptimizerFactory, usual_loss


def simulate(
    build_model: Callable[[], nn.Module],
    build_batch: Callable[[], Any],
    config: ZeroConfig,
    *,
    ranks: int,
    optimizer: OptimizerFactory,
    loss: Loss | None = None,
    engine: str = "shardbook",
    rank: int = 0,
    device: str | None = None,
    allocator: str | None = None,
    blocks: Literal["auto", "all"] = "auto",
) -> Forecast:
    """Bytes on one rank, by account, found by running the engine on fake tensors: the second witness beside ``forecast``.

    Two steps are taken. The first is reported by itself, as optimizers make their state in it; the peak is that of the second, which all
    later ones are like.

    Args:
        build_model: makes the model; its parameters have no values, so a model of any size is made in seconds.
        build_batch: makes the arguments of one call of the model: a tuple, a mapping of keywords, or one tensor.
        config: as for the engine; FSDP2 and DDP read types, accumulation and clipping from it.
        ranks: of the process group.
        optimizer: makes the optimizer from the parameters, as ``lambda parameters: torch.optim.AdamW(parameters, fused=True)``.
        loss: ``(loss_sum, weight)`` from the model's output; None: the output is that pair, a scalar loss, or has ``.loss``.
        engine: ``"shardbook"``, ``"fsdp2"`` or ``"ddp"``, which run their own code.
        rank: which one to be.
        device: a name of the catalog of devices: its kernels' temporaries and its caching allocator on top. None: a CPU.
        allocator: settings of the caching allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``.
        blocks: ``"all"`` runs every block of a deep model; ``"auto"`` runs a few where the rest follows to the byte.

    Raises:
        ConfigError: an argument outside what is allowed; a model that needs values, with the operator and the line.
        UsageError: this process is in a process group already.

    >>> import torch
    >>> told = simulate(
    ...     lambda: nn.Linear(64, 64),
    ...     lambda: (torch.randn(8, 64),),
    ...     ZeroConfig(stage=3),
    ...     ranks=16,
    ...     optimizer=torch.optim.AdamW,
    ...     loss=lambda out: (out.sum(), 8),
    ... )
    >>> told.witness, told.peak_phase, told.persistent
    ('simulation', 'step', 3844)
    """
    asked = Asked.of(
        config=config, engine=engine, ranks=ranks, rank=rank, device=device, allocator=allocator, blocks=blocks
    )  # fmt: skip
    functions: dict[str, Any] = {"build_model": build_model, "build_batch": build_batch, "optimizer": optimizer}
    check_functions(**functions, loss=loss or usual_loss)
    given = Functions(**functions, loss=_checked(loss or usual_loss))
    with _no_collection(), torch.inference_mode(False), torch.enable_grad():
        if asked.may_extrapolate:
            model = built(given)
            chain, known = chain_of(model), Model.of(model)
            if chain is not None and chain.length >= WORTHWHILE and (found := extrapolated(asked, given, model, chain)) is not None:
                return answer(asked, found, known)
            del model
        found = run(asked, given)
        return answer(asked, found, found.model)


def _checked(loss: Loss) -> Loss:
    """A person's function, and a look at what it gives."""
    return lambda output: check_loss(loss(output))


@contextmanager
def _no_collection() -> Generator[None]:
    """Looking for cycles, again and again, among all of torch's objects and the books' would take a third of the time."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
