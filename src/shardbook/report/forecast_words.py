"""A forecast in sentences."""

from collections.abc import Iterator

from shardbook.forecasting.conventions import ACCOUNTS
from shardbook.forecasting.result import NOT_A_PEAK, Forecast, PhasePeak
from shardbook.report.forecast_figures import both, device_memory, held, margin, saved, verdict
from shardbook.tables.reconciliation import in_order
from shardbook.tables.sizes import percent, place

_ENGINES = {"shardbook": "shardbook", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP", "megatron": "Megatron"}
_GIVEN = "given"
"""The phase of a peak that is made of a person's own figures."""

_DEGREES = ("tensor", "context", "expert")
_BUDGETS = ("state", "activations", "temporary")
_SHOWN = ("precision", "recompute", "accumulate", "optimizer", "attention", "loss")


def title(forecast: Forecast) -> str:
    """The model's name; "" where it is but its number of parameters."""
    return "" if forecast.model.endswith(" parameters") else forecast.model


def heading(forecast: Forecast) -> str:
    """What was asked about, and who trains it on how many ranks."""
    ranks = f"{forecast.ranks:,} rank" + ("s" if forecast.ranks > 1 else "")
    trainer = f"{_ENGINES.get(forecast.engine, forecast.engine)}, stage {forecast.stage}, {ranks}"
    return f"{forecast.num_parameters:,} parameters ({forecast.source}); {trainer}"


def phases_worth_saying(forecast: Forecast) -> list[PhasePeak]:
    """Highest first; the first step is left out where it is like the later ones."""
    later = {(phase.phase, phase.where): phase.nbytes for phase in forecast.phases if not phase.first}
    kept = [phase for phase in forecast.phases if not phase.first or later.get((phase.phase, phase.where)) != phase.nbytes]
    return sorted(kept, key=lambda phase: -phase.nbytes)


def setting_line(forecast: Forecast) -> str:
    """The rest of the question, as far as it was asked; "" where it was not."""
    asked = forecast.inputs
    facts = [f"{name}-parallel {asked[name]}" for name in _DEGREES if asked.get(name, 1) not in (None, 1)]
    if asked.get("micro_batch") and asked.get("sequence"):
        facts.append(f"micro-batch {asked['micro_batch']:,} of {asked['sequence']:,} tokens")
    facts += [f"{name} {asked[name]}" for name in _SHOWN if asked.get(name) not in (None, "", "none", 1)]
    facts += [f"{name} given: {both(asked[name])}" for name in _BUDGETS if asked.get(name)]
    return ", ".join(facts)


def size_lines(forecast: Forecast) -> Iterator[str]:
    """Weights beside training state, and the largest things that are never cut in two."""
    yield f"weights alone {gb(forecast.weights)}; training state {both(forecast.state)}"
    largest = (("unit", forecast.largest_unit), ("tensor", forecast.largest_tensor))
    found = [f"largest {kind}: {named[0]}, {named[1]:,} elements" for kind, named in largest if named is not None]
    yield "; ".join(found) or "largest unit and tensor: not known of a parameter count"


def peak_line(forecast: Forecast) -> str:
    """When the peak is; or that this is none."""
    if not forecast.is_peak:
        return f"persistent: {both(forecast.persistent)}; {NOT_A_PEAK}"
    where = "by the figures that were given" if forecast.peak_phase == _GIVEN else f"in {place(forecast.peak_phase, forecast.peak_where)}"
    return f"peak: {both(forecast.peak_allocated)} {where}; between steps {both(forecast.persistent)}"


def phase_words(phase: PhasePeak) -> str:
    """Which phase, in which unit, and whether of the first step."""
    return place(phase.phase, phase.where) + (", first step" if phase.first else "")


def needed_line(forecast: Forecast) -> str:
    """What the run needs of a device."""
    low, high = forecast.needed
    return f"needs {both(low)}" if low == high else f"needs {both(low)} to {both(high)}"


def verdict_line(forecast: Forecast) -> str:
    """Needed bytes against the device that was asked about, with the margin; "" without a device."""
    memory, left = device_memory(forecast), margin(forecast)
    if memory is None or left is None:
        return needed_line(forecast) if forecast.above else ""
    device = forecast.inputs.get("device") or "the device"
    words = f"{verdict(forecast)}: {needed_line(forecast)} of {device}'s {both(memory)}; {_margin_words(*left)}"
    return words if forecast.is_peak else f"{words}; {NOT_A_PEAK}"


def _margin_words(least: int, most: int) -> str:
    if least >= 0:
        return f"at least {both(least)} left"
    if most < 0:
        return f"at least {both(-most)} missing"
    return f"between {both(-least)} missing and {both(most)} left"


def bottleneck_lines(forecast: Forecast) -> Iterator[str]:
    """The account that dominates now, the lever on it, and the account that dominates then."""
    nbytes = forecast.accounts.get(forecast.dominant, 0)
    yield f"largest now: {forecast.dominant}, {both(nbytes)}, {percent(nbytes, forecast.peak_allocated)}"
    step = forecast.step_forward
    if step is None and forecast.simulated is not None and forecast.dominant not in ACCOUNTS:
        return  # a run shows what is held, not what would free it
    if step is None:
        yield f"nothing is left to turn on {forecast.dominant}"
        return
    after = step.accounts_after.get(forecast.next_dominant, 0)
    yield f"next lever: {step.lever}; frees {both(step.freed)} of {step.account}"
    yield f"largest then: {forecast.next_dominant}, {both(after)}, {percent(after, sum(step.accounts_after.values()))}"


def traffic_line(forecast: Forecast) -> str:
    """Bytes sent beside bytes saved, where it is known what the ranks would hold otherwise."""
    if not forecast.holdings:
        return f"sent per rank and step: {both(forecast.sent)}"
    return (
        f"sent per rank and step: {both(forecast.sent)}; saved by partitioning: {both(saved(forecast))} of"
        f" {both(saved(forecast) + held(forecast))}"
    )


def left_out_line(words: str) -> str:
    """A thing that is left out, said to be so once.

    >>> left_out_line("kernels of others"), left_out_line("activations not modelled: give --activations")
    ('not modelled: kernels of others', 'not modelled: activations: give --activations')
    """
    return f"not modelled: {words.replace(' not modelled', '', 1)}"


def gb(nbytes: int) -> str:
    """Bytes in decimal units only.

    >>> gb(14 * 10**9)
    '14.0 GB'
    """
    return both(nbytes).partition(" (")[0]


def tier_lines(forecast: Forecast) -> Iterator[str]:
    """Of a forecast or a simulation, a sentence for each."""
    for where, accounts in (("in host memory", forecast.host), ("on disk", forecast.disk)):
        for account in in_order(accounts):
            yield f"{where}: {account} {both(accounts[account])}"
        if len(accounts) > 1:
            yield f"{where}, together: {both(sum(accounts.values()))} on each rank"
    for link, nbytes in forecast.moved.items():
        yield f"moved {link}: {both(nbytes)} in a step of each rank"
