"""What the ledger wrote of a simulated run, as a forecast: the same record that the closed form fills."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardbook.checks import DTYPE_NBYTES
from shardbook.forecasting import above, bottleneck
from shardbook.forecasting.conventions import ACCOUNTS, PRESETS, Convention
from shardbook.forecasting.result import Above, Forecast, PhasePeak, Simulated
from shardbook.ledger.heights import Height
from shardbook.simulation.asked import Asked
from shardbook.simulation.cuda_workspaces import held
from shardbook.simulation.observe import Observed
from shardbook.simulation.run import Model, Run

SOURCES = {
    "shardbook": "shardbook's engine on fake tensors",
    "fsdp2": "FSDP2's own code on fake tensors",
    "ddp": "DistributedDataParallel's own code on fake tensors",
}


def answer(asked: Asked, run: Run, model: Model) -> Forecast:
    """See the file's header. ``model`` is the whole one, of which ``run`` may have had a few blocks."""
    run = _with_libraries(asked, run)
    highest = _highest(run.later)
    accounts = {account: nbytes for account, nbytes in highest.books.items() if nbytes}
    convention = _convention(asked, run.optimizer)
    step = bottleneck.step_forward(_situation(asked, accounts, convention, highest.phase))
    dominant = bottleneck.dominant(accounts)
    beyond = _above(asked, run, accounts)
    slack = next((line for line in beyond if line.name == "reserved"), None)
    reserved = None if slack is None else (highest.allocated + slack.low, highest.allocated + slack.high)
    return Forecast(
        model=model.name,
        num_parameters=model.num_parameters,
        source=SOURCES[asked.engine],
        engine=asked.engine,
        ranks=asked.ranks,
        stage=asked.config.stage,
        convention=convention,
        accounts=accounts,
        persistent=sum(run.later.after["device"].get(account, 0) for account in ACCOUNTS),
        peak_allocated=highest.allocated,
        peak_reserved=reserved,
        peak_phase=highest.phase,
        peak_where=highest.unit,
        dominant=dominant,
        next_dominant=dominant if step is None else bottleneck.dominant(step.accounts_after),
        not_modelled=_not_modelled(asked),
        host=run.later.host,
        disk=run.later.after["disk"],
        between={tier: held for tier, found in run.later.after.items() if (held := _state(tier, found))},
        moved=run.moved,
        sent=run.sent,
        phases=(*_phases(run.later, first=False), *_phases(run.first, first=True)),
        above=beyond,
        step_forward=step,
        largest_tensor=model.largest_tensor,
        weights=model.num_parameters * DTYPE_NBYTES[asked.config.precision.param],
        state=convention.state(model.num_parameters, model.num_trainable),
        inputs=_inputs(asked),
        warnings=_warnings(run),
        witness="simulation",
        simulated=_simulated(asked, run),
    )


def _state(tier: str, found: Mapping[str, int]) -> dict[str, int]:
    """What an engine holds between steps, without what belongs to whoever trains."""
    return {account: nbytes for account, nbytes in found.items() if tier != "device" or account in ACCOUNTS}


def _convention(asked: Asked, optimizer: Any) -> Convention:
    precision = asked.config.precision
    if asked.engine == "shardbook":
        return Convention.of_precision(precision, optimizer)
    narrow = "fp32" if precision.param == "fp32" else "bf16" if asked.engine == "fsdp2" else "amp"
    name = f"{asked.engine}-{narrow}" if precision.has_master or narrow == "fp32" else f"{asked.engine}-pure-bf16"
    return PRESETS[name].with_optimizer(optimizer)


def _situation(asked: Asked, accounts: Mapping[str, int], convention: Convention, phase: str) -> bottleneck.Situation:
    return bottleneck.Situation(
        accounts=accounts,
        convention=convention,
        engine=asked.engine,
        stage=asked.config.stage,
        ranks=asked.ranks,
        phase=phase,
        ahead=asked.config.prefetch.ahead,
    )


def _highest(observed: Observed) -> Height:
    return max(observed.heights, key=lambda height: height.allocated)


def _phases(observed: Observed, *, first: bool) -> list[PhasePeak]:
    best: dict[str, Height] = {}
    for one in observed.heights:
        if one.phase not in best or one.allocated > best[one.phase].allocated:
            best[one.phase] = one
    return [
        PhasePeak(phase=one.phase, where=one.unit, accounts={name: nbytes for name, nbytes in one.books.items() if nbytes}, first=first)
        for one in best.values()
    ]


def _with_libraries(asked: Asked, run: Run) -> Run:
    """What a device's libraries take with their first use and keep is part of every instant."""
    if asked.device is None:
        return run
    kept = held(asked.device.name)

    def more(one: Height) -> Height:
        books = {**one.books, "WORKSPACE": one.books.get("WORKSPACE", 0) + kept}
        return replace(one, allocated=one.allocated + kept, books=books)

    def with_libraries(observed: Observed) -> Observed:
        return replace(observed, heights=tuple(map(more, observed.heights)))

    return replace(run, first=with_libraries(run.first), later=with_libraries(run.later))


def _above(asked: Asked, run: Run, accounts: Mapping[str, int]) -> tuple[Above, ...]:
    """Context and communicators as the closed form has them. What is reserved is at least what the replay says, and, as no GPU has held it
    yet, at most what the closed form allows for holes.
    """
    if asked.device is None:
        return ()
    around = above.Surroundings(
        device=asked.device.name,
        ranks=asked.ranks,
        groups=int(asked.ranks > 1),
        expandable=asked.settings.expandable_segments,
        settled=sum(nbytes for account, nbytes in accounts.items() if account in ACCOUNTS),
    )
    allocated = sum(accounts.values())
    lines = above.lines(allocated, around)
    if run.replayed is None:
        return lines
    low = max(0, run.replayed.reserved - allocated)
    return tuple(_held_against(line, low) if line.name == "reserved" else line for line in lines)


def _held_against(line: Above, replayed: int) -> Above:
    source = f"at least: a model of PyTorch's caching allocator, fed with this run (docs/allocator.md); at most: {line.source}"
    return replace(line, low=replayed, high=max(replayed, line.high), source=source)


def _simulated(asked: Asked, run: Run) -> Simulated:
    first, later = _highest(run.first), _highest(run.later)
    written = run.later.document.reconciliations[0]
    return Simulated(
        rank=asked.rank,
        code=SOURCES[asked.engine],
        first_peak=first.allocated,
        later_peak=later.allocated,
        first_accounts={account: nbytes for account, nbytes in first.books.items() if nbytes},
        operator=later.operator if later.inside else "",
        items=written.items,
        curve=next(iter(run.later.document.curves), None),
        assumptions=(*run.assumptions, *_extrapolation(run)),
        replayed=run.replayed,
        seconds=run.seconds,
        blocks=run.blocks,
    )


def _extrapolation(run: Run) -> tuple[str, ...]:
    if run.blocks is None:
        return ()
    told = (
        f"the model's repeated blocks are alike: {run.blocks} of them ran, and the rest follow on straight lines that were looked at"
        " (largest storages and curve are of the short model; blocks='all' runs everything)"
    )
    return (told,)


def _not_modelled(asked: Asked) -> tuple[str, ...]:
    if asked.device is None:
        return ("a device: what its kernels take and its caching allocator reserves; name one",)
    return (f"kernels of {asked.device.name} have not been validated on a GPU, nor has the model of its caching allocator",)


def _warnings(run: Run) -> tuple[str, ...]:
    first, later = (_highest(one).allocated for one in (run.first, run.later))
    if first > later:
        return (f"the first step takes most: {first:,} bytes, {first - later:,} more than those after it, whose peak is shown",)
    return ()


def _inputs(asked: Asked) -> dict[str, Any]:
    config, device = asked.config, asked.device
    told: dict[str, Any] = dict.fromkeys(("micro_batch", "sequence", "state", "activations", "temporary"))
    told |= {"tensor": 1, "context": 1, "expert": 1, "accumulate": config.accumulate, "recompute": config.recompute.policy}
    told |= {"precision": config.precision.param, "device": device and device.name, "device_memory": device and device.memory}
    return told
