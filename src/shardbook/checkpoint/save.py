"""Saving, on every rank: what is plain is gathered and checked, each rank writes its own file, rank 0 writes the manifest and gives the
folder its name.
"""

import json
import os
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from shardbook.checkpoint import chance, manifest
from shardbook.checkpoint.agree import Ranks
from shardbook.checkpoint.dtypes import CODES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.folder import Place, around
from shardbook.checkpoint.plain import encoded
from shardbook.checkpoint.write import BLOCK_NBYTES, Item, blocks_of, write_file
from shardbook.engine.engine import Engine
from shardbook.engine.state import held_by, members_of, scalars_of
from shardbook.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a person gives to be kept beside the training state. ``keep``: of this series of checkpoints, leave so many."""

    extra: Mapping[str, Any]
    schedulers: Sequence[Any]
    keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save whose folder is made. ``place``: rank 0's; ``content``: of the manifest, what all ranks know alike."""

    path: Path
    token: str
    folder: Path
    place: Place | None
    content: dict[str, Any]
    keep: int | None
    ranks: Ranks

    def publish(self) -> None:
        """Rank 0, when the files of all ranks are on the disk."""
        assert self.place is not None
        _write_manifest(self.folder, self.content, self.ranks.num_ranks)
        self.place.publish(keep=self.keep)

    def give_up(self) -> None:
        """Clear away what was written; rank 0's to do."""
        if self.place is not None:
            with suppress(OSError):
                self.place.give_up()


@dataclass(frozen=True, slots=True)
class Own:
    """Of this rank: what its file holds, and beside it what the manifest must know of it."""

    items: list[Item]
    part: dict[str, Any]


def save(engine: Engine, path: Path, given: Given) -> Path:
    """Write a checkpoint at ``path``; all ranks call it, after :func:`check_between_steps`.

    Raises:
        CheckpointError: something given is no plain data, or the folder can't be written; what was there before is as it was.
    """
    with begun(engine, path, given) as under_way:
        ranks = under_way.ranks
        with ranks.together(f"writing {path}"):
            write_own(under_way.folder, ranks.rank, own_of(engine, ranks))
        with ranks.together(f"writing {path}"):
            if under_way.place is not None:
                under_way.publish()
    return path


@contextmanager
def begun(engine: Engine, path: Path, given: Given) -> Generator[Begun]:
    """A save, with its folder; given up if the block raises. All ranks enter it.

    Raises:
        CheckpointError: something given is no plain data, or the folder can't be made.
    """
    ranks = Ranks(engine.transport, engine._context.storage.device)
    with ranks.together("asking for a checkpoint"):
        if given.keep is not None and (type(given.keep) is not int or given.keep < 1):
            raise CheckpointError(f"keep: {given.keep!r}; at least 1 checkpoint is kept (None: all of them)")
        content = _content(engine, given)
    token = ranks.told(secrets.token_hex(8))[0]
    place, folder = _begin(ranks, path, token)
    under_way = Begun(path=path, token=token, folder=folder, place=place, content=content, keep=given.keep, ranks=ranks)
    try:
        yield under_way
    except BaseException:
        under_way.give_up()
        raise


def check_between_steps(engine: Engine) -> None:
    """Whether there is nothing that no checkpoint keeps.

    Raises:
        UsageError: gradients are there, which no checkpoint keeps; or parameters are gathered to be changed.
    """
    if engine._passes.tally.num_micro_batches:
        raise UsageError("engine.save: in the middle of a step, whose gradients are not kept; call it after engine.step()")
    for unit in engine._units:
        unit.check_untouched()


def _begin(ranks: Ranks, path: Path, token: str) -> tuple[Place | None, Path]:
    """Rank 0 makes the folder to be written into; the others look whether they see it."""
    place = None
    with ranks.together(f"making the folder of {path}"):
        if ranks.rank == 0:
            place = Place(path, token)
    folder = around(path) / token
    try:
        with ranks.together(f"looking for the folder of {path}"):
            if not folder.is_dir():
                raise CheckpointError(f"{path}: rank 0's folder is not seen here; all ranks need the same path on a file system they share")
    except BaseException:
        if place is not None:
            place.give_up()
        raise
    return place, folder


def own_of(engine: Engine, ranks: Ranks) -> Own:
    """What this rank has to keep, its tensors where they lie. All ranks call it."""
    with torch.no_grad():
        items = _items(engine, ranks)
    state = _optimizer_state(engine)
    scalars = {name: values for unit in engine._units for flat in unit.flats for name, values in scalars_of(flat, state).items()}
    device = engine._context.storage.device
    return Own(items, {"scalars": encoded(scalars, "optimizer state"), "rng": encoded(chance.taken(device), "random numbers")})


def write_own(folder: Path, rank: int, own: Own) -> None:
    """This rank's files, on the disk when it returns."""
    with torch.no_grad():
        written = write_file(folder / f"rank-{rank:05d}.safetensors", own.items)
    (folder / _part(rank)).write_text(json.dumps({"file": asdict(written), **own.part}), encoding="utf-8")


def _items(engine: Engine, ranks: Ranks) -> list[Item]:
    """Unit after unit: the weights of this rank's shards, then its optimizer's state; at the end the module buffers."""
    held = held_by(engine._context.disk, engine._units, ranks.rank, _optimizer_state(engine))
    return [*(Item(one.what, one.name, one.start, one.tensor) for one in held), *_buffer_items(engine, ranks)]


def _buffer_items(engine: Engine, ranks: Ranks) -> list[Item]:
    """Rank 0's module buffers, and of every other rank those that differ from rank 0's."""
    buffers = [(name, tensor.detach()) for name, tensor in persistent_buffers(engine.model).items()]
    if not buffers:
        return []
    sums = []
    for _, tensor in buffers:
        total = xxhash.xxh3_64()
        for block in blocks_of(tensor):
            total.update(block)
        sums.append(total.intdigest() >> 11)  # 53 bits, which the ranks can tell each other
    first = ranks.compared(sums)[0]
    mine = zip(buffers, sums, first, strict=True)
    return [
        Item("buffer", name, ranks.rank, tensor.contiguous().view(-1))
        for (name, tensor), own, other in mine
        if ranks.rank == 0 or own != other
    ]


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that torch's own ``state_dict`` keeps, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _optimizer_state(engine: Engine) -> Mapping[Any, Any]:
    return {} if engine.optimizer is None else engine.optimizer.state


def _content(engine: Engine, given: Given) -> dict[str, Any]:
    """What all ranks know alike."""
    scale = engine._stepper
    return {
        "written_by": {"shardbook": metadata.version("shardbook"), "torch": torch.__version__, "time_ns": time.time_ns()},
        "step": engine.num_steps,
        "block_nbytes": BLOCK_NBYTES,
        "config": _config(engine),
        "units": [{"name": unit.name, "parameters": [member.name for _, _, member in unit.members]} for unit in engine._units],
        "parameters": _parameters(engine),
        "aliases": aliases_of(engine.model),
        "buffers": {name: _buffer(name, tensor) for name, tensor in persistent_buffers(engine.model).items()},
        "optimizer": None if engine.optimizer is None else _optimizer(engine),
        "schedulers": [_scheduler(one, number) for number, one in enumerate(schedulers_of(engine, given.schedulers))],
        "loss_scale": None if scale is None else asdict(scale.loss_scale),
        "extra": _extra(given.extra),
    }


def _extra(extra: Any) -> Any:
    if not isinstance(extra, Mapping):
        raise CheckpointError(f"extra: {type(extra).__name__}; a mapping of names to plain data is allowed")
    return encoded(dict(cast(Mapping[str, Any], extra)), "extra")


def _buffer(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.dtype not in CODES or tensor.layout != torch.strided:
        raise CheckpointError(
            f"buffer {name!r} is of {tensor.dtype} ({tensor.layout}); dense ones of {', '.join(sorted(CODES.values()))} are kept: give it "
            f"another type, or register it with persistent=False"
        )
    return {"shape": list(tensor.shape), "dtype": CODES[tensor.dtype]}


def _config(engine: Engine) -> dict[str, Any]:
    precision = engine.config.precision
    return {
        "stage": engine.config.stage, "accumulate": engine.config.accumulate, "clip_grad_norm": engine.config.clip_grad_norm,
        "param": precision.param, "reduce": precision.reduce, "grad": precision.grad, "master": precision.master,
        "keep_param_shard": precision.keep_param_shard, "keep": dict(precision.keep),
    }  # fmt: skip


def _parameters(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _, flat, member in members_of(engine._units):
        found[member.name] = {
            "shape": list(member.shape), "stride": list(member.stride), "weight": CODES[flat.types.master or flat.types.param],
            "param": CODES[flat.types.param], "trainable": flat.trainable,
        }  # fmt: skip
    return found


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters, and the name under which each is kept."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False) if first[id(one)] != name}


def _optimizer(engine: Engine) -> dict[str, Any]:
    assert engine.optimizer is not None
    assert engine._pieces is not None
    names = engine._pieces.group_names({id(member.parameter): member.name for _, _, member in members_of(engine._units)})
    groups = [
        {
            "options": encoded({key: value for key, value in group.items() if key != "params"}, f"parameter group {number}"),
            "parameters": own,
        }
        for number, (group, own) in enumerate(zip(engine.optimizer.param_groups, names, strict=True))
    ]
    return {"class": type(engine.optimizer).__name__, "groups": groups}


def schedulers_of(engine: Engine, given: Sequence[Any]) -> list[Any]:
    """The engine's own, then those given."""
    return [*([] if engine._scheduler is None else [engine._scheduler]), *given]


def _scheduler(scheduler: Any, number: int) -> dict[str, Any]:
    if not callable(getattr(scheduler, "state_dict", None)):
        raise CheckpointError(
            f"schedulers: {type(scheduler).__name__} has no state_dict(); give it one, with plain data, and load_state_dict()"
        )
    return {"class": type(scheduler).__name__, "state": encoded(scheduler.state_dict(), f"scheduler {number} ({type(scheduler).__name__})")}


def _part(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _write_manifest(folder: Path, content: dict[str, Any], num_ranks: int) -> None:
    """One manifest of what all ranks have written beside their files."""
    parts = [json.loads((folder / _part(rank)).read_text(encoding="utf-8")) for rank in range(num_ranks)]
    scalars: dict[str, Any] = {}
    for part in parts:
        scalars = {**part["scalars"], **scalars}
    if content["optimizer"] is not None:
        content = {**content, "optimizer": {**content["optimizer"], "scalars": scalars}}
    files = [manifest.stored_file(part["file"]) for part in parts]
    data = manifest.packed({**content, "rng": [part["rng"] for part in parts]}, files)
    for rank in range(num_ranks):
        (folder / _part(rank)).unlink()
    with (folder / manifest.NAME).open("xb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
