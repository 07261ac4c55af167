"""Looks through a whole checkpoint, every byte of it, without an engine."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.manifest import NAME
from shardbook.checkpoint.read import Range, Reader, open_checkpoint
from shardbook.engine.state import WEIGHT


def faults(folder: Path) -> Iterator[str]:
    """Everything that is wrong with a checkpoint, in the order in which it is found; nothing where all is as it was written."""
    try:
        reader = open_checkpoint(folder)
    except CheckpointError as error:
        yield str(error)
        return
    try:
        yield from _of_files(reader)
        yield from _of_parameters(reader)
    finally:
        reader.close()


def _of_files(reader: Reader) -> Iterator[str]:
    for file in reader.manifest.files:
        try:
            reader.check_file(file)
        except CheckpointError as error:
            yield str(error)
            continue
        for stored in file.tensors:
            try:
                reader.verify((Range(file, stored, 0, stored.numel), None))
            except CheckpointError as error:
                yield str(error)


def _of_parameters(reader: Reader) -> Iterator[str]:
    try:
        numels = {name: prod(map(int, parameter["shape"])) for name, parameter in reader.manifest.parameters.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        yield f"{reader.folder / NAME}: a field of a parameter is missing or of another kind ({error!r}): written by no shardbook"
        return
    for name, numel in numels.items():
        for what in sorted({WEIGHT, *reader.kinds(name)}) if numel else ():
            try:
                reader.check_complete(what, name, numel)
            except CheckpointError as error:
                yield str(error)
