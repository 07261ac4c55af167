"""Fine-tuning: what may be missing, unexpected, of another shape, or begun anew, and that nothing else may."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR, StepLR

import shardbook as sb
from tests.checkpoints import held
from tests.test_checkpoint_resume import same


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, classes)
        self.register_buffer("seen", torch.zeros(classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs))).square().sum()


def half(epoch: int) -> float:
    return 0.5**epoch


def engine_of(
    classes: int = 4, *, groups: int = 1, optimizer: Any = torch.optim.AdamW, scheduler: Any = lambda made: LambdaLR(made, half)
) -> sb.Engine:
    torch.manual_seed(classes)
    model = Classifier(classes)
    parts = [list(model.parameters())] if groups == 1 else [list(model.body.parameters()), list(model.head.parameters())]
    made = optimizer([{"params": part} for part in parts], lr=0.1)
    return sb.Engine(model, made, sb.ZeroConfig(stage=2), scheduler=None if scheduler is None else scheduler(made))


def train(engine: sb.Engine, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 6)), weight=2)
        engine.step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    engine = engine_of()
    train(engine, 2)
    engine.save(tmp_path / "c")
    engine.close()
    return tmp_path / "c"


@pytest.fixture
def made() -> Iterator[list[sb.Engine]]:
    engines: list[sb.Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def refused(engine: sb.Engine, path: Path, said: str, **allowed: Any) -> None:
    train(engine)
    before = dict(engine.state_dict()), engine.optimizer.state_dict(), engine.num_steps
    scheduler = None if engine._scheduler is None else engine._scheduler.state_dict()
    with pytest.raises(sb.CheckpointError, match=said):
        engine.load(path, **allowed)
    assert same((dict(engine.state_dict()), engine.optimizer.state_dict(), engine.num_steps), before)
    assert scheduler is None or engine._scheduler.state_dict() == scheduler
    train(engine)


@pytest.mark.parametrize("name", ["allow_missing", "allow_unexpected"])
def test_one_string_is_no_list(name: str, path: Path, made: list[sb.Engine]):
    made.append(engine_of(5))
    refused(made[0], path, rf"{name}: 'head\.\*'; a list of patterns", **{name: "head.*"})


def test_a_head_of_another_size(path: Path, made: list[sb.Engine]):
    made += [engine_of(5), engine_of()]
    names = ["head.*", "seen"]
    for allowed in ({}, {"allow_missing": names}, {"allow_unexpected": names}):
        refused(made[0], path, r"'head\.weight' has shape .*allow_missing= and in allow_unexpected=", **allowed)
    made[1].load(path)
    before = dict(made[0].state_dict())
    made[0].load(path, allow_missing=names, allow_unexpected=names)
    after = made[0].state_dict()
    assert torch.equal(after["body.weight"], made[1].state_dict()["body.weight"])
    assert all(torch.equal(after[name], before[name]) for name in ("head.weight", "head.bias", "seen"))
    train(made[0])


def test_a_name_in_both_lists_is_loaded_where_it_fits(path: Path, made: list[sb.Engine]):
    made += [engine_of(), engine_of()]
    train(made[0])
    made[0].load(path, allow_missing=["*"], allow_unexpected=["*"])
    made[1].load(path)
    assert same(held(made[0]), held(made[1]))


def test_another_optimizer_begins_anew(path: Path, made: list[sb.Engine]):
    made.append(engine_of(optimizer=lambda groups, lr: torch.optim.SGD(groups, lr=0.3, momentum=0.9)))
    refused(made[0], path, r"AdamW.*SGD.*allow_unexpected=\('optimizer',\)")
    made[0].load(path, allow_unexpected=["optimizer"])
    assert made[0].num_steps == 2
    assert made[0].optimizer.param_groups[0]["momentum"] == 0.9
    assert "betas" not in made[0].optimizer.param_groups[0]
    train(made[0])


def test_other_groups_begin_anew(path: Path, made: list[sb.Engine]):
    made.append(engine_of(groups=2, scheduler=None))
    refused(made[0], path, r"two groups here.*allow_unexpected=\('optimizer',\)", allow_unexpected=["schedulers"])
    made[0].load(path, allow_unexpected=["optimizer", "schedulers"])
    train(made[0])


def test_schedulers_may_be_left_out_or_begin_anew(path: Path, made: list[sb.Engine], tmp_path: Path):
    made += [engine_of(scheduler=lambda one: StepLR(one, 1)), engine_of(scheduler=None), engine_of()]
    for engine in made[:2]:
        refused(engine, path, r"schedulers are \['LambdaLR'\].*allow_unexpected=\('schedulers',\)")
        engine.load(path, allow_unexpected=["schedulers"])
        train(engine)
    made[1].save(tmp_path / "without")
    refused(made[2], tmp_path / "without", r"schedulers are none.*allow_missing=\('schedulers',\)")
    made[2].load(tmp_path / "without", allow_missing=["schedulers"])
    train(made[2])


@pytest.mark.parametrize(
    "scheduler",
    [lambda one: LambdaLR(one, half), lambda one: SequentialLR(one, [LinearLR(one), LambdaLR(one, half)], [3])],
    ids=["lambda", "sequential"],
)
def test_a_new_group_and_a_schedule_of_the_old_ones(scheduler: Any, made: list[sb.Engine], tmp_path: Path):
    """The scheduler would take its state, and fail (or set only some rates) a step later."""
    torch.manual_seed(0)
    body = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(body.parameters(), lr=0.1)
    made.append(sb.Engine(nn.ModuleDict({"body": body}), optimizer, sb.ZeroConfig(), scheduler=scheduler(optimizer)))
    made[0].save(tmp_path / "c")
    made.append(engine_of(groups=2, scheduler=scheduler))
    refused(made[1], tmp_path / "c", r"scheduler 0 .*1.* parameter groups in it and .*2.* here", allow_missing=["head.*", "seen"])
    made[1].load(tmp_path / "c", allow_missing=["head.*", "seen"], allow_unexpected=["schedulers"])
    train(made[1], 2)


class Choosy(LambdaLR):
    """Takes only states that are its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not math.isfinite(state_dict["last_epoch"]) or state_dict["last_epoch"] == 2:
            self.last_epoch = -7
            raise RuntimeError("not mine")
        super().load_state_dict(state_dict)


def test_a_scheduler_that_does_not_take_its_state(made: list[sb.Engine], tmp_path: Path):
    made += [engine_of(scheduler=lambda one: Choosy(one, half)), engine_of(scheduler=lambda one: Choosy(one, half))]
    train(made[0], 2)
    made[0].save(tmp_path / "c")
    refused(made[1], tmp_path / "c", "Choosy does not take its state .*not mine.*Nothing was changed")
    made[1].load(tmp_path / "c", allow_unexpected=["schedulers"])
