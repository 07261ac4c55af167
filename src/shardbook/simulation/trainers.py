"""Who trains in a simulation, behind one signature: shardbook's engine here, others' own code in `peers`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shardbook.config import ZeroConfig
from shardbook.engine.engine import Engine
from shardbook.errors import ConfigError
from shardbook.events import Booking, Event, Traffic, Transfer

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
Loss = Callable[[Any], tuple[Tensor, Any]]


class Trainer(Protocol):
    """Something that takes steps."""

    @property
    def model(self) -> nn.Module:
        """What a person would call."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """What a person would hold."""
        ...

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it takes for granted, in sentences."""
        ...

    def micro_batch(self, batch: Any, *, last: bool) -> None:
        """Forward and backward; ``last``: of a step."""
        ...

    def step(self) -> None:
        """Clip, update, forget the gradients."""
        ...

    def settle(self) -> None:
        """Await what a step left under way."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Own:
    """shardbook's engine, as it is.

    ``sent``: bytes so far, without the few by which ranks agree on a step; ``moved``: bytes between tiers so far, by link; ``book`` is
    told of each of the engine's bookings.
    """

    assumptions = ("gradients are finite: no step is skipped, none is clipped to nothing",)

    def __init__(
        self, model: nn.Module, optimizer: OptimizerFactory, config: ZeroConfig, loss: Loss, book: Callable[[Booking], None] | None = None
    ) -> None:
        self.model: nn.Module = model
        self._loss, self._stage, self._book = loss, config.stage, book
        self.moved: Counter[str] = Counter()
        self.optimizer: Optimizer = optimizer(model.parameters())
        self._engine = Engine(model, self.optimizer, config)
        self.sent = 0
        self._observing = self._engine.observe(self._hear)
        self._observing.__enter__()

    def micro_batch(self, batch: Any, *, last: bool) -> None:
        output = called(self._engine, batch)  # which most loops hold until backward is over
        loss, weight = self._loss(output)
        self._engine.backward(loss, weight=weight)

    def step(self) -> None:
        self._engine.step()

    def settle(self) -> None:
        with self._engine.gathered() if self._stage < 3 else nullcontext():
            pass

    def close(self) -> None:
        self._observing.__exit__(None, None, None)
        self._engine.close()

    def _hear(self, event: Event) -> None:
        if isinstance(event, Traffic) and event.kind != "step":
            self.sent += event.sent_nbytes
        elif isinstance(event, Transfer):
            self.moved[event.link] += event.nbytes
        elif isinstance(event, Booking) and self._book is not None:
            self._book(event)


def called(model: Callable[..., Any], batch: Any) -> Any:
    """The model's output of one batch: a tuple's items are its arguments, a mapping's its keywords, a tensor is the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return model(*batch)
    return model(batch)


def usual_loss(output: Any) -> tuple[Tensor, Any]:
    """(loss, weight) of what models give: that pair; a loss alone, or an object with one, which counts 1.

    Raises:
        ConfigError: nothing of the kind.
    """
    found = getattr(output, "loss", output)
    if isinstance(found, (tuple, list)) and len(found) == 2:  # pyright: ignore[reportUnknownArgumentType]
        return found[0], found[1]
    if isinstance(found, Tensor) and found.numel() == 1:
        return found, None
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(output).__name__}"
    raise ConfigError(
        f"loss = None: the model gave {what}; allowed are (loss_sum, weight), a scalar loss or an output with .loss; give loss="
    )
