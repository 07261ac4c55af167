"""The right loops of the mutation suite: one process, ranks that reduce by hand, DDP, and shardbook's engine.

A :class:`Loop` is a training loop as a person writes it, cut into methods; a fault is a mixin that replaces one of them. Each loop
records itself. What a loop tells the recorder, it tells as its author believes it.

    one process   goes over the micro-batches of all ranks
    ranks         each goes over its own, then gradients are all-reduced by hand
    ddp           each goes over its own, and DDP reduces in the last
    shardbook     each goes over its own, under an engine
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardbook as sb
from tests.mutations_models import Batch, Setting, batch, build, num_counted, summed

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1


class Loop:
    """One process, or with ``world`` above 1 a rank that reduces by hand. ``size`` is the fault's."""

    def __init__(self, setting: Setting, path: str, *, size: Any = None, rank: int = 0, world: int = 1) -> None:
        self.setting, self.path, self.size, self.rank, self.world = setting, path, size, rank, world
        self.number = self.micro = 0
        self.model = self.build()
        self.wrapped: Any = self.model
        self.prepare()
        self.scheduler = self.make_scheduler()

    # ---- building -----------------------------------------------------------------------------------------------------------

    def build(self) -> nn.Module:
        return build(self.setting)

    def prepare(self) -> None:
        """Masters where the model is narrow, then the optimizer."""
        named = self.named()
        self.masters: list[nn.Parameter] | None = None
        if self.setting.precision != "fp32":
            self.masters = self.make_masters([parameter for _, parameter in named])
            self.model.to(NARROW[self.setting.precision])
        held = self.masters or [parameter for _, parameter in named]
        self.optimizer = self.make_optimizer(self.grouped([(name, p) for (name, _), p in zip(named, held, strict=True)]))

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def make_masters(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [nn.Parameter(parameter.detach().clone()) for parameter in parameters]

    def grouped(self, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Matrices decay, the rest does not. Masters stay in the model's order, which is how they are known."""
        if self.setting.precision != "fp32":
            return [{"params": [parameter for _, parameter in named], "weight_decay": self.setting.decay}]
        yes = [parameter for name, parameter in named if self.decays(name, parameter)]
        no = [parameter for name, parameter in named if not self.decays(name, parameter)]
        return [{"params": yes, "weight_decay": self.setting.decay}, {"params": no, "weight_decay": 0.0}]

    def decays(self, name: str, parameter: Tensor) -> bool:
        return decays(name, parameter)

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        s = self.setting
        groups = [group for group in groups if group["params"]]
        if s.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=s.lr, momentum=0.9)
        return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps)

    def make_scheduler(self) -> Any:
        warm_up = self.setting.warm_up
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / (warm_up + 1)))

    # ---- the run ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.setting.seeding == "once":
            torch.manual_seed(77 + self.setting.seed + self.rank)
        with sb.record(self.wrapped, self.optimizer, self.path) as self.recorder:
            for number in range(self.setting.steps):
                self.number = number
                self.train_step()
                self.evaluate()

    @property
    def data_ranks(self) -> Sequence[int]:
        return range(self.setting.num_ranks) if self.world == 1 else [self.rank]

    def batches(self, rank: int) -> list[Batch]:
        return [batch(self.setting, rank, self.number, micro) for micro in range(self.setting.num_micro)]

    def train_step(self) -> None:
        by_rank = {rank: self.batches(rank) for rank in self.data_ranks}
        self.total = self.total_weight([one for batches in by_rank.values() for one in batches])
        self.loss_sum, self.weight_sum = 0.0, 0.0
        for self.data_rank, batches in by_rank.items():
            self.num_here = len(batches)
            for self.micro, one in enumerate(batches):
                self.micro_step(one)
            self.after_rank()
        self.reduce()
        self.tell([one for batches in by_rank.values() for one in batches])
        self.clip()
        self.update()

    def micro_step(self, one: Batch) -> None:
        loss, weight = self.forward_loss(one)
        self.loss_sum, self.weight_sum = self.loss_sum + loss.item(), self.weight_sum + weight
        self.backward(loss, weight)
        self.after_micro()

    # ---- the objective --------------------------------------------------------------------------------------------------------

    def forward_loss(self, one: Batch) -> tuple[Tensor, float]:
        """A micro-batch's part of the objective, and what it counts."""
        self.seed()
        return self.loss_of(self.forward(one[0]), one[1])

    def forward(self, inputs: Tensor) -> Tensor:
        dtype = NARROW.get(self.setting.precision)
        return self.wrapped(inputs.to(dtype) if dtype and inputs.is_floating_point() else inputs)

    def seed(self) -> None:
        if self.setting.seeding == "micro":
            torch.manual_seed(self.setting.seed + 1009 * self.number + 31 * self.data_rank + self.micro)

    def loss_of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        counted = self.count(targets)
        loss = self.sum_of(logits, targets)
        return (loss, counted) if self.setting.objective == "tokens" else (loss / counted, 1.0)

    def sum_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        return summed(logits, targets)

    def count(self, targets: Tensor) -> int:
        return num_counted(targets)

    def total_weight(self, mine: Sequence[Batch]) -> float:
        """Over all ranks, known before the first backward."""
        if self.setting.objective == "mean":
            return float(self.num_micro * self.num_ranks)
        total = torch.tensor(float(sum(self.count(targets) for _, targets in mine)), dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(total)
        return total.item()

    @property
    def num_micro(self) -> int:
        return self.setting.num_micro

    @property
    def num_ranks(self) -> int:
        return self.setting.num_ranks

    # ---- gradients ------------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, weight: float) -> None:
        (self.share(loss, weight) * self.setting.loss_scale).backward()
        self.accumulate()

    def share(self, loss: Tensor, weight: float) -> Tensor:
        return loss / self.total

    def accumulate(self) -> None:
        """Gradients of a narrow model are added in fp32, in their masters'."""
        for parameter, master in self.mastered():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad + gradient

    def mastered(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip([parameter for _, parameter in self.named()], self.masters or [], strict=False))

    def held(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer holds, by the model's names."""
        return [(name, p) for (name, _), p in zip(self.named(), self.masters or [p for _, p in self.named()], strict=True)]

    def after_micro(self) -> None: ...

    def after_rank(self) -> None: ...

    def reduce(self) -> None:
        if self.world > 1:
            for name, parameter in self.held():
                self.reduce_one(name, parameter)
        self.unscale()

    def reduce_one(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)

    def unscale(self) -> None:
        if self.setting.loss_scale != 1.0:
            for _, parameter in self.held():
                if parameter.grad is not None:
                    parameter.grad /= self.setting.loss_scale

    def clip(self) -> None:
        if self.setting.clip is not None:
            nn.utils.clip_grad_norm_([parameter for _, parameter in self.held()], self.setting.clip)

    # ---- the rest of the step --------------------------------------------------------------------------------------------------

    def tell(self, given: list[Batch]) -> None:
        if self.setting.tells == "mean":
            self.recorder.step(loss=self.loss_sum / self.weight_sum)
            return
        self.recorder.step(loss=self.loss_sum, weight=self.weight_sum, batch=given)

    def update(self) -> None:
        self.optimizer.step()
        self.schedule()
        self.after_update()
        self.optimizer.zero_grad()

    def schedule(self) -> None:
        self.scheduler.step()

    @torch.no_grad()
    def after_update(self) -> None:
        for parameter, master in self.mastered():
            parameter.copy_(master)

    def evaluate(self) -> None:
        if self.setting.evaluates:
            self.model.eval()
            with torch.no_grad():
                for number in range(self.setting.evaluates):
                    self.wrapped(batch(self.setting, self.rank, 900 + self.number, number)[0])
            self.model.train()


class DdpLoop(Loop):
    """DDP gives the mean over ranks, so losses are multiplied by their number where the objective is a sum over all."""

    def prepare(self) -> None:
        super().prepare()
        self.wrapped = self.wrap()

    def wrap(self) -> nn.Module:
        return nn.parallel.DistributedDataParallel(self.model)

    def micro_step(self, one: Batch) -> None:
        with self.wrapped.no_sync() if self.micro < self.num_here - 1 else nullcontext():
            super().micro_step(one)

    def share(self, loss: Tensor, weight: float) -> Tensor:
        return super().share(loss, weight) * self.world

    def reduce_one(self, name: str, parameter: nn.Parameter) -> None: ...


class ShardbookLoop(Loop):
    """The engine divides, reduces, clips and casts. ``stage`` follows the setting's seed, so that all come up."""

    masters = None

    def prepare(self) -> None:
        self.optimizer = self.make_optimizer(self.grouped(self.named()))
        self.engine = self.wrapped = sb.Engine(self.model, self.optimizer, self.config())

    def config(self) -> sb.ZeroConfig:
        s = self.setting
        return sb.ZeroConfig(
            stage=self.stage, precision=self.precision(), accumulate=self.num_micro, clip_grad_norm=s.clip,
            loss_scale=s.loss_scale if s.precision == "fp16" else None,
        )  # fmt: skip

    @property
    def stage(self) -> Any:
        return (self.setting.seed + 3) % 4

    def precision(self) -> sb.Precision:
        return sb.Precision(param=self.setting.precision)

    def total_weight(self, mine: Sequence[Batch]) -> float:
        return 0.0  # the engine's to know

    def backward(self, loss: Tensor, weight: float) -> None:
        self.engine.backward(loss, weight=weight)

    def reduce(self) -> None: ...

    def clip(self) -> None: ...

    def update(self) -> None:
        self.engine.step()
        self.schedule()
        self.after_update()

    def pieces(self) -> list[tuple[Any, Any, Any]]:
        """(unit, flat buffer, piece): the engine's private parts, for faults inside of it."""
        return [(unit, flat, piece) for unit in self.engine._units for flat in unit.flats for piece in flat.pieces]


KINDS: dict[str, type[Loop]] = {"plain": Loop, "ranks": Loop, "ddp": DdpLoop, "shardbook": ShardbookLoop}
ONE_PROCESS = {"plain"}
