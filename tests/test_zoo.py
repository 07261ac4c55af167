"""The zoo is what it says: it covers the list of odd things, gives gradients where it should, and repeats itself to the bit."""

from typing import Any

import pytest
import torch

from tests.equality import Case, built, differences, plain_trace
from tests.zoo import ZOO

ASKED_FOR = [
    "tied",
    "frozen",
    "adapters",
    "block_twice",
    "shared_between_units",
    "used_in_some_steps",
    "used_on_some_ranks",
    "never_used",
    "odd_shapes",
    "fewer_than_ranks",
    "strided",
    "mixed_types",
    "buffers",
    "experts",
    "plain",
    "tuples",
    "dicts",
    "dataclasses",
    "checkpoint_block",
    "checkpoint_block_reentrant",
    "checkpoint_part",
    "checkpoint_part_reentrant",
    "nested",
    "no_blocks",
    "in_place_output",
    "loss_on_self",
    "dropout",
    "keywords",
    "several_lists",
    "huge_layer",
    "convolutions",
    "loss_outside",
]

NAMES = sorted(ZOO)


def missing_gradients(name: str, ranks: int, steps: int) -> list[set[str]]:
    """For each micro-batch, the trainable parameters that it gives no gradient."""
    model = built(ZOO[name], 0)
    found: list[set[str]] = []
    for step in range(steps):
        for rank in range(ranks):
            ZOO[name].forward(model, ZOO[name].batches(rank, step, 0))[0].backward()
            found.append({key for key, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None})
            model.zero_grad(set_to_none=True)
    return found


def test_everything_asked_for_is_there() -> None:
    assert set(ASKED_FOR) <= set(ZOO)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_missing_where_the_entry_says(name: str) -> None:
    entry = ZOO[name]
    missing = missing_gradients(name, ranks=4, steps=4)
    assert set.intersection(*missing) == entry.never
    at_times = set.union(*missing) - entry.never
    assert at_times <= entry.sometimes
    assert bool(at_times) == bool(entry.sometimes)
    frozen = {key for key, parameter in built(entry, 0).named_parameters() if not parameter.requires_grad}
    assert frozen == entry.frozen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_repeats_itself_and_learns(name: str, precision: str) -> None:
    case = Case(entry=name, precision=precision, num_ranks=2, stage=0, optimizer="adamw_foreach")
    first, second = plain_trace(case), plain_trace(case)
    assert differences(first, second) == []
    assert all(step["applied"] for step in first.steps)
    before = dict(built(ZOO[name], 1234).named_parameters())
    moved = {key for key, value in first.parameters.items() if not torch.equal(value, before[key].detach().to(value.dtype))}
    still = {key for key, value in before.items() if key in ZOO[name].never | ZOO[name].frozen or not value.numel()}
    assert not moved & still
    assert len(moved) >= len(before) - len(still) - len(ZOO[name].sometimes)


def cuts(numels: list[int], ranks: int) -> list[int]:
    """Where shard cuts fall inside parameters that lie one after the other from multiples of 64, in elements of the parameter."""
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + -(-numel // 64) * 64)
    shard = -(-offsets[-1] // (64 * ranks)) * 64
    places = [rank * shard for rank in range(1, ranks)]
    return [place - offset for place in places for offset, numel in zip(offsets, numels, strict=False) if offset < place < offset + numel]


def test_many_cuts_fall_at_odd_multiples_of_64() -> None:
    odd = 0
    for entry in ZOO.values():
        blocks: dict[str, list[int]] = {}
        for key, parameter in built(entry, 0).named_parameters():
            blocks.setdefault(".".join(key.split(".")[:2]) if key[-1] not in "0123" else key, []).append(parameter.numel())
        odd += any(cut // 64 % 2 for ranks in (2, 3, 4) for numels in blocks.values() for cut in cuts(numels, ranks))
    assert odd > len(ZOO) / 2


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
    return [shapes(item) for item in items]


def test_weights_and_shapes() -> None:
    for entry in ZOO.values():
        made = [entry.batches(rank, step, micro) for rank in range(4) for step in range(3) for micro in range(3)]
        assert len({str(shapes(batch.args)) for batch in made}) == 1, entry.name
        assert min(float(batch.weight) for batch in made) > 0
    assert len({float(ZOO["plain"].batches(rank, 0, 0).weight) for rank in range(8)}) > 2
