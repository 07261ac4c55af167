"""shardbook's own engine, seen from outside: found by the hooks on its model, read as any other peer is, and not imported."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardbook.ledger.peers_naming import Found, attribute


def is_engine(model: Any) -> bool:
    """Whether it is shardbook's engine, or built on it."""
    return any(kind.__module__ == "shardbook.engine.engine" for kind in type(model).__mro__)


def passes_of(model: Any) -> Any:
    """What runs the passes of a live engine: ``model`` is the engine, or the module that it trains. None where there is no engine."""
    if is_engine(model):
        return getattr(model, "_passes", None)
    if not isinstance(model, nn.Module):
        return None
    for hook in model._forward_pre_hooks.values():
        whole = getattr(hook, "_torchdynamo_orig_callable", hook)
        owner: Any = getattr(whole, "__self__", whole)
        if type(owner).__module__ == "shardbook.engine.hooks":
            passes = owner._callbacks()  # a weak reference
            if passes is not None:
                return passes
    return None


def stage_of(passes: Any) -> int:
    return attribute(passes, "_config", "stage")


def model_of(model: Any) -> nn.Module | None:
    """The module of an engine; a module is its own."""
    return model if isinstance(model, nn.Module) else getattr(model, "model", None)


def found(passes: Any) -> Iterator[Found]:
    """Every buffer of the engine that has memory, in the account that it is booked in."""
    for unit in passes._units:
        for flat in unit.flats:
            for value in vars(flat).values():
                if type(value).__name__ == "Buffer" and value.present:
                    yield value.account, f"{str(value.account).lower()} of {unit.name}", unit.name, value.tensor


def piece_names(passes: Any) -> dict[int, str]:
    """Names of the parameters whose pieces the optimizer steps on, by ``id`` of the piece."""
    return {id(piece.parameter): piece.member.name for unit in passes._units for flat in unit.flats for piece in flat.pieces}
