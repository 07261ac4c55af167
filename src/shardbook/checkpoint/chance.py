"""The generators of random numbers of one rank: torch's, its device's, Python's and numpy's."""

import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def taken(device: torch.device) -> dict[str, Any]:
    """Their states, as plain data. Numpy's only where somebody has loaded it."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, _packed(torch.tensor(words)), gauss)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, value = numpy.random.get_state()
        state["numpy"] = (str(kind), _packed(torch.from_numpy(keys.astype("int64"))), int(position), int(has_gauss), float(value))
    return state


def check(state: Mapping[str, Any]) -> None:
    """Whether generators accept these states, tried on generators that nobody uses.

    Raises:
        ValueError: one does not (or RuntimeError, TypeError or KeyError, as the generator says it).
    """
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(_python(state))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.RandomState().set_state(_numpy(state))


def restore_rank(states: Sequence[Mapping[str, Any]], encoded: Sequence[Any], rank: int, device: torch.device) -> None:
    """Each rank goes on from its own state.

    One that the saved run did not have goes on, generator by generator, from the state that all ranks had, if they did; else from a seed
    that follows from rank 0's state and its own number. ``encoded``: the states as they were stored, which can be compared.
    """
    if rank < len(states):
        _restore(states[rank], device)
        return
    seed = zlib.crc32(f"{encoded[0]} {rank}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    _restore({key: value for key, value in states[0].items() if all(one.get(key) == encoded[0][key] for one in encoded)}, device)


def _restore(state: Mapping[str, Any], device: torch.device) -> None:
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        random.setstate(_python(state))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(_numpy(state))


def _python(state: Mapping[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    return version, tuple(_unpacked(words).tolist()), gauss


def _numpy(state: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, keys, *rest = state["numpy"]
    return kind, _unpacked(keys).numpy().astype("uint32"), *rest


def _packed(words: Tensor) -> Tensor:
    """Unsigned 32-bit words in four bytes each, for which there is no type everywhere."""
    return words.to(torch.int32)


def _unpacked(words: Tensor) -> Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF
