"""What the engine does not take: each refusal comes when it is built or called, and says what, why and the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook.errors import ConfigError, ShardbookError, UsageError
from tests import ranks
from tests.equality import SEED, built
from tests.zoo import ZOO, Block, Decoder


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> sb.Engine:
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sb.Engine(model, optimizer, sb.ZeroConfig(**options))


def plain() -> nn.Module:
    return built(ZOO["plain"], SEED)


def backward(engine: sb.Engine, step: int = 0, micro: int = 0, **options: Any) -> None:
    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(0, step, micro))
    engine.backward(loss, weight=weight, **options)


# ---- optimizers ----------------------------------------------------------------------------------------------------------


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in model.parameters() if parameter.ndim == 2])


class Whitening(torch.optim.Optimizer):
    """One that nobody knows, which looks at the whole of a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


@pytest.mark.parametrize(
    "make, reason",
    [(lbfgs, "LBFGS"), (adafactor, "Adafactor"), (muon, "Muon"), (lambda model: Whitening(model.parameters()), "Whitening")],
    ids=["LBFGS", "Adafactor", "Muon", "unknown"],
)
def test_an_optimizer_that_is_not_element_wise(make: Callable[[nn.Module], torch.optim.Optimizer], reason: str) -> None:
    model = plain()
    if reason == "Muon":
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 2)
    with pytest.raises(ConfigError, match=f"(?is){reason}.*element"):
        engine_of(model, make(model))


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ConfigError, match=r"(?i)optimizer"):
        engine_of(plain(), torch.optim.SGD(plain().parameters(), lr=0.1))


def test_an_optimizer_with_a_foreign_parameter() -> None:
    model = plain()
    foreign = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"(?i)optimizer"):
        engine_of(model, torch.optim.SGD([*model.parameters(), foreign], lr=0.1))


def test_a_trainable_parameter_in_no_group() -> None:
    model = plain()
    some = [parameter for name, parameter in model.named_parameters() if name != "blocks.1.up.bias"]
    with pytest.raises(ConfigError, match=r"blocks\.1\.up\.bias"):
        engine_of(model, torch.optim.SGD(some, lr=0.1))


def test_no_optimizer_for_a_model_that_is_trained() -> None:
    model = plain()
    engine = sb.Engine(model, None, sb.ZeroConfig(stage=3))
    with pytest.raises(ShardbookError, match=r"(?i)optimizer"):
        backward(engine)
        engine.step()


def test_an_optimizer_that_two_engines_want() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer)
    with pytest.raises(ConfigError, match=r"(?i)engine"):
        engine_of(model, optimizer)
    del engine


# ---- models --------------------------------------------------------------------------------------------------------------


def test_a_model_without_parameters() -> None:
    with pytest.raises(ConfigError, match=r"(?i)no parameters"):
        sb.Engine(nn.Sequential(nn.ReLU()), None, sb.ZeroConfig())


def test_a_parameter_under_another_engine() -> None:
    model = plain()
    engine = engine_of(model, stage=3)
    other = nn.ModuleDict({"shared": model.get_submodule("blocks.1"), "own": nn.Linear(3, 3)})
    with pytest.raises(ConfigError, match=r"(?is)shared.*engine"):
        engine_of(other)
    backward(engine)
    assert engine.step().applied


def test_a_model_on_the_meta_device_without_init() -> None:
    with torch.device("meta"):
        model = plain()
    with pytest.raises(ConfigError, match=r"(?is)meta.*init="):
        engine_of(model)


def test_an_init_that_leaves_a_parameter_out() -> None:
    with torch.device("meta"):
        model = plain()

    def init(module: nn.Module) -> None:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(), init=init)


def distributed_tensor() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = plain()
    block = model.get_submodule("blocks.1")
    block.up.weight = nn.Parameter(distribute_tensor(block.up.weight.detach(), mesh, [Shard(0)]))  # type: ignore[union-attr]
    try:
        engine_of(model)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_distributed_tensor() -> None:
    for text in ranks.call(2, distributed_tensor):
        assert "blocks.1.up.weight" in text
        assert "DTensor" in text


def test_complex_and_sparse_parameters_are_told_apart() -> None:
    """Whatever is decided about them, it is decided when the engine is built, and by name."""
    model = plain()
    model.spare = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="spare"):
        engine_of(model)


# ---- units ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [["block"], ["blocks.7"], [nn.Conv2d], [Block, nn.Conv2d]])
def test_units_that_match_nothing(units: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"(?i)units"):
        engine_of(plain(), units=units)


def test_units_by_class_and_by_name() -> None:
    for units in ([Block], ["blocks.0", "blocks.1", "blocks.2"], ["Block"], ["blocks.*"]):
        try:
            text = engine_of(plain(), units=units).describe()
        except ConfigError as error:  # a name of a class, or a pattern, may be refused, with what is allowed
            assert "units" in str(error)
            continue
        assert "blocks.1" in text


# ---- micro-batches and calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_before_the_last_micro_batch_is_a_ragged_end(stage: int) -> None:
    """``step`` reduces what is left, so it is the same as saying ``last`` before."""
    results = []
    for last in (None, True):
        engine = engine_of(plain(), stage=stage, accumulate=3)
        backward(engine)
        backward(engine, micro=1, last=last)
        report = engine.step()
        results.append((report.loss, report.weight, report.grad_norm, [value.clone() for _, value in engine.full_parameters()]))
    assert results[0][:3] == results[1][:3]
    assert all(torch.equal(one, other) for one, other in zip(results[0][3], results[1][3], strict=True))


@pytest.mark.parametrize("stage", [0, 3])
def test_one_micro_batch_too_many(stage: int) -> None:
    engine = engine_of(plain(), stage=stage, accumulate=2)
    backward(engine)
    backward(engine, micro=1)
    with pytest.raises(UsageError, match=r"step\(\)"):
        backward(engine, micro=2)
    assert engine.step().applied


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_the_last_one_comes_the_step(stage: int) -> None:
    engine = engine_of(plain(), stage=stage, accumulate=3)
    backward(engine, last=True)
    with pytest.raises(UsageError, match=r"step\(\)"):
        backward(engine)


def test_a_step_without_any_backward() -> None:
    engine = engine_of(plain())
    with pytest.raises(UsageError, match="backward"):
        engine.step()


def test_gradients_outside_their_time() -> None:
    engine = engine_of(plain())
    with pytest.raises(UsageError, match="backward"), engine.grads():
        pass
    backward(engine)
    engine.step()
    with pytest.raises(UsageError, match="backward"), engine.grads():
        pass


def test_a_loss_that_is_no_scalar() -> None:
    engine = engine_of(plain())
    logits = engine(ZOO["plain"].batches(0, 0, 0).args[0])
    with pytest.raises((ShardbookError, RuntimeError), match="(?i)scalar"):
        engine.backward(logits)


def test_a_loss_without_gradient() -> None:
    engine = engine_of(plain())
    with pytest.raises((ShardbookError, RuntimeError), match="(?i)grad"):
        engine.backward(torch.tensor(1.0), weight=1)


def test_a_method_that_is_not_there() -> None:
    engine = engine_of(plain())
    with pytest.raises((ConfigError, UsageError, AttributeError), match="encode"):
        engine.register_forward("encode")


def test_gathered_of_a_foreign_module() -> None:
    engine = engine_of(plain())
    with pytest.raises(ShardbookError, match="not under this engine"), engine.gathered(nn.Linear(3, 3)):
        pass


def test_a_scheduler_of_another_optimizer() -> None:
    model = plain()
    other = torch.optim.SGD(plain().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
    with pytest.raises(ConfigError, match="scheduler"):
        sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sb.ZeroConfig(), scheduler=scheduler)


# ---- gradients that come too late ----------------------------------------------------------------------------------------


class TwoParts(Block):
    """One parameter in two reentrant checkpoints: its gradient arrives twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.inner, x, use_reentrant=True)
        return x + checkpoint(self.inner, x, use_reentrant=True)


def two_reentrant(stage: int) -> str:
    torch.manual_seed(SEED)
    model = Decoder(TwoParts, depth=2)
    engine = engine_of(model, stage=stage)
    try:
        backward(engine)
        engine.step()
    except ShardbookError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_for_what_is_reduced_already_is_refused_by_name(stage: int, num_ranks: int) -> None:
    for text in ranks.call(num_ranks, two_reentrant, stage):
        assert "blocks.1" in text
        assert "reentrant" in text
