"""Faults of updates: an optimizer's settings, what it keeps, and weight decay in all its wrong places. As in ``mutations_faults``."""

import torch

from tests.mutations_loops import Loop


class OtherSetting(Loop):
    """One setting of all groups is another: ``size`` is (name, value)."""

    def make_optimizer(self, groups):
        optimizer = super().make_optimizer(groups)
        name, value = self.size
        for group in optimizer.param_groups:
            group[name] = value
        return optimizer


class HandAdam(torch.optim.Optimizer):
    """AdamW as people write it. ``hidden``: settings that the code has and its groups don't show."""

    def __init__(self, groups, *, lr, betas, eps, hidden=None, moment=None):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.hidden, self.moment = hidden or {}, moment

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            settings = {**group, **self.hidden}
            (first, second), lr = settings["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=self.moment) for _ in range(2))
                state["step"] += 1
                p.mul_(1 - lr * settings["weight_decay"])
                m = state["exp_avg"].to(p.dtype).mul(first).add(p.grad, alpha=1 - first)
                v = state["exp_avg_sq"].to(p.dtype).mul(second).addcmul(p.grad, p.grad, value=1 - second)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                m, v = state["exp_avg"].to(p.dtype), state["exp_avg_sq"].to(p.dtype)
                v = v / (1 - second ** state["step"])
                root = (v + settings["eps"]).sqrt_() if settings.get("inside") else v.sqrt_().add_(settings["eps"])
                p.addcdiv_(m, root, value=-lr / (1 - first ** state["step"]))


class ByHand(Loop):
    """The hand-written Adam; ``size`` are hidden settings, a pair or None."""

    def make_optimizer(self, groups):
        s = self.setting
        hidden = {} if self.size is None else {self.size[0]: self.size[1]}
        return HandAdam(groups, lr=s.lr, betas=s.betas, eps=s.eps, hidden=hidden)


class NarrowByHand(Loop):
    """Moments kept in bf16."""

    def make_optimizer(self, groups):
        s = self.setting
        return HandAdam(groups, lr=s.lr, betas=s.betas, eps=s.eps, moment=torch.bfloat16)


class RoundedMoments(Loop):
    """Moments through bf16 after each step, of the first ``size`` parameters: as a checkpoint or an offload in bf16 does."""

    def after_update(self):
        super().after_update()
        for parameter in list(self.optimizer.state)[: self.size]:
            for key in ("exp_avg", "exp_avg_sq"):
                moment = self.optimizer.state[parameter][key]
                moment.copy_(moment.bfloat16())


class DecayMissing(Loop):
    """The optimizer's default, which is not what the recipe says."""

    def grouped(self, named):
        return [group | {"weight_decay": 0.0} for group in super().grouped(named)]


class AllDecay(Loop):
    """One group: norms and biases decay as well."""

    def decays(self, name, parameter):
        return True


class OneMoreDecays(Loop):
    """Names, not shapes, decide, and ``size`` matches where it should not, or the other way round."""

    def decays(self, name, parameter):
        return super().decays(name, parameter) != (self.size in name)


class DecayedByHand(Loop):
    """AdamW decays, and the loop does so once more."""

    def update(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 - group["lr"] * group["weight_decay"])
        super().update()


class DecayDoubled(Loop):
    """The groups have twice the decay: a wrapper adds the recipe's to the optimizer's."""

    def grouped(self, named):
        return [group | {"weight_decay": 2 * group["weight_decay"]} for group in super().grouped(named)]


class PenaltyAdded(Loop):
    """The loss has an L2 penalty besides the optimizer's decay."""

    def share(self, loss, weight):
        share = super().share(loss, weight)
        if self.micro or self.data_rank != self.data_ranks[0]:
            return share
        squares = [p.square().sum() for name, p in self.named() if self.decays(name, p)]
        return share + 0.5 * self.setting.decay * torch.stack(squares).sum() / (1 if hasattr(self.wrapped, "no_sync") else self.world)
