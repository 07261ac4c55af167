"""What a module is, by its classes' names: nothing here imports torch."""

from typing import Any


def is_kind(module: Any, *kinds: str) -> bool:
    """Whether a module is of one of torch's classes, or of one derived from it."""
    return any(base.__name__ in kinds and base.__module__.startswith("torch.") for base in type(module).__mro__)
