"""A selection of a product in which every pair of values of every two fields occurs, found greedily and always the same.

>>> rows = pairwise({"a": [0, 1, 2], "b": "xyz", "c": [True, False]})
>>> len(rows) < 18 and covers(rows, {"a": [0, 1, 2], "b": "xyz", "c": [True, False]})
True
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairwise(fields: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0) -> list[Row]:
    """Rows that hold every pair which some allowed row holds. ``allowed`` also sees rows that lack fields: it judges what is there."""
    rng = random.Random(seed)
    missing = dict.fromkeys(pairs_of_fields(fields))
    rows: list[Row] = []
    while missing:
        best = max((complete(fields, allowed, start, missing, rng) for start in first_few(missing)), key=lambda row: gain(row, missing))
        if best:
            rows.append(best)
        for pair in pairs_of(best) if best else first_few(missing):
            missing.pop(pair, None)
    return rows


def complete(
    fields: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], start: Pair, missing: Mapping[Pair, None], rng: random.Random
) -> Row:
    """A whole row around one pair, each further value the one that covers most; empty where no allowed row holds the pair."""
    row: Row = dict(start)
    if not allowed(row):
        return {}
    rest = [name for name in fields if name not in row]
    rng.shuffle(rest)
    return extend(fields, allowed, row, rest, missing, rng) or {}


def extend(
    fields: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    row: Row,
    rest: list[str],
    missing: Mapping[Pair, None],
    rng: random.Random,
) -> Row | None:
    """Depth first, so that a dead end only costs its last choice."""
    if not rest:
        return row
    name, *others = rest
    values = list(fields[name])
    rng.shuffle(values)
    values.sort(key=lambda value: -sum(ordered((name, value), item) in missing for item in row.items()))
    for value in values:
        longer = {**row, name: value}
        if allowed(longer) and (found := extend(fields, allowed, longer, others, missing, rng)):
            return found
    return None


def first_few(missing: Mapping[Pair, None], count: int = 8) -> list[Pair]:
    return [pair for pair, _ in zip(missing, range(count), strict=False)]


def gain(row: Row, missing: Mapping[Pair, None]) -> int:
    return sum(pair in missing for pair in pairs_of(row))


def pairs_of(row: Row) -> Iterator[Pair]:
    return (ordered(left, right) for left, right in combinations(row.items(), 2))


def pairs_of_fields(fields: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for left, right in combinations(fields, 2):
        for values in product(fields[left], fields[right]):
            yield ordered((left, values[0]), (right, values[1]))


def ordered(left: tuple[str, Any], right: tuple[str, Any]) -> Pair:
    return (left, right) if left[0] < right[0] else (right, left)


def covers(rows: Sequence[Row], fields: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> bool:
    """Whether every pair that some allowed row of the whole product holds is in ``rows``: by trying all of them, for small products."""
    names = list(fields)
    whole = [dict(zip(names, values, strict=True)) for values in product(*fields.values())]
    wanted = {pair for row in whole if allowed(row) for pair in pairs_of(row)}
    return wanted <= {pair for row in rows for pair in pairs_of(row)} and all(allowed(row) for row in rows)
