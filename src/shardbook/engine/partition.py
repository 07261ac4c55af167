"""Which modules form a unit, and which unit each parameter belongs to.

A model's repeated blocks are units; so are a large embedding and the head over its vocabulary (one unit if they share their
weight). A parameter that several units reach belongs to their lowest common ancestor. What is left is the root's, the unit of
the whole model, which is gathered whenever the model runs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from shardbook.errors import ConfigError

ROOT = "root"
_LARGE = 1 / 64  # an embedding or head with at least this share of all elements is gathered by itself


@dataclass(slots=True)
class Part:
    """A unit to be: the modules whose forward needs it, and its parameters by name."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list[tuple[str, nn.Parameter]])
    ancestors: list[int] = field(default_factory=list[int])


def partition(model: nn.Module, wanted: Sequence[str | type[nn.Module]] | None) -> list[Part]:
    """The units of a model, the root first, the others as their modules are registered; units without parameters are left out.

    Raises:
        ConfigError: an entry of ``units=`` matches no module.
    """
    modules = dict(model.named_modules())
    chosen = _chosen(modules, wanted) if wanted is not None else _found(model, modules)
    parts = [Part(ROOT, [model])] + [Part(name, [modules[name]]) for name in modules if name and name in chosen]
    if wanted is None:
        parts = _merge_tied(parts, chosen)
    _assign(model, parts)
    parts = [parts[0]] + [part for part in parts[1:] if part.parameters]
    owner = {id(module): index for index, part in enumerate(parts) for module in part.modules}
    for index, part in enumerate(parts[1:], start=1):
        around = [set(_units_around(modules, module, owner)) - {index} for module in part.modules]
        part.ancestors = sorted({0}.union(set.intersection(*around)))
    return parts


def _chosen(modules: dict[str, nn.Module], wanted: Sequence[str | type[nn.Module]]) -> set[str]:
    chosen: set[str] = set()
    for entry in wanted:
        if isinstance(entry, str):
            matches = {
                name for name, module in modules.items() if name and (fnmatchcase(name, entry) or type(_inner(module)).__name__ == entry)
            }
        else:
            matches = {name for name, module in modules.items() if name and isinstance(_inner(module), entry)}
        # a compiled module and what it wraps are one unit: the wrapper, whose hooks run outside of the compiled code
        matches = {
            name for name in matches if not (name.endswith("_orig_mod") and name.rpartition(".")[0] in modules and name.rpartition(".")[0])
        }
        if not matches:
            shown = entry if isinstance(entry, str) else entry.__name__
            known = sorted({type(module).__name__ for name, module in modules.items() if name} | {name for name in modules if name})
            near = get_close_matches(shown, known, n=3) or known[:5]
            raise ConfigError(
                f"ZeroConfig.units: {shown!r} matches no module of the model; nearest: {', '.join(near)}. "
                f"Give a class, a class name or a module name (patterns allowed), or None to find the blocks"
            )
        chosen |= matches
    return chosen


def _found(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """Outermost repeated blocks, and large embeddings and heads outside of them."""
    blocks = repeated_blocks(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    outside = {
        name: module
        for name, module in modules.items()
        if name and not any(name == block or name.startswith(block + ".") for block in blocks)
    }
    embeddings = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    vocabularies = {module.num_embeddings for module in embeddings.values()}
    heads = {name: module for name, module in outside.items() if isinstance(module, nn.Linear) and module.out_features in vocabularies}
    return blocks | {name for name, module in {**embeddings, **heads}.items() if module.weight.numel() >= total * _LARGE and blocks}


def repeated_blocks(model: nn.Module) -> set[str]:
    """Names of the outermost repeated blocks."""
    blocks: set[str] = set()
    for name, module in model.named_modules():
        if not any(name.startswith(block + ".") for block in blocks):
            blocks |= {f"{name}.{child}" if name else child for child in _repeated(module)}
    return blocks


def _repeated(module: nn.Module) -> list[str]:
    """Children of a container that share their class with a sibling, have children of their own, and hold parameters."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return []
    composite = {
        name: child
        for name, child in module.named_children()
        if any(True for _ in _inner(child).children()) and any(True for _ in child.parameters())
    }
    counts = Counter(type(_inner(child)) for child in composite.values())
    return [name for name, child in composite.items() if counts[type(_inner(child))] > 1]


def _merge_tied(parts: list[Part], chosen: set[str]) -> list[Part]:
    """An embedding and a head that share their weight are one unit with two modules."""
    merged: list[Part] = []
    by_weight: dict[int, Part] = {}
    for part in parts:
        module = part.modules[0]
        weight = module.weight if isinstance(module, (nn.Embedding, nn.Linear)) and part.name in chosen else None
        if weight is not None and id(weight) in by_weight:
            by_weight[id(weight)].modules.append(module)
            continue
        if weight is not None:
            by_weight[id(weight)] = part
        merged.append(part)
    return merged


def _assign(model: nn.Module, parts: list[Part]) -> None:
    """Give every parameter to the deepest unit that is around all the modules that hold it."""
    owner = {id(module): index for index, part in enumerate(parts) for module in part.modules}
    chains: dict[int, list[list[int]]] = {}
    for chain, module in _walk(model, (), owner):
        for parameter in module._parameters.values():
            if parameter is not None:
                chains.setdefault(id(parameter), []).append(list(chain))
    for name, parameter in model.named_parameters():
        common = chains[id(parameter)]
        around = [unit for unit in common[0] if all(unit in chain for chain in common)]
        parts[around[-1]].parameters.append((name, parameter))


def _walk(module: nn.Module, chain: tuple[int, ...], owner: dict[int, int]) -> Iterator[tuple[tuple[int, ...], nn.Module]]:
    """Every path to every module, with the units around it from the outside in."""
    index = owner.get(id(module))
    if index is not None and index not in chain:
        chain = (*chain, index)
    yield chain, module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child, chain, owner)


def _units_around(modules: dict[str, nn.Module], module: nn.Module, owner: dict[int, int]) -> Iterator[int]:
    name = next(name for name, found in modules.items() if found is module)
    parts = name.split(".")
    for length in range(len(parts)):
        index = owner.get(id(modules[".".join(parts[:length])]))
        if index is not None:
            yield index


def _inner(module: nn.Module) -> nn.Module:
    """What a compiled module wraps."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
