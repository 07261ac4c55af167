"""From a model to units: checks, types, layout, initial values. Runs once, before the first step."""

import hashlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.accounts import Account
from shardbook.engine.comm import Transport
from shardbook.engine.context import Context
from shardbook.engine.disk import Disk, Form
from shardbook.engine.flat import Flat, Member
from shardbook.engine.guard import is_guarded
from shardbook.engine.hooks import is_taken
from shardbook.engine.layout import FlatLayout, lay_out
from shardbook.engine.partition import Part, partition
from shardbook.engine.policy import Policy, Types
from shardbook.engine.room import Group, Kept, check_room, need_of
from shardbook.engine.storage import Buffer, Storage, is_memory_known, make_fake_meta
from shardbook.engine.unit import Unit
from shardbook.errors import ConfigError, DivergenceError

_MAX_FLATS = 1 << 13


def check_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name.

    Raises:
        ConfigError: there is none; one is a DTensor, or is under another engine.
    """
    named = dict(model.named_parameters())
    if not named:
        raise ConfigError(f"model: {type(model).__name__} has no parameters; an engine needs at least one")
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    for name, parameter in named.items():
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ConfigError(
                f"model: parameter {name!r} is a DTensor; parameters that are already distributed are not supported: "
                f"build the engine on the plain model"
            )
        if parameter.layout != torch.strided or parameter.is_nested or parameter.is_quantized or parameter.is_complex():
            kind = "a complex" if parameter.is_complex() else f"a {str(parameter.layout).removeprefix('torch.')}"
            raise ConfigError(f"model: parameter {name!r} is {kind} tensor; dense real parameters are supported: convert it first")
    for path, module in model.named_modules():
        if is_taken(module) or any(parameter is not None and is_guarded(parameter) for parameter in module._parameters.values()):
            name = next((name for name in named if name.startswith(f"{path}." if path else "")), path)
            raise ConfigError(f"model: parameter {name!r} is already under another engine; build a model of its own for this one")
    return named


def build_units(
    context: Context,
    model: nn.Module,
    named: dict[str, nn.Parameter],
    policy: Policy,
    *,
    trains: bool,
    init: Callable[[nn.Module], None] | None,
    kept: Kept | None = None,
) -> list[Unit]:
    """Every unit, with its memory and its initial values; the root first. ``kept``: what the optimizer keeps of each element."""
    on_meta = [name for name, parameter in named.items() if parameter.device.type == "meta"]
    if on_meta and init is None and context.storage.device.type != "meta":
        raise ConfigError(
            f"model: parameter {on_meta[0]!r} is on the meta device and no init= was given; "
            f"pass init=, which initialises one unit's modules in place"
        )
    parts = partition(model, context.config.units)
    plan = [_group(part, policy, trains=trains) for part in parts]
    _check_same_model(plan, context.transport, context.storage)
    if context.homes.optimizer_away or context.homes.params_away:
        check_room(context, need_of(context, _shards(context, plan), kept))
    if context.disk is not None:
        _make_room(context, context.disk, [group for groups in plan for group in groups.items()])
    numbers = {id(parameter): number for number, parameter in enumerate(named.values())}
    around = {index for part in parts for index in part.ancestors}
    units: list[Unit] = []
    if not is_memory_known(torch.empty(0, device=context.storage.device)) and context.storage.device.type != "meta":
        for parameter in named.values():
            make_fake_meta(parameter)
    for index, (part, groups) in enumerate(zip(parts, plan, strict=True)):
        flats = [
            _make_flat(
                context,
                part.name,
                [_member(name, parameter, numbers[id(parameter)]) for name, parameter in members],
                types,
                trainable=trainable,
            )
            for (types, trainable), members in groups.items()
        ]
        sources = [context.storage.buffer(Account.WORKSPACE, part.name, flat.layout.numel, flat.types.source) for flat in flats]
        if any(parameter.device.type == "meta" for _, parameter in part.parameters) or (index == 0 and on_meta):
            for flat, source in zip(flats, sources, strict=True):
                _materialise(flat, source)
            if init is not None:
                _initialise(model, part, init, context.storage.device)
        for flat, source in zip(flats, sources, strict=True):
            _load(source, flat)
            _synchronise(source, flat, context.transport, context.config.init_sync)
            flat.adopt(source.tensor)
            source.give_back()
        units.append(Unit(context, index, part.name, part.modules, flats, part.ancestors))
        if index not in around:  # units around others stay until those have been initialised
            units[-1].release()
    for unit in units:
        unit.release()
    return units


def thaw(context: Context, unit: Unit, policy: Policy) -> list[Flat]:
    """Give the unit's frozen parameters that require a gradient now what a trained one has; returns the new flat buffers.

    The unit's parameters are here. All ranks do this together. The master begins from the type the frozen values had.
    """
    kept: list[Flat] = []
    fresh: list[Flat] = []
    regrouped = [(flat, _thawed(flat, policy)) for flat in unit.flats]
    if context.disk is not None:
        pairs = [(key, [(one.name, one.parameter) for one in members]) for _, groups in regrouped for key, members in groups.items()]
        _make_room(context, context.disk, [(key, named) for key, named in pairs if key[1]])
    for flat, groups in regrouped:
        if not any(thawed for _, thawed in groups):
            kept.append(flat)
            continue
        for (types, thawed), members in groups.items():
            made = _make_flat(context, unit.name, members, types, trainable=thawed)
            source = context.storage.buffer(Account.WORKSPACE, unit.name, made.layout.numel, types.param)
            _load(source, made)
            made.adopt(source.tensor)
            source.give_back()
            (fresh if thawed else kept).append(made)
        flat.give_back()
    unit.hold([*kept, *fresh])
    return fresh


def _thawed(flat: Flat, policy: Policy) -> dict[tuple[Types, bool], list[Member]]:
    """The parameters of a flat buffer by the types they have from now on, and whether they are trained from now on."""
    groups: dict[tuple[Types, bool], list[Member]] = {}
    for member in flat.members:
        thawed = not flat.trainable and member.parameter.requires_grad
        types = policy.types(member.name, member.parameter, trainable=True) if thawed else flat.types
        groups.setdefault((types, thawed), []).append(member)
    return groups


def _make_room(context: Context, disk: Disk, groups: Sequence[tuple[tuple[Types, bool], Sequence[tuple[str, nn.Parameter]]]]) -> None:
    """Take this rank's space for the flat buffers that will be made of these groups. All ranks have it, or all of them raise.

    Raises:
        ConfigError: some rank has no space, or can't write there.
    """
    parts: list[tuple[int, Form]] = []
    for (types, trainable), named in groups:
        numel = _layout(context, [(name, parameter.numel()) for name, parameter in named]).shard_numel
        if trainable and numel:
            master = types.master or types.param
            parts.append((numel, Form.of(master, [disk.kept(parameter, master) for _, parameter in named])))
    failure: ConfigError | None = None
    try:
        disk.make_room(parts)
    except ConfigError as error:
        failure = error
    if context.transport.num_ranks > 1:
        mine = torch.tensor([float(failure is not None)], dtype=torch.float64, device=context.storage.device)
        rows = context.transport.exchange(mine, "construction")
        failed = [rank for rank, (flag,) in enumerate(rows.tolist()) if flag] if is_memory_known(rows) else []
        if failed and failure is None:
            raise ConfigError(
                f"Offload.path = {str(context.config.offload.path)!r}: rank {failed[0]} can't keep its state there, and says why"
            )
    if failure is not None:
        raise failure


def _shards(context: Context, plan: Sequence[Mapping[tuple[Types, bool], Sequence[tuple[str, nn.Parameter]]]]) -> Iterator[Group]:
    """This rank's part of every flat buffer that will be made."""
    for groups in plan:
        for (types, trainable), named in groups.items():
            numel = _layout(context, [(name, parameter.numel()) for name, parameter in named]).shard_numel
            yield types, trainable, numel, [parameter for _, parameter in named]


def _layout(context: Context, sizes: Sequence[tuple[str, int]]) -> FlatLayout:
    return lay_out(sizes, context.transport.num_ranks, context.transport.header_numel)


def _make_flat(context: Context, unit: str, members: Sequence[Member], types: Types, *, trainable: bool) -> Flat:
    number = context.next_channel()
    if number >= _MAX_FLATS:
        raise ConfigError(f"ZeroConfig.units: more than {_MAX_FLATS} flat buffers can't be told apart in messages; choose larger units")
    layout = _layout(context, [(member.name, member.parameter.numel()) for member in members])
    return Flat(context, unit, number, members, layout, types, trainable=trainable)


def _member(name: str, parameter: nn.Parameter, number: int) -> Member:
    return Member(name, parameter, number, tuple(parameter.shape), _stride(parameter))


def _group(part: Part, policy: Policy, *, trains: bool) -> dict[tuple[Types, bool], list[tuple[str, nn.Parameter]]]:
    """The parameters of a unit by their types and whether they are trained: one flat buffer each."""
    groups: dict[tuple[Types, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in part.parameters:
        trainable = parameter.requires_grad and trains
        groups.setdefault((policy.types(name, parameter, trainable=trainable), trainable), []).append((name, parameter))
    return groups


def _check_same_model(plan: Sequence[Any], transport: Transport, storage: Storage) -> None:
    """All ranks must build the same units of the same parameters: compare digests before the first message of a unit."""
    lines = [
        f"{name} {tuple(parameter.shape)} {types} trainable={trainable}"
        for groups in plan
        for (types, trainable), members in groups.items()
        for name, parameter in members
    ]
    digests = [float(int.from_bytes(hashlib.blake2b(line.encode(), digest_size=6).digest(), "big")) for line in lines]
    mine = torch.tensor([float(len(lines)), *digests[:4096]], dtype=torch.float64, device=storage.device)
    if transport.num_ranks == 1 or not is_memory_known(mine):
        return
    lengths = transport.exchange(mine[:1], "construction").flatten().tolist()
    if len(set(lengths)) > 1:
        raise DivergenceError(f"the ranks built different models: numbers of parameters per rank are {[int(length) for length in lengths]}")
    rows = transport.exchange(mine, "construction").tolist()
    for index, line in enumerate(lines[:4096], start=1):
        different = [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
        if different:
            raise DivergenceError(
                f"the ranks built different models: rank {different[0]} differs from rank 0 at the parameter that is here {line}"
            )


def _load(source: Buffer, flat: Flat) -> None:
    """Copy the parameters' values, if they are not there already, into their slots; padding is zero."""
    for index, member in enumerate(flat.members):
        if member.parameter.untyped_storage()._cdata != source.tensor.untyped_storage()._cdata:
            flat.slot_view(source, index).copy_(member.parameter.detach())


def _synchronise(source: Buffer, flat: Flat, transport: Transport, how: str) -> None:
    """Make the initial values rank 0's, or check that they are."""
    if transport.num_ranks == 1 or how == "none":
        return
    if how == "rank0":
        transport.broadcast(source.tensor, flat.unit)
        return
    mine = source.tensor.clone()
    transport.broadcast(source.tensor, flat.unit)
    same = [torch.equal(flat.slot_view(source, index), mine.as_strided(member.shape, member.stride, slot.offset))
            for index, (member, slot) in enumerate(zip(flat.members, flat.layout.slots, strict=True))]  # fmt: skip
    first = float(same.index(False)) if False in same else -1.0
    for rank, (found,) in enumerate(
        transport.exchange(torch.tensor([first], dtype=torch.float64, device=source.tensor.device), flat.unit).tolist()
    ):
        if found >= 0:
            raise DivergenceError(
                f'init_sync="check": rank {rank} begins with other values than rank 0 in parameter {flat.members[int(found)].name!r}; '
                f'seed all ranks alike before the model is built, or use init_sync="rank0"'
            )


def _materialise(flat: Flat, source: Buffer) -> None:
    """Parameters that were built on the meta device become views of ``source``."""
    for member, slot in zip(flat.members, flat.layout.slots, strict=True):
        if member.parameter.device.type == "meta":
            source.place(member.parameter, slot.offset, member.shape, member.stride)
            _spoil(member.parameter)


def _initialise(model: nn.Module, part: Part, init: Callable[[nn.Module], None], device: torch.device) -> None:
    """Let ``init`` fill a unit whose parameters have just been given memory.

    ``init`` gets each module of the unit (of the root: each module that owns a parameter of the root). What that leaves untouched
    is tried again module by module, as an ``init`` written for single modules expects.
    """
    mine = {id(parameter) for _, parameter in part.parameters}
    modules = [module for root in part.modules for module in root.modules()]
    fresh = [
        named
        for module in modules
        if part.modules[0] is not model or _owns(module, mine) or not _has_parameters(module)
        for named in _fill_buffers(module, device)
    ]
    roots = part.modules if part.modules[0] is not model else [module for module in modules if _owns(module, mine)]
    with torch.no_grad(), _left_alone(modules, mine):
        for module in roots:
            init(module)
        for module in modules:
            if any(_is_spoilt(parameter) for parameter in module._parameters.values() if parameter is not None and id(parameter) in mine):
                init(module)
        for module, name in fresh:
            buffer = module._buffers[name]
            if buffer is not None and _is_spoilt(buffer):
                init(module)
    missing = [name for name, parameter in part.parameters if _is_spoilt(parameter)]
    missing += [name for module, name in fresh if (buffer := module._buffers[name]) is not None and _is_spoilt(buffer)]
    if missing:
        raise ConfigError(
            f"init: {missing[0]!r} of unit {part.name!r} was not initialised; "
            f"init(module) must fill every parameter and buffer of the module it gets, in place"
        )


@contextmanager
def _left_alone(modules: Sequence[nn.Module], mine: set[int]) -> Generator[None]:
    """Parameters that another unit owns, and has initialised, go through ``init`` on a copy."""
    guests = {id(parameter): parameter for module in modules for parameter in module._parameters.values() if parameter is not None}
    kept = [(guest, guest.data) for key, guest in guests.items() if key not in mine and guest.device.type != "meta"]
    for guest, values in kept:
        guest.data = values.clone()
    try:
        yield
    finally:
        for guest, values in kept:
            guest.data = values


def _owns(module: nn.Module, ids: set[int]) -> bool:
    return any(parameter is not None and id(parameter) in ids for parameter in module._parameters.values())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _fill_buffers(module: nn.Module, device: torch.device) -> list[tuple[nn.Module, str]]:
    """Give the module's own buffers memory."""
    found: list[tuple[nn.Module, str]] = []
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device.type == "meta" and device.type != "meta":
            module._buffers[name] = fresh = torch.zeros_like(buffer, device=device)
            _spoil(fresh)
            found.append((module, name))
    return found


def _spoil(tensor: Tensor) -> None:
    """Mark as untouched."""
    if tensor.is_floating_point() and is_memory_known(tensor):
        tensor.detach().fill_(float("nan"))


def _is_spoilt(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and is_memory_known(tensor) and bool(torch.isnan(tensor.detach()).all())


def _stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where its elements fill their memory without gaps, else those of a contiguous tensor."""
    expected = 1
    for length, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if length != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= length
    return tuple(parameter.stride())


def choose_device(named: dict[str, nn.Parameter], device: torch.device | None, group: Any) -> torch.device:
    """Where the engine keeps its memory: as asked; else where the parameters are; for a meta model, what the backend serves."""
    if device is not None:
        return torch.device(device)
    devices = {parameter.device for parameter in named.values() if parameter.device.type != "meta"}
    if len(devices) > 1:
        raise ConfigError(
            f"model: parameters are on several devices ({', '.join(sorted(map(str, devices)))}); move the model to one, or give device="
        )
    backend = None if group is None else dist.get_backend(group)
    if backend == "nccl" or (not devices and backend is None and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return devices.pop() if devices else torch.device("cpu")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers belong to each rank, on the device where it computes."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)
