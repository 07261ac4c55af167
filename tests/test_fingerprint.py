"""The laws of fingerprints: any cut adds up to the whole, any changed bit shows, and projections say what they promise."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardbook.recording.batches import Batch, batch_of
from shardbook.recording.fingerprint import Extent, Plan, Prints
from shardbook.recording.keys import NUM_PROJECTIONS, ROW_NUMEL, column_keys, column_signs, row_keys, row_signs, signed
from shardbook.recording.prints import Fingerprint, compare

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
sizes = st.integers(1, 700) | st.sampled_from([255, 256, 257, 512, 65_535, 65_536, 65_537, 70_001])


def tensor_of(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 50
    return values.abs().to(dtype) if dtype in (torch.uint8, torch.bool) else values.to(dtype)


def whole(tensor: torch.Tensor, **options) -> Prints:
    return Plan([Extent(0, tensor.numel())], tensor.dtype, CPU).prints([tensor], **options)


def close(a: torch.Tensor, b: torch.Tensor, scale: float) -> bool:
    """Within what float64 may lose in a sum of terms whose absolute values add up to ``scale``."""
    return bool(((a - b).abs() <= 1e-12 * scale).all())


@EXAMPLES
@given(numel=sizes, dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_cut_adds_up_to_the_whole(numel, dtype, data):
    tensor = tensor_of(numel, dtype)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=6))})
    extents = [Extent(a, b - a) for a, b in itertools.pairwise(cuts)]
    extents = data.draw(st.permutations(extents))
    parts = Plan(extents, dtype, CPU).prints([tensor[e.start : e.start + e.numel] for e in extents])
    one = whole(tensor)
    assert parts.hash.sum() == one.hash[0]
    absolute = one.absolute.item()
    assert close(parts.squares.sum(), one.squares, one.squares.item())
    assert close(parts.total.sum(), one.total, absolute)
    assert close(parts.absolute.sum(), one.absolute, absolute)
    assert close(parts.projections.sum(0), one.projections[0], absolute)
    assert parts.largest.max() == one.largest.max()


@EXAMPLES
@given(numel=sizes, dtype=st.sampled_from(DTYPES[:6]), data=st.data())
def test_a_flipped_bit_changes_the_hash(numel, dtype, data):
    tensor = tensor_of(numel, dtype)
    changed = tensor.clone()
    as_bytes = changed.view(torch.uint8)
    as_bytes[data.draw(st.integers(0, len(as_bytes) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(tensor).hash != whole(changed).hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flipped_signs_swaps_and_shifts_change_the_hash(dtype):
    tensor = tensor_of(2000, dtype)
    swapped, two_signs = tensor.clone(), tensor.clone()
    swapped[[3, 999]] = swapped[[999, 3]]
    two_signs[[5, 6]] *= -1
    rows = torch.cat([tensor[256:512], tensor[:256], tensor[512:]])
    hashes = [whole(one).hash.item() for one in (tensor, swapped, two_signs, -tensor, tensor.roll(1), rows)]
    assert len(set(hashes)) == len(hashes)
    zeros = torch.zeros(300, dtype=dtype)
    assert whole(zeros).hash != whole(-zeros).hash


def test_many_pairs_of_flipped_signs_have_different_hashes():
    """Sign bits are where a sum of products mod 2^64 is weakest: 2^31 times the key is all that they move."""
    base = torch.ones(1024)
    tensors = []
    for a in range(64):
        for b in range(a + 1, 64):
            tensors.append(base.clone())
            tensors[-1][[a * 16, b * 16]] = -1.0
    prints = Plan([Extent(0, 1024)] * len(tensors), torch.float32, CPU).prints(tensors, brief=True)
    assert len(set(prints.hash.tolist())) == len(tensors)


def test_the_hash_by_its_formula():
    tensor = tensor_of(1000, torch.float32)
    rows, columns = torch.arange(1000) // ROW_NUMEL, torch.arange(1000) % ROW_NUMEL
    keys = [int(k) * int(c) for k, c in zip(row_keys(rows), column_keys(ROW_NUMEL, CPU)[columns], strict=True)]
    expected = sum(lane * key for lane, key in zip(tensor.view(torch.int32).tolist(), keys, strict=True))
    assert whole(tensor).hash.item() == signed(expected)


def test_projections_by_their_formula_and_sums():
    tensor = tensor_of(1000, torch.float32).double()
    rows, columns = torch.arange(1000) // ROW_NUMEL, torch.arange(1000) % ROW_NUMEL
    signs = row_signs(rows)[:, None] * column_signs(CPU)[columns]
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    one = whole(tensor.float())
    assert close(one.projections[0], (tensor[:, None] * signs).sum(0), tensor.abs().sum().item())
    assert close(one.total[0], tensor.sum(), tensor.abs().sum().item())
    assert one.largest[0] == tensor.abs().max()


def test_projections_estimate_the_norm():
    """The mean of 8 squares over 400 tensors: within four standard deviations of Σx², which are √(2/3200) each."""
    tensors = [tensor_of(3000, torch.float32, seed) for seed in range(400)]
    prints = Plan([Extent(0, 3000)] * 400, torch.float32, CPU).prints(tensors)
    ratios = prints.projections.square().mean(1) / prints.squares
    assert abs(ratios.mean().item() - 1) < 4 * math.sqrt(2 / 3200)
    inside = ((ratios.sqrt() > 0.52) & (ratios.sqrt() < 1.48)).double().mean().item()
    assert inside > 0.92


def test_sparse_differences_are_seen_at_their_size():
    """A difference in one element has that element's size in every projection: nothing averages it away."""
    tensor = tensor_of(100_000, torch.float32)
    changed = tensor.clone()
    changed[77_777] += 1.0
    moved = (whole(changed).projections - whole(tensor).projections)[0].abs()
    assert torch.allclose(moved, torch.full((NUM_PROJECTIONS,), float(changed[77_777] - tensor[77_777]), dtype=torch.float64), atol=1e-8)


def test_nothing_finite_is_lost_and_nothing_else_hidden():
    tensor = tensor_of(70_000, torch.float32)
    tensor[[1, 40_000, 69_999]] = torch.tensor([math.inf, math.nan, -math.inf])
    one = whole(tensor)
    assert one.nonfinite.item() == 3
    assert not math.isfinite(one.squares.item())
    assert math.isfinite(whole(torch.full((10,), 3e38)).squares.item())
    assert whole(tensor).hash == whole(tensor.clone()).hash


def test_what_is_not_finite_stays_with_its_own_tensor():
    tensors = [tensor_of(300, torch.float32, seed) for seed in range(4)]
    tensors[1][7], tensors[2][0] = math.nan, math.inf
    plan = Plan([Extent(0, 300)] * 4, torch.float32, CPU)
    together = plan.prints(tensors)
    for place in (0, 3):
        alone = whole(tensors[place])
        scale = alone.absolute.item()
        for name in ("squares", "total", "absolute", "largest", "projections"):
            assert close(getattr(together, name)[place], getattr(alone, name)[0], scale**2)
    assert together.nonfinite.tolist() == [0, 1, 1, 0]
    assert together.projections[1].isnan().all()
    assert together.projections[2].isinf().all()


def test_brief_is_the_same_hash_and_squares():
    tensors = [tensor_of(n, torch.float32) for n in (1, 100, 256, 70_000, 0)]
    plan = Plan([Extent(0, t.numel()) for t in tensors], torch.float32, CPU)
    brief, full = plan.prints(tensors, brief=True), plan.prints(tensors)
    assert torch.equal(brief.hash, full.hash)
    assert torch.equal(brief.squares, full.squares)
    assert brief.total is None
    assert (full.hash[4].item(), full.squares[4].item()) == (0, 0.0)


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    one = whole(tensor)
    values = {name: getattr(one, name).item() for name in ("squares", "total", "absolute", "largest", "nonfinite")}
    projections = tuple(one.projections[0].tolist())
    return Fingerprint(dtype=str(tensor.dtype), numel=tensor.numel(), hash=one.hash.item() % 2**64, projections=projections, **values)


@EXAMPLES
@given(numel=st.integers(1, 3000), factor=st.sampled_from([0.25, 0.5, 2.0, 4.0, 8.0, -1.0]))
def test_a_ratio_is_found_exactly(numel, factor):
    tensor = tensor_of(numel, torch.float32)
    found = compare(fingerprint(tensor * factor), fingerprint(tensor))
    assert found.ratio == pytest.approx(factor, rel=1e-12)
    assert found.rest < 1e-12


def test_a_relative_deviation_is_estimated():
    tensor = tensor_of(50_000, torch.float32)
    for size in (1e-1, 1e-3, 1e-5):
        other = tensor + tensor_of(50_000, torch.float32, seed=1) * size
        true = (other - tensor).norm().item() / tensor.norm().item()
        assert 0.4 < compare(fingerprint(other), fingerprint(tensor)).distance / true < 1.6


def test_types_can_be_compared_by_sums_not_by_hash():
    tensor = tensor_of(5000, torch.float32)
    rounded = tensor.bfloat16()
    a, b = fingerprint(rounded), fingerprint(tensor)
    assert not a.same_bits(b)
    assert 2**-12 < compare(a, b).distance < 2**-7
    assert fingerprint(rounded.float()).squares == a.squares


# ---- narrower types -------------------------------------------------------------------------------------------------------


def narrow_types(tensor: torch.Tensor) -> set[str]:
    """Narrower types that hold a float32 tensor, by conversion and back."""
    return {name for name, dtype in NARROW.items() if torch.equal(tensor, tensor.to(dtype).float())}


NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@EXAMPLES
@given(
    parts=st.lists(st.sampled_from(["bf16", "fp16", "both", "zero", "fp32", "large", "tiny"]), min_size=1, max_size=4),
    numel=st.sampled_from([1, 5, 200, 256, 257, 5000, 66_000]),
)
def test_narrower_types_are_found_exactly_and_add_up(parts, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    made = {
        "bf16": values.mul(1e10).bfloat16().float(), "fp16": values.half().float(), "both": values.mul(8).round(), "zero": values * 0.0,
        "fp32": torch.cat([values[1:].bfloat16().float(), torch.tensor([1 / 3])]), "large": torch.full((numel,), 65536.0),
        "tiny": torch.full((numel,), 2.0**-24),
    }  # fmt: skip
    tensors = [made[part] for part in parts]
    sizes = [0, *itertools.accumulate(numel for _ in tensors)]
    plan = Plan([Extent(a, b - a) for a, b in itertools.pairwise(sizes)], torch.float32, CPU)
    prints = [fingerprint_of(plan.prints(tensors), place, numel) for place in range(len(tensors))]
    together = prints[0]
    for one in prints[1:]:
        together = together + one
    for one, expected in zip([*prints, together], [*(narrow_types(t) for t in tensors), narrow_types(torch.cat(tensors))], strict=True):
        assert one.narrow == min(expected, default=None)
        assert one.also_fp16 == (len(expected) == 2)


def fingerprint_of(prints: Prints, place: int, numel: int) -> Fingerprint:
    bits = prints.narrow[place].item()
    return Fingerprint(
        dtype="float32", numel=numel, hash=prints.hash[place].item() % 2**64, squares=0.0, total=0.0, absolute=0.0, largest=0.0,
        nonfinite=0, projections=(0.0,) * 8, narrow="bf16" if bits & 1 else "fp16" if bits else None, also_fp16=bits == 3,
    )  # fmt: skip


def test_one_wide_element_among_many_narrow_ones_shows_wherever_it_is():
    tensor = torch.ones(1000)
    for place in (0, 1, 15, 255, 256, 700, 999):
        changed = tensor.clone()
        changed[place] = 1 + 2**-10  # fp16 holds it, bf16 does not
        assert whole(changed).narrow.item() == 2
        changed[place] = 1 + 2**-11
        assert whole(changed).narrow.item() == 0
    assert whole(tensor).narrow.item() == 3


def test_only_complete_prints_of_float32_say_what_is_narrow():
    assert whole(torch.ones(5), brief=True).narrow is None
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        assert whole(torch.ones(5, dtype=dtype)).narrow.item() == 0


def test_keys_of_columns_do_not_depend_on_how_many_there_are():
    for num in (1, 255, 256, 257, 1000, 5000):
        assert torch.equal(column_keys(num, CPU), column_keys(8192, CPU)[:num])


# ---- batches --------------------------------------------------------------------------------------------------------------


def total(batch) -> int:
    return sum(value.item() for value in batch_of(batch).hashes) % 2**64


@EXAMPLES
@given(rows=st.integers(1, 12), cuts=st.lists(st.integers(0, 12), max_size=3), seed=st.integers(0, 3))
def test_a_batch_is_the_sum_of_its_rows(rows, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(0, 1000, (rows, 7), generator=generator) for _ in range(2))
    cuts = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    micro = [(inputs[a:b], targets[a:b]) for a, b in itertools.pairwise(cuts)]
    order = torch.randperm(rows, generator=generator)
    assert batch_of(micro).num_rows == rows
    assert total(micro) == total((inputs, targets)) == total({"a": inputs[order], "b": targets[order]})
    if not torch.equal(inputs, targets):
        assert total((targets, inputs)) != total((inputs, targets))


def test_inputs_with_other_targets_are_other_data():
    inputs, targets = torch.arange(6).view(3, 2), torch.arange(6, 12).view(3, 2)
    assert total((inputs, targets)) != total((inputs, targets[[1, 0, 2]]))
    assert total([(inputs, targets)]) != total([(inputs, targets), (inputs, targets)])
    assert batch_of(None) == Batch(0, [], [])
