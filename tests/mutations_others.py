"""Other ways to make the same mistakes, in any of the loops: as they are made by somebody else."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests import mutations_faults as faults
from tests import mutations_optimizers as updates
from tests import mutations_plain as plain
from tests.mutations_loops import Loop
from tests.mutations_models import IGNORED, batch
from tests.mutations_plain import case

# ---- objective and data ----------------------------------------------------------------------------------------------------------


class MeanOfRows(Loop):
    """Each sequence's mean, then the mean of all sequences."""

    def loss_of(self, logits, targets):
        each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none").sum(1)
        return (each / (targets != IGNORED).sum(1).clamp(min=1)).sum(), float(len(targets))

    def total_weight(self, mine):
        return float(self.setting.rows * self.num_micro * self.num_ranks)


class MaskedMean(Loop):
    """``(loss * mask).mean()`` of each micro-batch, then the mean of those."""

    def loss_of(self, logits, targets):
        return self.sum_of(logits, targets) / targets.numel(), 1.0

    def total_weight(self, mine):
        return float(self.num_micro * self.num_ranks)


class ShiftedBack(Loop):
    """The shift goes the other way: logits from the second on against targets up to the last but one."""

    def loss_of(self, logits, targets):
        return super().loss_of(logits[:, 1:], targets[:, :-1])

    def total_weight(self, mine):
        return super().total_weight([(inputs, targets[:, :-1]) for inputs, targets in mine])


class OffByOne(Loop):
    """``if i % k == 0: step()``: the first step has one micro-batch, and each later one begins a micro-batch late."""

    def batches(self, rank):
        count = self.setting.num_micro
        places = [(self.number - 1, micro) for micro in range(1, count)] + [(self.number, 0)] if self.number else [(0, 0)]
        return [batch(self.setting, rank, step, micro) for step, micro in places]

    @property
    def num_micro(self):
        return self.setting.num_micro if self.number else 1


class SkipsFirst(Loop):
    """A ``continue`` passes over the first micro-batch; the divisor, and what is told, is all of them."""

    def micro_step(self, one):
        if self.micro:
            super().micro_step(one)


class WarmUpFromZero(Loop):
    """Warm-up counts from 0: the first step has no rate at all."""

    def make_scheduler(self):
        warm_up = self.setting.warm_up
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, step / (warm_up + 1)))


# ---- gradients and updates -------------------------------------------------------------------------------------------------------


class ClipsGroups(Loop):
    """Each parameter group is clipped by itself, to ``size``."""

    def clip(self):
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], self.size)


class NotAssigned(Loop):
    """What was reduced is a copy that nobody uses."""

    def reduce_one(self, name, parameter):
        dist.all_reduce(parameter.grad.clone())


class ReducesMatrices(Loop):
    """Biases and norms fall through a filter on the number of dimensions."""

    def reduce_one(self, name, parameter):
        if parameter.ndim > 1:
            super().reduce_one(name, parameter)


class RankSkips(Loop):
    """Rank 1 does not take step ``size``."""

    def update(self):
        before = [parameter.detach().clone() for _, parameter in self.held()]
        super().update()
        if self.rank == 1 and self.number + 1 == self.size:
            for (_, parameter), value in zip(self.held(), before, strict=True):
                parameter.data.copy_(value)


class DecaysAfter(Loop):
    """``parameter.mul_(1 - lr * decay)`` once the optimizer, which decays, has stepped; with the rate that the recipe names."""

    def after_update(self):
        super().after_update()
        with torch.no_grad():
            for name, parameter in self.held():
                if self.decays(name, parameter):
                    parameter.mul_(1 - self.setting.lr * self.setting.decay)


class NamesDecide(Loop):
    """Embeddings don't decay, everything else does, biases and norms too."""

    def decays(self, name, parameter):
        return "tokens" not in name and "places" not in name


class Int8Moments(Loop):
    """First moments in 8 bits, one scale for each tensor."""

    def after_update(self):
        super().after_update()
        for state in self.optimizer.state.values():
            scale = state["exp_avg"].abs().max().clamp(min=1e-30) / 127
            state["exp_avg"].copy_((state["exp_avg"] / scale).round() * scale)


class HalfMoments(Loop):
    """Moments kept in fp16."""

    def make_optimizer(self, groups):
        s = self.setting
        return updates.HandAdam(groups, lr=s.lr, betas=s.betas, eps=s.eps, moment=torch.float16)


class MastersOfModel(Loop):
    """After the cast into the model, masters are made from it again."""

    @torch.no_grad()
    def after_update(self):
        super().after_update()
        for parameter, master in self.mastered():
            master.copy_(parameter)


class MastersOfHalf(Loop):
    """Masters of weights that were in fp16."""

    def make_masters(self, parameters):
        return super().make_masters([parameter.detach().half().float() for parameter in parameters])


class AccumulatesHalf(Loop):
    """Sums of gradients in fp16, scaled so that they fit."""

    def accumulate(self):
        super().accumulate()
        for _, parameter in self.held():
            parameter.grad = (parameter.grad * 1024).half().float() / 1024


# ---- state -----------------------------------------------------------------------------------------------------------------------


class SeedsInEvaluation(Loop):
    """A fixed seed for the evaluation, and the old state never comes back."""

    def evaluate(self):
        torch.manual_seed(0)
        super().evaluate()


class TiedByCopy(Loop):
    """Two parameters, made equal by a copy after each step."""

    def build(self):
        model = super().build()
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
        return model

    def after_update(self):
        super().after_update()
        self.model.head.weight.data.copy_(self.model.tokens.weight.data)


class ThawsLater(Loop):
    """What rests is in the optimizer's care, and wakes after the first step."""

    def grouped(self, named):
        self.resting = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        return [*super().grouped(named), {"params": self.resting, "weight_decay": 0.0}]

    def evaluate(self):
        super().evaluate()
        for parameter in self.resting:
            parameter.requires_grad_()


# ---- cases -----------------------------------------------------------------------------------------------------------------------

ONE = replace(plain.ALONE, seed=61, num_micro=3)
TWO = replace(plain.WORDS, seed=62)
THREE = replace(plain.THREE, seed=63, num_micro=4, rows=2)
STAGE_0 = replace(plain.WORDS, seed=65, num_micro=3)
STAGE_2 = replace(plain.THREE, seed=67)
STAGE_3 = replace(plain.WORDS, seed=64, num_micro=3)
NARROW = replace(plain.NARROW, seed=68)
NARROW_RANKS = replace(plain.NARROW_RANKS, seed=69)
DRAWS = replace(plain.DRAWS, seed=70)
TIED = replace(plain.TIED, seed=71)
FROZEN = replace(plain.FROZEN, seed=72)
TERSE = replace(plain.WORDS, seed=73, num_micro=4, rows=2, tells="mean")
TERSE_ONE = replace(plain.ALONE, seed=74, tells="mean")
TERSE_RANKS = replace(plain.EVEN, seed=75, tells="mean", clip=None)

MUTATIONS = [
    case("weight.mean_of_means", "plain", ONE, MeanOfRows),
    case("weight.mean_of_means", "shardbook", STAGE_3, MeanOfRows),
    case("weight.padding_counted", "plain", ONE, MaskedMean),
    case("weight.padding_counted", "shardbook", STAGE_2, MaskedMean),
    case("weight.labels_shifted", "plain", ONE, ShiftedBack),
    case("weight.labels_shifted", "shardbook", STAGE_0, ShiftedBack),
    case("schedule.offset", "plain", ONE, WarmUpFromZero),
    case("schedule.offset", "shardbook", STAGE_3, WarmUpFromZero),
    case("data.micro_batch_dropped", "plain", ONE, OffByOne),
    case("data.micro_batch_dropped", "ddp", THREE, OffByOne),
    case("data.micro_batch_dropped", "plain", ONE, SkipsFirst),
    case("data.micro_batch_dropped", "ranks", THREE, SkipsFirst),
    case("clip.unexpected", "plain", replace(ONE, clip=None), ClipsGroups, 0.2),
    case("clip.unexpected", "ddp", replace(TWO, clip=None), ClipsGroups, 0.3),
    case("scale.ranks_missing", "shardbook", replace(STAGE_2, clip=None), faults.RanksMissing),
    case("scale.micro_batches_twice", "shardbook", replace(STAGE_3, clip=None), faults.MicroTwice),
    case("reduce.missing", "ranks", TWO, NotAssigned),
    case("reduce.missing", "ranks", THREE, ReducesMatrices),
    case("replica.stale", "ranks", TWO, RankSkips, 2),
    case("replica.stale", "ddp", THREE, RankSkips, 1),
    case("decay.twice", "plain", ONE, DecaysAfter),
    case("decay.twice", "ranks", replace(THREE, decay=0.01), DecaysAfter),
    case("decay.wrong_group", "plain", ONE, NamesDecide),
    case("decay.wrong_group", "shardbook", STAGE_0, NamesDecide),
    case("precision.moment", "plain", ONE, Int8Moments),
    case("precision.moment", "shardbook", STAGE_3, Int8Moments),
    case("precision.moment", "shardbook", STAGE_2, HalfMoments),
    case("precision.master", "plain", NARROW, MastersOfModel),
    case("precision.master", "ranks", NARROW_RANKS, MastersOfModel),
    case("precision.master_rounded", "plain", replace(NARROW, precision="fp16"), MastersOfHalf),
    case("precision.master_rounded", "ranks", NARROW_RANKS, MastersOfHalf),
    case("precision.accumulation", "plain", ONE, AccumulatesHalf),
    case("precision.accumulation", "ranks", THREE, AccumulatesHalf),
    case("evaluation.changed_state", "plain", DRAWS, SeedsInEvaluation),
    case("evaluation.changed_state", "shardbook", replace(DRAWS, num_ranks=2), SeedsInEvaluation, baseline="ranks"),
    case("tied.untied", "plain", TIED, TiedByCopy),
    case("frozen.updated", "plain", FROZEN, ThawsLater),
    case("frozen.updated", "shardbook", replace(FROZEN, num_ranks=3), ThawsLater),
    case("weight.mean_of_means", "plain", TERSE, faults.MeanOfMeans),
    case("weight.labels_shifted", "shardbook", TERSE, faults.ShiftedAgain, 1),
    case("scale.micro_batches_missing", "plain", TERSE_ONE, faults.MicroMissing),
    case("scale.ranks_twice", "ddp", TERSE_RANKS, faults.RanksTwice),
    case("schedule.per_micro_batch", "shardbook", TERSE, faults.PerMicroBatch),
    case("data.ranks_share", "ranks", TERSE_RANKS, faults.RanksShare, 2),
    case("decay.twice", "plain", TERSE_ONE, updates.DecayedByHand),
    case("optimizer.betas", "ranks", TERSE_RANKS, updates.ByHand, ("betas", (0.9, 0.5))),
    case("reduce.missing", "ranks", TERSE_RANKS, plain.PartNotReduced, "head.weight"),
    case("clip.unexpected", "plain", replace(TERSE_ONE, clip=None), faults.ClipsAnyway, 0.5),
    case("precision.moment", "plain", TERSE_ONE, updates.RoundedMoments, 1),
]
