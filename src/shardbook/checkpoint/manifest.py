"""The manifest: everything a checkpoint says of itself beside the bytes of its tensors.

One JSON object. ``sha256`` is taken over the rest of it in one fixed spelling, so that no change of it goes unseen; ``version`` is read
before anything else is believed. ``docs/checkpoints.md`` lists the fields.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.safetensors import ITEMSIZE, Entry

VERSION = 1
FORMAT = "shardbook checkpoint"
NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Elements of a weight, of an optimizer's state or of a buffer, in a file: bytes ``begin`` to ``end`` of it.

    ``what``: "weight", "buffer", or the optimizer's name of a state. ``start``: the first element, in the order of the parameter's
    memory; of a buffer, the rank whose it is. ``xxh3``: one for each block of the checkpoint's ``block_nbytes``, from ``begin`` on.
    """

    key: str
    what: str
    name: str
    start: int
    dtype: str
    begin: int
    end: int
    xxh3: tuple[str, ...]

    @property
    def numel(self) -> int:
        return (self.end - self.begin) // ITEMSIZE[self.dtype]

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint; ``header_xxh3`` is of its first bytes, up to the first tensor."""

    name: str
    nbytes: int
    header_nbytes: int
    header_xxh3: str
    tensors: tuple[Stored, ...]


_KINDS: dict[str, type] = {
    "key": str, "what": str, "name": str, "dtype": str, "start": int, "begin": int, "end": int, "xxh3": tuple, "nbytes": int,
    "header_nbytes": int, "header_xxh3": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """``content`` is plain data as :mod:`.plain` spells it; ``files`` are checked."""

    content: Mapping[str, Any]
    files: tuple[StoredFile, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.content["rng"])

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["parameters"]

    @property
    def step(self) -> int:
        return self.content["step"]

    @property
    def nbytes(self) -> int:
        """Of all files of tensors."""
        return sum(file.nbytes for file in self.files)


def packed(content: Mapping[str, Any], files: Sequence[StoredFile]) -> bytes:
    """The bytes of a manifest."""
    body = {"format": FORMAT, "version": VERSION, **content, "files": [asdict(file) for file in files]}
    fields = {"sha256": _digest(body), **body}
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its own sum and every field of its files checked.

    Raises:
        CheckpointError: there is none, it is of a newer version, or it was changed after it was written.
    """
    path = folder / NAME
    try:
        body: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}); a checkpoint is a folder that engine.save wrote") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: it is no JSON ({error}): damaged; take another checkpoint, or copy this one again") from error
    if not isinstance(body, dict) or cast(dict[str, Any], body).get("format") != FORMAT:
        raise CheckpointError(f"{path}: not the manifest of a shardbook checkpoint (format {FORMAT!r} is expected)")
    found = cast(dict[str, Any], body)
    version = found.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(f"{path}: version {version}; this shardbook reads versions up to {VERSION}: use a newer one")
    digest = found.pop("sha256", None)
    if version != VERSION or digest != _digest(found):
        raise CheckpointError(f"{path}: damaged: its own checksum does not fit; take another checkpoint, or copy this one again")
    try:
        return Manifest(found, tuple(_file(folder, value) for value in found["files"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: a field is missing or of another kind ({error!r}): written by no shardbook") from error


def _file(folder: Path, value: Mapping[str, Any]) -> StoredFile:
    """One file's part of the manifest; its name must be a name in the folder, as nothing outside may be read."""
    name = value["name"]
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise CheckpointError(f"{folder / NAME}: file {name!r} is no plain name of a file in this folder: refused")
    return stored_file(value)


def stored_file(value: Mapping[str, Any]) -> StoredFile:
    """The inverse of ``asdict``, every field of its type.

    Raises:
        TypeError: a field is not (or KeyError: is missing).
    """
    tensors: list[dict[str, Any]] = [{**tensor, "xxh3": tuple(tensor["xxh3"])} for tensor in value["tensors"]]
    for one in (value, *tensors):
        for field, kind in _KINDS.items():
            if field in one and type(one[field]) is not kind:
                raise TypeError(f"{field} is {one[field]!r}")
    if any(tensor["dtype"] not in ITEMSIZE for tensor in tensors):
        raise TypeError("a type of no known name")
    numbers = (value["nbytes"], value["header_nbytes"], value["header_xxh3"])
    return StoredFile(value["name"], *numbers, tuple(Stored(**tensor) for tensor in tensors))


def check_file(folder: Path, file: StoredFile, found: Sequence[Entry]) -> None:
    """A file's header and the manifest say the same of every tensor.

    Raises:
        CheckpointError: the first that they don't agree on.
    """
    if len(found) != len(file.tensors):
        raise CheckpointError(f"{folder / file.name}: it holds {len(found)} tensors, the manifest names {len(file.tensors)}: another file?")
    for stored, entry in zip(file.tensors, found, strict=True):
        if (stored.key, stored.dtype, stored.begin, stored.end) != (entry.key, entry.dtype, entry.begin, entry.end):
            raise CheckpointError(
                f"{folder / file.name}: tensor {entry.key!r} ({entry.dtype}, bytes {entry.begin} to {entry.end}) is in the manifest "
                f"{stored.key!r} ({stored.dtype}, bytes {stored.begin} to {stored.end}): the file is another one, or damaged"
            )
