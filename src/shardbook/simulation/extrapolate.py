"""A deep model from three shallow ones, where the result is the same to the byte.

Blocks that are alike take alike. So what is held at an instant in the first or last blocks, or outside of them, is a straight line in
their number, and among the blocks between it is one in their place. Both are looked at, account by account, in models of 4, 5 and 6
blocks; where anything is not a line (buckets that blocks share, say), all blocks are run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from shardbook.ledger.reconcile import Height
from shardbook.simulation.asked import Asked
from shardbook.simulation.observe import Observed
from shardbook.simulation.run import Functions, Run, run

DEPTHS = (4, 5, 6)
WORTHWHILE = sum(DEPTHS) + 1
"""So many blocks, or more, take longer than the three models."""

Place = tuple[str, str, int]
"""(phase, unit or "from the first" or "from the last", which of them)."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Repeated blocks: the path of the list that holds them, and how many."""

    path: str
    length: int


def chain_of(model: nn.Module) -> Chain | None:
    """The longest list of modules that are alike in everything that takes memory; None: there is none."""
    found = [
        Chain(path, len(module))
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _are_alike(list(module.children()))
    ]
    return max(found, key=lambda chain: chain.length, default=None)


def extrapolated(asked: Asked, given: Functions, model: nn.Module, chain: Chain) -> Run | None:
    """The run of all blocks of ``model``, from short ones; None: it can't be told from them. The model is cut."""
    runs: list[Run] = []
    try:
        for depth in reversed(DEPTHS):
            _cut(model, chain, depth)
            runs.insert(0, run(asked, replace(given, build_model=lambda: model), by_unit=True))
    except Exception:  # noqa: BLE001 - a model that counts its blocks, or a real fault: the whole one will tell
        return None
    first = _observed([one.first for one in runs], chain)
    later = _observed([one.later for one in runs], chain)
    sent = _line([one.sent for one in runs], chain.length)
    if first is None or later is None or sent is None:
        return None
    return replace(runs[-1], first=first, later=later, sent=sent, seconds=sum(one.seconds for one in runs), blocks=DEPTHS[-1])


def _cut(model: nn.Module, chain: Chain, depth: int) -> None:
    blocks = model.get_submodule(chain.path)
    for key in list(blocks._modules)[depth:]:
        del blocks._modules[key]


def _observed(short: Sequence[Observed], chain: Chain) -> Observed | None:
    places = [_places(one.heights, chain, depth) for one, depth in zip(short, DEPTHS, strict=True)]
    if any(found.keys() != places[0].keys() for found in places) or not _is_even(short[-1].heights, chain, DEPTHS[-1]):
        return None
    heights: list[Height] = []
    for place in places[0]:
        books = _lines([found[place].books for found in places], chain.length)
        if books is None:
            return None
        heights.append(Height(phase=place[0], unit=_unit(place, chain), allocated=sum(books.values()), books=books))
    after = _lines([one.after for one in short], chain.length)
    return None if after is None else replace(short[-1], heights=tuple(heights), after=after)


def _places(heights: Sequence[Height], chain: Chain, depth: int) -> dict[Place, Height]:
    """Heights outside of the blocks, in the first two and in the last two."""
    found: dict[Place, Height] = {}
    for height in heights:
        number = _number(height.unit, chain)
        if number is None:
            found[height.phase, height.unit, -1] = height
        elif number < 2:
            found[height.phase, "from the first", number] = height
        elif number >= depth - 2:
            found[height.phase, "from the last", depth - 1 - number] = height
    return found


def _unit(place: Place, chain: Chain) -> str:
    _, where, number = place
    if where == "from the first":
        return f"{chain.path}.{number}"
    return f"{chain.path}.{chain.length - 1 - number}" if where == "from the last" else where


def _is_even(heights: Sequence[Height], chain: Chain, depth: int) -> bool:
    """Whether from the second block to the last but one each takes as much more, or less, as the one before."""
    inner: dict[tuple[str, int], Mapping[str, int]] = {
        (height.phase, number): height.books for height in heights if (number := _number(height.unit, chain)) is not None
    }
    phases = {phase for phase, _ in inner}
    for phase in phases:
        books = [inner.get((phase, number)) for number in range(1, depth - 1)]
        known = [one for one in books if one is not None]
        if len(known) != len(books):
            return False
        for account in {name for one in known for name in one}:
            series = [one.get(account, 0) for one in known]
            if len({after - before for before, after in pairwise(series)}) > 1:
                return False
    return True


def _number(unit: str, chain: Chain) -> int | None:
    found = re.fullmatch(re.escape(chain.path) + r"\.(\d+)(\..*)?", unit)
    return None if found is None else int(found[1])


def _lines(series: Sequence[Mapping[str, int]], length: int) -> dict[str, int] | None:
    """Each key's value for ``length`` blocks."""
    found: dict[str, int] = {}
    for key in dict.fromkeys(key for one in series for key in one):
        value = _line([one.get(key, 0) for one in series], length)
        if value is None or value < 0:
            return None
        found[key] = value
    return found


def _line(values: Sequence[int], length: int) -> int | None:
    step = values[1] - values[0]
    return None if values[2] - values[1] != step else values[0] + (length - DEPTHS[0]) * step


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    return len({_shape_of(block) for block in blocks}) == 1


def _shape_of(block: nn.Module) -> tuple[object, ...]:
    """Classes, types and shapes of everything below a block, and its plain settings."""
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for named in (block.named_parameters(), block.named_buffers())
        for name, tensor in named
    ]
    return (*((name, type(module), module.training) for name, module in block.named_modules()), *tensors)
