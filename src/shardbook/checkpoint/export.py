"""A checkpoint's weights as others load them: safetensors files of whole parameters under the model's names, and an index over them."""

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardbook.checkpoint.dtypes import TYPES
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.folder import Place, is_checkpoint
from shardbook.checkpoint.foreign import INDEX
from shardbook.checkpoint.foreign_names import FLOATING, renamed
from shardbook.checkpoint.read import Range, Reader, open_checkpoint
from shardbook.checkpoint.safetensors import Entry, packed_header
from shardbook.checkpoint.write import write_bytes
from shardbook.engine.state import WEIGHT

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How to write. ``dtype``: of all floating parameters (a name in the format); None: each in the type it was trained in.

    ``file_nbytes``: no file is larger, unless one parameter alone is. ``rename``: beginnings of names, and what stands in their place in
    the files. ``config``: fields of a ``config.json`` to lie beside them, which is told the type that most weights have.
    """

    dtype: str | None = None
    file_nbytes: int = 5 * 10**9
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    config: Mapping[str, Any] | None = None


def export(folder: Path, to: Path, form: Form) -> list[Path]:
    """Write all parameters and module buffers (rank 0's) of a checkpoint into a new folder; the files, index and config last.

    One parameter at a time is in memory. Every byte that is read is checked. Tied parameters are written once, under their first name.

    Raises:
        CheckpointError: the checkpoint is damaged, something is at ``to`` already, or the folder can't be written.
    """
    if is_checkpoint(to):
        raise CheckpointError(f"{to}: is a checkpoint, which an export must not replace: choose another path")
    reader = open_checkpoint(folder)
    try:
        for file in reader.manifest.files:
            reader.check_file(file)
        groups = _grouped(_entries(reader, form), form.file_nbytes)
        place = Place(to, secrets.token_hex(8))
        try:
            names = _names(len(groups))
            for name, entries in zip(names, groups, strict=True):
                _write_file(reader, place.folder / name, entries, form.rename)
            if len(groups) > 1:
                _write_json(place.folder / INDEX, _index(names, groups, form.rename))
                names.append(INDEX)
            if form.config is not None:
                _write_json(place.folder / CONFIG, {**form.config, "dtype": _main_type(groups)})
                names.append(CONFIG)
            place.publish(keep=None)
        except BaseException:
            place.give_up()
            raise
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: a field of the manifest is missing or of another kind ({error!r})") from error
    except OSError as error:
        raise CheckpointError(f"{to}: can't be written ({error.strerror}); choose another folder, or free some space") from error
    finally:
        reader.close()
    return [to / name for name in names]


def _entries(reader: Reader, form: Form) -> list[Entry]:
    """What the files will hold, in the model's order."""
    parameters, buffers = reader.manifest.parameters, reader.manifest.content["buffers"]
    found = [Entry(name, _type(form, one["param"]), tuple(one["shape"])) for name, one in parameters.items()]
    return found + [Entry(name, one["dtype"], tuple(one["shape"])) for name, one in buffers.items()]


def _type(form: Form, dtype: str) -> str:
    return form.dtype if form.dtype is not None and TYPES[dtype].is_floating_point else dtype


def _grouped(entries: Sequence[Entry], file_nbytes: int) -> list[list[Entry]]:
    """Entries file by file: a new one begins where the next parameter would make it too large."""
    groups: list[list[Entry]] = [[]]
    total = 0
    for entry in entries:
        if groups[-1] and total + entry.nbytes > file_nbytes:
            groups.append([])
            total = 0
        groups[-1].append(entry)
        total += entry.nbytes
    return groups


def _names(count: int) -> list[str]:
    return ["model.safetensors"] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_file(reader: Reader, path: Path, entries: Sequence[Entry], rename: Mapping[str, str]) -> None:
    header, _ = packed_header([replace(entry, key=renamed(entry.key, rename)) for entry in entries], {"format": "pt"})
    with path.open("xb", buffering=0) as file:
        write_bytes(file.fileno(), memoryview(header))
        for entry in entries:
            write_bytes(file.fileno(), _value(reader, entry))
        os.fsync(file.fileno())


def _value(reader: Reader, entry: Entry) -> Tensor:
    """A whole parameter or buffer, flat, in the order of its elements rather than of its memory."""
    parameter: Mapping[str, Any] | None = reader.manifest.parameters.get(entry.key)
    if not entry.numel:
        return torch.empty(0, dtype=TYPES[entry.dtype])
    if parameter is None:
        found = reader.whole("buffer", entry.key, 0)
        if found is None or found.numel != entry.numel:
            raise CheckpointError(f"{reader.folder}: buffer {entry.key!r} is not in the files as the manifest says: incomplete")
        return _read(reader, [found], entry.numel)
    reader.check_complete(WEIGHT, entry.key, entry.numel)
    flat = _read(reader, list(reader.ranges(WEIGHT, entry.key, 0, entry.numel)), entry.numel)
    stride = tuple(parameter["stride"])
    if prod(entry.shape) != 1 + sum((length - 1) * step for length, step in zip(entry.shape, stride, strict=True)):
        raise CheckpointError(f"{reader.folder}: parameter {entry.key!r}: strides {stride} don't belong to shape {entry.shape}: damaged")
    through = flat.to(TYPES[parameter["param"]])  # what the model computes with is the weight, rounded to its own type first
    return through.as_strided(entry.shape, stride).to(TYPES[entry.dtype]).contiguous().view(-1)


def _read(reader: Reader, ranges: Sequence[Range], numel: int) -> Tensor:
    flat = torch.empty(numel, dtype=TYPES[ranges[0].stored.dtype])
    place = 0
    for wanted in ranges:
        reader.verify((wanted, None))
        reader.fill(wanted, (flat[place : place + wanted.numel],), None)
        place += wanted.numel
    reader.drain()
    return flat


def _index(names: Sequence[str], groups: Sequence[Sequence[Entry]], rename: Mapping[str, str]) -> dict[str, Any]:
    places = {renamed(entry.key, rename): name for name, entries in zip(names, groups, strict=True) for entry in entries}
    total = sum(entry.nbytes for entries in groups for entry in entries)
    return {"metadata": {"total_size": total}, "weight_map": places}


def _main_type(groups: Sequence[Sequence[Entry]]) -> str:
    """The floating type of most elements, as a ``config.json`` names it: from_pretrained casts all weights to that one."""
    numels: Counter[str] = Counter()
    for entries in groups:
        for entry in entries:
            numels[entry.dtype] += entry.numel if entry.dtype in FLOATING else 0
    return str(TYPES[numels.most_common(1)[0][0]]).removeprefix("torch.")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("xb", buffering=0) as file:
        write_bytes(file.fileno(), memoryview((json.dumps(content, indent=2) + "\n").encode()))
        os.fsync(file.fileno())
