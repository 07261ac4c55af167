"""A record of a loop in one process: what is seen, what is kept, and what is said when it can't be."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import shardbook as sb
from shardbook.errors import ConfigError, UsageError
from shardbook.recording.format import MAGIC, MANIFEST, VERSION, file_of
from shardbook.recording.prints import compare
from shardbook.recording.record import COMPLETE_EVERY, COMPLETE_FIRST


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5))


def data(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(
    path: Path, *, steps: int = 3, scale: float = 1.0, clip: float | None = None, model: nn.Module | None = None, seen=None, rates=False,
    optimizer: torch.optim.Optimizer | None = None, **options,
) -> sb.Record:  # fmt: skip
    """Train and read the record again. ``seen`` is called with (step, where, model, optimizer)."""
    model = model or build()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)) if rates else None
    seen = seen or (lambda *_: None)
    with sb.record(model, optimizer, path, **options) as recorder:
        for step in range(1, steps + 1):
            batch = data(step)
            loss = model(batch).square().mean() * scale
            loss.backward()
            seen(step, "before record", model, optimizer)
            recorder.step(loss=loss, weight=8, batch=batch)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            seen(step, "before step", model, optimizer)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return sb.Record.open(path)


def bits(record: sb.Record, phase: str) -> list[dict[str, int]]:
    return [{name: one.hash for name, one in step.phases.get(phase, {}).items()} for step in record.steps()]


# ---- what is seen -----------------------------------------------------------------------------------------------------------


def test_the_same_run_twice_has_the_same_bits(tmp_path):
    one, other = train(tmp_path / "a", steps=12), train(tmp_path / "b", steps=12)
    assert one.num_steps == 12
    for phase in ("weight", "gradient", "state.exp_avg", "state.exp_avg_sq", "buffer", "before"):
        assert bits(one, phase) == bits(other, phase)
        assert any(bits(one, phase))
    assert [step.data for step in one.steps()] == [step.data for step in other.steps()]


def test_recording_changes_nothing(tmp_path):
    recorded, plain = build(), build()
    train(tmp_path / "a", model=recorded, clip=0.1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(1, 4):
        plain(data(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(recorded.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert not optimizer._optimizer_step_pre_hooks


def test_figures_are_those_of_the_tensors(tmp_path):
    norms, rates = [], []

    def seen(step, where, model, optimizer):
        if where == "before record":
            norms.append({name: p.grad.double().norm().item() for name, p in model.named_parameters()})
        else:
            rates.append(optimizer.param_groups[0]["lr"])

    record = train(tmp_path / "a", clip=0.05, rates=True, seen=seen)
    start, *steps = record.steps()
    assert start.phases["weight"].keys() == record.parameters.keys()
    for step, expected, rate in zip(steps, norms, rates, strict=True):
        assert {name: one.norm for name, one in step.phases["gradient"].items()} == pytest.approx(expected, rel=1e-12)
        assert step.norm() == pytest.approx(math.hypot(*expected.values()))
        assert step.norm("stepped") == pytest.approx(0.05, rel=1e-4)
        assert step.groups[0][0]["lr"] == rate
        assert step.groups[0][0]["betas"] == [0.9, 0.999]
        assert step.groups[0][0]["weight_decay"] == 0.1
        assert step.groups[0][0]["parameters"] == list(record.parameters)
        assert step.applied
        assert step.weights == (8.0,)
    assert record.engine == "plain"


def test_brief_steps_have_norms_of_what_clipping_left(tmp_path):
    for step in list(train(tmp_path / "a", steps=9, clip=0.05).steps())[1:]:
        assert step.norm("stepped") == pytest.approx(min(0.05, step.norm()), rel=1e-4)
        assert (step.phases["stepped"]["0.weight"].hash is None) == (not step.complete)
    with pytest.raises(ValueError, match="only the norm"):
        step.phases["stepped"]["0.weight"].same_bits(step.phases["gradient"]["0.weight"])


def test_a_loss_four_times_too_large_is_seen_as_that(tmp_path):
    right, wrong = train(tmp_path / "a", steps=1), train(tmp_path / "b", steps=1, scale=4.0)
    for a, b in zip(list(wrong.steps())[1:], list(right.steps())[1:], strict=True):
        for name, gradient in a.phases["gradient"].items():
            assert compare(gradient, b.phases["gradient"][name]).ratio == 4.0


def test_steps_are_complete_at_first_and_now_and_then(tmp_path):
    record = train(tmp_path / "a", steps=20)
    complete = [step.number for step in record.steps() if step.complete]
    assert complete == [*range(COMPLETE_FIRST + 1), *range(COMPLETE_EVERY, 21, COMPLETE_EVERY)]
    for step in record.steps():
        assert step.phases["weight"]["0.weight"].is_complete == step.complete
        assert ("state.exp_avg" in step.phases) == (step.complete and step.number > 0)
        if step.number:
            assert step.norm("stepped") == pytest.approx(step.norm(), rel=1e-5)
            assert step.phases["before"]["0.weight"].is_complete >= step.complete
    assert all(step.complete for step in train(tmp_path / "b", steps=20, complete_every=1).steps())


def test_weights_changed_between_steps_are_seen(tmp_path):
    def seen(step, where, model, optimizer):
        if where == "before record" and step == 11:
            with torch.no_grad():
                model[3].bias[2] += 0.5

    record = train(tmp_path / "a", steps=12, seen=seen)
    steps = list(record.steps())
    assert steps[10].phases["before"] == steps[9].phases["weight"]
    changed = [name for name, one in steps[11].phases["before"].items() if not one.same_bits(steps[10].phases["weight"][name])]
    assert changed == ["3.bias"]
    assert steps[12].phases["before"] == steps[11].phases["weight"]


@pytest.mark.parametrize("step_of_write", [3, 16])
def test_writes_that_move_no_counter_are_seen_in_complete_steps(tmp_path, step_of_write):
    def seen(step, where, model, optimizer):
        if where == "before record" and step == step_of_write:
            model[3].bias.data[2] += 0.5
        if where == "before step":
            for parameter in model.parameters():
                parameter.grad.data.mul_(0.5)

    steps = list(train(tmp_path / "a", steps=17, seen=seen).steps())
    for step, last in zip(steps[1:], steps, strict=False):
        changed = [name for name, one in step.phases["before"].items() if not one.same_bits(last.phases["weight"][name])]
        assert changed == (["3.bias"] if step.number == step_of_write else [])
        assert step.norm("stepped") == pytest.approx(step.norm() / 2, rel=1e-5)


def test_gradients_made_inside_of_the_optimizers_step(tmp_path):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        for step in range(1, 4):

            def closure():
                optimizer.zero_grad()
                loss = model(data(step)).square().mean()  # noqa: B023
                loss.backward()
                recorder.step(loss=loss, batch=data(step))  # noqa: B023
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                return loss

            optimizer.step(closure) if step == 1 else optimizer.step(closure=closure)
    expected = train(tmp_path / "b", clip=0.05)
    for phase in ("gradient", "stepped", "weight", "before"):
        assert bits(sb.Record.open(tmp_path / "a"), phase) == bits(expected, phase)


def test_a_step_that_the_optimizer_did_not_take(tmp_path):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        for step in range(1, 4):
            loss = model(data(step)).mean()
            loss.backward()
            recorder.step(loss=loss)
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
    steps = list(sb.Record.open(tmp_path / "a").steps())
    assert [step.applied for step in steps[1:]] == [True, False, True]
    assert "weight" not in steps[2].phases
    assert steps[3].phases["before"]["0.weight"].same_bits(steps[1].phases["weight"]["0.weight"])


def test_masters_are_the_weights_and_the_model_is_beside_them(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        model(torch.ones(3, 6, dtype=torch.bfloat16)).float().sum().backward()
        recorder.step(loss=1.0)
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    step = list(sb.Record.open(tmp_path / "a").steps())[1]
    assert step.phases["weight"]["1.bias"].dtype == "float32"
    assert step.phases["model"]["1.bias"].dtype == "bfloat16"
    assert step.phases["gradient"]["0.weight"].dtype == "bfloat16"
    assert step.phases["stepped"]["0.weight"].dtype == "float32"
    assert step.phases["stepped"]["0.weight"].squares == step.phases["gradient"]["0.weight"].squares


def test_tied_frozen_and_oddly_laid_parameters(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    model[3].weight = model[2].weight
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        loss = model(torch.randn(2, 3, 3, 3)).square().sum()
        loss.backward()
        gradient = model[0].weight.grad.double().norm().item()
        recorder.step(loss=loss)
        optimizer.step()
    record = sb.Record.open(tmp_path / "a")
    assert record.parameters["2.weight"].aliases == ("3.weight",)
    assert not record.parameters["2.bias"].trainable
    start, step = record.steps()
    assert start.phases["weight"]["2.bias"].same_bits(step.phases["weight"]["2.bias"])
    assert step.phases["gradient"]["0.weight"].norm == pytest.approx(gradient)
    assert "2.bias" not in step.phases["gradient"]


def test_full_tensors_on_request(tmp_path):
    kept = {}

    def seen(step, where, model, optimizer):
        if where == "before record":
            kept[step] = model[0].weight.grad.clone().view(-1)

    record = train(tmp_path / "a", seen=seen, full=True)
    assert torch.equal(record.tensor(2, "gradient")["0.weight", 0], kept[2])
    assert record.tensor(99, "gradient") == {}


def test_not_finite(tmp_path):
    def seen(step, where, model, optimizer):
        if where == "before record" and step == 2:
            model[0].weight.grad[0, 0] = math.nan

    steps = list(train(tmp_path / "a", seen=seen).steps())
    assert steps[2].phases["gradient"]["0.weight"].nonfinite == 1
    assert not steps[2].phases["gradient"]["0.weight"].is_finite
    assert steps[2].phases["gradient"]["0.bias"].is_finite


# ---- what is kept -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_thousand_steps_of_a_hundred_parameters_are_under_20_mb(tmp_path):
    """Of two micro-batches each."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(100))

        def forward(self, tokens, targets):
            return (torch.stack(list(self.each)) * torch.arange(1, 1601).view(100, 16) * (tokens * targets).sum(0)).sum()

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        for step in range(1000):
            optimizer.zero_grad()
            micro_batches = list(torch.randint(0, 99, (2, 2, 4, 16), generator=torch.Generator().manual_seed(step)))
            losses = [model(tokens, targets) for tokens, targets in micro_batches]
            sum(losses).backward()
            recorder.step(loss=losses, batch=[tuple(pair) for pair in micro_batches])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    nbytes = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert nbytes < 20e6
    record = sb.Record.open(tmp_path / "a")
    assert record.num_steps == 1000
    assert {len(step.micro_batches[0]) for step in record.steps() if step.number} == {2}


def test_what_was_flushed_before_an_end_can_be_read(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", steps=40, seen=lambda step, *_: (_ for _ in ()).throw(KeyboardInterrupt) if step == 37 else None)
    with pytest.raises(ConfigError, match=r"did not come to its end .* after step 36 was flushed"):
        sb.Record.open(tmp_path / "a")
    record = sb.Record.open(tmp_path / "a", unfinished=True)
    assert not record.ended
    assert [step.number for step in record.steps()] == list(range(37))


def test_truncated_at_any_byte(tmp_path):
    train(tmp_path / "a", steps=20)
    file = file_of(tmp_path / "a", 0)
    content = file.read_bytes()
    for length in range(0, len(content), 997):
        file.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"truncated|not a rank's file|did not come to its end"):
            sb.Record.open(tmp_path / "a")
    file.write_bytes(content[:-40])
    record = sb.Record.open(tmp_path / "a", unfinished=True)
    assert 0 < record.num_steps <= 20
    assert len(list(record.steps())) == record.num_steps + 1


# ---- bad input ----------------------------------------------------------------------------------------------------------------


def test_damage_and_foreign_files(tmp_path):
    train(tmp_path / "a", steps=5)
    file, manifest = file_of(tmp_path / "a", 0), tmp_path / "a" / MANIFEST
    content, text = file.read_bytes(), manifest.read_text()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    for write, said in (
        (lambda: file.write_bytes(bytes(damaged)), "damaged|truncated"),
        (lambda: file.write_bytes(b"PK\x03\x04" + content), "not a rank's file"),
        (lambda: file.unlink(), "rank 0 of 1 is missing"),
    ):
        write()
        with pytest.raises(ConfigError, match=said):
            sb.Record.open(tmp_path / "a")
        file.write_bytes(content)
    for change, said in (
        ({"version": VERSION + 1}, f"version {VERSION + 1}.*reads version {VERSION}"),
        ({"scheme": 99}, "scheme 99"),
        ({"ranks": 2}, "files of different runs|missing"),
        ({"engine": "ddp"}, "files of different runs"),
    ):
        manifest.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(ConfigError, match=said):
            sb.Record.open(tmp_path / "a")
    for content_of_manifest in ("{", "[]", "{}"):
        manifest.write_text(content_of_manifest)
        with pytest.raises(ConfigError, match="manifest"):
            sb.Record.open(tmp_path / "a")
    with pytest.raises(ConfigError, match="no record"):
        sb.Record.open(tmp_path / "elsewhere")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_a_ranks_file_is_noticed(tmp_path, data):
    folder = tmp_path / "a"
    if not folder.exists():
        train(folder, steps=20)
        (tmp_path / "good").write_bytes(file_of(folder, 0).read_bytes())
    content = bytearray((tmp_path / "good").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file_of(folder, 0).write_bytes(content)
    with pytest.raises(ConfigError, match=r"truncated|damaged|not a rank's file"):
        sb.Record.open(folder)


def test_a_missing_part_is_noticed(tmp_path):
    train(tmp_path / "a", steps=40)
    file = file_of(tmp_path / "a", 0)
    content, starts = file.read_bytes(), [len(MAGIC)]
    while starts[-1] < len(content):
        starts.append(starts[-1] + 16 + int.from_bytes(content[starts[-1] + 8 : starts[-1] + 16], "little"))
    assert len(starts) > 5
    for begin, end in itertools.pairwise(starts[1:-2]):
        file.write_bytes(content[:begin] + content[end:])
        with pytest.raises(ConfigError, match="a part of it is missing"):
            sb.Record.open(tmp_path / "a")
    file.write_bytes(content + content[starts[0] :])
    with pytest.raises(ConfigError, match="not in the order"):
        sb.Record.open(tmp_path / "a")


def test_nothing_is_written_over(tmp_path):
    train(tmp_path / "a", steps=1)
    with pytest.raises(ConfigError, match="never written over"):
        train(tmp_path / "a", steps=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        train(tmp_path / "file" / "a", steps=1)


def test_called_at_the_wrong_time(tmp_path):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, tmp_path / "a") as recorder:
        with pytest.raises(UsageError, match="before gradients are cleared"):
            recorder.step(loss=0.0)
        model(data(0)).sum().backward()
        optimizer.step()
        with pytest.raises(UsageError, match="between backward and clipping"):
            recorder.step(loss=0.0)


def test_what_can_not_be_recorded(tmp_path):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="optimizer is None"), sb.record(model, None, tmp_path / "a"):
        pass
    with pytest.raises(ConfigError, match="not one of the model's"), sb.record(nn.Linear(3, 3), optimizer, tmp_path / "a"):
        pass
    for wrong in (0, True):
        with pytest.raises(ConfigError, match="complete_every"), sb.record(model, optimizer, tmp_path / "a", complete_every=wrong):
            pass
    assert not (tmp_path / "a").exists()


def test_a_folder_can_be_moved(tmp_path):
    before = bits(train(tmp_path / "a"), "weight")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert bits(sb.Record.open(tmp_path / "b"), "weight") == before
