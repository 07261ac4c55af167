"""The engine: a model, its optimizer and a configuration become a training step over all ranks.

A step, in the order things happen to one parameter: its unit is gathered when forward enters it and released when forward leaves
it; gathered again when backward reaches it; its gradient lands in the unit's flat buffer; the complete unit is sent to the owners
of its shards and added in rank order; ``step`` exchanges one vector, scales, clips, steps on pieces and, where parameters stay
full, sends the new values around. This file is the surface; `passes` and `step` decide when, `unit` and `flat` know how.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardbook.config import ZeroConfig
from shardbook.engine import describe, hooks
from shardbook.engine.announce import Announcer
from shardbook.engine.build import build_units, check_model, choose_device, move_buffers, thaw
from shardbook.engine.comm import Transport, connect
from shardbook.engine.context import Context
from shardbook.engine.disk import Disk
from shardbook.engine.disk_step import DiskStep
from shardbook.engine.homes import homes_of
from shardbook.engine.host_step import prefer_fused
from shardbook.engine.journal import Journal
from shardbook.engine.link import Link
from shardbook.engine.optimizer import PieceOptimizer, StateKinds, check_elementwise, check_groups
from shardbook.engine.passes import Passes
from shardbook.engine.policy import Policy
from shardbook.engine.recompute import Recomputation
from shardbook.engine.report import StepReport
from shardbook.engine.residency import residency_of
from shardbook.engine.step import Stepper
from shardbook.engine.storage import Storage
from shardbook.engine.unit import Presence, Unit
from shardbook.engine.watch import Watch
from shardbook.errors import ConfigError, UsageError
from shardbook.events import Observer
from shardbook.structure import Structure
from shardbook.tiers.memory import keep_freed_memory, map_large_blocks


class Engine:
    """Trains ``model`` under ZeRO. See the file's header for how a step goes.

    Args:
        model: any module; on the meta device with ``init=``.
        optimizer: an element-wise torch optimizer, built on the model's parameters before the engine, which takes over its groups and
            state. None: nothing is trained.
        config: what is partitioned, in which types, and how a step is made.
        scheduler: anything with ``step()``; called once per applied step.
        mesh: a one-dimensional device mesh; else the default process group; without one, a single rank.
        init: for models on the meta device: initialises the modules of one unit in place.
        device: where the engine keeps its memory; else where the model is.

    Raises:
        ConfigError: the model, the optimizer or the configuration can't be honoured.
        DivergenceError: the ranks built different models.

    >>> model = torch.nn.Linear(4, 2)
    >>> engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig(stage=2))
    >>> engine.backward(engine(torch.ones(3, 4)).sum(), weight=3)
    >>> engine.step().weight
    3.0
    >>> engine.close()
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: ZeroConfig, *, scheduler: Any = None,
        mesh: DeviceMesh | None = None, init: Callable[[nn.Module], None] | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.config, self.num_steps = model, optimizer, config, 0
        self._scheduler = scheduler
        named = check_model(model)
        group = _group_of(mesh)
        place = choose_device(named, device, group)
        _check_scheduler(scheduler, optimizer)
        if optimizer is not None:
            check_groups(optimizer, named)
            is_away = config.offload.optimizer != "none" and place.type == "cuda"
            if is_away:
                prefer_fused(optimizer)
            check_elementwise(optimizer, torch.device("cpu") if is_away else place)
        self._context = context = _connect(group, config, place)
        self._journal, self._watch, self._transport = context.journal, context.watch, context.transport
        self._disk_step = None if optimizer is None else _on_disk(context, optimizer)
        if place.type == "cpu":
            map_large_blocks()
        with torch.no_grad():
            self._policy = Policy(config.precision, named.items())
            kept = _kinds_of(context, optimizer)
            self._units = build_units(context, model, named, self._policy, trains=optimizer is not None, init=init, kept=kept)
            move_buffers(model, place)
        self._passes = Passes(context, self._units, self._thaw, trains=optimizer is not None)
        self._pieces = self._stepper = None
        if optimizer is not None:
            self._pieces = PieceOptimizer(
                optimizer, [flat for unit in self._units for flat in unit.flats], self._journal, context.moments_tier
            )
            if self._disk_step is not None:
                self._disk_step.absorb([flat for unit in self._units for flat in unit.flats])
                self._pieces.settle()
            self._stepper = Stepper(context, tuple(named), self._units, self._pieces, self._passes, self._disk_step)
        self._handles = hooks.install(self._units, self._passes)
        self._recomputation = None if config.recompute.policy == "none" else Recomputation(context, model, self._units)
        if self._recomputation is not None:
            self._passes.on_backward = self._recomputation.look_ahead
        self._journal.phase = self._watch.activity = "idle"
        if place.type == "cpu":
            keep_freed_memory()  # which steps take and free
        # an engine that nobody holds any more gives its threads and its process group back, closed or not
        self._finalizer = weakref.finalize(self, _give_back, self._watch, self._transport, self._recomputation)

    # ---- what a person calls --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def register_forward(self, method: str) -> None:
        """Let another method of the model gather and release as its forward does."""
        original = getattr(self.model, method, None)
        if not callable(original):
            raise ConfigError(f"register_forward: {type(self.model).__name__} has no method {method!r}")
        root = self._units[0]

        def entering(*args: Any, **kwargs: Any) -> Any:
            changed = self._passes.enter_forward(root, args, kwargs)
            args, kwargs = changed or (args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._passes.leave_forward(root, output)
            return output

        setattr(self.model, method, entering)

    def backward(self, loss: Tensor | None, weight: float | Tensor | None = None, last: bool | None = None) -> None:
        """Backward of one micro-batch.

        Args:
            loss: a scalar: the sum of losses when ``weight`` is given, else a mean that counts 1. None: this rank has no data for this
                micro-batch and takes part with weight 0.
            weight: what the loss is a sum over (tokens, say).
            last: whether this is the step's last micro-batch; None: the ``accumulate``-th is.

        Raises:
            UsageError: too many micro-batches in a step; a loss that is no scalar.
            RankError: another rank makes it impossible to go on.
        """
        if loss is not None and loss.numel() != 1:
            raise UsageError(
                f"engine.backward: loss has shape {tuple(loss.shape)}; a scalar is needed: a sum over what weight= counts, or a mean"
            )
        self._passes.backward(loss, weight, last)

    def step(self) -> StepReport:
        """Reduce what is left, scale, clip, step and clear gradients.

        Raises:
            UsageError: no micro-batch since the last step; no optimizer; weights that don't add up to a positive number.
            RankError: another rank makes it impossible to go on.
        """
        if self._stepper is None:
            raise UsageError(
                "engine.step: this engine was built without an optimizer and trains nothing; build it with one, or only evaluate"
            )
        if not self._passes.tally.num_micro_batches:
            raise UsageError(
                "engine.step: no micro-batch since the last step; "
                "call engine.backward(loss) first (engine.backward(None) for a rank without data)"
            )
        self._journal.phase = self._watch.activity = "step"
        try:
            with torch.no_grad():
                self._passes.finish()
                report = self._stepper.step()
        except BaseException as error:
            self._watch.raised(error)
            raise
        finally:
            self._passes.clear()
        if report.applied:
            self.num_steps += 1
            if self._scheduler is not None:
                self._scheduler.step()
        return report

    @contextmanager
    def gathered(self, *modules: nn.Module, write_back: bool = False) -> Generator[None]:
        """Full parameters of everything below the modules (none given: the model), for reading, or for changing.

        Where parameters are sharded all ranks must enter it. With ``write_back`` they must at every stage: rank 0's values are taken over.
        """
        own = {id(member.parameter) for unit in self._units for _, _, member in unit.members}
        for module in modules:
            foreign = [name for name, parameter in module.named_parameters() if id(parameter) not in own]
            if foreign:
                raise UsageError(
                    f"engine.gathered: parameter {foreign[0]!r} of {type(module).__name__} is not under this engine: "
                    f"pass modules of its model"
                )
        wanted = {id(parameter) for module in modules or (self.model,) for parameter in module.parameters()}
        units = [unit for unit in self._units if any(id(member.parameter) in wanted for _, _, member in unit.members)]
        with torch.no_grad():
            for unit in units:
                unit.wait()
                unit.pins += 1
        try:
            yield
            if write_back:
                with torch.no_grad():
                    for unit in units:
                        for flat in unit.flats:
                            self._transport.broadcast(flat.full.tensor, unit.name)
                            flat.write_back()
                        unit.changed()
        finally:
            for unit in units:
                unit.pins -= 1
                if not unit.in_backward:
                    unit.leave()

    @contextmanager
    def grads(self) -> Generator[Mapping[str, Tensor]]:
        """Between backward and step: this rank's pieces of the reduced gradients by name, for reading or changing in place.

        They are sums over ranks and micro-batches, not yet divided by the weight (nor by the loss scale). Reduces what is left, so
        all ranks must enter it.
        """
        if not self._passes.tally.num_micro_batches:
            raise UsageError("engine.grads: there are no gradients before engine.backward, and none after engine.step")
        with torch.no_grad():
            self._passes.finish()
        yield {name: part for unit in self._units for flat in unit.flats if flat.trainable for name, part in flat.gradients()}

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) on rank 0, one unit gathered at a time; the other ranks iterate as well and get nothing."""
        for unit in self._units:
            with torch.no_grad():
                was_here = unit.presence is Presence.HERE
                unit.wait()
                found = (
                    [(member.name, member.parameter.detach().clone()) for _, _, member in unit.members] if self._transport.rank == 0 else []
                )
                if not was_here:
                    unit.release()
            yield from found

    def state_dict(self) -> Mapping[str, Tensor]:
        """Full values under the model's own names, buffers included, on rank 0 (empty elsewhere). All ranks must call it."""
        full = dict(self.full_parameters())
        if self._transport.rank:
            return {}
        aliases = {id(parameter): name for name, parameter in self.model.named_parameters()}
        values = {name: full[aliases[id(parameter)]] for name, parameter in self.model.named_parameters(remove_duplicate=False)}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    values[f"{path}.{name}" if path else name] = buffer.detach().clone()
        return values

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Send every event to ``observer`` inside the ``with``; it begins with a booking for each account that holds something."""
        return self._journal.observed(observer)

    def describe(self) -> str:
        """Units and their sizes, what is partitioned, who owns which piece, and the convention in force."""
        return describe.text(self._context, self._units)

    @property
    def transport(self) -> Transport:
        """How this rank sends to the others, for who times it: all ranks must use it in the same way, between steps."""
        return self._transport

    def structure(self) -> Structure:
        """Units, sizes, types, the group and the orders of use as plain data, which closed forms read."""
        return describe.structure(self._context, self._units, self._passes, has_stepped=self.num_steps > 0)

    @contextmanager
    def _doing(self, activity: str) -> Generator[None]:
        """For what works on the engine's state from above: events and other ranks are told what goes on, and what ends it."""
        self._journal.phase = self._watch.activity = activity
        try:
            yield
        except (ConfigError, UsageError):  # all ranks raise it, and can go on
            raise
        except BaseException as error:
            self._watch.raised(error)
            raise
        finally:
            self._journal.phase = self._watch.activity = "idle"

    def close(self) -> None:
        """Give back the process group and the watchdog, and take the hooks off the model, whose parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._pieces is not None:
            self._pieces.close()
        if self._context.disk is not None:
            self._context.disk.close()
        self._finalizer()

    def _thaw(self, unit: Unit) -> None:
        """Train parameters of the unit that were frozen when the engine was built. All ranks come here together."""
        assert self._pieces is not None
        for flat, _, member in unit.members:
            if not flat.trainable and member.parameter.requires_grad and not self._pieces.knows(member.parameter):
                raise ConfigError(
                    f"optimizer: parameter {member.name!r} requires a gradient now and is in no parameter group; "
                    f"build the optimizer on it as well (a frozen parameter in a group costs nothing)"
                )
        unit.wait()
        num_before = sum(flat.trainable for flat in unit.flats)
        fresh = thaw(self._context, unit, self._policy)
        self._pieces.add(fresh, {})
        self._handles += hooks.install_landing(unit, self._passes, first=num_before)
        unit.release()


def _on_disk(context: Context, optimizer: torch.optim.Optimizer) -> DiskStep | None:
    """Master and state on a disk, where the configuration says so; space is taken when it is known how much."""
    folder, transport = context.config.offload.path, context.transport
    if not context.homes.optimizer_on_disk or folder is None:
        return None
    kinds = _kinds_of(context, optimizer)
    assert kinds is not None, "a disk is away"
    label = f"state-rank{transport.rank:05d}-of-{transport.num_ranks:05d}"
    context.disk = Disk(folder, label, context.storage, context.journal, kinds)
    return DiskStep(context.disk, optimizer, context.journal)


def _kinds_of(context: Context, optimizer: torch.optim.Optimizer | None) -> StateKinds | None:
    """What an optimizer that is away keeps of each element; None: it is not away."""
    if optimizer is None or not context.homes.optimizer_away:
        return None
    device = context.storage.device
    return StateKinds(optimizer, torch.device("cpu") if device.type == "cuda" else device)


def _give_back(watch: Watch, transport: Transport, recomputation: Recomputation | None) -> None:
    if recomputation is not None:
        recomputation.remove()
    transport.close()
    watch.stop()


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    theirs = getattr(scheduler, "optimizer", optimizer)
    if scheduler is not None and (theirs is not optimizer or not callable(getattr(scheduler, "step", None))):
        raise ConfigError("scheduler: it belongs to another optimizer (or has no step()); build it on the optimizer that the engine gets")


def _group_of(mesh: DeviceMesh | None) -> Any:
    if mesh is not None:
        if mesh.ndim != 1:
            raise ConfigError(
                f"mesh: it has {mesh.ndim} axes {mesh.mesh_dim_names or ''}; "
                f"one axis of data-parallel ranks is supported: pass mesh['axis']"
            )
        return mesh.get_group()
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _connect(group: Any, config: ZeroConfig, device: torch.device) -> Context:
    """Residency, memory, and the transport with the watchdog over it."""
    journal = Journal()
    num_ranks = 1 if group is None else dist.get_world_size(group)
    store: Any = None
    prefix = ""
    if num_ranks > 1 and dist.get_backend(group) != "fake":
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store  # a connection of its own: the watchdog's thread uses it
        ranks = "-".join(map(str, dist.get_process_group_ranks(group))) if num_ranks < dist.get_world_size() else "all"
        prefix = f"shardbook/{ranks}/{store.add(f'shardbook/{ranks}/engines/{dist.get_rank(group)}', 1)}"
    watch = Watch(dist.get_rank(group) if num_ranks > 1 else 0, num_ranks, store, prefix)
    transport = connect(group, watch, journal, config.reduction, device)
    watch.start(transport.free)
    announcer = Announcer(store, prefix, watch)
    storage = Storage(device, journal)
    link = Link(storage, journal)
    return Context(config, residency_of(config.stage), homes_of(config.offload), transport, storage, link, journal, watch, announcer)
