"""Looks through a whole checkpoint, every byte of it, without an engine."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.manifest import Manifest
from shardbook.checkpoint.read import Range, Reader, open_checkpoint
from shardbook.engine.state import WEIGHT


def faults(folder: Path) -> Iterator[str]:
    """Everything that is wrong with a checkpoint, in the order in which it is found; nothing where all is as it was written."""
    try:
        found, reader = open_checkpoint(folder)
    except CheckpointError as error:
        yield str(error)
        return
    try:
        yield from _of_files(reader, found)
        yield from _of_parameters(reader, found)
    finally:
        reader.close()


def _of_files(reader: Reader, found: Manifest) -> Iterator[str]:
    for file in found.files:
        try:
            reader.check_file(file)
        except CheckpointError as error:
            yield str(error)
            continue
        for stored in file.tensors:
            try:
                reader.verify(Range(file, stored, 0, stored.numel))
            except CheckpointError as error:
                yield str(error)


def _of_parameters(reader: Reader, found: Manifest) -> Iterator[str]:
    for name, parameter in found.parameters.items():
        numel = prod(parameter["shape"])
        for what in sorted({WEIGHT, *reader.kinds(name)}) if numel else ():
            try:
                reader.check_complete(what, name, numel)
            except CheckpointError as error:
                yield str(error)
