"""Mutations of loops that people write themselves: one process, ranks that all-reduce by hand, and DDP."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from tests import mutations_faults as faults
from tests import mutations_optimizers as updates
from tests.mutations import Mutation
from tests.mutations_loops import Loop
from tests.mutations_models import Setting

# ---- faults that need the loop's own reduction, clipping or update --------------------------------------------------------------


class ClippedBeforeReduction(Loop):
    """Each rank clips what it has, then gradients are added: one process does so after each rank's micro-batches."""

    def after_rank(self):
        held = [parameter for _, parameter in self.held()]
        nn.utils.clip_grad_norm_(held, self.setting.clip / (self.num_ranks if self.size == "share" else 1))
        self.clipped = [*getattr(self, "clipped", []), [parameter.grad for parameter in held]]
        self.optimizer.zero_grad()

    def reduce(self):
        for (_, parameter), *gradients in zip(self.held(), *self.clipped, strict=True):
            parameter.grad = sum(gradients[1:], start=gradients[0])
        self.clipped = []
        super().reduce()

    def clip(self): ...


class ClippedBeforeUnscaling(Loop):
    """Clipping comes first, dividing by the loss scale afterwards. Where the record is taken is between backward and clipping."""

    def unscale(self): ...

    def clip(self):
        super().clip()
        super().unscale()


class PartNotReduced(Loop):
    """Some parameters never reach the other ranks: one process leaves out the gradients of the other ranks' micro-batches."""

    def skips(self, name):
        return self.size in name

    def reduce_one(self, name, parameter):
        if self.skips(name):
            parameter.grad *= self.num_ranks  # the usual: a mean over ranks, by hand, of what was reduced
        else:
            super().reduce_one(name, parameter)

    def after_rank(self):
        if self.world == 1 and self.data_rank == 0:
            self.kept = {name: parameter.grad.clone() for name, parameter in self.held() if self.skips(name)}

    def reduce(self):
        super().reduce()
        if self.world == 1:
            for name, parameter in self.held():
                if name in self.kept:
                    parameter.grad = self.kept[name] * self.num_ranks


class SkipsSync(Loop):
    """DDP's ``no_sync`` around all micro-batches, or around the last step's."""

    def micro_step(self, one):
        with self.wrapped.no_sync():
            Loop.micro_step(self, one)


class IgnoresParameter(Loop):
    """DDP is told to ignore parameters that it should reduce."""

    def wrap(self):
        names = [name for name, _ in self.model.named_parameters() if self.size in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)
        return super().wrap()


class NotBroadcast(Loop):
    """ZeRO-1 by hand: each parameter is updated by its owner, which tells the others. It forgets those that ``size`` names."""

    def update(self):
        before = {name: parameter.detach().clone() for name, parameter in self.held()}
        super().update()
        for number, (name, parameter) in enumerate(self.held()):
            owner = number % self.world
            if self.rank != owner:
                parameter.data.copy_(before[name])
            if self.size not in name:
                dist.broadcast(parameter.data, owner)


class OtherStart(Loop):
    """Ranks seed their models by rank, and nothing is broadcast: of the parameters that ``size`` names."""

    def build(self):
        from tests.mutations_models import build

        model = super().build()
        other = dict(build(self.setting, seed=self.rank).named_parameters())
        for name, parameter in model.named_parameters():
            if self.size in name:
                parameter.data.copy_(other[name].data)
        return model


class NotCopied(Loop):
    """Masters are stepped on and copied into the model, but for those that ``size`` names: forward goes on with old values."""

    @torch.no_grad()
    def after_update(self):
        for (name, parameter), master in zip(self.named(), self.masters, strict=True):
            if self.size not in name:
                parameter.copy_(master)


class NoMasters(Loop):
    """The optimizer steps on the narrow parameters themselves; gradients are still added in fp32."""

    def make_masters(self, parameters):
        self.sums = [None for _ in parameters]

    def accumulate(self):
        for number, (_, parameter) in enumerate(self.held()):
            gradient, parameter.grad = parameter.grad.float(), None
            self.sums[number] = gradient if self.sums[number] is None else self.sums[number] + gradient

    def reduce(self):
        for (_, parameter), total in zip(self.held(), self.sums, strict=True):
            if self.world > 1:
                dist.all_reduce(total)
            parameter.grad = total.to(parameter.dtype)
        self.sums = [None for _ in self.sums]


class WeightsRounded(Loop):
    """A checkpoint in bf16 replaces the weights after each step: of the first ``size`` parameters."""

    def after_update(self):
        super().after_update()
        for _, parameter in self.held()[: self.size]:
            parameter.data.copy_(parameter.data.bfloat16())


class MastersOfNarrow(Loop):
    """``model.bfloat16()`` first, then ``parameter.float()`` for the masters: of the first ``size``."""

    def make_masters(self, parameters):
        rounded = [parameter.detach().bfloat16().float() for parameter in parameters]
        size = self.size or len(rounded)
        return super().make_masters([*rounded[:size], *parameters[size:]])


class AccumulatesNarrow(Loop):
    """Gradients of several micro-batches are added in bf16: of the first ``size`` parameters."""

    def accumulate(self):
        super().accumulate()
        for _, parameter in self.held()[: self.size]:
            parameter.grad = parameter.grad.bfloat16().float()


class AccumulatesInModel(Loop):
    """``parameter.grad`` of the bf16 model adds up, and goes to the masters once."""

    def accumulate(self): ...

    def reduce(self):
        super().accumulate()
        super().reduce()


class ReducesNarrow(Loop):
    """The all-reduce carries bf16."""

    def reduce_one(self, name, parameter):
        narrow = parameter.grad.bfloat16()
        dist.all_reduce(narrow)
        parameter.grad = narrow.float()


# ---- cases ------------------------------------------------------------------------------------------------------------------------

WORDS = Setting(seed=11)
FOUR = Setting(seed=12, num_micro=4, rows=2)
THREE = Setting(seed=13, num_ranks=3, num_micro=2, rows=3)
ALONE = Setting(seed=14, num_ranks=1, num_micro=2)
ONE_PAD = Setting(seed=15, padding="one")
EVEN = Setting(seed=16, num_ranks=3, num_micro=2, padding="none", objective="mean")
EVEN_FOUR = Setting(seed=17, num_ranks=2, num_micro=4, rows=2, padding="none", objective="mean", clip=None)
GENTLE = Setting(seed=18, decay=0.01, clip=None)
ROWS = Setting(seed=19, model="rows", num_ranks=1, num_micro=2, evaluates=1)
ROWS_RANKS = Setting(seed=20, model="rows", num_ranks=2, num_micro=1, evaluates=2, objective="mean")
GPT = Setting(seed=21, model="gpt", num_ranks=1, num_micro=2, rows=2, lr=1e-3)
TIED = Setting(seed=22, model="tied")
FROZEN = Setting(seed=23, frozen=("tokens", "places"))
FROZEN_BIAS = Setting(seed=24, frozen=("blocks.0",), num_micro=1)
DROPOUT = Setting(seed=25, model="dropout", num_ranks=1, recompute=True)
HEAVY = Setting(seed=26, model="heavy dropout", num_ranks=2, num_micro=1, recompute=True)
DRAWS = Setting(seed=27, model="dropout", num_ranks=1, seeding="once", evaluates=1)
DRAWS_ROWS = Setting(seed=28, model="rows with dropout", num_ranks=2, num_micro=2, seeding="once", evaluates=1)
NARROW = Setting(seed=29, precision="bf16", num_ranks=1, num_micro=4, rows=2)
NARROW_RANKS = Setting(seed=30, precision="bf16", num_ranks=2, num_micro=2)
SCALED = Setting(seed=31, loss_scale=2.0**7)
SCALED_MORE = Setting(seed=32, loss_scale=2.0**16, num_micro=4, rows=2)
UNCLIPPED = Setting(seed=33, clip=None)
WIDE_OPEN = Setting(seed=34, clip=None, num_micro=4, rows=2, objective="mean", padding="none")


def case(rule: str, engine: str, setting: Setting, fault: type, size=None, *, baseline: str = "plain") -> Mutation:
    name = f"{rule}/{engine}/{fault.__name__}" + ("" if size is None else f"({size})") + f"/seed{setting.seed}"
    return Mutation(name=name, rule=rule, engine=engine, setting=setting, fault=fault, size=size, baseline=baseline)


OBJECTIVE = [
    case("weight.mean_of_means", "plain", WORDS, faults.MeanOfMeans),
    case("weight.mean_of_means", "plain", FOUR, faults.MeanOfMeans),
    case("weight.mean_of_means", "plain", ONE_PAD, faults.MeanOfMeans),
    case("weight.mean_of_means", "plain", THREE, faults.MeanOfRankMeans),
    case("weight.mean_of_means", "ranks", THREE, faults.MeanOfRankMeans),
    case("weight.mean_of_means", "ddp", WORDS, faults.MeanOfRankMeans),
    case("weight.padding_counted", "plain", ONE_PAD, faults.PaddingCounted),
    case("weight.padding_counted", "plain", WORDS, faults.PaddingCounted),
    case("weight.padding_counted", "plain", FOUR, faults.PaddingTrained),
    case("weight.padding_counted", "plain", ONE_PAD, faults.PaddingTrained),
    case("weight.padding_counted", "ranks", THREE, faults.PaddingCounted),
    case("weight.padding_counted", "ddp", WORDS, faults.PaddingTrained),
    case("weight.labels_shifted", "plain", WORDS, faults.ShiftedAgain, 1),
    case("weight.labels_shifted", "plain", GPT, faults.ShiftedAgain, 2),
    case("weight.labels_shifted", "plain", replace(WORDS, padding="none"), faults.NotShifted, 1),
    case("weight.labels_shifted", "ddp", THREE, faults.ShiftedAgain, 1),
]

FACTORS = [
    case("scale.micro_batches_missing", "plain", ALONE, faults.MicroMissing),
    case("scale.micro_batches_missing", "plain", EVEN_FOUR, faults.MicroMissing, baseline="ranks"),
    case("scale.micro_batches_missing", "ranks", EVEN, faults.MicroMissing),
    case("scale.micro_batches_missing", "ddp", FOUR, faults.TotalForgetsMicro),
    case("scale.micro_batches_twice", "plain", ALONE, faults.MicroTwice),
    case("scale.micro_batches_twice", "plain", EVEN_FOUR, faults.MicroTwice, baseline="ranks"),
    case("scale.micro_batches_twice", "ddp", EVEN, faults.MicroTwice),
    case("scale.ranks_missing", "plain", EVEN, faults.RanksMissing, baseline="ranks"),
    case("scale.ranks_missing", "ranks", EVEN, faults.RanksMissing),
    case("scale.ranks_missing", "ranks", FOUR, faults.TotalForgetsRanks),
    case("scale.ranks_missing", "ddp", EVEN_FOUR, faults.RanksMissing),
    case("scale.ranks_twice", "plain", EVEN, faults.RanksTwice, baseline="ranks"),
    case("scale.ranks_twice", "ranks", FOUR, faults.RanksTwice),
    case("scale.ranks_twice", "ddp", EVEN, faults.RanksTwice),
]

DATA = [
    case("schedule.per_micro_batch", "plain", ALONE, faults.PerMicroBatch),
    case("schedule.per_micro_batch", "plain", EVEN_FOUR, faults.PerMicroBatch, baseline="ranks"),
    case("schedule.per_micro_batch", "ddp", FOUR, faults.PerMicroBatch),
    case("schedule.offset", "plain", WORDS, faults.ScheduledFirst),
    case("schedule.offset", "plain", ALONE, faults.StepsAhead, 3),
    case("schedule.offset", "plain", GPT, faults.StepsBehind, 1),
    case("schedule.offset", "ranks", THREE, faults.StepsAhead, 1),
    case("data.micro_batch_dropped", "plain", ALONE, faults.DroppedSeen, 1),
    case("data.micro_batch_dropped", "plain", FOUR, faults.Dropped, 1),
    case("data.micro_batch_dropped", "plain", FOUR, faults.DroppedSeen, 3),
    case("data.micro_batch_dropped", "plain", ALONE, faults.ClearedInBetween, 1),
    case("data.micro_batch_dropped", "ranks", EVEN, faults.DroppedSeen, 1),
    case("data.micro_batch_dropped", "ranks", FOUR, faults.ClearedInBetween, 3),
    case("data.ranks_share", "plain", WORDS, faults.RanksShare, 2),
    case("data.ranks_share", "plain", THREE, faults.RanksShare, 2),
    case("data.ranks_share", "ranks", THREE, faults.RanksShare, 3),
    case("data.ranks_share", "ddp", EVEN_FOUR, faults.RanksShare, 2),
]

CLIPPING = [
    case("clip.per_rank", "plain", WORDS, ClippedBeforeReduction, "share", baseline="ranks"),
    case("clip.per_rank", "plain", replace(THREE, clip=0.1), ClippedBeforeReduction, "share", baseline="ranks"),
    case("clip.per_rank", "ranks", replace(WORDS, clip=0.2), ClippedBeforeReduction),
    case("clip.per_rank", "ranks", THREE, ClippedBeforeReduction, "share"),
    case("clip.before_unscale", "plain", SCALED, ClippedBeforeUnscaling),
    case("clip.before_unscale", "plain", SCALED_MORE, ClippedBeforeUnscaling),
    case("clip.before_unscale", "ranks", SCALED, ClippedBeforeUnscaling),
    case("clip.unexpected", "plain", replace(GPT, clip=None), faults.ClipsAnyway, 1.0),
    case("clip.unexpected", "plain", WIDE_OPEN, faults.ClipsAnyway, 0.1),
    case("clip.unexpected", "plain", UNCLIPPED, faults.ClipsValues, 1e-3),
    case("clip.unexpected", "ddp", UNCLIPPED, faults.ClipsAnyway, 0.5),
    case("clip.unexpected", "plain", WORDS, faults.ClipsAnyway, 0.25),
]

OPTIMIZER = [
    case("decay.wrong_group", "plain", WORDS, updates.AllDecay),
    case("decay.wrong_group", "plain", GENTLE, updates.OneMoreDecays, "blocks.1.second.weight"),
    case("decay.wrong_group", "plain", GPT, updates.OneMoreDecays, "tokens"),
    case("decay.wrong_group", "ddp", WORDS, updates.AllDecay),
    case("decay.missing", "plain", WORDS, updates.DecayMissing),
    case("decay.missing", "plain", GENTLE, updates.DecayMissing),
    case("decay.missing", "plain", GENTLE, updates.ByHand, ("weight_decay", 0.0)),
    case("decay.missing", "ranks", THREE, updates.ByHand, ("weight_decay", 0.0)),
    case("decay.twice", "plain", WORDS, updates.DecayedByHand),
    case("decay.twice", "plain", GENTLE, updates.DecayedByHand),
    case("decay.twice", "plain", WORDS, updates.PenaltyAdded),
    case("decay.twice", "plain", GENTLE, updates.PenaltyAdded),
    case("decay.twice", "ddp", THREE, updates.DecayedByHand),
    case("decay.twice", "plain", ALONE, updates.DecayDoubled),
    case("optimizer.betas", "plain", WORDS, updates.OtherSetting, ("betas", (0.9, 0.951))),
    case("optimizer.betas", "plain", WORDS, updates.OtherSetting, ("betas", (0.5, 0.95))),
    case("optimizer.betas", "plain", ALONE, updates.ByHand, ("betas", (0.9, 0.951))),
    case("optimizer.betas", "plain", GPT, updates.ByHand, ("betas", (0.9, 0.5))),
    case("optimizer.betas", "plain", ALONE, updates.ByHand, ("betas", (0.95, 0.9))),
    case("optimizer.betas", "ddp", WORDS, updates.OtherSetting, ("betas", (0.9, 0.999))),
    case("optimizer.eps", "plain", WORDS, updates.OtherSetting, ("eps", 1e-7)),
    case("optimizer.eps", "plain", WORDS, updates.ByHand, ("eps", 1e-3)),
    case("optimizer.eps", "plain", ALONE, updates.ByHand, ("eps", 1e-6)),
    case("optimizer.eps", "plain", ALONE, updates.ByHand, ("inside", True)),
    case("optimizer.eps", "ddp", THREE, updates.OtherSetting, ("eps", 1e-5)),
]

RANKS = [
    case("reduce.missing", "plain", WORDS, PartNotReduced, "head.weight", baseline="ranks"),
    case("reduce.missing", "plain", EVEN, PartNotReduced, "", baseline="ranks"),
    case("reduce.missing", "ranks", THREE, PartNotReduced, "norm.bias"),
    case("reduce.missing", "ranks", WORDS, PartNotReduced, ""),
    case("reduce.missing", "ddp", WORDS, SkipsSync),
    case("reduce.missing", "ddp", THREE, IgnoresParameter, "blocks.0.up.weight"),
    case("replica.stale", "plain", NARROW, NotCopied, "head.weight"),
    case("replica.stale", "plain", NARROW, NotCopied, ""),
    case("replica.stale", "ranks", WORDS, NotBroadcast, "blocks.1.down.weight"),
    case("replica.stale", "ranks", THREE, NotBroadcast, ""),
    case("replica.stale", "ranks", WORDS, OtherStart, "head"),
    case("replica.stale", "ranks", EVEN, OtherStart, ""),
]

STATE = [
    case("tied.untied", "plain", TIED, faults.Untied, "copy"),
    case("tied.untied", "plain", replace(TIED, num_micro=4), faults.Untied, "init"),
    case("tied.untied", "ddp", TIED, faults.Untied, "copy"),
    case("frozen.updated", "plain", FROZEN, faults.Thawed, 1),
    case("frozen.updated", "plain", FROZEN_BIAS, faults.Thawed, None),
    case("frozen.updated", "plain", FROZEN, faults.FrozenDecays, 1),
    case("frozen.updated", "ranks", FROZEN_BIAS, faults.FrozenDecays, None),
    case("recompute.rng", "plain", DROPOUT, faults.MasksDrawnAnew, 1),
    case("recompute.rng", "plain", HEAVY, faults.MasksDrawnAnew, 2),
    case("recompute.rng", "ranks", HEAVY, faults.MasksDrawnAnew, 1),
    case("evaluation.changed_state", "plain", ROWS, faults.EvaluatesTraining, 1),
    case("evaluation.changed_state", "plain", DRAWS, faults.EvaluatesTraining, 1),
    case("evaluation.changed_state", "plain", DRAWS, faults.EvaluatesDrawing, 1),
    case("evaluation.changed_state", "plain", DRAWS, faults.StaysInEval, 1),
    case("evaluation.changed_state", "ranks", ROWS_RANKS, faults.EvaluatesTraining, 5, baseline="ranks"),
    case("evaluation.changed_state", "ranks", DRAWS_ROWS, faults.StaysInEval, 2, baseline="ranks"),
]

PRECISION = [
    case("precision.moment", "plain", WORDS, updates.RoundedMoments, 1),
    case("precision.moment", "plain", ALONE, updates.RoundedMoments, None),
    case("precision.moment", "plain", GPT, updates.NarrowByHand),
    case("precision.moment", "ddp", THREE, updates.RoundedMoments, None),
    case("precision.master", "plain", NARROW, NoMasters),
    case("precision.master", "plain", ALONE, WeightsRounded, 1),
    case("precision.master", "plain", WORDS, WeightsRounded, None),
    case("precision.master", "ranks", NARROW_RANKS, NoMasters),
    case("precision.master_rounded", "plain", NARROW, MastersOfNarrow, None),
    case("precision.master_rounded", "plain", NARROW, MastersOfNarrow, 1),
    case("precision.master_rounded", "plain", ALONE, faults.MastersOfRounded, None),
    case("precision.master_rounded", "ranks", NARROW_RANKS, MastersOfNarrow, None),
    case("precision.accumulation", "plain", NARROW, AccumulatesInModel),
    case("precision.accumulation", "plain", FOUR, AccumulatesNarrow, None),
    case("precision.accumulation", "plain", FOUR, AccumulatesNarrow, 1),
    case("precision.accumulation", "ranks", NARROW_RANKS, AccumulatesInModel),
    case("precision.accumulation", "ranks", THREE, ReducesNarrow),
]

MUTATIONS = [*OBJECTIVE, *FACTORS, *DATA, *CLIPPING, *OPTIMIZER, *RANKS, *STATE, *PRECISION]
