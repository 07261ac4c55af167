"""Deliberate faults of the engine: what each gets wrong, where it is put in, and the test that must go red.

A fault replaces one function (or constant) of the engine inside the processes of the ranks, as if its author had got that one
thing wrong. ``wrong(original)`` gives the replacement. It counts how often it was called, so that a fault which no longer
touches anything is noticed, and one that only breaks the code's own shape (a wrong name, a missing argument) does not pass for found.
"""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CRASHES = ("AttributeError", "NameError", "TypeError", "ImportError", "KeyError", "IndexError")


@dataclass(frozen=True)
class Fault:
    """``place`` is module:attribute path below shardbook.engine. ``is_value``: ``wrong`` gives a value, not a function."""

    place: str
    wrong: Callable[[Any], Any]
    is_value: bool = False


def replacing(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A fault whose replacement is ``function(original, *args, **kwargs)``."""
    return lambda original: lambda *args, **kwargs: function(original, *args, **kwargs)


def rows_changed(change: Callable[[list[list[float]]], None]) -> Callable[[Any], Any]:
    """A fault in what the ranks told each other at the step: (loss, squares, mismatch, weight, first non-finite, ...) a rank."""

    def wrong(original: Any) -> Any:
        def add_up(rows: Any, *args: Any, **kwargs: Any) -> Any:
            copied = [list(row) for row in rows]
            change(copied)
            return original(copied, *args, **kwargs)

        return add_up

    return wrong


def drop_last(column: int) -> Callable[[list[list[float]]], None]:
    def change(rows: list[list[float]]) -> None:
        rows[-1][column] = 0.0

    return change


# ---- what each fault does ------------------------------------------------------------------------------------------------


def parts_backwards(original: Any, out: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
    return original(out, [part.clone() for part in reversed(parts)], *args, **kwargs)


def only_the_first_part(original: Any, out: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
    return original(out, parts[:1], *args, **kwargs)


def scale_twice(original: Any, flat: Any, scale: float, *args: Any) -> Any:
    return original(flat, scale * scale, *args)


def all_have_gradients(original: Any, flat: Any, scale: float, has_gradient: Any) -> Any:
    return original(flat, scale, [True for _ in has_gradient])


def rounded_before_the_master(original: Any, flat: Any, source: Any) -> Any:
    return original(flat, source.to(flat.types.param).to(source.dtype))


def nothing(original: Any, *args: Any, **kwargs: Any) -> Any:
    return None


def nothing_for_the_tied(original: Any, flat: Any, index: int, gradient: Any, *, add: bool) -> Any:
    if flat.members[index].name == "embedding.weight":
        gradient = gradient * 0.0
    return original(flat, index, gradient, add=add)


def never_added(original: Any, flat: Any, index: int, gradient: Any, *, add: bool) -> Any:
    return original(flat, index, gradient, add=False)


def landing_shifted(original: Any, transport: Any, kind: str, channel: Any, sends: Any, receives: Any) -> Any:
    """Where a gather of three ranks puts what comes from the other two: each in the other's place."""
    if kind == "gather" and len(receives) == 3:
        others = [index for index in range(3) if index != transport.rank]
        receives = list(receives)
        receives[others[0]], receives[others[1]] = receives[others[1]], receives[others[0]]
    return original(transport, kind, channel, sends, receives)


def clipped_before_unscaling(original: Any, raw_norm: float, weight: float, loss_scale: float, clip: float | None) -> Any:
    norm, factor, _ = original(raw_norm, weight, 1.0, clip)
    _, _, scale = original(raw_norm, weight * loss_scale, 1.0, None)
    return norm, factor, scale * factor


def mean_over_ranks(original: Any, *args: Any) -> Any:
    norm, factor, scale = original(*args)
    return norm, factor, scale / 2


def empty_counts(original: Any, tally: Any, loss: Any, weight: Any, *, empty: bool) -> Any:
    original(tally, loss, weight, empty=empty)
    if empty:
        tally.weight = tally.weight + 1.0


def state_from_the_start(original: Any, state: Any, piece: Any) -> Any:
    span = dataclasses.replace(piece.span, start=0, stop=piece.span.numel)
    return original(state, dataclasses.replace(piece, span=span))


def added_in_the_type_of_parameters(original: Any, policy: Any, name: str, parameter: Any, *, trainable: bool) -> Any:
    types = original(policy, name, parameter, trainable=trainable)
    return dataclasses.replace(types, reduce=types.param, grad=types.param)


def groups_swapped(original: Any, optimizer: Any, *args: Any) -> Any:
    original(optimizer, *args)
    first, second = optimizer._optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def one_rank_finds_it_finite(original: Any, totals: Any) -> Any:
    return True


def drop_one_refreshed_unit(original: Any, unit: Any) -> Any:
    if unit.index != 1:
        original(unit)


def decayed_when_skipped(original: Any, scale: Any, *, applied: bool) -> Any:
    return original(scale, applied=True)


def stays_open(original: Any, guard: Any) -> Any:
    return None


FAULTS: dict[str, Fault] = {
    "ranks are added in reverse order": Fault("numerics:add_in_order", replacing(parts_backwards)),
    "only one rank's gradient counts": Fault("numerics:add_in_order", replacing(only_the_first_part)),
    "a missing gradient adds 0.0": Fault("numerics:NOTHING", lambda original: 0.0, is_value=True),
    "a parameter without a gradient is stepped on": Fault("flat:Flat.scaled_gradients", replacing(all_have_gradients)),
    "shards are cut at multiples of 16": Fault("layout:ALIGNMENT", lambda original: 16, is_value=True),
    "one unit is not refreshed": Fault("unit:Unit.refresh", replacing(drop_one_refreshed_unit)),
    "the scale is applied twice": Fault("flat:Flat.scaled_gradients", replacing(scale_twice)),
    "gradients are averaged over ranks": Fault("step:scale_of", replacing(mean_over_ranks)),
    "masters are copied from rounded weights": Fault("flat:Flat.adopt", replacing(rounded_before_the_master)),
    "the tied gradient is dropped": Fault("flat:Flat.land", replacing(nothing_for_the_tied)),
    "a second micro-batch replaces the first": Fault("flat:Flat.land", replacing(never_added)),
    "the norm leaves out a rank": Fault("step:add_up", rows_changed(drop_last(1))),
    "the weight leaves out a rank": Fault("step:add_up", rows_changed(drop_last(3))),
    "the loss leaves out a rank": Fault("step:add_up", rows_changed(drop_last(0))),
    "shards land in each other's place": Fault("comm:PointToPoint._start", replacing(landing_shifted)),
    "clipping comes before unscaling": Fault("step:scale_of", replacing(clipped_before_unscaling)),
    "an empty micro-batch counts one": Fault("exchange:Tally.add", replacing(empty_counts)),
    "optimizer state is cut in the wrong place": Fault("optimizer:_cut_state", replacing(state_from_the_start)),
    "gradients are added in bf16": Fault("policy:Policy.types", replacing(added_in_the_type_of_parameters)),
    "pieces are in each other's group": Fault("optimizer:PieceOptimizer.__init__", replacing(groups_swapped)),
    "what is not finite is applied": Fault("exchange:Totals.is_finite", lambda original: property(lambda totals: True), is_value=True),
    "the loss scale does not notice an overflow": Fault("step:LossScale.update", replacing(decayed_when_skipped)),
    "version counters are not bumped": Fault("unit:Unit.changed", replacing(nothing)),
    "stage 2 adds micro-batches before ranks": Fault("residency:RESIDENCY", lambda rows: {**rows, 2: rows[1]}, is_value=True),
    "initial weights are not sent": Fault("build:_synchronise", replacing(nothing)),
    "sharded parameters stay readable": Fault("guard:Guard.close", replacing(stays_open)),
}


def under_fault(name: str, module: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str, Any]:
    """A job: another job with the fault in place. How often the fault was called, and the value or the error's class and text."""
    fault = FAULTS[name]
    path = fault.place.partition(":")
    holder: Any = importlib.import_module(f"shardbook.engine.{path[0]}")
    *parents, attribute = path[2].split(".")
    for parent in parents:
        holder = getattr(holder, parent)
    calls = 0
    wrong = fault.wrong(getattr(holder, attribute))

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return wrong(*args, **kwargs)

    setattr(holder, attribute, wrong if fault.is_value else counted)
    job: Any = importlib.import_module(module)
    for part in function.split("."):
        job = getattr(job, part)
    try:
        value = job(*args, **kwargs)
        return 1 if fault.is_value else calls, "", value
    except Exception as error:
        import traceback

        return 1 if fault.is_value else calls, type(error).__name__, "".join(traceback.format_exception(error))
