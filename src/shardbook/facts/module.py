"""Facts of any ``nn.Module``, also on the meta device, read without importing torch.

Units are the engine's: repeated blocks, large embeddings and heads (one unit where they share their weight), and the root for what
is left; a parameter that several units reach belongs to their lowest common ancestor. ``tests/test_facts_module.py`` compares them
with what an engine makes of the same model.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardbook.checks import short_dtype
from shardbook.errors import ConfigError
from shardbook.facts import configured, recognise
from shardbook.facts.kinds import is_kind
from shardbook.facts.model import ModelFacts, ParameterFacts, UnitParameters
from shardbook.facts.parameters import LARGE

_CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")


def is_module(value: Any) -> bool:
    """Whether something is an ``nn.Module``, or looks enough like one; a class is none, its instances are."""
    looks_like_one = callable(getattr(value, "named_parameters", None)) and callable(getattr(value, "named_modules", None))
    return looks_like_one and not isinstance(value, type)


def facts(model: Any, name: str = "") -> ModelFacts:
    """Parameters by unit, and the architecture where it can be told.

    Args:
        model: any ``nn.Module``; values are never read.
        name: how to call it; the name of its class if left out.

    Raises:
        ConfigError: it has no parameters, or one of a lazy layer that has no shape yet.
    """
    kind = type(model).__name__
    lazy = next((name for name, parameter in model.named_parameters() if _is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(f"model: parameter {lazy!r} of {kind} has no shape yet; run one forward, so that lazy layers get their sizes")
    units = units_of(model)
    if not any(unit.parameters for unit in units):
        raise ConfigError(f"model: {kind} has no parameters; give a module that has some")
    count = sum(unit.numel for unit in units)
    architecture, notes = configured.architecture(model, count)
    if architecture is None:
        architecture, more = recognise.architecture(model, count)
        notes += more
    if architecture is None:
        notes += ("activations not modelled: give activations=, a config.json or a name of the catalog",)
    source = f"an nn.Module of class {kind}"
    return ModelFacts(
        name=name or kind, source=source, num_parameters=count, units=units, architecture=architecture, notes=tuple(dict.fromkeys(notes))
    )


def units_of(model: Any) -> tuple[UnitParameters, ...]:
    """The units that the engine would make, the root first; those without parameters are left out."""
    modules: dict[str, Any] = dict(model.named_modules())
    chosen = _found(model, modules)
    parts = [("root", [model]), *((name, [modules[name]]) for name in modules if name in chosen)]
    parts = _merged(parts, chosen)
    members = _members(model, parts)
    kept = [index for index in range(len(parts)) if index == 0 or members[index]]
    parts, members = [parts[index] for index in kept], [members[index] for index in kept]
    around = _around(model, parts)
    return tuple(
        UnitParameters(name=name, parameters=tuple(inside), around=outer)
        for (name, _), inside, outer in zip(parts, members, around, strict=True)
    )


def inner(module: Any) -> Any:
    """What a compiled module wraps."""
    return getattr(module, "_orig_mod", module)


def _found(model: Any, modules: Mapping[str, Any]) -> set[str]:
    blocks: set[str] = set()
    for name, module in modules.items():
        if not _is_under(name, blocks):
            blocks |= {f"{name}.{child}" if name else child for child in repeated(module)}
    if not blocks:
        return set()
    least = sum(parameter.numel() for parameter in model.parameters()) * LARGE
    outside = {name: module for name, module in modules.items() if name and name not in blocks and not _is_under(name, blocks)}
    embeddings = {name: module for name, module in outside.items() if is_kind(module, "Embedding")}
    vocabularies = {module.num_embeddings for module in embeddings.values()}
    heads = {name: module for name, module in outside.items() if is_kind(module, "Linear") and module.out_features in vocabularies}
    return blocks | {name for name, module in {**embeddings, **heads}.items() if module.weight.numel() >= least}


def _is_under(name: str, blocks: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in blocks for length in range(1, len(parts)))


def repeated(module: Any) -> list[str]:
    """Children of a container that share their class with a sibling, have children of their own, and hold parameters."""
    if not is_kind(module, *_CONTAINERS):
        return []
    composite = {
        name: child
        for name, child in module.named_children()
        if any(True for _ in inner(child).children()) and any(True for _ in child.parameters())
    }
    counts = Counter(type(inner(child)) for child in composite.values())
    return [name for name, child in composite.items() if counts[type(inner(child))] > 1]


def _merged(parts: list[tuple[str, list[Any]]], chosen: set[str]) -> list[tuple[str, list[Any]]]:
    """An embedding and a head that share their weight are one unit with two modules."""
    kept: list[tuple[str, list[Any]]] = []
    by_weight: dict[int, list[Any]] = {}
    for name, modules in parts:
        weight = modules[0].weight if name in chosen and is_kind(modules[0], "Embedding", "Linear") else None
        if weight is not None and id(weight) in by_weight:
            by_weight[id(weight)].append(modules[0])
            continue
        if weight is not None:
            by_weight[id(weight)] = modules
        kept.append((name, modules))
    return kept


def _members(model: Any, parts: list[tuple[str, list[Any]]]) -> list[list[ParameterFacts]]:
    """Each parameter once, in the deepest unit that is around all the modules that hold it."""
    owner = {id(module): index for index, (_, modules) in enumerate(parts) for module in modules}
    chains: dict[int, list[tuple[int, ...]]] = {}
    for chain, module in _walk(model, (), owner):
        for parameter in module._parameters.values():
            if parameter is not None:
                chains.setdefault(id(parameter), []).append(chain)
    members: list[list[ParameterFacts]] = [[] for _ in parts]
    for name, parameter in model.named_parameters():
        common = chains[id(parameter)]
        around = [index for index in common[0] if all(index in chain for chain in common)]
        members[around[-1]].append(_parameter(name, parameter))
    return members


def _around(model: Any, parts: list[tuple[str, list[Any]]]) -> list[tuple[int, ...]]:
    """For each unit the units that are around all of its modules; a module is where it was registered first."""
    owner = {id(module): index for index, (_, modules) in enumerate(parts) for module in modules}
    modules: dict[str, Any] = dict(model.named_modules())
    places = {id(module): name for name, module in reversed(modules.items())}
    found: list[tuple[int, ...]] = []
    for index, (_, inside) in enumerate(parts):
        chains = [{owner.get(id(modules[name]), 0) for name in _above(places[id(module)])} - {0, index} for module in inside]
        found.append(tuple(sorted(set.intersection(*chains))))
    return found


def _above(name: str) -> Iterator[str]:
    parts = name.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


def _walk(module: Any, chain: tuple[int, ...], owner: Mapping[int, int]) -> Iterator[tuple[tuple[int, ...], Any]]:
    index = owner.get(id(module))
    if index is not None and index not in chain:
        chain = (*chain, index)
    yield chain, module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child, chain, owner)


def _is_lazy(parameter: Any) -> bool:
    """``UninitializedParameter`` answers neither ``shape`` nor ``numel()``."""
    return callable(getattr(parameter, "materialize", None))


def _parameter(name: str, parameter: Any) -> ParameterFacts:
    dtype = short_dtype(parameter.dtype) or str(parameter.dtype).removeprefix("torch.")
    shape = tuple(int(each) for each in parameter.shape)
    return ParameterFacts(name=name, shape=shape, dtype=dtype, trainable=bool(parameter.requires_grad))
