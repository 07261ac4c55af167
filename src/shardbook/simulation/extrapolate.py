"""A deep model from three shallow ones, where the result is the same to the byte.

Blocks that are alike take alike. So what is held at an instant in the first or last blocks, or outside of them, is a straight line in
their number, and among the blocks between it is one in their place. Both are looked at, account by account, in models of 5, 6 and 7
blocks; where anything is not a line (buckets that blocks share, say), all blocks are run. That the blocks between do what the others do
is looked at in the whole model (`likeness`). Phases that don't own the peak may be some hundred bytes off.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.config import ZeroConfig
from shardbook.engine.partition import Part, partition
from shardbook.ledger.heights import Height
from shardbook.simulation.asked import Asked
from shardbook.simulation.likeness import are_alike, passes_of
from shardbook.simulation.observe import Observed
from shardbook.simulation.run import Functions, Run, run

DEPTHS = (5, 6, 7)
WORTHWHILE = sum(DEPTHS) + 1
"""So many blocks, or more, take longer than the three models."""

Place = tuple[str, str, int, str, int]
"""(phase, unit or "from the first" or "from the last", which of them, operator, which in order of the bytes that reach the height)."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Repeated blocks: the path of the list that holds them, and how many."""

    path: str
    length: int


def chain_of(model: nn.Module) -> Chain | None:
    """The longest list of modules that are alike in everything that may take memory; None: there is none."""
    found = [
        Chain(path, len(module))
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and _are_alike(list(module.children()))
    ]
    longest = max(found, key=lambda chain: chain.length, default=None)
    return longest if longest is not None and _are_apart(model, longest) else None


def extrapolated(asked: Asked, given: Functions, model: nn.Module, chain: Chain) -> Run | None:
    """The run of all blocks of ``model``, from short ones; None: it can't be told from them. The model is cut."""
    runs: list[Run] = []
    try:
        whole, passes = partition(model, asked.config.units), passes_of(model, chain.path, given)
        for depth in reversed(DEPTHS):
            _cut(model, chain, depth)
            if not runs and not are_alike(passes, passes_of(model, chain.path, given)):
                return None
            config = _with_units(asked.config, whole, model)
            if config is None:
                return None
            runs.insert(0, run(replace(asked, config=config), replace(given, build_model=lambda: model), finely=True))
    except Exception:  # noqa: BLE001 - a model that counts its blocks, or a real fault: the whole one will tell
        return None
    first = _observed([one.first for one in runs], chain)
    later = _observed([one.later for one in runs], chain)
    sent, moved = _line([one.sent for one in runs], chain.length), _lines([one.moved for one in runs], chain.length)
    if first is None or later is None or sent is None or moved is None:
        return None
    return replace(runs[-1], first=first, later=later, sent=sent, moved=moved, seconds=sum(one.seconds for one in runs), blocks=DEPTHS[-1])


def _with_units(config: ZeroConfig, whole: Sequence[Part], short: nn.Module) -> ZeroConfig | None:
    """A configuration under which a short model has the units of the whole one: how large an embedding is beside the rest decides
    whether it is one. None: there is none.
    """
    names = {name for name, _ in short.named_parameters()}
    wanted = [(part.name, kept) for part in whole if (kept := [name for name, _ in part.parameters if name in names]) or part is whole[0]]
    for units in (config.units, [name for name, _ in wanted[1:]]):
        found = [(part.name, [name for name, _ in part.parameters]) for part in partition(short, units)]
        if found == wanted:
            return replace(config, units=units)
    return None


def _cut(model: nn.Module, chain: Chain, depth: int) -> None:
    blocks = model.get_submodule(chain.path)
    for key in list(blocks._modules)[depth:]:
        del blocks._modules[key]


def _observed(short: Sequence[Observed], chain: Chain) -> Observed | None:
    places = [_places(one.heights, chain, depth) for one, depth in zip(short, DEPTHS, strict=True)]
    if any(found.keys() != places[0].keys() for found in places) or not _is_even(short[-1].heights, chain, DEPTHS[-1]):
        return None
    heights: list[Height] = []
    rough: list[Height] = []
    for place in places[0]:
        series = [found[place] for found in places]
        books = [height.books for height in series]
        is_rough = len({height.nbytes for height in series}) > 1
        line = _roughly(books, chain.length) if is_rough else _lines(books, chain.length)
        if line is None:
            return None
        unit, allocated = _unit(place, chain), sum(line.values())
        height = replace(series[-1], unit=unit, allocated=allocated, books=line)
        heights.append(height)
        rough += [height] if is_rough else []
    after = {tier: _lines([one.after[tier] for one in short], chain.length) for tier in short[0].after}
    host = [one.host for one in short]
    top = max(height.allocated for height in heights)
    peaks = [height for height in heights if height.allocated == top]
    held = {tier: accounts for tier, accounts in after.items() if accounts is not None}
    if held.keys() != after.keys() or any(height in rough or height.books != peaks[0].books for height in peaks):
        return None  # an exact peak is all that is promised; of two as high, which came first isn't known
    return replace(
        short[-1], heights=tuple(heights), after=held, host=_lines(host, chain.length) or _roughly(host, chain.length)
    )  # fmt: skip


def _roughly(series: Sequence[Mapping[str, int]], length: int) -> dict[str, int]:
    """Of instants made by as many bytes as there are parameters, say, a flag for each, rounded up."""
    first, _, last = series
    return {
        key: last.get(key, 0) + (length - DEPTHS[-1]) * (last.get(key, 0) - first.get(key, 0)) // (DEPTHS[-1] - DEPTHS[0])
        for key in dict.fromkeys(key for one in series for key in one)
    }


def _places(heights: Sequence[Height], chain: Chain, depth: int) -> dict[Place, Height]:
    """Heights outside of the blocks, in the first two and in the last two."""
    groups: dict[tuple[str, str, int, str], list[Height]] = {}
    for height in heights:
        number = _number(height.unit, chain)
        if number is None:
            where, which = height.unit, -1
        elif number < 2:
            where, which = "from the first", number
        elif number >= depth - 2:
            where, which = "from the last", depth - 1 - number
        else:
            continue
        groups.setdefault((height.phase, where, which, height.operator), []).append(height)
    return {
        (*key, order): height
        for key, group in groups.items()
        for order, height in enumerate(sorted(group, key=lambda height: height.nbytes))
    }


def _unit(place: Place, chain: Chain) -> str:
    _, where, number, _, _ = place
    if where == "from the first":
        return f"{chain.path}.{number}"
    return f"{chain.path}.{chain.length - 1 - number}" if where == "from the last" else where


def _is_even(heights: Sequence[Height], chain: Chain, depth: int) -> bool:
    """Whether from the third block to the last but two each takes as much more, or less, as the one before."""
    inner: dict[tuple[str, str, int], dict[int, Mapping[str, int]]] = {}
    for height in heights:
        number = _number(height.unit, chain)
        if number is not None and 2 <= number < depth - 2:
            inner.setdefault((height.phase, height.operator, height.nbytes), {})[number] = height.books
    return all(
        len(books) == depth - 4 and all(_is_line([books[number].get(account, 0) for number in sorted(books)]) for account in Account)
        for books in inner.values()
    )


def _is_line(values: Sequence[int]) -> bool:
    return len({after - before for before, after in pairwise(values)}) <= 1


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
    return values[0] + (length - DEPTHS[0]) * (values[1] - values[0]) if _is_line(values) else None


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """A setting may be a block's own number: then it is that in each of them."""
    described = [_described(block) for block in blocks]
    numbers = list(range(len(blocks)))
    return len({len(one) for one in described}) == 1 and all(
        all(value == values[0] for value in values) or list(values) == numbers for values in zip(*described, strict=True)
    )


def _are_apart(model: nn.Module, chain: Chain) -> bool:
    """Whether no parameter or buffer of a block is another's as well."""
    blocks = list(model.get_submodule(chain.path).children())
    owners = [{id(tensor) for tensor in (*block.parameters(), *block.buffers())} for block in blocks]
    return sum(map(len, owners)) == len(set[int]().union(*owners)) and not set[int]().union(*owners) & _outside(model, chain)


def _outside(model: nn.Module, chain: Chain) -> set[int]:
    return {
        id(tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        if _number(path, chain) is None
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }


def _described(block: nn.Module) -> list[object]:
    """Classes, plain settings, types and shapes of everything below a block."""
    found: list[object] = []
    for name, module in block.named_modules():
        found += [name, type(module)]
        for key, value in sorted(vars(module).items()):
            found += [key, _plain(value)]
    for named in (block.named_parameters(), block.named_buffers()):
        found += [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in named]
    return found


def _plain(value: object) -> object:
    """A setting to be compared: digits in a name only say which block it is, and of anything else than plain data and tensors the kind."""
    if isinstance(value, str):
        return re.sub(r"\d+", "#", value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, dict):
        return [(_plain(key), _plain(item)) for key, item in cast("dict[object, object]", value).items()]
    return type(value).__name__
