"""Verdicts of plain loops: identical, within rounding, different, where, and what two records must have in common."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import shardbook as sb
from benchmarks.models import SMALL, build
from shardbook.errors import ConfigError
from shardbook.recording.format import RecordError
from shardbook.recording.read import Record
from shardbook.verifying.bounds import Bounds
from shardbook.verifying.closeness import Closeness, together
from shardbook.verifying.judge import judge
from shardbook.verifying.pairing import num_steps
from shardbook.verifying.verdict import RULES, PhaseResult, Verdict

STEPS = 3
MICRO = 2


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, SMALL.vocab, (2, SMALL.sequence + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Loop:
    """A right loop; each test changes one method of it."""

    steps, clip, seed = STEPS, 0.5, 0

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [batch(step, micro) for micro in range(MICRO)]

    def factor(self, num: int) -> float:
        return 1 / num

    def before(self, model: torch.nn.Module, step: int) -> None: ...

    def gradients(self, model: torch.nn.Module) -> None: ...

    def divide(self, model: torch.nn.Module, num: int) -> None: ...

    def told(self, losses: list[torch.Tensor]) -> tuple[object, object]:
        return sum(losses), len(losses)

    def run(self, path: Path) -> None:
        torch.manual_seed(self.seed)
        model = build(SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        with sb.record(model, optimizer, path) as recorder:
            for step in range(self.steps):
                self.before(model, step)
                batches = self.batches(step)
                losses = [model(*one) for one in batches]
                for loss in losses:
                    (loss * self.factor(len(losses))).backward()
                self.gradients(model)
                loss, weight = self.told([loss.detach() for loss in losses])
                recorder.step(loss=loss, weight=weight, batch=batches)
                self.divide(model, len(losses))
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """The record of a right loop of so many steps, made once."""

    @cache
    def made(steps: int = STEPS, clip: float = 0.5) -> Record:
        loop = Loop()
        loop.steps, loop.clip = steps, clip
        path = tmp_path_factory.mktemp("right") / "record"
        loop.run(path)
        return Record.open(path)

    return made


def judged(loop: Loop, baseline: Record, path: Path, **rest) -> Verdict:
    loop.run(path / "candidate")
    return judge(Record.open(path / "candidate"), baseline, **rest)


# ---- the same ---------------------------------------------------------------------------------------------------------------


def test_the_same_loop_is_identical_in_brief_steps_too(right, tmp_path):
    loop = Loop()
    loop.steps = 8
    verdict = judged(loop, right(8), tmp_path)
    assert (verdict.kind, verdict.rule, verdict.step, verdict.deviation, verdict.num_steps) == ("identical", None, None, 0.0, 8)
    assert verdict.same
    assert [mine for _, mine, _ in verdict.losses] == [theirs for _, _, theirs in verdict.losses]
    assert str(verdict) == "identical: 8 steps, every bit"


def test_one_large_batch_is_within_rounding(right, tmp_path):
    class Large(Loop):
        def batches(self, step):
            return [tuple(torch.cat(parts) for parts in zip(*super().batches(step), strict=True))]  # type: ignore[misc]

        def told(self, losses):
            return losses[0], 1

    verdict = judged(Large(), right(), tmp_path)
    assert verdict.kind == "within_rounding"
    assert 0 < verdict.deviation <= verdict.bound < 1e-3
    assert not any(one.exceeds for one in verdict.phases)


def test_a_sum_that_is_divided_after_it_was_recorded_is_the_same_training(right, tmp_path):
    class Sum(Loop):
        def factor(self, num):
            return 1.0

        def divide(self, model, num):
            for parameter in model.parameters():
                parameter.grad /= num  # two: exact

    verdict = judged(Sum(), right(), tmp_path)
    assert verdict.kind == "identical"


def test_a_loss_that_is_told_otherwise_is_a_note(right, tmp_path):
    class Told(Loop):
        def told(self, losses):
            return losses[0], 1

    verdict = judged(Told(), right(), tmp_path)
    assert verdict.kind == "identical"
    assert any(note.startswith("loss: told") for note in verdict.notes)


# ---- different --------------------------------------------------------------------------------------------------------------


def test_a_last_bit_between_steps_is_found_and_placed(right, tmp_path):
    class Flip(Loop):
        def before(self, model, step):
            if step == 1:
                bits = model.blocks[1].up.weight.data.view(-1).view(torch.int32)
                bits[7] ^= 1

    verdict = judged(Flip(), right(), tmp_path)
    assert (verdict.kind, verdict.rule) == ("different", "evaluation.changed_state")
    assert (verdict.step, verdict.phase, verdict.parameter) == (2, "state", "blocks.1.up.weight")
    assert verdict.deviation > verdict.bound == 0.0


def test_one_parameters_gradient_that_is_a_little_off_is_found_and_placed(right, tmp_path):
    class Off(Loop):
        def gradients(self, model):
            model.blocks[0].down.weight.grad *= 1.001

    verdict = judged(Off(), right(), tmp_path)
    assert verdict.kind == "different"
    assert (verdict.step, verdict.parameter) == (1, "blocks.0.down.weight")
    assert verdict.phase in ("backward", "reduce")
    assert 1e-4 < verdict.deviation < 2e-3
    assert verdict.bound < 1e-4


def test_a_multiple_that_clipping_hides_is_found(right, tmp_path):
    class Forgets(Loop):
        def factor(self, num):
            return 1.0

    verdict = judged(Forgets(), right(clip=0.01), tmp_path)
    assert (verdict.kind, verdict.rule, verdict.phase) == ("different", "scale.micro_batches_missing", "backward")
    assert "2.00 times" in verdict.ranking[0][2]


def test_what_nothing_explains_is_unknown(right, tmp_path):
    class Noise(Loop):
        def gradients(self, model):
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                parameter.grad += torch.randn(parameter.shape, generator=generator)

    verdict = judged(Noise(), right(), tmp_path)
    assert verdict.kind == "different"
    assert verdict.rule in RULES
    assert verdict.ranking[0][1] <= 0.7


def test_not_a_number_is_never_within_a_bound(right, tmp_path):
    class Lost(Loop):
        def gradients(self, model):
            model.blocks[0].down.weight.grad[0, 0] = float("nan")

    verdict = judged(Lost(), right(), tmp_path)
    assert (verdict.kind, verdict.step, verdict.parameter) == ("different", 1, "blocks.0.down.weight")
    assert Verdict.from_json(verdict.to_json()).to_json() == verdict.to_json()


# ---- what records must have in common ---------------------------------------------------------------------------------------


def test_records_of_other_step_counts_are_refused_by_number(right):
    with pytest.raises(RecordError, match=r"has 3 steps, .* has 8; record as many in both, or compare the first 3"):
        judge(right(), right(8))
    assert num_steps(right(), right(8), 3) == 3
    assert judge(right(), right(8), steps=3).kind == "identical"


def test_records_of_other_models_are_refused_by_name(right, tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sb.record(model, optimizer, tmp_path / "other") as recorder:
        model(torch.ones(1, 3)).sum().backward()
        recorder.step(loss=1.0)
        optimizer.step()
    with pytest.raises(RecordError, match=r"different models: weight is in the candidate only; .* and \d+ more"):
        judge(Record.open(tmp_path / "other"), right())


def test_records_of_other_data_are_refused(right, tmp_path):
    class Other(Loop):
        def batches(self, step):
            return [batch(step + 50, micro) for micro in range(MICRO)]

    with pytest.raises(RecordError, match="different batches: in step 1 they have no tensor in common"):
        judged(Other(), right(), tmp_path)


def test_zero_steps_are_refused(right):
    with pytest.raises(RecordError, match="steps = 0"):
        judge(right(), right(), steps=0)


# ---- verdicts as data -------------------------------------------------------------------------------------------------------


def test_a_verdict_survives_json():
    phase = PhaseResult(step=1, phase="backward", parameter="w", rank=1, deviation=float("inf"), bound=1e-6, num_compared=3)
    verdict = Verdict(
        kind="different", rule="unknown", ranking=(("unknown", 0.3, "inf"),), step=1, phase="backward", parameter="w", rank=1,
        deviation=float("nan"), bound=1e-6, num_steps=3, notes=("a",), losses=((1, 2.0, None), (2, float("inf"), 1.0)), phases=(phase,),
    )  # fmt: skip
    again = Verdict.from_json(verdict.to_json())
    assert again.phases == (phase,)
    assert again.losses == verdict.losses
    assert again.ranking == verdict.ranking
    assert again.to_json() == verdict.to_json()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "shardbook verdict", "version": 2}', '{"format": "shardbook verdict", "version": 1}']
)
def test_what_is_no_verdict_is_refused(text):
    with pytest.raises(ConfigError, match=r"^verdict: "):
        Verdict.from_json(text)


def test_rules_are_checked():
    with pytest.raises(ConfigError, match="kinds are"):
        Verdict(kind="different", ranking=(("no.rule", 1.0, ""),))


# ---- figures ----------------------------------------------------------------------------------------------------------------


def test_one_factor_is_found_with_its_error():
    ones = [(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), (8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)]
    exact = together(Closeness.of_projections([4 * value for value in one], one, 8) for one in ones)
    assert exact is not None
    assert (exact.ratio, exact.rest, exact.error) == (4.0, 0.0, 0.0)
    apart = together(
        [Closeness.of_projections([4 * value for value in ones[0]], ones[0], 8), Closeness.of_projections(ones[1], ones[1], 8)]
    )
    assert apart is not None
    assert apart.ratio == pytest.approx(2.5)
    assert apart.rest > 0.4


def test_bounds_follow_the_chance_they_are_given():
    few, many = (Bounds(num_comparisons=number, num_parameters=10) for number in (10, 10_000_000))
    assert few.chance == pytest.approx(1e-7)
    assert many.systematic(1e-3) > few.systematic(1e-3) > 1e-3


def test_reruns_bound_what_they_are_apart(right, tmp_path):
    class Large(Loop):
        def batches(self, step):
            return [tuple(torch.cat(parts) for parts in zip(*super().batches(step), strict=True))]  # type: ignore[misc]

        def told(self, losses):
            return losses[0], 1

    Large().run(tmp_path / "rerun")
    verdict = judged(Large(), right(), tmp_path, reruns=[Record.open(tmp_path / "rerun")])
    assert verdict.kind == "within_rounding"
    assert verdict.bound_origin.startswith("1 runs of the baseline")
    exact = judge(right(), right(), reruns=[Record.open(tmp_path / "rerun")])
    assert exact.kind == "identical"
