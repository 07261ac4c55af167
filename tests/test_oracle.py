"""The plain loop against arithmetic done by hand, and against the loop as people write it, within a bound derived here."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equality import Case, as_integers, built, differences, plain_trace
from tests.oracle import Outcome, PlainRun, Types, add, plain_step, split_masters, usual_step
from tests.zoo import ZOO, Batch, Entry

UNIT = 2.0**-24  # relative rounding error of fp32
STEPSIZE = 1.0


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=STEPSIZE)


# ---- by hand -------------------------------------------------------------------------------------------------------------


def dot(model: Callable[..., Any], batch: tuple[list[float], float | None]) -> tuple[Tensor, float | None]:
    """A loss whose gradient is the batch itself."""
    return model(torch.tensor(batch[0])), batch[1]


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.tensor([1.0, -0.0]))
        self.unused = nn.Parameter(torch.tensor([5.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.used * x).sum()


def one_step(batches: Any, **options: Any) -> tuple[Dot, Outcome]:
    model = Dot()
    outcome = plain_step(model, list(model.parameters()), sgd(model.named_parameters()), batches, dot, **options)
    return model, outcome


def test_the_objective_is_all_losses_over_all_weights() -> None:
    model, outcome = one_step([[([3.0, 0.0], 1.0)], [([1.0, 8.0], 3.0)]])
    assert (outcome.loss, outcome.weight) == (1.0, 4.0)
    assert outcome.norm == float(torch.tensor(math.sqrt(80.0), dtype=torch.float32)) / 4
    assert model.used.tolist() == [0.0, -2.0]


def test_without_weights_each_micro_batch_counts_one() -> None:
    model, outcome = one_step([[([2.0, 0.0], None), ([4.0, 4.0], None)]])
    assert (outcome.loss, outcome.weight) == (3.0, 2.0)
    assert model.used.tolist() == [-2.0, -2.0]


def test_clipping_uses_the_norm_of_the_objective() -> None:
    model, outcome = one_step([[([6.0, 8.0], 2.0)]], clip=1.0)
    assert outcome.norm == 5.0
    assert outcome.clip_factor == 1.0 / (5.0 + 1e-6)
    assert model.used.tolist() == pytest.approx([1 - 0.6, -0.8], abs=1e-6)


def test_a_parameter_without_gradient_is_untouched_and_others_do_not_see_it() -> None:
    model, _ = one_step([[([1.0, 1.0], 1.0)]])
    assert model.unused.tolist() == [5.0]
    model, _ = one_step([[None], [([1.0, 1.0], 1.0)]])
    assert model.used.tolist() == [0.0, -1.0]


def test_what_is_missing_adds_nothing_not_even_a_zero() -> None:
    minus = torch.tensor([-0.0])
    for left, right in (([None], [minus]), ([minus], [None])):
        total = add(left, right)[0]
        assert total is not None
        assert math.copysign(1, float(total)) == -1
    assert add([None], [None]) == [None]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model, outcome = one_step([[([math.inf, 0.0], 1.0)]])
    assert not outcome.applied
    assert model.used.tolist() == [1.0, -0.0]


def test_the_two_nestings_add_in_two_orders() -> None:
    """1 + (2^-24 + 2^-24) is not (1 + 2^-24) + 2^-24: ranks hold [1, tiny] and [0, tiny], or micro-batches do."""
    one, tiny = [1.0, 0.0], [UNIT, 0.0]
    batches = [[(one, 1.0), (tiny, 1.0)], [(tiny, 1.0), ([0.0, 0.0], 1.0)]]
    results = [one_step(batches, reduce_each=each)[1].norm for each in (False, True)]
    assert results == [0.25, 0.25]  # both orders lose the tiny parts here
    batches = [[(one, 1.0), (tiny, 1.0)], [([0.0, 0.0], 1.0), (tiny, 1.0)]]
    results = [one_step(batches, reduce_each=each)[1].norm for each in (False, True)]
    assert results == [0.25, (1 + 2 * UNIT) / 4]


def test_masters_are_copied_before_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    masters = split_masters(model, Types(param="bf16"))
    assert torch.equal(masters[0], before)
    assert model.weight.dtype is torch.bfloat16
    assert torch.equal(model.weight, before.bfloat16())
    assert split_masters(nn.Linear(8, 8).bfloat16(), Types(param="bf16", master=None))[0].dtype is torch.bfloat16


def test_types_that_stay() -> None:
    model = built(ZOO["mixed_types"], 0)
    types = Types(param="bf16", keep={"head": "fp32", "*.norm.bias": "fp32"})
    masters = split_masters(model, types)
    got = {name: (p.dtype, m.dtype) for (name, p), m in zip(model.named_parameters(), masters, strict=True)}
    single, double, half = torch.float32, torch.float64, torch.bfloat16
    assert got["embedding.weight"] == (half, single)
    assert got["head.weight"] == (single, single)
    assert got["blocks.0.inner.norm.bias"] == (single, single)
    assert got["blocks.0.inner.norm.weight"] == (half, single)
    assert got["blocks.0.scales"] == (double, double)
    assert got["blocks.0.shifts"] == (half, single)


def test_buffers_belong_to_each_rank() -> None:
    run = PlainRun(built(ZOO["buffers"], 0), sgd, ZOO["buffers"].forward, num_ranks=2)
    run.step([[ZOO["buffers"].batches(rank, 0, micro) for micro in range(2)] for rank in range(2)])
    first, second = ({**run.buffers.named(rank, run.model)} for rank in range(2))
    assert int(first["blocks.0.calls"]) == int(second["blocks.0.calls"]) == 2
    assert not torch.equal(first["blocks.0.average"], second["blocks.0.average"])


# ---- the tests have teeth ------------------------------------------------------------------------------------------------


def test_orders_and_types_that_matter_show_in_the_bits() -> None:
    """If these agreed, equality with the plain loop would prove nothing about order, scale or type."""
    base = Case(num_ranks=3, stage=0, accumulate=3, optimizer="sgd")
    for other in (
        Case(num_ranks=3, stage=2, accumulate=3, optimizer="sgd"),
        Case(num_ranks=3, stage=0, accumulate=3, optimizer="sgd", weighted=False),
    ):
        assert differences(plain_trace(base), plain_trace(other))
    half = Case(num_ranks=2, stage=0, precision="bf16-no-master")
    assert differences(plain_trace(half), plain_trace(Case(num_ranks=2, stage=0, precision="pure-bf16")))
    kept = Case(num_ranks=2, stage=0, precision="2+2+4+8")
    assert differences(plain_trace(kept), plain_trace(Case(num_ranks=2, stage=0, precision="bf16")))


def test_clipping_bites_in_some_steps_only() -> None:
    factors = [step["clip_factor"] for name in ("plain", "experts", "nested") for step in plain_trace(Case(entry=name, steps=4)).steps]
    assert 1.0 in factors
    assert min(factors) < 1.0


# ---- the loop as people write it -----------------------------------------------------------------------------------------


def gamma(count: int) -> float:
    """Higham's bound of a chain of ``count`` roundings."""
    return count * UNIT / (1 - count * UNIT)


def parts_of(entry: Entry, batches: list[list[Batch]], forward: Any) -> list[list[Tensor]]:
    """Per parameter, the gradient of each micro-batch, as float64 holds them."""
    model = built(entry, 7)
    found: list[list[Tensor]] = [[] for _ in model.parameters()]
    for batch in (batch for rank in batches for batch in rank):
        forward(model, batch)[0].backward()
        for parts, parameter in zip(found, model.parameters(), strict=True):
            if parameter.grad is not None:
                parts.append(parameter.grad.double())
        model.zero_grad(set_to_none=True)
    return found


def bounds(parts: list[list[Tensor]], weight: float, clip: float, rel_part: float = 0.0) -> list[Tensor]:
    """How far the step of the plain loop and that of the usual one can be apart, element by element, for SGD with step size 1.

    Let g_k (k = 1..K) be the parts of an element, A = Σ|g_k| and G = Σg_k, everything over the total weight W.

    1. *Sums.* Both loops add K parts one after the other, in two orders. A recursive sum is off by at most γ(K-1)·A
       (Higham, Accuracy and Stability, 4.4), so the two sums are apart by at most 2·γ(K-1)·A. Where W is a power of two,
       the loss over W has exactly the gradients over W (a power of two goes through every product and sum unrounded), so the parts
       are the same; else each part may be off by ``rel_part``·A more.
    2. *Scale.* The plain loop rounds the scale once and multiplies once: 2u. The usual one divides by the exact W inside
       and multiplies by its clip factor: the factor is clip / (norm + 1e-6), two operations, and the product, one more: 3u.
    3. *Norm.* The usual loop computes the norm in fp32: a sum of n squares (γ(n+1)), its root (u), P such norms squared,
       added and rooted (γ(P+2)); roots halve the relative error, but that gain is left unused. The plain loop rounds once.
       The vectors under the two norms are apart by the norm of the errors of 1.
    4. *Update.* p - g rounds once in each loop: u·(|p| + |g|) each, p added by the caller.
    """
    count = max(len(p) for p in parts)
    numel = max(p[0].numel() for p in parts if p)
    absolute = [sum((x.abs() for x in p), torch.zeros(())).double() / weight for p in parts]
    totals = [sum(p, torch.zeros(())).double() / weight for p in parts]
    apart = [(2 * gamma(max(count - 1, 1)) + rel_part) * a for a in absolute]
    norm = math.sqrt(sum(float(t.square().sum()) for t in totals))
    norm_apart = math.sqrt(sum(float(e.square().sum()) for e in apart))
    relative_norm = gamma(numel + len(parts) + 5) + norm_apart / norm
    factor = min(1.0, clip / norm)
    relative = 5 * UNIT + (relative_norm if clip / norm < 1.01 else 0.0)
    return [factor * (1 + relative) * (e + relative * (t.abs() + e)) + 2 * UNIT * (t.abs() + e) for e, t in zip(apart, totals, strict=True)]


def compare_with_usual(entry: Entry, batches: list[list[Batch]], forward: Any, clip: float, rel_part: float = 0.0) -> float:
    """One step of both from the same weights: the largest distance over its bound."""
    plain, usual = built(entry, 7), built(entry, 7)
    before = [parameter.detach().double().clone() for parameter in plain.parameters()]
    outcome = plain_step(plain, list(plain.parameters()), sgd(plain.named_parameters()), batches, forward, clip=clip)
    other = usual_step(usual, sgd(usual.named_parameters()), batches, forward, clip=clip)
    allowed = bounds(parts_of(entry, batches, forward), outcome.weight, clip, rel_part)
    assert outcome.weight == other.weight
    assert outcome.loss == pytest.approx(other.loss, rel=gamma(len(batches) * len(batches[0]) + 4))
    worst = 0.0
    for one, two, start, bound in zip(plain.parameters(), usual.parameters(), before, allowed, strict=True):
        if not one.numel():
            continue
        limit = bound + 2 * UNIT * start.abs()
        distance = (one.detach().double() - two.detach().double()).abs()
        assert bool((distance <= limit).all()), f"{float((distance / limit).max())} of the bound"
        worst = max(worst, float((distance / limit.clamp_min(1e-300)).max()))
    return worst


def all_count(batch: Batch) -> Batch:
    """Every target counts, so that total weights are powers of two."""
    return Batch(batch.args, batch.kwargs, batch.targets.clamp_min(0), 16.0, batch.seed)


@pytest.mark.parametrize("clip", [0.02, 1e9])
@pytest.mark.parametrize("name", ["plain", "tied", "shared_between_units", "experts", "dropout", "convolutions", "odd_shapes", "recurrent"])
def test_the_usual_loop_is_within_the_bound(name: str, clip: float) -> None:
    entry = ZOO[name]
    batches = [[all_count(entry.batches(rank, 0, micro)) for micro in range(2)] for rank in range(4)]
    assert compare_with_usual(entry, batches, entry.forward, clip) > 0  # and it is a real bound: something did differ


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_usual_loop_is_within_the_bound_for_any_weight(ranks: int) -> None:
    """A model whose gradient is one product per row, dW = dᵀx with d = target · seed: the seed 1/W rounds once, the product
    with it once, and the sum over n rows n times, in either loop: each part is off by at most 2·γ(n + 2)·Σ|d||x|, and
    Σ|d||x| is at most ``rel``·A for the positive inputs and targets used here, where nothing cancels (A is that sum).
    """

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 24))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    def batch(rank: int, step: int, micro: int) -> Batch:
        made = torch.Generator().manual_seed(100 * rank + micro)
        x, targets = torch.rand(8, 24, generator=made), torch.rand(8, 40, generator=made)
        return Batch((x,), {}, targets, 3 + rank + micro, 0)

    def loss(y: Any, batch: Batch) -> Tensor:
        return (y * batch.targets).sum()

    entry = Entry("linear", "", Linear, batch, loss, lambda model, batch: model(*batch.args))
    batches = [[batch(rank, 0, micro) for micro in range(3)] for rank in range(ranks)]
    assert compare_with_usual(entry, batches, entry.forward, 0.5, rel_part=2 * gamma(8 + 2)) > 0


def test_raw_bits_tell_zeros_apart() -> None:
    assert not torch.equal(as_integers(torch.tensor(-0.0)), as_integers(torch.tensor(0.0)))
