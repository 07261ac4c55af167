"""Whether the blocks of a deep model do the same, looked at and not concluded from how they are built.

What a block takes may depend on what no description of it has: a hook, a shared list that is asked for its number, a loop that treats the
ninth apart. So the whole model takes one forward and one backward, without an engine and without values, and so does a short one. Where
the blocks are alike, what the whole one allocates and frees is what the short one does with equal stretches put in at one place of either
pass, and every block runs once, in order.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook

from shardbook.simulation.assumptions import unpacked
from shardbook.simulation.given import building, check_model
from shardbook.simulation.memory import FakeMemory
from shardbook.simulation.run import Functions
from shardbook.simulation.trainers import called
from shardbook.simulation.workspaces import on_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Forward or backward: bytes of each allocation (above zero) and free, and the numbers of the blocks that were called."""

    changes: Sequence[int]
    visits: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Of a model of ``length`` blocks."""

    length: int
    forward: Pass
    backward: Pass


def passes_of(model: nn.Module, path: str, given: Functions) -> Passes:
    """What a forward and a backward of a copy of ``model`` do; its blocks lie at ``path``."""
    mode = FakeTensorMode()
    with mode, FakeMemory(mode, on_cpu) as memory, building(), unpacked():
        model = check_model(model, mode)  # a copy: a model may keep what it has computed
        blocks = list(model.get_submodule(path).children())
        batch = given.build_batch()
        with _visits(blocks) as visits:
            begin = len(memory.trace)
            output = called(model, batch)  # held until backward is over, as by those who train
            loss, _ = given.loss(output)
            middle, seen = len(memory.trace), len(visits)
            loss.backward()
            end = len(memory.trace)
        changes = [change.nbytes for change in memory.trace[:end]]
        del output, loss
    return Passes(
        length=len(blocks),
        forward=Pass(changes=changes[begin:middle], visits=visits[:seen]),
        backward=Pass(changes=changes[middle:end], visits=visits[seen:]),
    )


def are_alike(whole: Passes, short: Passes) -> bool:
    """Whether all that ``whole`` has beyond ``short`` are more blocks of one kind."""
    more = whole.length - short.length
    return (
        list(whole.forward.visits) == list(range(whole.length))
        and list(whole.backward.visits) in ([], list(reversed(range(whole.length))))
        and _is_longer(whole.forward.changes, short.forward.changes, more)
        and _is_longer(whole.backward.changes, short.backward.changes, more)
    )


def _is_longer(whole: Sequence[int], short: Sequence[int], times: int) -> bool:
    """Whether ``whole`` is ``short`` with one stretch put in ``times`` times, at one place."""
    length, rest = divmod(len(whole) - len(short), times)
    if rest or length < 0:
        return False
    place = next((place for place, (one, other) in enumerate(zip(whole, short, strict=False)) if one != other), len(short))
    stretch = list(whole[place : place + length])
    return list(whole) == [*short[:place], *stretch * times, *short[place:]]


@contextmanager
def _visits(blocks: Sequence[nn.Module]) -> Generator[list[int]]:
    """Numbers of blocks in the order in which they are called."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    visits: list[int] = []

    def hook(module: nn.Module, _: Any) -> None:
        number = numbers.get(id(module))
        if number is not None:
            visits.append(number)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield visits
    finally:
        handle.remove()
