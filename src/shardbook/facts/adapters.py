"""Models of which only a part is trained: low-rank adapters (Hu et al., 2021), and a share of the parameters.

>>> from shardbook.facts import catalog
>>> with_adapters(catalog.facts("llama-3.1-8b"), rank=16).num_trainable  # queries and values
6815744
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardbook.errors import ConfigError
from shardbook.facts.model import ModelFacts, ParameterFacts, UnitParameters

# Last part of a layer's name -> what it is, in shardbook's names and in those of other libraries.
_QUERIES_AND_VALUES = frozenset(("query", "value", "q_proj", "v_proj", "wq", "wv", "query_up", "q_b_proj", "kv_up", "kv_b_proj"))
_FUSED = frozenset(("qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "in_proj"))
_NEVER = frozenset(("router", "shared_gate", "shared_expert_gate", "gate_router"))


def with_adapters(facts: ModelFacts, rank: int, targets: str | Sequence[str] = "attention") -> ModelFacts:
    """Each target of ``outputs x inputs`` gets A of ``rank x inputs`` and B of ``outputs x rank``; everything else is frozen.

    Args:
        facts: a model with units.
        rank: inner elements of an adapter.
        targets: ``"attention"``: queries and values, or the one matrix that holds them; ``"all"``: every linear layer of a block, routed
            experts and router left out; or last parts of layers' names.

    Raises:
        ConfigError: rank below 1, no units, or no layer of these names.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"lora_rank = {rank!r}: allowed is an integer from 1 up; 8 or 16 is usual")
    blocks = facts.units[1:]
    if not blocks:
        raise ConfigError(f"lora_rank = {rank}: {facts.name} is known by its count alone; give an architecture or a module")
    units = [replace(unit, parameters=tuple(_adapted(unit, rank, targets, index > 0))) for index, unit in enumerate(facts.units)]
    count = sum(unit.numel for unit in units)
    if count == facts.num_parameters:
        known = sorted({_layer(each.name) for unit in blocks for each in unit.parameters if _is_matrix(each)})
        raise ConfigError(
            f"lora_targets = {targets!r}: no layer has such a name; allowed are attention, all, or some of {', '.join(known)}"
        )
    shown = targets if isinstance(targets, str) else ", ".join(targets)
    note = f"adapters of rank {rank} on {shown}: {count - facts.num_parameters:,} trained parameters, the rest is frozen"
    return replace(facts, num_parameters=count, units=tuple(units), notes=(*facts.notes, note))


def with_share_trained(facts: ModelFacts, share: float) -> ModelFacts:
    """Freezes parameters from the first on until at most ``share`` of the elements is trained, a parameter being trained whole.

    Raises:
        ConfigError: not a share from 0 to 1.
    """
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        raise ConfigError(f"trainable = {share!r}: allowed is a share from 0 to 1; 1 trains everything")
    if share == 1:
        return facts
    least_frozen = facts.num_parameters - int(facts.num_parameters * share)
    if not facts.units:
        return replace(facts, num_frozen=least_frozen, notes=(*facts.notes, f"{share:.1%} of the parameters is trained"))
    units, frozen = list(facts.units), 0
    # the root's parameters come last: it is the unit that holds the final norm and the head's rest
    for index in [*range(1, len(units)), 0]:
        kept: list[ParameterFacts] = []
        for parameter in units[index].parameters:
            kept.append(replace(parameter, trainable=parameter.trainable and frozen >= least_frozen))
            frozen += 0 if kept[-1].trainable else parameter.numel
        units[index] = replace(units[index], parameters=tuple(kept))
    trained = 1 - frozen / facts.num_parameters
    note = f"the first {frozen:,} parameters are frozen: {trained:.1%} is trained, where {share:.1%} was asked for"
    return replace(facts, units=tuple(units), notes=(*facts.notes, note))


def _adapted(unit: UnitParameters, rank: int, targets: str | Sequence[str], is_block: bool) -> Iterator[ParameterFacts]:
    for parameter in unit.parameters:
        yield replace(parameter, trainable=False)
        if is_block and _is_matrix(parameter) and _is_target(_layer(parameter.name), targets):
            outputs, inputs = parameter.shape
            base = parameter.name.removesuffix(".weight")
            yield ParameterFacts(name=f"{base}.adapter_a", shape=(rank, inputs), dtype=parameter.dtype)
            yield ParameterFacts(name=f"{base}.adapter_b", shape=(outputs, rank), dtype=parameter.dtype)


def _is_matrix(parameter: ParameterFacts) -> bool:
    """A linear layer's: two dimensions, inside a block (an embedding's or a head's name has no parts before it)."""
    return len(parameter.shape) == 2 and parameter.name.endswith(".weight") and any(part.isdigit() for part in parameter.name.split("."))


def _is_target(layer: str, targets: str | Sequence[str]) -> bool:
    if targets == "attention":
        return layer in _QUERIES_AND_VALUES or layer in _FUSED
    if targets == "all":
        return layer not in _NEVER
    return layer == targets if isinstance(targets, str) else layer in targets


def _layer(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
