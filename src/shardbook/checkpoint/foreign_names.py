"""Which tensor of foreign files belongs to which parameter or buffer here, and in words what fits nothing. No values are read."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from shardbook.checkpoint.compare import SHOWN, Allowed, Findings
from shardbook.checkpoint.errors import CheckpointError
from shardbook.checkpoint.foreign import Found

FLOATING = ("F64", "F32", "F16", "BF16")
"""Types that are cast into each other. Eight-bit ones are not: they mean nothing without scales that no name tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A parameter or buffer of the model. ``aliases``: other names of a tied one. ``dtype``: by its name in the format."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person asks of an import. ``rename``: beginnings of names in the files, and what stands in their place here."""

    allowed: Allowed = field(default_factory=Allowed)
    rename: Mapping[str, str] = field(default_factory=dict[str, str])


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The longest beginning that fits is replaced.

    >>> renamed("h.0.weight", {"": "transformer."})
    'transformer.h.0.weight'
    """
    start = max((start for start in rename if name.startswith(start)), key=len, default=None)
    return name if start is None else rename[start] + name[len(start) :]


def names_here(found: Mapping[str, Found], rename: Mapping[str, str], path: Path) -> dict[str, Found]:
    """The tensors under the names that they have here.

    Raises:
        CheckpointError: a beginning that no name has; two tensors of one name.
    """
    for start in rename:
        if not any(name.startswith(start) for name in found):
            raise CheckpointError(f"rename: no name in {path} begins with {start!r}; they begin as {next(iter(found), None)!r} does")
    names: dict[str, str] = {}
    for name in found:
        here = renamed(name, rename)
        if here in names:
            raise CheckpointError(f"rename: {names[here]!r} and {name!r} of {path} are both {here!r} then")
        names[here] = name
    return {here: found[name] for here, name in names.items()}


def match(found: Mapping[str, Found], wanted: Sequence[Wanted], allowed: Allowed, findings: Findings) -> dict[str, list[Found]]:
    """By the name here, the tensors to take: one, or one for each name of a tied parameter that is in the files."""
    matches: dict[str, list[Found]] = {}
    missing: list[Wanted] = []
    for one in wanted:
        names = [name for name in (one.name, *one.aliases) if name in found]
        for name in names:
            _compare(name, found[name], one, findings)
        if names:
            matches[one.name] = [found[name] for name in names]
        elif not any(allowed.misses(name) for name in (one.name, *one.aliases)):
            missing.append(one)
    known = {name for one in wanted for name in (one.name, *one.aliases)}
    unexpected = [name for name in found if name not in known and not allowed.ignores(name)]
    _tell(missing, unexpected, findings)
    return matches


def _compare(name: str, found: Found, one: Wanted, findings: Findings) -> None:
    entry = found.entry
    if entry.shape != one.shape:
        findings.add(f"{one.kind} {name!r} has shape {entry.shape} in {found.path.name} and {one.shape} here")
    elif entry.dtype != one.dtype and (entry.dtype not in FLOATING or one.dtype not in FLOATING):
        remedy = f"{', '.join(FLOATING)} are cast into each other" if one.dtype in FLOATING else "it is never cast"
        findings.add(f"{one.kind} {name!r} is {entry.dtype} in {found.path.name} and {one.dtype} here ({remedy})")


def _tell(missing: Sequence[Wanted], unexpected: Sequence[str], findings: Findings) -> None:
    hint = _difference(missing, unexpected)
    if hint:
        findings.add(hint)
    for one in missing:
        near = get_close_matches(one.name, unexpected, n=1) if len(findings.texts) < SHOWN else []
        nearest = f"; the nearest name in it is {near[0]!r}" if near else ""
        findings.add(f"{one.kind} {one.name!r} {one.shape} is missing in it (allow_missing= lets it keep its value){nearest}")
    for name in unexpected:
        findings.add(f"{name!r} is in it and not in the model (allow_unexpected= leaves it out)")


def _difference(missing: Sequence[Wanted], unexpected: Sequence[str]) -> str:
    """Where most names differ by what they begin with, the words that put it right."""
    tails = {tail: start for name in unexpected for start, tail in _cuts(name)}
    counts: Counter[tuple[str, str]] = Counter()
    for one in missing:
        pairs = [(len(tail), tails[tail], start) for name in (one.name, *one.aliases) for start, tail in _cuts(name) if tail in tails]
        if pairs:
            _, theirs, ours = max(pairs)
            counts[theirs, ours] += 1
    ((theirs, ours), count) = counts.most_common(1)[0] if counts else (("", ""), 0)
    if not missing or count * 2 < len(missing):
        return ""
    return f"names differ by what they begin with: rename={{{theirs!r}: {ours!r}}} makes {count} of {len(missing)} missing ones fit"


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Beginning and rest of a dotted name, the longest rest first.

    >>> list(_cuts("model.norm.weight"))
    [('', 'model.norm.weight'), ('model.', 'norm.weight'), ('model.norm.', 'weight')]
    """
    parts = name.split(".")
    for cut in range(len(parts)):
        yield "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])
