"""Micro-batches of a record: every forward as the outermost module saw it, in real loops, and nothing about the loop changed by it."""

import contextlib
import copy
import gc
import io
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from shardbook.recording import batches, forwards
from shardbook.recording.fingerprint import Extent, Plan
from shardbook.recording.read import Step


class Words(nn.Module):
    """Tokens to logits, or to a mean loss where targets are given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 30)

    def forward(self, tokens, targets=None):
        logits = self.head(self.dropout(self.embed(tokens)))
        return logits if targets is None else loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def batch(seed: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 30, (rows, 6), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :2] = -100
    return tokens[:, :-1], targets


def recorded(path, body, *, steps: int = 1, model=None, optimizer=None) -> list[Step]:
    """``body(model, step)`` makes the gradients of a step and returns what is passed to ``recorder.step``."""
    model = Words() if model is None else model
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    with sb.record(model, optimizer, path) as recorder:
        for step in range(1, steps + 1):
            recorder.step(**{"loss": 0.0} | (body(model, step) or {}))
            optimizer.step()
            optimizer.zero_grad()
    return list(sb.Record.open(path).steps())[1:]


def hash_of(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    return Plan([Extent(0, flat.numel())], flat.dtype, flat.device).prints([flat]).hash.item() % 2**64


# ---- what is seen -----------------------------------------------------------------------------------------------------------


def test_each_forward_is_a_micro_batch_with_what_went_in_and_came_out(tmp_path):
    seen = []

    def body(model, step):
        micro_batches = [batch(10 * step + place, rows=place + 2) for place in range(2)]
        losses = []
        for tokens, targets in micro_batches:
            logits = model(tokens)
            logits.retain_grad()
            losses.append(loss_of(logits, targets) / 2)
            losses[-1].backward()
            seen.append((hash_of(logits), hash_of(logits.grad), logits.numel()))
        return {"loss": losses, "weight": [1, 2.5], "batch": micro_batches}

    steps = recorded(tmp_path / "a", body, steps=3)
    expected = iter(seen)
    for step in steps:
        (mine,), (given,) = step.micro_batches, step.given
        assert [one.num_rows for one in mine] == [2, 3]
        assert [one.inputs for one in mine] == [(tokens,) for tokens, _ in given]
        assert [(t.numel, t.valid, y.numel, y.valid) for t, y in given] == [(10, 10, 10, 8), (15, 15, 15, 13)]
        for one in mine:
            hashes = one.output.hash, one.output_gradient.hash, one.output.numel
            assert hashes == next(expected)
            assert (one.learning_rates, one.evaluating, one.autocast) == ((0.01,), 0, None)
        assert step.weights == (3.5,)
        assert step.losses[0] == pytest.approx(3.4, rel=0.2)


def test_the_gradient_of_a_loss_is_the_factor_on_it(tmp_path):
    def body(model, step):
        for place in range(2):
            loss = model(*batch(place))
            if step == 1:
                loss = loss / 2
            else:
                loss /= 4  # in place: the gradient is still that of the value before
            loss.backward()

    first, second = recorded(tmp_path / "a", body, steps=2)
    assert [one.output_gradient.total for one in first.micro_batches[0]] == [0.5, 0.5]
    assert [one.output_gradient.total for one in second.micro_batches[0]] == [0.25, 0.25]
    assert {one.output.numel for one in first.micro_batches[0]} == {1}


def test_backwards_that_come_to_one_output_add_up(tmp_path):
    def body(model, _):
        loss = model(*batch(0))
        loss.backward(retain_graph=True)
        (loss * 3).backward()
        model(*batch(1))  # without a backward

    (step,) = recorded(tmp_path / "a", body)
    one, other = step.micro_batches[0]
    assert one.output_gradient.total == 4.0
    assert other.output is not None
    assert other.output_gradient is None


def test_brief_steps_have_micro_batches_without_outputs(tmp_path):
    def body(model, step):
        model(*batch(step)).backward()

    for step in recorded(tmp_path / "a", body, steps=17):
        ((one,),) = step.micro_batches
        assert (one.output is not None, one.output_gradient is not None) == (step.complete, step.complete)
        assert [facts.valid for facts in one.inputs] == [15, 13]


def test_a_large_output_is_sampled_by_whole_leading_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(forwards, "SAMPLE_NUMEL", 400)
    kept = []

    def body(model, step):
        logits = model(batch(0, rows=6)[0] if step == 1 else batch(0, rows=2)[0].repeat(1, 3))  # rows of 150 elements, and of 450
        logits.square().sum().backward()
        kept.append(logits)

    first, second = (step.micro_batches[0][0].output for step in recorded(tmp_path / "a", body, steps=2))
    assert (first.numel, first.hash) == (300, hash_of(kept[0][:2]))
    assert (second.numel, second.hash) == (400, hash_of(kept[1].flatten()[:400]))


def test_a_rate_that_changes_within_a_step_shows(tmp_path):
    model = Words()
    groups = [{"params": [model.head.weight], "lr": 0.5}, {"params": [model.head.bias, model.embed.weight], "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def body(model, _):
        for place in range(2):
            model(*batch(place)).backward()
            optimizer.param_groups[0]["lr"] /= 2
            optimizer.param_groups[1]["lr"].mul_(0.5)

    (step,) = recorded(tmp_path / "a", body, model=model, optimizer=optimizer)
    assert [one.learning_rates for one in step.micro_batches[0]] == [(0.5, 0.25), (0.25, 0.125)]
    assert [group["lr"] for group in step.groups[0]] == [0.125, 0.0625]


def test_modules_left_in_evaluation_mode_are_counted(tmp_path):
    def body(model, step):
        model.train()
        if step == 2:
            model.eval()
        if step == 3:
            model.dropout.eval()
        model(*batch(0)).backward()

    steps = recorded(tmp_path / "a", body, steps=3)
    assert [step.micro_batches[0][0].evaluating for step in steps] == [0, 4, 1]


def test_autocast_shows_wherever_it_is_switched_on(tmp_path):
    class Inside(Words):  # as accelerate does it
        def forward(self, *args):
            with torch.autocast("cpu", torch.float16) if self.casts else contextlib.nullcontext():
                return super().forward(*args)

    def body(model, step):
        model.casts = step == 3
        with torch.autocast("cpu", torch.bfloat16) if step == 2 else contextlib.nullcontext():
            loss = model(*batch(0))
        loss.backward()

    steps = recorded(tmp_path / "a", body, steps=3, model=Inside())
    assert [step.micro_batches[0][0].autocast for step in steps] == [None, "bfloat16", "float16"]


def test_keyword_arguments_come_after_positional_ones_by_name(tmp_path):
    class Model(nn.Linear):
        def forward(self, x, *, scale, extra):
            return super().forward(x) * scale + extra["bias"]

    x, scale, bias = torch.randn(3, 2), torch.tensor(2.0), torch.randn(2)

    def body(model, _):
        model(x, scale=scale, extra={"bias": bias, "note": "no tensor", "factor": 3.0}).sum().backward()

    (step,) = recorded(tmp_path / "a", body, model=Model(2, 2))
    ((one,),) = step.micro_batches
    assert [facts.hash for facts in one.inputs] == [batches.facts_of(t).hash.item() % 2**64 for t in (x, bias, scale)]
    assert one.num_rows == 3


def test_outputs_in_containers(tmp_path):
    class Model(nn.Linear):
        def forward(self, x):
            return {"count": torch.tensor(3), "detached": x, "loss": super().forward(x).sum(), "logits": super().forward(x)}

    def body(model, _):
        (model(torch.ones(3, 2))["loss"] / 8).backward()

    (step,) = recorded(tmp_path / "a", body, model=Model(2, 2))
    ((one,),) = step.micro_batches
    assert (one.output.numel, one.output_gradient.total) == (1, 0.125)


@pytest.mark.parametrize(
    "batch_as",
    [lambda x, y: (x, y), lambda x, y: [(x[:1], y[:1]), (x[1:], y[1:])], lambda x, y: {"x": x, "y": y}, lambda x, y: [x, y]],
)
def test_what_was_given_by_tensor(tmp_path, batch_as):
    x, y = batch(0)

    def body(model, _):
        model(x, y).backward()
        return {"batch": batch_as(x, y)}

    (step,) = recorded(tmp_path / "a", body)
    ((one,),) = step.micro_batches
    for place in range(2):
        parts = [tensors[place] for tensors in step.given[0]]
        assert sum(facts.hash for facts in parts) % 2**64 == one.inputs[place].hash  # however it was cut
        assert sum(facts.numel for facts in parts) == x.numel()
        assert sum(facts.valid for facts in parts) == one.inputs[place].valid


def test_a_batch_of_one_tensor_with_numbers_beside_it(tmp_path):
    def body(model, step):
        x, y = batch(0)
        model(x, y).backward()
        return {"batch": x if step == 1 else (7, x, {"n": 2.5})}

    first, second = recorded(tmp_path / "a", body, steps=2)
    assert first.given == second.given
    assert len(first.given[0][0]) == 1
    assert first.data != second.data


def test_generators_at_the_first_forward_and_at_the_step(tmp_path):
    def body(model, step):
        torch.manual_seed(step)
        model.dropout.p = 0.5 if step == 3 else 0.0
        model(*batch(0)).backward()

    one, two, three = recorded(tmp_path / "a", body, steps=3, model=Words(0.25))
    again = recorded(tmp_path / "b", body, steps=3, model=Words(0.25))
    assert [step.rng_before for step in again] == [step.rng_before for step in (one, two, three)]
    assert one.rng_before == one.rng != two.rng_before == two.rng
    assert three.rng_before != three.rng
    assert sb.Record.open(tmp_path / "a").manifest["dropout"] == 0.25


def test_the_type_of_products_and_settings_of_dropout(tmp_path):
    class Attention(nn.Linear):
        attention_dropout = 0.0

        def __init__(self):
            super().__init__(2, 2)
            self.attention_dropout, self.drop_path_steps = 0.125, 3.0

    def body(model, _):
        model(torch.ones(1, 2)).sum().backward()

    model = nn.Sequential(Attention(), nn.Linear(2, 2))
    recorded(tmp_path / "a", body, model=model)
    manifest = sb.Record.open(tmp_path / "a").manifest
    assert (manifest["dropout"], manifest["compute"]) == (0.125, "float32")
    wide = nn.Linear(2, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(wide.parameters())
    for path, model, expected in (("b", wide, "float64"), ("c", nn.Sequential(wide, nn.Linear(2, 2).bfloat16()), "bfloat16")):
        with sb.record(model, optimizer, tmp_path / path):
            pass
        assert sb.Record.open(tmp_path / path).manifest["compute"] == expected


# ---- what is left alone -----------------------------------------------------------------------------------------------------


def test_evaluation_and_what_is_not_differentiated_are_no_micro_batches(tmp_path):
    def body(model, _):
        with torch.no_grad():
            model(*batch(1))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model(*batch(2))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))
        model(*batch(0)).backward()

    (step,) = recorded(tmp_path / "a", body)
    assert [[facts.hash for facts in one.inputs] for one in step.micro_batches[0]] == [
        [batches.facts_of(tensor).hash.item() % 2**64 for tensor in batch(0)]
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_no_forward_of_its_own(tmp_path, reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Words()

        def forward(self, tokens, targets):
            embedded = self.inner.embed(tokens)
            return loss_of(checkpoint(self.inner.head, embedded, use_reentrant=reentrant), targets)

    def body(model, _):
        model(*batch(0)).backward()
        if not reentrant:
            checkpoint(model, *batch(1), use_reentrant=False).backward()

    (step,) = recorded(tmp_path / "a", body, model=Outer())
    assert [one.output_gradient.total for one in step.micro_batches[0]] == [1.0] * (1 if reentrant else 2)


def test_functional_transforms_are_left_alone(tmp_path):
    def body(model, _):
        parameters = dict(model.named_parameters())
        tokens, targets = batch(0)
        functional = lambda p, x, y: torch.func.functional_call(model, p, (x[None], y[None]))  # noqa: E731
        each = torch.func.vmap(torch.func.grad(functional), in_dims=(None, 0, 0))(parameters, tokens, targets)
        assert each["head.bias"].shape == (3, 30)
        model(tokens, targets).backward()

    (step,) = recorded(tmp_path / "a", body)
    assert len(step.micro_batches[0]) == 1


@pytest.mark.filterwarnings("ignore")  # torch's own, of its prototypes
def test_inputs_that_can_not_be_hashed_are_left_out(tmp_path):
    class Model(nn.Linear):
        def forward(self, *inputs):
            return super().forward(inputs[-1])

    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    exotic = [
        torch.eye(3).to_sparse(),
        nested,
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ]

    def body(model, step):
        model(*exotic[:step], torch.ones(4, 2)).sum().backward()

    for step in recorded(tmp_path / "a", body, steps=4, model=Model(2, 2)):
        ((one,),) = step.micro_batches
        assert [facts.numel for facts in one.inputs if facts.numel == 8] == [8]
        assert len(one.inputs) <= 2


def test_a_nested_output_is_still_a_micro_batch(tmp_path):
    def body(model, _):
        nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
        model(nested).values().sum().backward()

    (step,) = recorded(tmp_path / "a", body, model=nn.Linear(2, 2))
    ((one,),) = step.micro_batches
    assert one.output_gradient is None or one.output is not None


@pytest.mark.slow
def test_compiled_models_train_and_are_not_cut(tmp_path):
    """Inside of a graph nothing is seen; with ``fullgraph`` a hook that cut it would be an error."""
    model = Words()
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def body(_, step):
        (compiled if step < 3 else model)(*batch(0)).backward()

    for path, given, expected in (("a", model, [0, 0, 1]), ("b", compiled, [1, 1, 0])):
        steps = recorded(tmp_path / path, body, steps=3, model=given)
        assert [len(step.micro_batches[0]) for step in steps] == expected
        assert all(one.evaluating == 0 for step in steps for one in step.micro_batches[0])
    torch._dynamo.reset()


def test_outputs_are_left_alone_and_nothing_is_kept_alive(tmp_path):
    model = Words()
    before = [dict(module._forward_hooks) for module in model.modules()]

    def body(model, _):
        tokens, targets = batch(0)
        for goes_back in (True, False):
            logits = model(tokens)
            assert type(logits) is torch.Tensor
            alive = weakref.ref(logits)
            if goes_back:
                loss_of(logits, targets).backward()
            gc.disable()  # freed at once: no cycle holds it
            del logits
            assert alive() is None
            gc.enable()

    recorded(tmp_path / "a", body, steps=3, model=model)
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_recording_changes_no_bit_of_training_with_dropout(tmp_path):
    models = [Words(0.5), Words(0.5)]
    for place, model in enumerate(models):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sb.record(model, optimizer, tmp_path / "a") if place else contextlib.nullcontext() as recorder:
            for step in range(3):
                for part in range(2):
                    model(*batch(2 * step + part)).backward()
                if recorder is not None:
                    recorder.step(loss=0.0)
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_copies_of_the_model_are_not_recorded(tmp_path):
    def body(model, _):
        copied, stored = copy.deepcopy(model), io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        for other in (copied, loaded):
            other(*batch(1)).backward()
        model(*batch(0)).backward()

    for step in recorded(tmp_path / "a", body, steps=2):
        assert [[facts.valid for facts in one.inputs] for one in step.micro_batches[0]] == [[15, 13]]


def test_arguments_that_can_not_be_looked_at(tmp_path):
    class Unreadable(dict):
        def __getitem__(self, key):
            raise RuntimeError("not for you")

    class Model(nn.Linear):
        def forward(self, x, _):
            return super().forward(x)

    def body(model, _):
        model(torch.ones(2, 2), Unreadable(a=1)).sum().backward()

    (step,) = recorded(tmp_path / "a", body, model=Model(2, 2))
    ((one,),) = step.micro_batches
    assert one.inputs == ()
    assert one.output.numel == 4


def test_a_loop_that_never_steps_fills_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(forwards, "MOST_FORWARDS", 3)

    def body(model, _):
        for place in range(5):
            model(*batch(place)).backward()

    steps = recorded(tmp_path / "a", body, steps=2)
    assert [len(step.micro_batches[0]) for step in steps] == [3, 3]


# ---- hashes of tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8])
def test_a_tensor_is_the_sum_of_its_rows_in_any_order_and_block(dtype, monkeypatch):
    tensor = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).mul(9).clamp(min=0).to(dtype)
    whole = batches.facts_of(tensor).hash.item()
    cuts = [0, 2, 3, 7]
    assert sum(batches.facts_of(tensor[a:b]).hash.item() for a, b in itertools.pairwise(cuts)) % 2**64 == whole % 2**64
    assert batches.facts_of(tensor.flip(0)).hash.item() == whole
    assert batches.facts_of(tensor.flip(1)).hash.item() != whole
    monkeypatch.setattr(batches, "_BLOCK_NUMEL", 30)
    assert batches.facts_of(tensor).hash.item() == whole


def test_only_integers_have_valid_elements():
    assert batches.facts_of(torch.tensor([1, -100, 0])).valid.item() == 2
    for other in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j])):
        assert batches.facts_of(other).valid is None
    assert batches.facts_of(torch.empty(0, 3)).hash.item() == 0
    assert batches.facts_of(torch.tensor(3)).numel == 1
