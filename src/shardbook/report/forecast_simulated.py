"""What a simulation says beyond a forecast, as rows and sentences: the same for terminal and page."""

from collections.abc import Iterator, Sequence

from shardbook.document import Item
from shardbook.forecasting.result import NOT_A_PEAK, Forecast, Replayed, Simulated
from shardbook.report.forecast_figures import Scale, both
from shardbook.tables.reconciliation import in_order
from shardbook.tables.sizes import percent, place

NUM_ITEMS = 6
"""Storages of the peak that are listed; the JSON has more."""

WITNESS_HEADS = ("account", "closed form", "simulation", "difference")
ITEM_HEADS = ("", "what", "where", "shape", "type")
"""The first is bytes, whose unit the reader of the scale adds."""

Row = tuple[str, ...]


def witness_rows(simulated: Forecast, closed_form: Forecast, scale: Scale) -> Iterator[Row]:
    """Account by account, what both witnesses say of the peak; last the peak itself. Differences are the simulation's surplus."""
    names = in_order({**closed_form.accounts, **simulated.accounts})
    for name in names:
        ours, theirs = simulated.accounts.get(name, 0), closed_form.accounts.get(name, 0)
        if ours or theirs:
            yield name, scale.in_decimal(theirs), scale.in_decimal(ours), difference(ours - theirs)
    told = closed_form.peak_allocated, simulated.peak_allocated
    by = difference(told[1] - told[0]) + (f", {_signed_share(told[1] - told[0], told[0])}" if told[0] else "")
    yield "peak" if closed_form.is_peak else "in all", *(scale.in_decimal(one) for one in told), by


def witness_words(closed_form: Forecast) -> str:
    """What must be known of the comparison; "" where it is of like with like."""
    return "" if closed_form.is_peak else f"the closed form knows the persistent bytes of this model alone; {NOT_A_PEAK}"


def simulated_lines(forecast: Forecast, told: Simulated) -> Iterator[str]:
    """Whose code ran, what the first step takes beside the later ones, what ran at the peak, and the caching allocator."""
    yield f"simulated: {told.code}, as rank {told.rank} of {forecast.ranks:,}, in {told.seconds:.1f} s"
    yield f"first step: peak {both(told.first_peak)}; later steps: {both(told.later_peak)}{_more(told)}"
    if told.operator:
        yield f"at the peak ran {told.operator}, in {place(forecast.peak_phase, forecast.peak_where)}"
    if told.replayed is not None:
        yield replayed_line(told.replayed)
    yield from (f"assumed: {line}" for line in told.assumptions)


def replayed_line(replayed: Replayed) -> str:
    """What the caching allocator makes of it. What it is not validated against stands in the table of what comes on top."""
    settings = f" with {replayed.settings}" if replayed.settings else ""
    words = f"caching allocator{settings}, replayed: reserves {both(replayed.reserved)} for {both(replayed.allocated)} of tensors"
    return f"{words}; {replayed.fragmented:.1%} of it unused when most is reserved; not validated"


def item_rows(items: Sequence[Item], scale: Scale) -> Iterator[Row]:
    """The largest storages at the peak."""
    for item in sorted(items, key=lambda one: -one.nbytes)[:NUM_ITEMS]:
        yield scale.in_decimal(item.nbytes), f"{item.account}: {item.name}", _where(item), _shape(item.shape), item.dtype


def difference(nbytes: int) -> str:
    """Exact bytes with their sign.

    >>> difference(1024), difference(-5), difference(0)
    ('+1,024 B', '-5 B', 'none')
    """
    return f"{nbytes:+,} B" if nbytes else "none"


def _signed_share(part: int, whole: int) -> str:
    return ("-" if part < 0 else "+") + percent(abs(part), whole)


def _more(told: Simulated) -> str:
    beyond = told.first_peak - told.later_peak
    return f"; the first takes {both(beyond)} more" if beyond > 0 else f"; the first takes {both(-beyond)} less" if beyond else ""


def _where(item: Item) -> str:
    """The line of the model's code, which is in a function; a line in none is that of a script that started the command."""
    return item.unit if not item.site or item.site.endswith("<module>") else item.site


def _shape(shape: tuple[int, ...]) -> str:
    """Nothing for a buffer whose memory comes and goes, and whose tensor is made of nothing at first."""
    return "" if shape == (0,) else " × ".join(f"{length:,}" for length in shape)
