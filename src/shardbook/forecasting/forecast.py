"""``sb.forecast``: how many bytes each rank holds, before the first one is allocated.

    question      what is asked, checked
    state         persistent accounts: shardbook's own to the byte, other engines' by their convention
    peak          a walk through a step with sizes, where architecture and batch are known
    above, sent   what comes on top of the allocator, and what travels
    bottleneck    the largest account, what would shrink it, and the largest then

>>> told = forecast(7e9, ranks=1, convention="2+2+4+8")
>>> told.persistent, told.is_peak
(112000000000, False)
>>> forecast(7.5e9, ZeroConfig(stage=1), ranks=64, convention="2+2+4+8").persistent
31406250000
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.config import ZeroConfig
from shardbook.facts.machine import Machine
from shardbook.forecasting import above, bottleneck
from shardbook.forecasting.advice import advise
from shardbook.forecasting.choices import Choices
from shardbook.forecasting.conventions import ACCOUNTS, Convention
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.forecasting.peak import Peak, peak_of
from shardbook.forecasting.question import Question, ask
from shardbook.forecasting.result import Forecast
from shardbook.forecasting.sent import sent_of
from shardbook.forecasting.state import State, state_of
from shardbook.forecasting.words import explain, not_modelled, warnings_of

TRANSIENT = (Account.GATHERED, Account.GRAD_FULL, Account.COMM, Account.WORKSPACE, Account.BUFFER, Account.INPUT)
"""What ``temporary=`` replaces."""


def forecast(model: Any, config: ZeroConfig | None = None, *, ranks: int, micro_batch: int | None = None, sequence: int | None = None,
             convention: Convention | str | None = None, engine: str = "shardbook", device: str | None = None,
             tensor: int = 1, context: int = 1, expert: int = 1,
             state: int | None = None, activations: int | None = None, temporary: int | None = None,
             choices: Choices | None = None, knobs: Knobs | None = None,
             budget: int | None = None, machine: Machine | None = None) -> Forecast:  # fmt: skip
    """Bytes on the rank that holds most, by account, at the peak of a step.

    Args:
        model: a catalog name, the path of a ``config.json``, a number of parameters, facts, or a module (also on the meta device).
        config: stage, types, prefetch, recomputation, offload, accumulation; None: the engine's highest stage in fp32.
        ranks: all devices.
        micro_batch: sequences in a micro-batch on one data-parallel rank; without it only state is known.
        sequence: tokens in each of them.
        convention: bytes per parameter in each account, by name or as ``"2+2+4+8"``; None: the engine's own for ``config.precision``.
        engine: ``"shardbook"``, ``"deepspeed"``, ``"fsdp2"``, ``"ddp"`` or ``"megatron"``.
        device: a name of the catalog of devices, or a size such as ``"24GiB"``; decides what stands above the allocator and which
            kernels run. None: the CPU's kernels, as measured runs and simulations have them.
        tensor: devices that share heads, feed-forward and vocabulary.
        context: devices that share a sequence.
        expert: devices that share the experts.
        state: bytes that replace what would be forecast for the persistent accounts.
        activations: bytes that replace ACTIVATION.
        temporary: bytes that replace the rest.
        choices: optimizer, kernels, loss, adapters, and other details.
        knobs: DeepSpeed's settings; None: its defaults at ``config.stage``.
        budget: most bytes of live tensors on the device, which decides the advice before ``device`` does.
        machine: what a machine was measured to do (``shardbook doctor --calibrate``); with it the step is timed, and what recomputation
            and offload would cost, for shardbook's own engine with an architecture and a batch.

    Raises:
        ConfigError: something that is not allowed, in one line with the remedy.

    >>> told = forecast("gpt2", ZeroConfig(stage=3), ranks=8, micro_batch=4, sequence=1024)
    >>> told.peak_phase, told.dominant, told.fits(24 * 2**30)
    ('backward', 'ACTIVATION', 'fits')
    """
    question = ask(
        model, config, engine=engine, convention=convention, device=device, choices=choices, knobs=knobs, ranks=ranks,
        micro_batch=micro_batch, sequence=sequence, tensor=tensor, context=context, expert=expert,
        state=state, activations=activations, temporary=temporary, budget=budget, machine=machine,
    )  # fmt: skip
    return answer(question)


def answer(question: Question) -> Forecast:
    """The forecast to a checked question, timed where there is a calibration."""
    found, machine = _answer(question), question.machine
    if machine is None:
        return found
    told = advise(question, machine, _answer)
    return found if told is None else replace(found, advice=told, step_seconds=told.way(told.asked).seconds)


def _answer(question: Question) -> Forecast:
    """Bytes alone."""
    held = state_of(question)
    peak = _with_budgets(question, held, peak_of(question, held))
    accounts = {account: nbytes for account, nbytes in peak.accounts.items() if nbytes}
    allocated = sum(accounts.values())
    around = _surroundings(question, accounts)
    lines = above.lines(allocated, around) if question.device is not None else ()
    reserved = None
    if question.device is not None and peak.is_peak:
        reserved = above.reserved(allocated, around, peak.pooled)
    step = bottleneck.step_forward(_situation(question, held, accounts, peak))
    facts = question.facts
    unit, tensor = facts.largest_unit, facts.largest_tensor
    dominant = bottleneck.dominant(accounts)
    return Forecast(
        model=facts.name,
        num_parameters=facts.num_parameters,
        source=facts.source,
        engine=question.engine,
        ranks=question.ranks,
        stage=question.config.stage,
        convention=held.convention,
        accounts=accounts,
        persistent=held.between_steps if question.state is None else question.state,
        peak_allocated=allocated,
        peak_phase=peak.phase,
        dominant=dominant,
        next_dominant=dominant if step is None else bottleneck.dominant(step.accounts_after),
        peak_reserved=reserved,
        peak_where=peak.where,
        not_modelled=not_modelled(question, peak),
        host=peak.host,
        disk=held.between.get("disk", {}),
        between=held.between,
        moved=_moved(question, held, peak),
        sent=sent_of(question),
        holdings=held.holdings,
        phases=peak.phases,
        above=lines,
        step_forward=step,
        terms=explain(question, held, peak, accounts),
        largest_unit=None if unit is None else (unit.name, unit.numel),
        largest_tensor=None if tensor is None else (tensor.name, tensor.numel),
        weights=_weights(question, held.convention),
        state=held.convention.state(facts.num_parameters, facts.num_trainable),
        inputs=_inputs(question),
        warnings=(*facts.notes, *warnings_of(question, held.convention)),
    )


def _moved(question: Question, held: State, peak: Peak) -> Mapping[str, int]:
    """Link to bytes: of states, and of inputs that recomputed blocks keep on the host."""
    rested = peak.rested * question.config.accumulate
    if not rested:
        return held.moved
    return {**held.moved, **{link: held.moved.get(link, 0) + rested for link in ("device to host", "host to device")}}


def _with_budgets(question: Question, held: State, peak: Peak) -> Peak:
    """A person's own figures in place of what was forecast."""
    accounts = dict(peak.accounts)
    if question.state is not None:
        accounts = {account: nbytes for account, nbytes in accounts.items() if account not in ACCOUNTS}
        split = bottleneck.split_state(question.state, held.convention, question.config.stage, question.shards)
        accounts.update(split)
    if question.activations is not None:
        accounts[Account.ACTIVATION] = question.activations
    if question.temporary is not None:
        accounts = {account: nbytes for account, nbytes in accounts.items() if account not in TRANSIENT}
        accounts[Account.WORKSPACE] = question.temporary
    if accounts == peak.accounts:
        return peak
    phase = peak.phase or ("given" if question.activations is not None else "")
    return replace(peak, accounts={str(account): nbytes for account, nbytes in accounts.items()}, phase=phase, phases=())


def _situation(question: Question, held: State, accounts: Mapping[str, int], peak: Peak) -> bottleneck.Situation:
    config, choices, unit = question.config, question.choices, question.facts.largest_unit
    on = [
        *(["recompute"] if config.recompute.policy == "full" else []),
        *(["chunked-loss"] if choices.loss != "full" else []),
        *(["fused"] if choices.kernel == "fused" else []),
        *(["offload"] if config.offload.optimizer != "none" else []),
        *([] if choices.reshard else ["no-reshard"]),
    ]
    return bottleneck.Situation(
        accounts=accounts,
        convention=held.convention,
        engine=question.engine if question.convention is None else "convention",
        stage=config.stage,
        ranks=question.shards,
        phase=peak.phase,
        on=on,
        micro_batch=question.micro_batch,
        num_units=question.facts.architecture.layers if question.facts.architecture else 0,
        unit_nbytes=0 if unit is None else int(unit.numel * held.convention.term(Account.PARAM).nbytes),
        ahead=config.prefetch.ahead,
        loss=peak.loss,
    )


def _surroundings(question: Question, accounts: Mapping[str, int]) -> above.Surroundings:
    degrees = sum(degree > 1 for degree in (question.tensor, question.context, question.expert))
    return above.Surroundings(
        device="" if question.device is None else question.device.name,
        ranks=question.ranks,
        groups=degrees + (question.shards > 1),
        all_to_all=question.expert > 1,
        records_streams=False,
        settled=sum(nbytes for account, nbytes in accounts.items() if account in ACCOUNTS),
    )


def _weights(question: Question, convention: Convention) -> int:
    """Bytes of the parameters alone, in the type they compute in, as people compare them with a device."""
    told = question.convention is not None or question.knobs is not None
    width = convention.term(Account.PARAM).nbytes if told else DTYPE_NBYTES[question.config.precision.param]
    return int(question.facts.num_parameters * width)


def _inputs(question: Question) -> Mapping[str, Any]:
    config, device = question.config, question.device
    told: dict[str, Any] = {name: getattr(question, name) for name in ("micro_batch", "sequence", "tensor", "context", "expert")}
    precision = None if question.convention is not None else config.precision.param
    told |= {"accumulate": config.accumulate, "recompute": config.recompute.policy, "precision": precision}
    told |= {name: getattr(question, name) for name in ("state", "activations", "temporary", "budget")}
    told |= {"device": device and device.name, "device_memory": device and device.memory}
    return told
