"""Master and moments in a file: how the engine cuts a shard into chunks, and the slots of host memory that these come through.

A chunk has at most c elements, a sixteenth of what the rank holds and not more than 2^22; slots have room for one, with its master and
all moments, and there are three of them (docs/tiers.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardbook.config import ZeroConfig
from shardbook.forecasting.buffers import ALIGNMENT, FlatForm, flat_form, piece_numels
from shardbook.structure import FlatFacts, Structure

NUM_SLOTS = 3
CHUNK_NUMEL = 1 << 22
LEAST_NUMEL = 1 << 14
SHARE = 16
PAGE_NBYTES, LARGE_PAGE_NBYTES = 4096, 1 << 21
LARGE_FROM_NBYTES = 1 << 22
"""Slots of so many bytes are laid at the border of a large page."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``slot_nbytes``: of each slot, its slack for alignment left out; ``num_pieces``: what optimizers step on, cut where chunks end.

    ``longest``: elements of the largest chunk; ``chunk_nbytes``: of each chunk, in the order of steps.
    """

    slot_nbytes: int
    num_pieces: int
    longest: int
    chunk_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Host memory of all slots, with what it takes to lay them at the border of a page."""
        return NUM_SLOTS * (self.slot_nbytes + (LARGE_PAGE_NBYTES if self.slot_nbytes >= LARGE_FROM_NBYTES else PAGE_NBYTES))


def plan(structure: Structure, config: ZeroConfig, per_element: int, quantised_nbytes: int = 0) -> Plan:
    """The chunks of one rank, for an optimizer with so many moments of each element, and bytes of it whatever its type."""
    found = [(flat, form) for flat, form in _trained(structure, config)]
    widths = {id(form): form.stepped_nbytes * (1 + per_element) + quantised_nbytes for _, form in found}
    planned = min(CHUNK_NUMEL, max(LEAST_NUMEL, _up(-(-sum(form.shard_numel for _, form in found) // SHARE), ALIGNMENT)))
    slot = max((_up(min(planned, form.shard_numel) * widths[id(form)], PAGE_NBYTES) for _, form in found), default=0)
    pieces = longest = 0
    nbytes: list[int] = []
    for flat, form in found:
        most = slot // widths[id(form)] // ALIGNMENT * ALIGNMENT
        first = structure.group.rank * form.shard_numel
        for begin in range(0, form.shard_numel, most):
            end = min(form.shard_numel, begin + most)
            longest = max(longest, end - begin)
            nbytes.append((end - begin) * widths[id(form)])
            pieces += sum(1 for _ in piece_numels(flat.numels, first + begin, first + end))
    return Plan(slot_nbytes=slot, num_pieces=pieces, longest=longest, chunk_nbytes=tuple(nbytes))


def _trained(structure: Structure, config: ZeroConfig) -> Iterator[tuple[FlatFacts, FlatForm]]:
    for unit in structure.units:
        for flat in unit.flats:
            form = flat_form(flat, config, structure.group)
            if form.trainable and form.shard_numel:
                yield flat, form


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
