"""From a model's facts to what an engine is made of: units and flat buffers, and where each weight of the walk lies.

Tensor-parallel devices hold a part of every matrix (and of the biases of those that are cut by their outputs), expert-parallel ones a
part of the experts. Both only divide numbers of elements here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from shardbook.checks import DTYPE_NBYTES
from shardbook.config import Precision
from shardbook.facts.model import ModelFacts, ParameterFacts, UnitParameters
from shardbook.facts.parameters import units_of
from shardbook.forecasting.graph import Weight
from shardbook.structure import FlatFacts, GroupFacts, Orders, Structure, UnitFacts

_WHOLE = ("norm", "router", "query_down", "kv_down", "sinks", "positions", "shared_gate")
"""Parts of names that tensor-parallel devices all hold whole: norms, routers, compressing matrices, tables of positions."""
_CUT_BY_INPUTS = ("out.bias", "down.bias", "down_bias")
"""Biases that are added once, after the sum over devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``weights`` by the names of ``facts/parameters.py``; empty where the architecture is not known. ``notes``: what was assumed."""

    structure: Structure
    weights: Mapping[str, Weight]
    notes: tuple[str, ...] = ()


def place(facts: ModelFacts, precision: Precision, group: GroupFacts, *, tensor: int = 1, expert: int = 1) -> Placement:
    """Every parameter in its unit and flat buffer, in the types of ``precision``."""
    units = [_divided(unit, tensor, expert) for unit in facts.units]
    main = _main_dtype(facts)
    structure = Structure.in_order_of_registration([_unit_facts(unit, precision, main) for unit in units], group)
    roles, notes = _roles(facts, tensor, expert)
    structure = _in_order_of_use(structure, [(parameter.name, unit) for unit, parameter in roles])
    weights = {
        parameter.name: Weight(parameter.name, unit, parameter.numel, _width(parameter, precision, main), trainable=parameter.trainable)
        for unit, parameter in roles
    }
    return Placement(structure=structure, weights=weights, notes=notes)


def merged(placement: Placement, facts: ModelFacts) -> tuple[Placement, Mapping[str, UnitParameters]]:
    """As engines have it that wrap the blocks and the model: what is in no block is the root's. Also each unit's parameters."""
    blocks = {weight.unit for name, weight in placement.weights.items() if name.startswith("blocks.")} - {"root"}
    weights = {
        name: weight if weight.unit in blocks else Weight(name, "root", weight.numel, weight.width, trainable=weight.trainable)
        for name, weight in placement.weights.items()
    }
    rest = [parameter for unit in facts.units if unit.name not in blocks for parameter in unit.parameters]
    units = {"root": UnitParameters(name="root", parameters=tuple(rest))}
    units |= {unit.name: unit for unit in facts.units if unit.name in blocks}
    return Placement(structure=placement.structure, weights=weights, notes=placement.notes), units


def num_weights(weights: Mapping[str, Weight]) -> Mapping[str, int]:
    """How many gradients each unit waits for."""
    return Counter(weight.unit for weight in weights.values() if weight.trainable)


def divided_facts(facts: ModelFacts, tensor: int, expert: int) -> ModelFacts:
    """What one tensor- and expert-parallel device holds."""
    return replace(facts, units=tuple(_divided(unit, tensor, expert) for unit in facts.units))


def _divided(unit: UnitParameters, tensor: int, expert: int) -> UnitParameters:
    if tensor == expert == 1:
        return unit
    return UnitParameters(name=unit.name, parameters=tuple(_part(parameter, tensor, expert) for parameter in unit.parameters))


def _part(parameter: ParameterFacts, tensor: int, expert: int) -> ParameterFacts:
    """One device's part; what does not divide evenly is rounded up, as padding is."""
    names = parameter.name
    routed = is_routed(names)
    shared = any(part in names for part in _WHOLE) or names.endswith(_CUT_BY_INPUTS)
    divisor = (expert if routed else 1) * (1 if shared else tensor)
    if divisor == 1:
        return parameter
    return ParameterFacts(name=names, shape=(-(-parameter.numel // divisor),), dtype=parameter.dtype, trainable=parameter.trainable)


def is_routed(name: str) -> bool:
    """Whether a parameter is one of experts that tokens are routed to."""
    return ".experts." in name


def _unit_facts(unit: UnitParameters, precision: Precision, main: str) -> UnitFacts:
    flats: dict[tuple[str, bool, bool], list[int]] = {}
    for parameter in unit.parameters:
        dtype, kept = _type_of(parameter, precision, main)
        flats.setdefault((dtype, parameter.trainable, kept), []).append(parameter.numel)
    found = [
        FlatFacts(numels=tuple(numels), param=dtype, trainable=trainable, kept=kept) for (dtype, trainable, kept), numels in flats.items()
    ]
    return UnitFacts(name=unit.name, flats=tuple(found))


def _in_order_of_use(structure: Structure, roles: Sequence[tuple[str, str]]) -> Structure:
    """Orders as a decoder has them: embeddings, blocks, head, which may be the first's unit once more; (weight, unit) are given.

    A unit is reduced when backward comes to its first use. Where a unit is none of these, the order of registration stays.
    """
    unit_of = dict(roles)
    first = unit_of.get("embedding.weight", "root")
    blocks = dict.fromkeys(unit for name, unit in roles if name.startswith("blocks."))
    used = [unit for unit in (first, unit_of.get("positions.weight", "root"), *blocks, unit_of.get("head.weight", first)) if unit != "root"]
    numbers = {unit.name: number for number, unit in enumerate(structure.units)}
    if set(used) != set(numbers) - {structure.units[0].name}:
        return structure
    entered = [numbers[unit] for unit in used]
    backward = (0, *reversed(entered))
    trained = [number for number in dict.fromkeys(entered) if structure.units[number].is_trainable]
    reduced = sorted(trained, key=entered.index, reverse=True)
    last = [0] if structure.units[0].is_trainable else []
    return replace(structure, orders=Orders(forward=(0, *entered), backward=backward, reduce=(*reduced, *last)))


def _type_of(parameter: ParameterFacts, precision: Precision, main: str) -> tuple[str, bool]:
    """The type that a parameter computes in, and whether it stays out of the policy."""
    for pattern, dtype in precision.keep.items():
        if fnmatchcase(parameter.name, pattern):
            return dtype, True
    return (precision.param, False) if parameter.dtype == main else (parameter.dtype, True)


def _width(parameter: ParameterFacts, precision: Precision, main: str) -> int:
    return DTYPE_NBYTES.get(_type_of(parameter, precision, main)[0], 1)


def _main_dtype(facts: ModelFacts) -> str:
    """The type of most elements."""
    counts: Counter[str] = Counter()
    for parameter in facts.parameters():
        counts[parameter.dtype] += parameter.numel
    return counts.most_common(1)[0][0] if counts else "fp32"


def _roles(facts: ModelFacts, tensor: int, expert: int) -> tuple[list[tuple[str, ParameterFacts]], tuple[str, ...]]:
    """(unit, parameter) of what the walk uses: the model's own where it has these names, else by its place."""
    if facts.architecture is None:
        return [], ()
    wanted = [(unit.name, parameter) for unit in units_of(facts.architecture) for parameter in unit.parameters]
    own = {parameter.name: (unit.name, parameter) for unit in facts.units for parameter in unit.parameters}
    if all(parameter.name in own for _, parameter in wanted):
        found: Iterable[tuple[str, ParameterFacts]] = own.values()
        return [(unit, _part(parameter, tensor, expert)) for unit, parameter in found], ()
    mapped = _by_place(facts)
    if mapped is None:
        return [], ("activations not modelled: the units of this module are not those of a decoder that is known",)
    return [(mapped.get(unit, unit), _part(parameter, tensor, expert)) for unit, parameter in wanted], ()


def _by_place(facts: ModelFacts) -> Mapping[str, str] | None:
    """Canonical names of units to the module's: blocks in order, the first table of the vocabulary, the last; the rest is the root's."""
    architecture = facts.architecture
    assert architecture is not None
    canonical = units_of(architecture)
    blocks = [unit for unit in canonical if unit.name.startswith("blocks.")]
    sizes = {unit.numel for unit in blocks}
    own = [unit for unit in facts.units[1:] if unit.numel in sizes]
    if len(own) != len(blocks):
        return None
    tables = [unit.name for unit in facts.units if any(each.shape == (architecture.vocab, architecture.hidden) for each in unit.parameters)]
    mapped = {block.name: unit.name for block, unit in zip(blocks, own, strict=True)}
    root = facts.units[0].name
    first, last = (tables[0], tables[-1]) if tables else (root, root)
    rows = (architecture.learned_positions, architecture.hidden)
    positions = next(
        (unit.name for unit in facts.units if unit.name != first and any(each.shape == rows for each in unit.parameters)), root
    )
    return {**mapped, "root": root, "embedding": first, "head": last, "positions": positions}
