"""Faults that any loop can have: in what it computes, what it is given, its model, its optimizer, its schedule.

Each is a mixin over :class:`tests.mutations_loops.Loop` and replaces what the mistake replaces, as its author would have written it.
``self.size`` is how much of it there is.
"""

import copy

import torch
from torch import nn

from tests.mutations_loops import Loop
from tests.mutations_models import batch, summed

# ---- what the objective is -------------------------------------------------------------------------------------------------


class MeanOfMeans(Loop):
    """Each micro-batch's own mean, then the mean of those."""

    def loss_of(self, logits, targets):
        return self.sum_of(logits, targets) / self.count(targets), 1.0

    def total_weight(self, mine):
        return float(self.num_micro * self.num_ranks)


class MeanOfRankMeans(Loop):
    """Tokens are counted right on each rank, but not over the ranks."""

    def micro_step(self, one):
        if self.micro == 0:
            self.on_rank = sum(self.count(targets) for _, targets in self.batches(self.data_rank))
        super().micro_step(one)

    def share(self, loss, weight):
        return loss / self.on_rank / self.num_ranks * (self.world if hasattr(self.wrapped, "no_sync") else 1)


class PaddingCounted(Loop):
    """The divisor is the number of elements, padding included."""

    def count(self, targets):
        return targets.numel()


class PaddingTrained(Loop):
    """Padding has a token of its own as target, and nobody ignores it."""

    def sum_of(self, logits, targets):
        return summed(logits, targets.clamp(min=0))

    def count(self, targets):
        return targets.numel()


class ShiftedAgain(Loop):
    """Targets come shifted, and the loss shifts them once more: each position learns the token ``size`` further on."""

    def loss_of(self, logits, targets):
        return super().loss_of(logits[:, : -self.size], targets[:, self.size :])

    def total_weight(self, mine):
        return super().total_weight([(inputs, targets[:, self.size :]) for inputs, targets in mine])


class NotShifted(Loop):
    """Targets are rolled back over their inputs, ``size`` positions."""

    def batches(self, rank):
        return [(inputs, torch.roll(targets, self.size, 1)) for inputs, targets in super().batches(rank)]


# ---- factors ----------------------------------------------------------------------------------------------------------------


class Multiplied(Loop):
    """A factor on the loss; in the recorder's hands is the loss as it was before."""

    def factor(self) -> float:
        raise NotImplementedError

    def backward(self, loss, weight):
        super().backward(loss * self.factor(), weight)


class MicroMissing(Multiplied):
    def factor(self):
        return self.num_micro


class MicroTwice(Multiplied):
    def factor(self):
        return 1 / self.num_micro


class RanksMissing(Multiplied):
    def factor(self):
        return self.num_ranks


class RanksTwice(Multiplied):
    def factor(self):
        return 1 / self.num_ranks


class TotalForgetsMicro(Loop):
    """Tokens of one micro-batch stand for the step's."""

    def total_weight(self, mine):
        return super().total_weight(mine) / self.num_micro


class TotalForgetsRanks(Loop):
    def total_weight(self, mine):
        return super().total_weight(mine) / self.num_ranks


# ---- data -------------------------------------------------------------------------------------------------------------------


class Dropped(Loop):
    """The last ``size`` micro-batches of each rank are never seen, and the divisor is that of all."""

    def total_weight(self, mine):
        return super().total_weight([one for rank in self.data_ranks for one in super(Dropped, self).batches(rank)])

    def batches(self, rank):
        return super().batches(rank)[: self.num_micro - self.size]


class DroppedSeen(Loop):
    """The same, but what is left is averaged among itself."""

    def batches(self, rank):
        return super().batches(rank)[: self.setting.num_micro - self.size]

    @property
    def num_micro(self):
        return self.setting.num_micro - self.size


class ClearedInBetween(Loop):
    """``zero_grad`` inside the loop over micro-batches: only the last of a rank counts. The batch is told in full."""

    def micro_step(self, one):
        if self.micro in range(1, 1 + self.size):
            self.optimizer.zero_grad()
        super().micro_step(one)


class RanksShare(Loop):
    """No sampler by rank: the first ``size`` ranks train on rank 0's data."""

    def batches(self, rank):
        return super().batches(0 if rank < self.size else rank)


# ---- schedule ---------------------------------------------------------------------------------------------------------------


class PerMicroBatch(Loop):
    """The scheduler steps in the loop over micro-batches."""

    def after_micro(self):
        if self.data_rank == self.data_ranks[0]:
            self.scheduler.step()

    def schedule(self): ...


class StepsAhead(Loop):
    """The scheduler has stepped ``size`` times before the first step."""

    def make_scheduler(self):
        scheduler = super().make_scheduler()
        for _ in range(self.size):
            scheduler.step()
        return scheduler


class ScheduledFirst(Loop):
    """``scheduler.step()`` before ``optimizer.step()``."""

    def tell(self, given):
        super().tell(given)
        self.scheduler.step()

    def schedule(self): ...


class StepsBehind(Loop):
    """Resumed from a checkpoint without the scheduler: from step ``size`` on the warm-up begins again."""

    def schedule(self):
        super().schedule()
        if self.number + 1 == self.size:
            self.scheduler = self.make_scheduler()


# ---- the model ----------------------------------------------------------------------------------------------------------------


class Untied(Loop):
    """Head and embedding no longer share their weight: "copy" begins with equal values, "init" anew."""

    def build(self):
        model = super().build()
        model.head.weight = copy.deepcopy(model.tokens.weight)
        if self.size == "init":
            nn.init.normal_(model.head.weight, std=0.02)
        return model


class Thawed(Loop):
    """What should rest is trained: the first ``size`` of the frozen parameters, or all."""

    def build(self):
        model = super().build()
        for parameter in [parameter for parameter in model.parameters() if not parameter.requires_grad][: self.size]:
            parameter.requires_grad_()
        return model


class FrozenDecays(Loop):
    """Weight decay by hand, over all parameters of the model."""

    def update(self):
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        super().update()
        with torch.no_grad():
            for parameter in frozen[: self.size]:
                parameter.mul_(1 - self.setting.lr * self.setting.decay)


class MasksDrawnAnew(Loop):
    """Recomputation with ``preserve_rng_state=False``, of the first ``size`` blocks."""

    def build(self):
        model = super().build()
        model.keeps_masks = [False if number < self.size else keeps for number, keeps in enumerate(model.keeps_masks)]
        return model


class EvaluatesTraining(Loop):
    """Evaluation without ``model.eval()``, on ``size`` batches: batch norm learns from it, dropout draws."""

    def evaluate(self):
        with torch.no_grad():
            for number in range(self.size):
                self.wrapped(batch(self.setting, self.rank, 900 + self.number, number)[0])


class EvaluatesDrawing(Loop):
    """Evaluation that samples: ``size`` draws of the generator that dropout uses."""

    def evaluate(self):
        super().evaluate()
        torch.rand(self.size)


class StaysInEval(Loop):
    """``model.eval()`` for an evaluation after step ``size``, and never back."""

    def evaluate(self):
        super().evaluate()
        if self.number + 1 >= self.size:
            self.model.eval()


class ClipsAnyway(Loop):
    """A trainer's default: the norm is clipped to ``size``."""

    def clip(self):
        nn.utils.clip_grad_norm_([parameter for _, parameter in self.held()], self.size)


class ClipsValues(Loop):
    def clip(self):
        nn.utils.clip_grad_value_([parameter for _, parameter in self.held()], self.size)


class MastersOfRounded(Loop):
    """The model was narrow before masters were taken from it: of the first ``size`` parameters."""

    def build(self):
        model = super().build()
        with torch.no_grad():
            for parameter in list(model.parameters())[: self.size]:
                parameter.copy_(parameter.bfloat16())
        return model
