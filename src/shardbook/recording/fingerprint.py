"""Fingerprints of many tensors in one pass: small, and additive over the parts of a tensor.

Nouns. A *fragment* is a run of elements of one parameter, flat, from element ``start`` on: a whole parameter, or what a rank has of
it. A *lane* is the bits of an element as one integer (8-byte elements have two lanes). The fingerprint of a fragment is

    hash       Σ lane · row key · column key  mod 2^64        exact: the order and the cut do not matter
    squares    Σ x²                                           float64, as are all that follow
    total      Σ x            absolute  Σ |x|          largest  max |x|
    projections[k]  Σ x · row sign · column sign k            eight of them
    narrow     which narrower types hold every element of a float32 tensor exactly: 1 for bf16, 2 for fp16, 3 for both, 0 for none

with keys and signs of the element's position in its *parameter*, so that what ranks hold of it adds up to what one rank would have
of the whole. A change of any one bit changes the hash; two tensors that differ have equal hashes with a probability of about 2^-33
at worst (all differences in sign bits) and 2^-64 mostly. E[projections²] is Σx², and projections are linear: those of a difference
are the difference of the projections.

A *brief* fingerprint has hash and squares only. Work goes in chunks of rows that stay in cache; the geometry of the fragments is
laid out once, in a `Plan`, and used in every step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardbook.recording.keys import NUM_PROJECTIONS, ROW_NUMEL, column_keys, column_signs, row_keys, row_signs

_CHUNK_ROWS = 1024  # 256 Ki elements, 2 MiB in float64 and as much as integers: calls cost more than cache misses do
_CHUNK_MEMBERS = 16  # fragments: the matrix that sums rows by fragment has members · rows entries
_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_BELOW_BF16, _BELOW_FP16 = 0xFFFF, 0x1FFF  # bits of a float32 that are zero in values of the type; for fp16 its range counts as well
_SAMPLED = 16  # columns from one element that is looked at first to the next


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements ``start`` to ``start + numel`` of a parameter."""

    start: int
    numel: int


@dataclass(slots=True)
class Prints:
    """Fingerprints, one per fragment. The last six are None where they are brief, the hash as well where only norms were taken."""

    hash: Tensor | None
    squares: Tensor
    total: Tensor | None = None
    absolute: Tensor | None = None
    largest: Tensor | None = None
    projections: Tensor | None = None
    nonfinite: Tensor | None = None
    narrow: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Slice:
    """Elements ``begin`` to ``end`` of fragment ``index`` go to element ``at`` of the chunk's scratch."""

    index: int
    begin: int
    end: int
    at: int


@dataclass(slots=True)
class _Chunk:
    slices: list[_Slice] = field(default_factory=list[_Slice])
    rows: list[int] = field(default_factory=list[int])  # their numbers in their parameters
    owners: list[int] = field(default_factory=list[int])  # the fragment of each row
    has_gaps: bool = False
    num_members: int = 0


@dataclass(frozen=True, slots=True)
class _Ready:
    """A chunk with its keys on the device."""

    slices: tuple[_Slice, ...]
    num_rows: int
    has_gaps: bool
    owners: Tensor  # fragment of each row
    members: Tensor  # fragments, each once
    keys: Tensor  # of the rows
    signs: Tensor  # (members, rows): the row's sign where the fragment owns it, else 0
    owned: Tensor  # likewise, 1 where it does


def norms(tensors: Sequence[Tensor]) -> Prints:
    """Squares only, in float32 or better: relative errors stay below numel / 64 · 6e-8 and are mostly near 1e-6.

    >>> norms([torch.tensor([3.0, 4.0])]).squares.tolist()
    [25.0]
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    each = torch._foreach_norm(list(tensors), 2, wide)  # pyright: ignore[reportPrivateImportUsage]
    return Prints(None, torch.stack(each).double().square_())


class Plan:
    """Fingerprints of fragments whose extents stay the same, all of one type on one device.

    >>> plan = Plan([Extent(0, 3), Extent(3, 2)], torch.float32, torch.device("cpu"))
    >>> parts = plan.prints([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, -5.0])])
    >>> whole = Plan([Extent(0, 5)], torch.float32, torch.device("cpu")).prints([torch.tensor([1.0, 2.0, 3.0, 4.0, -5.0])])
    >>> bool(parts.hash.sum() == whole.hash[0]), parts.squares.sum().item(), whole.total.item()
    (True, 55.0, 5.0)
    """

    def __init__(self, extents: Sequence[Extent], dtype: torch.dtype, device: torch.device) -> None:
        self._extents, self._dtype, self._device = tuple(extents), dtype, device
        self._per_element = 2 if dtype.itemsize == 8 else 1
        self._lane = _LANES[dtype.itemsize]
        self._chunks = [self._ready(chunk) for chunk in _chunks(self._extents)]

    def prints(self, tensors: Sequence[Tensor], *, brief: bool = False) -> Prints:
        """Fingerprints of flat tensors, one per extent, each as long as it. Nothing is kept, nothing waits for the device."""
        out = self._nothing(brief=brief)
        asks = not brief and self._dtype == torch.float32
        wide = torch.zeros(len(self._extents), 2, dtype=torch.float64, device=self._device) if asks else None
        most = max((chunk.num_rows for chunk in self._chunks), default=0)
        values = torch.empty(most, ROW_NUMEL, dtype=torch.float64, device=self._device)
        lanes = torch.empty(most, ROW_NUMEL * self._per_element, dtype=torch.int64, device=self._device)
        with torch.no_grad():
            for chunk in self._chunks:
                here, bits = values[: chunk.num_rows], lanes[: chunk.num_rows]
                self._fill(chunk, tensors, here, bits)
                self._add(chunk, here, bits, out)
                if wide is not None:
                    self._count_wide(chunk, here, bits, wide)
            if wide is not None:
                out.narrow = (wide[:, 0] == 0).long() + (wide[:, 1] == 0).long() * 2
        return out

    def _nothing(self, *, brief: bool) -> Prints:
        zero = torch.zeros(len(self._extents), dtype=torch.float64, device=self._device)
        none = torch.zeros(len(self._extents), dtype=torch.int64, device=self._device)
        if brief:
            return Prints(none, zero)
        projections = torch.zeros(len(self._extents), NUM_PROJECTIONS, dtype=torch.float64, device=self._device)
        return Prints(none, zero, zero.clone(), zero.clone(), zero.clone(), projections, none.clone(), none.clone())

    def _add(self, chunk: _Ready, values: Tensor, lanes: Tensor, out: Prints) -> None:
        if out.hash is not None:
            out.hash.index_add_(0, chunk.owners, self._row_hashes(lanes) * chunk.keys)
        out.squares.index_add_(0, chunk.owners, torch.linalg.vector_norm(values, 2, dim=1).square_())
        if out.total is None or out.absolute is None or out.largest is None or out.projections is None or out.nonfinite is None:
            return
        totals = values.sum(1)
        is_finite = self._device.type == "cpu" and bool(totals.isfinite().all())  # elsewhere the question would wait for the answer
        out.total.index_add_(0, chunk.owners, totals)
        if is_finite:
            out.projections.index_add_(0, chunk.members, torch.mm(torch.mm(chunk.signs, values), column_signs(self._device)))
        else:  # row by row: 0 · NaN is NaN, and must not come to other fragments
            out.projections.index_add_(0, chunk.owners, torch.mm(values, column_signs(self._device)) * chunk.signs.sum(0)[:, None])
        values.abs_()
        out.absolute.index_add_(0, chunk.owners, values.sum(1))
        mine = torch.where(chunk.owned == 0, 0.0, values.amax(1)).amax(1)
        out.largest[chunk.members] = torch.maximum(out.largest[chunk.members], mine)
        if not is_finite:
            out.nonfinite.index_add_(0, chunk.owners, values.isfinite().logical_not_().sum(1))

    def _count_wide(self, chunk: _Ready, values: Tensor, lanes: Tensor, wide: Tensor) -> None:
        """Count rows with an element that bf16, and that fp16, can't hold. Where a few elements tell of all, the others are not seen.

        Last of all, since it works in the chunk's own memory; values may be without their signs.
        """
        if self._device.type == "cpu":
            some = torch.mv(chunk.owned, ((lanes[:, ::_SAMPLED] & _BELOW_FP16).amax(1) != 0).double())
            if some.all():
                wide.index_add_(0, chunk.members, some[:, None].expand(-1, 2))
                return
        below = lanes.bitwise_and_(_BELOW_BF16).amax(1)  # amax, since any is several times slower
        lost = values.sub_(values.half()).abs_().amax(1)  # NaN where a value is infinite: not held either
        rows = torch.stack([below != 0, lost != 0], 1)
        wide.index_add_(0, chunk.members, torch.mm(chunk.owned, rows.double()))

    def _fill(self, chunk: _Ready, tensors: Sequence[Tensor], values: Tensor, lanes: Tensor) -> None:
        """Lay the elements where their positions in their parameters are, zeros where the chunk has none of them."""
        if chunk.has_gaps:
            values.zero_()
            lanes.zero_()
        flat_values, flat_lanes, per = values.view(-1), lanes.view(-1), self._per_element
        for part in chunk.slices:
            source, numel = tensors[part.index][part.begin : part.end], part.end - part.begin
            flat_values[part.at : part.at + numel].copy_(source)
            flat_lanes[part.at * per : (part.at + numel) * per].copy_(source.view(self._lane))

    def _row_hashes(self, lanes: Tensor) -> Tensor:
        keys = column_keys(lanes.shape[1], self._device)
        return torch.mv(lanes, keys) if lanes.device.type == "cpu" else (lanes * keys).sum(1)  # no integer matrices on CUDA

    def _ready(self, chunk: _Chunk) -> _Ready:
        rows, members = torch.tensor(chunk.rows), sorted(set(chunk.owners))
        owners = torch.tensor(chunk.owners)
        owned = (owners[None, :] == torch.tensor(members)[:, None]).double()
        signs = row_signs(rows) * owned
        return _Ready(tuple(chunk.slices), len(chunk.rows), chunk.has_gaps, owners.to(self._device),
                      torch.tensor(members, device=self._device), row_keys(rows).to(self._device), signs.to(self._device),
                      owned.to(self._device))  # fmt: skip


def _chunks(extents: Sequence[Extent]) -> Iterator[_Chunk]:
    """Rows of all extents, one after the other, at most :data:`_CHUNK_ROWS` at a time."""
    chunk = _Chunk()
    for index, extent in enumerate(extents):
        position, end = extent.start, extent.start + extent.numel
        while position < end:
            row, column = divmod(position, ROW_NUMEL)
            upto = min(end, (row + _CHUNK_ROWS - len(chunk.rows)) * ROW_NUMEL)
            num_rows = -(-upto // ROW_NUMEL) - row
            chunk.slices.append(_Slice(index, position - extent.start, upto - extent.start, len(chunk.rows) * ROW_NUMEL + column))
            chunk.rows += range(row, row + num_rows)
            chunk.owners += [index] * num_rows
            chunk.has_gaps |= column > 0 or upto % ROW_NUMEL > 0
            position = upto
            chunk.num_members += 1
            if len(chunk.rows) == _CHUNK_ROWS or chunk.num_members == _CHUNK_MEMBERS:
                yield chunk
                chunk = _Chunk()
    if chunk.rows:
        yield chunk
