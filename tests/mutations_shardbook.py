"""Mutations under shardbook's engine: what its user does wrong, and parts of the engine itself that fail."""

from dataclasses import replace
from unittest import mock

import torch

import shardbook as sb
from shardbook.engine import step as engine_step
from shardbook.engine.exchange import to_fp32
from tests import mutations_faults as faults
from tests import mutations_optimizers as updates
from tests import mutations_plain as plain
from tests.mutations_loops import Loop
from tests.mutations_models import Setting
from tests.mutations_plain import case

# ---- a user's ----------------------------------------------------------------------------------------------------------------------


class ClipsOwnPieces(Loop):
    """Clipping by hand inside of ``engine.grads()``, by the norm of this rank's pieces alone; the configuration clips nothing."""

    def config(self):
        return replace(super().config(), clip_grad_norm=None)

    def clip(self):
        with self.engine.grads() as gradients:
            norm = torch.stack([one.norm() for one in gradients.values()]).norm()
            divisor = self.engine._passes.tally.weight * self.num_ranks
            for one in gradients.values():
                one *= min(1.0, self.setting.clip / (norm.item() / divisor))


class EngineClips(Loop):
    """A configuration taken over from elsewhere clips at ``size``."""

    def config(self):
        return replace(super().config(), clip_grad_norm=self.size)


class FrozenDecays(Loop):
    """Weight decay by hand on what should rest: the first ``size`` parameters of it."""

    def update(self):
        super().update()
        with self.engine.gathered(self.model, write_back=True), torch.no_grad():
            for parameter in [parameter for parameter in self.model.parameters() if not parameter.requires_grad][: self.size]:
                parameter.mul_(1 - self.setting.lr * self.setting.decay)


class NoMasters(Loop):
    def precision(self):
        return sb.Precision(param=self.setting.precision, master=None)


class WeightsRounded(Loop):
    """Pieces through bf16 after each step: the first ``size``."""

    def after_update(self):
        for _, _, piece in self.pieces()[: self.size]:
            piece.parameter.data.copy_(piece.parameter.data.bfloat16())


class OtherStart(Loop):
    """Ranks begin with other weights, and nobody sends rank 0's: of the parameters that ``size`` names."""

    def build(self):
        from tests.mutations_models import build

        model, other = super().build(), dict(build(self.setting, seed=self.rank).named_parameters())
        for name, parameter in model.named_parameters():
            if self.size in name:
                parameter.data.copy_(other[name].data)
        return model

    def config(self):
        return replace(super().config(), init_sync="none")


# ---- the engine's own ----------------------------------------------------------------------------------------------------------------


class WeightForgotten(Loop):
    """The tally of a rank's weights is off by a factor: "micro" forgets micro-batches, "micro twice" counts each again."""

    def reduce(self):
        tally = self.engine._passes.tally
        tally.weight = tally.weight * (self.num_micro if self.size == "micro twice" else 1 / self.num_micro)


class Patched(Loop):
    """The step's totals come out of ``totals`` instead."""

    def totals(self, rows, right):
        raise NotImplementedError

    def run(self):
        right = engine_step.add_up
        with mock.patch.object(engine_step, "add_up", lambda rows, *sizes: self.totals(rows, right(rows, *sizes))):
            super().run()


class RanksWeightForgotten(Patched):
    """The weights of the other ranks are not added."""

    def totals(self, rows, right):
        return replace(right, weight=right.weight / self.num_ranks)


class RanksWeightTwice(Patched):
    def totals(self, rows, right):
        return replace(right, weight=right.weight * self.num_ranks)


class NormOfOwnShard(Patched):
    """The norm is that of this rank's shard."""

    def totals(self, rows, right):
        return replace(right, raw_norm=to_fp32(rows[self.rank][1] ** 0.5))


class ClippedBeforeUnscaling(Loop):
    """The factor is found from gradients that still have the loss scale."""

    def run(self):
        def scale_of(raw_norm, weight, loss_scale, clip):
            factor = min(1.0, clip / (raw_norm / weight + 1e-6))
            return raw_norm / weight / loss_scale, factor, to_fp32(factor / (weight * loss_scale))

        with mock.patch.object(engine_step, "scale_of", scale_of):
            super().run()


class PartsForgotten(Loop):
    """An owner adds up its own part only, of the parameters that ``size`` names."""

    def prepare(self):
        super().prepare()
        for unit in self.engine._units:
            for flat in unit.flats:
                flat._add = self.adding(flat, flat._add)

    def adding(self, flat, right):
        def add(out, parts, *, again):
            for span in flat.layout.spans(self.rank):
                if self.size in flat.members[span.slot].name:
                    for rank, part in enumerate(parts):
                        part[span.offset : span.offset + span.numel] *= self.num_ranks if rank == self.rank else 0.0
            right(out, parts, again=again)

        return add


class PartLost(Loop):
    """What the last rank sends of one parameter is lost."""

    def prepare(self):
        super().prepare()
        for unit in self.engine._units:
            for flat in unit.flats:
                flat.land = self.landing(flat, flat.land)

    def landing(self, flat, right):
        def land(index, gradient, *, add):
            lost = self.rank == self.world - 1 and self.size in flat.members[index].name
            right(index, gradient * 0 if lost else gradient, add=add)

        return land


class GradientsForgotten(Loop):
    """What has been accumulated is thrown away after the first micro-batch."""

    def after_micro(self):
        if self.micro < self.size:
            for unit in self.engine._units:
                unit.forget_gradients()


class NotRefreshed(Loop):
    """After the step a rank's new values are not sent around, in the units that ``size`` names."""

    stage = 1

    def prepare(self):
        super().prepare()
        for unit in self.engine._units:
            if self.size in unit.name:
                unit.refresh = lambda: None


class RankNotStepped(Loop):
    """Stage 0: the last rank keeps the old values of the parameters that ``size`` names."""

    stage = 0

    def update(self):
        before = [(piece, piece.parameter.detach().clone()) for _, _, piece in self.pieces() if self.size in piece.member.name]
        super().update()
        for piece, value in before if self.rank == self.world - 1 else ():
            piece.parameter.data.copy_(value)


class AddsNarrow(Loop):
    """Sums are rounded to bf16 each time something is added: of the parameters that ``size`` names."""

    def prepare(self):
        super().prepare()
        for unit in self.engine._units:
            for flat in unit.flats:
                flat._add = self.adding(flat, flat._add)

    def adding(self, flat, right):
        def add(out, parts, *, again):
            right(out, parts, again=again)
            for span in flat.layout.spans(self.rank):
                if self.size in flat.members[span.slot].name:
                    part = out[span.offset : span.offset + span.numel]
                    part.copy_(part.bfloat16())

        return add


class ReducesNarrow(Loop):
    def precision(self):
        return sb.Precision(param=self.setting.precision, reduce="bf16")


# ---- cases ------------------------------------------------------------------------------------------------------------------------------

HALF = Setting(seed=40, precision="fp16", loss_scale=2.0**7, clip=0.2)
HALF_MORE = Setting(seed=43, precision="fp16", loss_scale=2.0**10, num_ranks=3, clip=0.2)
STAGE_3 = Setting(seed=44, clip=0.2)
NARROW_ONE = Setting(seed=46, precision="bf16", num_ranks=3, num_micro=1)
STAGE_0 = Setting(seed=49, num_micro=4, rows=2)


def ours(rule, setting, fault, size=None, *, baseline="plain"):
    return case(rule, "shardbook", setting, fault, size, baseline=baseline)


OBJECTIVE = [
    ours("weight.mean_of_means", plain.WORDS, faults.MeanOfMeans),
    ours("weight.mean_of_means", plain.FOUR, faults.MeanOfMeans),
    ours("weight.padding_counted", plain.ONE_PAD, faults.PaddingCounted),
    ours("weight.padding_counted", plain.THREE, faults.PaddingCounted),
    ours("weight.padding_counted", plain.FOUR, faults.PaddingTrained),
    ours("weight.labels_shifted", plain.WORDS, faults.ShiftedAgain, 1),
    ours("weight.labels_shifted", plain.THREE, faults.ShiftedAgain, 2),
    ours("scale.micro_batches_missing", plain.FOUR, faults.MicroMissing),
    ours("scale.micro_batches_missing", replace(plain.EVEN, clip=None), WeightForgotten, "micro"),
    ours("scale.micro_batches_twice", plain.EVEN_FOUR, faults.MicroTwice),
    ours("scale.micro_batches_twice", plain.THREE, WeightForgotten, "micro twice"),
    ours("scale.ranks_missing", plain.EVEN, faults.RanksMissing),
    ours("scale.ranks_missing", plain.WIDE_OPEN, RanksWeightForgotten),
    ours("scale.ranks_twice", plain.EVEN, faults.RanksTwice),
    ours("scale.ranks_twice", replace(plain.EVEN, clip=None), RanksWeightTwice),
    ours("schedule.per_micro_batch", plain.WORDS, faults.PerMicroBatch),
    ours("schedule.per_micro_batch", plain.FOUR, faults.PerMicroBatch),
    ours("schedule.offset", plain.WORDS, faults.ScheduledFirst),
    ours("schedule.offset", plain.THREE, faults.StepsAhead, 3),
    ours("data.micro_batch_dropped", plain.WORDS, faults.DroppedSeen, 1),
    ours("data.micro_batch_dropped", plain.FOUR, faults.DroppedSeen, 1),
    ours("data.micro_batch_dropped", STAGE_0, GradientsForgotten, 1),
    ours("data.ranks_share", plain.EVEN, faults.RanksShare, 3),
    ours("data.ranks_share", plain.THREE, faults.RanksShare, 2),
]

UPDATE = [
    ours("clip.per_rank", STAGE_3, ClipsOwnPieces),
    ours("clip.per_rank", replace(plain.THREE, seed=48, clip=0.1), NormOfOwnShard),
    ours("clip.before_unscale", HALF, ClippedBeforeUnscaling),
    ours("clip.before_unscale", HALF_MORE, ClippedBeforeUnscaling),
    ours("clip.unexpected", replace(plain.TIED, clip=None), EngineClips, 1.0),
    ours("clip.unexpected", plain.WIDE_OPEN, EngineClips, 0.1),
    ours("decay.wrong_group", plain.WORDS, updates.AllDecay),
    ours("decay.wrong_group", plain.GENTLE, updates.OneMoreDecays, "blocks.0.up.bias"),
    ours("decay.missing", plain.WORDS, updates.DecayMissing),
    ours("decay.missing", plain.GENTLE, updates.ByHand, ("weight_decay", 0.0)),
    ours("decay.twice", plain.WORDS, updates.DecayedByHand),
    ours("decay.twice", plain.GENTLE, updates.DecayDoubled),
    ours("optimizer.betas", plain.WORDS, updates.OtherSetting, ("betas", (0.9, 0.951))),
    ours("optimizer.betas", plain.THREE, updates.ByHand, ("betas", (0.9, 0.5))),
    ours("optimizer.eps", plain.WORDS, updates.OtherSetting, ("eps", 1e-7)),
    ours("optimizer.eps", plain.THREE, updates.ByHand, ("eps", 1e-3)),
]

STATE = [
    ours("reduce.missing", plain.WORDS, PartsForgotten, "head.weight"),
    ours("reduce.missing", plain.THREE, PartsForgotten, ""),
    ours("reduce.missing", Setting(seed=50, num_micro=1), PartLost, "blocks.1.up.weight"),
    ours("replica.stale", plain.NARROW_RANKS, NotRefreshed, "blocks.1"),
    ours("replica.stale", plain.WORDS, NotRefreshed, "blocks.0"),
    ours("replica.stale", plain.THREE, RankNotStepped, "blocks.0.down.weight"),
    ours("replica.stale", plain.WORDS, RankNotStepped, ""),
    ours("replica.stale", STAGE_0, OtherStart, "head"),
    ours("tied.untied", plain.TIED, faults.Untied, "copy"),
    ours("tied.untied", replace(plain.TIED, num_ranks=3), faults.Untied, "init"),
    ours("frozen.updated", plain.FROZEN, faults.Thawed, 1),
    ours("frozen.updated", plain.FROZEN_BIAS, faults.Thawed, None),
    ours("frozen.updated", plain.FROZEN_BIAS, FrozenDecays, None),
    ours("recompute.rng", plain.HEAVY, faults.MasksDrawnAnew, 1),
    ours("recompute.rng", replace(plain.DROPOUT, num_ranks=3), faults.MasksDrawnAnew, 2),
    ours("precision.moment", plain.WORDS, updates.RoundedMoments, 1),
    ours("precision.moment", plain.THREE, updates.NarrowByHand),
    ours("precision.master", plain.NARROW_RANKS, NoMasters),
    ours("precision.master", plain.WORDS, WeightsRounded, 1),
    ours("precision.master_rounded", plain.NARROW_RANKS, faults.MastersOfRounded, None),
    ours("precision.master_rounded", plain.NARROW_RANKS, faults.MastersOfRounded, 1),
    ours("precision.accumulation", NARROW_ONE, ReducesNarrow),
    ours("precision.accumulation", plain.NARROW_RANKS, AddsNarrow, ""),
    ours("precision.accumulation", plain.THREE, AddsNarrow, "head.weight"),
    ours("evaluation.changed_state", replace(plain.DRAWS, num_ranks=2), faults.EvaluatesDrawing, 1, baseline="ranks"),
    ours("evaluation.changed_state", plain.ROWS_RANKS, faults.EvaluatesTraining, 5, baseline="ranks"),
    ours("evaluation.changed_state", plain.DRAWS_ROWS, faults.StaysInEval, 1, baseline="ranks"),
]

MUTATIONS = [*OBJECTIVE, *UPDATE, *STATE]
