"""The same loop with other rounding: everything that rounds moves by a rounding's worth, nothing else moves at all."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardbook as sb
from benchmarks.models import SMALL, build
from shardbook.errors import ConfigError
from shardbook.verifying import rerun
from shardbook.verifying.callables import RERUNS, baseline_reruns, record_of
from shardbook.verifying.reorder import REORDERED, Shuffle
from tests import ranks

pytestmark = pytest.mark.full

MODES: dict[str, Callable[[], AbstractContextManager]] = dict(RERUNS)


def trained(mode: AbstractContextManager) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Last gradients and weights of a small transformer after three steps."""
    model = build(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with mode:
        for step in range(3):
            tokens = torch.randint(0, SMALL.vocab, (3, SMALL.sequence + 1), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {name: one.grad for name, one in model.named_parameters()}, {name: one.detach() for name, one in model.named_parameters()}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@cache
def once(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return trained(MODES[name]() if name else nullcontext())


@pytest.mark.parametrize("name", MODES)
def test_every_gradient_and_weight_moves_by_a_roundings_worth(name):
    for again, before in zip(once(name), once(""), strict=True):
        moved = {parameter: apart(again[parameter], before[parameter]) for parameter in before}
        assert min(moved.values()) > 0, min(moved, key=moved.get)
        assert max(moved.values()) < 1e-3, max(moved, key=moved.get)


@pytest.mark.parametrize("name", ["order-1", "rounding-1"])
def test_a_mode_repeats_itself(name):
    for one, other in zip(trained(MODES[name]()), once(name), strict=True):
        assert all(torch.equal(one[parameter], other[parameter]) for parameter in one)


def test_seeds_differ():
    for first, second in (("order-1", "order-2"), ("rounding-1", "rounding-2")):
        one, other = once(first)[1], once(second)[1]
        assert all(not torch.equal(one[parameter], other[parameter]) for parameter in one if one[parameter].dim() > 1)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_optimizer_rounds_too(options):
    """In its first step the update hardly depends on how the gradient was rounded: so what moves there is the optimizer's own rounding."""
    moved = {}
    for name in ("precision", "rounding-1"):
        results = []
        for mode in (nullcontext(), MODES[name]()):
            parameter = nn.Parameter(torch.linspace(0.1, 3.0, 4001))
            parameter.grad = torch.linspace(-1.0, 2.0, 4001).exp()
            with mode:
                torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, **options).step()
            results.append(parameter.detach())
        moved[name] = apart(*results)
    assert all(0 < one < 2e-7 for one in moved.values()), moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_keep_their_type_and_are_rounded_from_float32(dtype):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with rerun.precision():
        found = (x @ x).softmax(0)
    step_by_step = (x.float() @ x.float()).to(dtype).float().softmax(0).to(dtype)
    assert found.dtype is dtype
    assert torch.equal(found, step_by_step)


def test_float32_is_rounded_once_from_float64():
    x = torch.randn(40, 700, generator=torch.Generator().manual_seed(0))
    with rerun.precision():
        found, norm = x @ x.T, x.norm()
    assert torch.equal(found, (x.double() @ x.double().T).float())
    assert torch.equal(norm, x.double().norm().float())


@pytest.mark.parametrize("seed", [0, 3])
def test_random_rounding_is_to_a_neighbour_and_right_on_average(seed):
    """A quarter of the spacing, squared, from what is rounded to nearest, in the mean."""
    made = torch.Generator().manual_seed(seed)
    one, other = (1 + torch.rand(200_000, generator=made) for _ in range(2))
    exact = one.double() * other.double()
    with rerun.rounding(seed):
        found, kept = one * other, one * 2
    spacing = 2.0 ** (exact.frexp().exponent.double() - 24)
    errors, nearest = (found.double() - exact) / spacing, (exact.float().double() - exact) / spacing
    assert errors.abs().max() < 1
    assert abs(errors.mean()) < 5 * (1 / 6 / errors.numel()) ** 0.5
    assert abs((errors - nearest).square().mean() - 0.25) < 0.005
    assert abs(torch.corrcoef(torch.stack([errors[1:], errors[:-1]]))[0, 1]) < 0.02
    assert torch.equal(kept, one * 2)


def test_equal_values_are_rounded_alike():
    """However a tensor is cut: an element-wise optimizer stays one, and replicas stay equal."""
    values = torch.linspace(0.1, 3.0, 1001)
    with rerun.rounding(1):
        whole = values / 3 + values.sqrt()
        parts = torch.cat([part / 3 + part.sqrt() for part in values.split(129)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, values / 3 + values.sqrt())


# ---- what stays --------------------------------------------------------------------------------------------------------------


def in_float64(mode: AbstractContextManager) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 70), nn.LayerNorm(70), nn.GELU(), nn.Linear(70, 20)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with mode:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(9, 30, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def test_float64_is_moved_by_order_alone():
    plain = in_float64(nullcontext())
    for name, mode in MODES.items():
        found = in_float64(mode())
        same = [torch.equal(found[parameter], plain[parameter]) for parameter in plain]
        assert all(same) if "order" not in name else not any(same), name
        assert all(apart(found[parameter], plain[parameter]) < 1e-10 for parameter in plain)


@pytest.mark.parametrize("name", MODES)
def test_random_numbers_and_integers_stay(name):
    def drawn() -> list[Tensor]:
        torch.manual_seed(7)
        x = torch.ones(50, 60, requires_grad=True)
        dropped = F.dropout(x, 0.3)
        dropped.sum().backward()
        q = torch.ones(1, 2, 16, 8)
        attended = F.scaled_dot_product_attention(q, q, torch.ones(1, 2, 16, 8), dropout_p=0.5)
        in_place = torch.empty(40).normal_() > 0
        counts = torch.bincount(torch.randint(9, (100,))).cumsum(0) + torch.arange(9).flip(0)
        return [dropped != 0, x.grad != 0, attended != 0, in_place, torch.randn(5), counts, torch.randperm(30), torch.get_rng_state()]

    expected = drawn()
    with MODES[name]():
        found = drawn()
    assert not expected[0].all()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODES)
def test_writes_land_in_the_tensor_itself(name):
    x = torch.linspace(0, 1, 12).view(3, 4)
    view, address, version = x[1], x.data_ptr(), x._version
    with MODES[name]():
        returned = view.div_(3)
        out = torch.empty(3)
        torch.sum(x, 1, out=out)
        norm = nn.BatchNorm1d(4)
        norm(x)
    assert returned is view
    assert x.data_ptr() == address
    assert x._version == version + 1
    assert torch.allclose(x[1], torch.linspace(0, 1, 12).view(3, 4)[1] / 3)
    assert torch.allclose(out, x.sum(1))
    assert torch.allclose(norm.running_mean, 0.1 * x.mean(0), atol=1e-6)
    assert int(norm.num_batches_tracked) == 1


# ---- operators in another order mean the same ------------------------------------------------------------------------------------


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).requires_grad_()


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def with_batch_norm(training: bool) -> Tensor:
    norm = nn.BatchNorm2d(4, dtype=torch.float64).train(training)
    return torch.cat([norm(x(5, 4, 6, 6)).flatten(), norm.running_mean, norm.running_var])


def attention(**options) -> Tensor:
    return F.scaled_dot_product_attention(x(2, 3, 9, 8), x(2, 3, 9, 8, seed=1), x(2, 3, 9, 8, seed=2), **options)


OPERATORS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: x(5, 40) @ x(40, 7),
    "linear": lambda: F.linear(x(5, 40), x(7, 40), x(7)),
    "bmm": lambda: x(3, 5, 40) @ x(3, 40, 7),
    "baddbmm": lambda: torch.baddbmm(x(3, 5, 7), x(3, 5, 40), x(3, 40, 7)),
    "addbmm": lambda: torch.addbmm(x(5, 7), x(3, 5, 40), x(3, 40, 7)),
    "mv": lambda: x(5, 40) @ x(40),
    "addmv": lambda: torch.addmv(x(5), x(5, 40), x(40)),
    "dot": lambda: x(40) @ x(40, seed=1),
    "convolution": lambda: F.conv2d(x(3, 6, 8, 8), x(10, 6, 3, 3), x(10), padding=1),
    "convolution in groups": lambda: F.conv1d(x(3, 6, 8), x(10, 3, 3), x(10), groups=2),
    "transposed convolution": lambda: F.conv_transpose2d(x(3, 6, 8, 8), x(6, 10, 3, 3), x(10), stride=2),
    "sums": lambda: x(4, 5, 6).sum((0, 2)) + x(4, 5, 6).mean((-1, 0)) + x(4, 5, 6).sum() + x(5, 30).var(1),
    "norms": lambda: x(5, 30).norm(dim=1) + x(50).norm() + x(5, 30).logsumexp(1) + sum(torch._foreach_norm([x(30), x(3, 4)])),
    "softmax": lambda: x(5, 30).softmax(-1) * x(5, 30, seed=1).log_softmax(1) + x(5, 30, seed=2).softmax(0),
    "cross entropy": lambda: F.cross_entropy(x(9, 30), torch.tensor([1, 2, -100, 4, 5, 6, 7, 8, 9]), weight=x(30).detach().exp()),
    "mean square": lambda: F.mse_loss(x(9, 30), x(9, 30, seed=1)),
    "layer norm": lambda: F.layer_norm(x(4, 5, 30), (30,), x(30), x(30, seed=1)),
    "layer norm of two dims": lambda: F.layer_norm(x(4, 5, 6), (5, 6), x(5, 6), x(5, 6, seed=1)),
    "rms norm": lambda: F.rms_norm(x(4, 5, 30), (30,), x(30)),
    "group norm": lambda: F.group_norm(x(3, 6, 5, 5), 2, x(6), x(6, seed=1)),
    "batch norm": lambda: with_batch_norm(True),
    "batch norm, evaluating": lambda: with_batch_norm(False),
    "attention": attention,
    "causal attention": lambda: attention(is_causal=True),
    "masked attention": lambda: attention(attn_mask=numbers(3, 2, 1, 9, 9) > 0),
    "embedding": lambda: F.embedding(numbers(6, 4, 9), x(6, 5), padding_idx=2),
    "index_add": lambda: x(6, 5).index_add(1, numbers(5, 12), x(6, 12)).cumsum(0),
    "scatter_add": lambda: x(6, 5).scatter_add(1, numbers(5, 6, 12), x(6, 12)),
    "index_put": lambda: x(6, 5).index_put((numbers(6, 4, 3),), x(4, 3, 5), accumulate=True),
    "in place": lambda: x(5, 7).clone().addmm_(x(5, 40), x(40, 7)).index_add_(0, numbers(5, 12), x(12, 7)),
}


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def result_and_gradients(make: Callable[[], Tensor], mode: AbstractContextManager) -> list[Tensor]:
    leaves: list[Tensor] = []
    with mode:
        found = make()
        stack, seen = [found.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            stack += [following for following, _ in node.next_functions]
        scale = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view(found.shape)
        return [found.detach(), *torch.autograd.grad((found * scale).sum(), leaves)]


@pytest.mark.parametrize("name", OPERATORS)
def test_another_order_is_the_same_mathematics(name):
    expected = result_and_gradients(OPERATORS[name], nullcontext())
    for seed in (1, 2):
        found = result_and_gradients(OPERATORS[name], rerun.order(seed))
        assert len(found) == len(expected) > 1
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-11)


def test_every_operator_that_is_put_in_another_order_was_tried():
    with Seen() as seen:
        for make in OPERATORS.values():
            result_and_gradients(make, nullcontext())
    rest = {name for name in REORDERED if name not in seen.names}
    only_cuda = {name for name in rest if "flash_attention" in name or "efficient" in name or "cudnn" in name or "_rms_" in name}
    assert rest - only_cuda == {
        *("_addmm_activation", "baddbmm_", "norm", "nansum", "std", "var_mean", "scatter_add_", "index_put_", "_index_put_impl_"),
        *("_native_batch_norm_legit",),
    }


def test_rms_norm_as_cuda_has_it():
    """Its operators have no kernel on a CPU: what is done to their arguments and results is tried on a formula."""

    def backward(a: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scaled, normal = a["grad_out"] * a["weight"], a["input"] * a["rstd"]
        return a["rstd"] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True)), (a["grad_out"] * normal).flatten(0, -2).sum(0)

    inputs = x(4, 5, 30).detach()
    rstd = inputs.square().mean(-1, keepdim=True).rsqrt()
    arguments = {
        "grad_out": x(4, 5, 30, seed=3).detach(),
        "input": inputs,
        "normalized_shape": [30],
        "rstd": rstd,
        "weight": x(30).detach(),
    }
    expected = backward(arguments)
    undo = REORDERED["_fused_rms_norm_backward"](arguments, Shuffle(1))
    assert not torch.equal(arguments["input"].flatten(), inputs.flatten())
    for one, other in zip(undo(backward(arguments)), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11)


# ---- callables -------------------------------------------------------------------------------------------------------------------


def train(path, steps=2, *, seed=0, data=None, noise=0.0) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, path) as recorder:
        for _ in range(steps):
            batch = torch.randn(16, 20, generator=data)
            loss = model(batch).square().mean() * (1 + noise)
            loss.backward()
            recorder.step(loss=loss, batch=batch)
            optimizer.step()
            optimizer.zero_grad()


class Loop:
    """A callable with state: only its first run is as it should be."""

    def __init__(self, **options) -> None:
        self.runs, self.options = 0, options

    def __call__(self, path) -> None:
        self.runs += 1
        train(path, **{name: value(self.runs) for name, value in self.options.items()})


def to_its_own(folder: Path, name: str = "own"):
    return lambda: train(folder / name)


@pytest.mark.parametrize(
    "source",
    [
        lambda path: train(path),
        lambda path, steps: train(path, steps),
        lambda folder, steps: train(folder, steps),
        lambda where: train(where),
    ],
)
def test_the_path_and_the_steps_are_handed_over(source, tmp_path):
    path = record_of(source, tmp_path / "a", 4)
    assert path == tmp_path / "a"
    assert sb.Record.open(path).num_steps == (4 if "steps" in source.__code__.co_varnames else 2)


def test_a_record_at_a_path_of_its_own_is_found(tmp_path):
    assert record_of(lambda: str(train(tmp_path / "one") or tmp_path / "one"), tmp_path / "a") == tmp_path / "one"
    assert record_of(to_its_own(tmp_path), tmp_path / "a") == tmp_path / "own"


def test_no_record_or_several_is_said(tmp_path):
    with pytest.raises(ConfigError, match="recorded nothing.*recorder.step"):
        record_of(lambda: None, tmp_path / "a")
    with pytest.raises(ConfigError, match="made 2 records.*verify each by itself"):
        record_of(lambda path: (train(path), train(tmp_path / "other")), tmp_path / "b")
    with pytest.raises(ConfigError, match="takes model, path.*functools.partial"):
        record_of(lambda model, path: None, tmp_path / "c")


def test_a_baseline_is_run_again(tmp_path):
    found = baseline_reruns(train, tmp_path, 3)
    assert [path.folder.name for path in found.reruns] == list(MODES)
    assert found.notes == ()
    last = list(found.record.steps())[3].phases["weight"]
    for again in found.reruns:
        assert again.num_steps == 3
        for name, weight in list(again.steps())[3].phases["weight"].items():
            assert 0 < abs(weight.total / last[name].total - 1) < 1e-4, (again.folder.name, name)


def test_a_loop_that_does_not_repeat_itself_is_said(tmp_path):
    found = baseline_reruns(Loop(noise=lambda runs: 1e-7 * runs), tmp_path)
    assert len(found.reruns) == 6
    assert "first in step 1, gradient of 0.weight" in found.notes[0]


def test_a_loop_that_begins_elsewhere_is_no_baseline(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match=r"other values of '0.weight' before the first step.*from seeds"):
        baseline_reruns(Loop(seed=lambda runs: runs), tmp_path / "a")
    with pytest.raises(ConfigError, match="other data in step 1"):
        baseline_reruns(Loop(data=lambda runs: torch.Generator().manual_seed(runs)), tmp_path / "b")
    with pytest.raises(ConfigError, match="another number of steps in step 2"):
        baseline_reruns(Loop(steps=lambda runs: 1 + runs), tmp_path / "c")


def test_a_baseline_with_a_fixed_path_is_run_once(tmp_path):
    found = baseline_reruns(to_its_own(tmp_path), tmp_path / "folder")
    assert found.reruns == ()
    assert "was not run again" in found.notes[0]


def test_unseeded_runs_begin_with_the_same_random_numbers(tmp_path):
    def unseeded(path) -> None:
        train(path, seed=int(torch.randint(1000, ())))

    assert baseline_reruns(unseeded, tmp_path).notes == ()


def on_two_ranks(folder: str) -> list[str]:
    mine = Path(folder) / f"of rank {dist.get_rank()}"
    mine.mkdir()
    found = baseline_reruns(train_under_ddp, mine)
    return [str(found.record.folder), *(str(one.folder.parent) for one in found.reruns), *found.notes]


def train_under_ddp(path) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, path) as recorder:
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
        loss = model(batch).square().mean()
        loss.backward()
        recorder.step(loss=loss, batch=batch)
        optimizer.step()


@pytest.mark.ranks
def test_ranks_run_a_baseline_together(tmp_path):
    of_rank_0 = str(tmp_path / "of rank 0")
    assert ranks.call(2, on_two_ranks, str(tmp_path)) == [[f"{of_rank_0}/plain", *[of_rank_0] * len(MODES)]] * 2
