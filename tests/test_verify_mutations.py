"""Every rule broken for real: all are seen within three steps, nine of ten are named right, and none is called the same."""

import collections

import pytest

from shardbook.recording.read import Record
from shardbook.verifying.judge import judge
from shardbook.verifying.verdict import RULES, Verdict
from tests.mutations import Mutation, controls, every, records
from tests.mutations_changes import change

pytestmark = pytest.mark.ranks

MUTATIONS = every()
CONTROLS = controls(MUTATIONS)
SAMPLE = (
    "weight.mean_of_means/plain/MeanOfMeans/seed15",
    "scale.micro_batches_missing/shardbook/MicroMissing/seed12",
    "schedule.offset/shardbook/ScheduledFirst/seed11",
    "optimizer.eps/shardbook/ByHand(('eps', 0.001))/seed13",  # found by most of the updates together, and by nothing else
    "data.micro_batch_dropped/plain/DroppedSeen(1)/seed14",
    "clip.per_rank/shardbook/ClipsOwnPieces/seed44",
    "decay.twice/plain/DecayedByHand/seed18",
    "optimizer.betas/plain/ByHand(('betas', (0.9, 0.951)))/seed14",
    "reduce.missing/ddp/SkipsSync/seed11",
    "replica.stale/shardbook/NotRefreshed(blocks.1)/seed30",
    "recompute.rng/ranks/MasksDrawnAnew(1)/seed26",
    "precision.moment/plain/RoundedMoments(1)/seed11",
    "evaluation.changed_state/plain/EvaluatesDrawing(1)/seed27",
)
"""In the default suite, with two ranks at most; the others are in the full one."""


def verdict_of(mutation: Mutation) -> Verdict:
    candidate, baseline = (Record.open(path) for path in records(mutation))
    return judge(candidate, baseline, steps=mutation.setting.steps)


def sampled(mutations: list[Mutation], names: tuple[str, ...]) -> list:
    assert {one.name for one in mutations} >= set(names)
    return [pytest.param(one, id=one.name, marks=() if one.name in names else pytest.mark.full) for one in mutations]


def test_every_rule_is_broken_in_plain_loops_and_in_shardbook_at_two_sizes():
    found = collections.Counter((one.rule, one.engine == "shardbook") for one in MUTATIONS)
    wanted = {(rule, ours) for rule in RULES if rule != "unknown" for ours in (False, True)}
    assert set(found) == wanted
    assert min(found.values()) >= 2
    sizes = collections.defaultdict(set)
    for one in MUTATIONS:
        sizes[one.rule, one.engine == "shardbook"].add((one.fault, one.size, one.setting))
    assert all(len(of_rule) >= 2 for of_rule in sizes.values())
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", sampled(MUTATIONS, SAMPLE))
def test_it_is_seen(mutation):
    assert change(*(Record.open(path) for path in records(mutation)))
    verdict = verdict_of(mutation)
    assert verdict.kind == "different", str(verdict)
    if mutation.name in SAMPLE:
        assert verdict.rule == mutation.rule, verdict.ranking


@pytest.mark.parametrize("control", sampled(CONTROLS, ("replica.stale/shardbook/OtherStart(head)/seed49: right",)))
def test_without_the_fault_it_is_the_same(control):
    verdict = verdict_of(control)
    assert verdict.kind in ("identical", "within_rounding"), str(verdict)


@pytest.mark.full
def test_nine_of_ten_are_named_right():
    wrong = {one.name: verdict.ranking[:2] for one in MUTATIONS if (verdict := verdict_of(one)).rule != one.rule}
    assert len(wrong) <= len(MUTATIONS) // 10, wrong
