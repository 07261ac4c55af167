"""Weights that others wrote: which files hold them, and every tensor of theirs by name, checked before a byte of one is used.

A folder as transformers writes it (``model.safetensors``, or shards with an index over them), or one safetensors file. No torch here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardbook.checkpoint import manifest
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.safetensors import Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin.index.json")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor in a file, its elements in the order of its dimensions."""

    path: Path
    entry: Entry


def find_tensors(path: Path) -> dict[str, Found]:
    """Every tensor by the name that it has there.

    Raises:
        CheckpointError: no such weights, pickles, an index that is damaged or names what isn't there, a damaged or truncated file, a
            tensor in two files. The message names file and tensor.
    """
    files, table = _files(path)
    found: dict[str, Found] = {}
    for file in files:
        for entry in read_header(file):
            if entry.key in found:
                raise CheckpointError(f"{file}: tensor {entry.key!r} is in {found[entry.key].path.name} as well: which one is meant?")
            if table is not None and table.get(entry.key) != file.name:
                where = f"in {table[entry.key]}" if entry.key in table else "nowhere"
                raise CheckpointError(f"{file}: it holds tensor {entry.key!r}, which the index has {where}: files of two exports?")
            found[entry.key] = Found(file, entry)
    for name, file in (table or {}).items():
        if name not in found:
            raise CheckpointError(f"{path / INDEX}: tensor {name!r} is not in {file}, where the index has it: files of two exports?")
    return found


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files to read, and what the index says where there is one: tensors to names of files."""
    if path.is_dir():
        if (path / SINGLE).is_file():  # before an index, as transformers takes them
            return [path / SINGLE], None
        if (path / INDEX).is_file():
            table = _read_index(path / INDEX)
            return [path / name for name in sorted(set(table.values()))], table
        raise CheckpointError(_nothing_in(path))
    if not path.exists():
        raise CheckpointError(f"{path}: not there; give a folder with {SINGLE} or {INDEX}, or one .safetensors file")
    if path.name.endswith(_PICKLES):
        raise CheckpointError(_pickle(path))
    if path.name.endswith(".index.json"):
        raise CheckpointError(f"{path}: an index; give its folder")
    return [path], None


def _nothing_in(folder: Path) -> str:
    if (folder / manifest.NAME).is_file():
        return f"{folder}: a checkpoint of shardbook; engine.load takes it as it is, or export its weights: shardbook checkpoint export"
    names = sorted(found.name for found in folder.iterdir())
    others = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if others:
        return f"{folder}: neither {SINGLE} nor {INDEX} in it, but {_listed(others)}; give the file itself, or add the index"
    if pickles:
        return _pickle(folder / pickles[0])
    return f"{folder}: neither {SINGLE} nor {INDEX} in it; give the folder that save_pretrained wrote, or one .safetensors file"


def _pickle(path: Path) -> str:
    return (
        f"{path}: a pickle, which can run code when it is read: refused; write its weights as safetensors, where it is trusted "
        f"(safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors'), or from_pretrained and save_pretrained "
        f"of transformers)"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: it is no JSON, or names a tensor twice ({error}): damaged") from error
    table: Any = cast(dict[str, Any], content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f'{path}: it has no "weight_map" of tensors to files: damaged')
    for name, file in cast(dict[str, Any], table).items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {name!r} is in {file!r}, which is no name of a .safetensors file in this folder: refused"
            )
    missing = sorted({file for file in table.values() if not (path.parent / file).is_file()})
    if missing:
        raise CheckpointError(f"{path}: of its files {_listed(missing)} are not in the folder: incomplete; copy it again")
    return cast(dict[str, str], table)


def _once(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name comes twice")
    return table


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
