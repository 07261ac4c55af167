"""``global_batch = micro_batch * accumulate * ranks``: the number that is missing is derived, a contradiction shows all four."""

from dataclasses import dataclass

from shardbook.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """The four numbers of a step, which agree, and the names of those that were derived."""

    micro_batch: int
    accumulate: int
    ranks: int
    global_batch: int
    derived: tuple[str, ...]


def batch_numbers(
    *,
    ranks: int,
    micro_batch: int | None,
    accumulate: int | None,
    global_batch: int | None,
    usual_micro_batch: int,
    origins: dict[str, str],
) -> BatchNumbers:
    """Completes what was asked for; ``None`` is what nobody said.

    Without ``global_batch`` the others are multiplied. With it, ``accumulate`` is derived, or ``micro_batch`` where
    ``accumulate`` was given; where neither was, the largest micro-batch up to ``usual_micro_batch`` that fits.

    Args:
        ranks: number of ranks, always known.
        micro_batch: sequences in one forward of one rank.
        accumulate: micro-batches of one rank in a step.
        global_batch: sequences in a step over all ranks.
        usual_micro_batch: what ``micro_batch`` is where nobody cares.
        origins: where each number came from, for the message.

    Raises:
        ConfigError: the numbers contradict each other, or no whole number completes them; all are shown.

    >>> batch_numbers(ranks=2, micro_batch=4, accumulate=None, global_batch=32, usual_micro_batch=4, origins={}).accumulate
    4
    """
    if global_batch is None:
        micro, times = micro_batch or usual_micro_batch, accumulate or 1
        return BatchNumbers(micro_batch=micro, accumulate=times, ranks=ranks, global_batch=micro * times * ranks, derived=("global_batch",))
    per_rank, rest = divmod(global_batch, ranks)
    micro, times, derived = micro_batch, accumulate, ()
    if micro is None and times is None:
        micro, derived = _largest_divisor(per_rank, usual_micro_batch), ("micro_batch", "accumulate")
    if times is None and micro is not None:
        times, derived = per_rank // micro, derived or ("accumulate",)
    elif micro is None and times is not None:
        micro, derived = per_rank // times, ("micro_batch",)
    assert micro is not None
    assert times is not None
    if rest or micro * times != per_rank or not per_rank:
        given = {"micro_batch": micro_batch, "accumulate": accumulate, "ranks": ranks, "global_batch": global_batch}
        raise ConfigError(_contradiction(given, origins))
    return BatchNumbers(micro_batch=micro, accumulate=times, ranks=ranks, global_batch=global_batch, derived=derived)


def _contradiction(given: dict[str, int | None], origins: dict[str, str]) -> str:
    shown = {
        name: f"{name} not given" if value is None else f"{name} = {value}" + (f" ({origins[name]})" if name in origins else "")
        for name, value in given.items()
    }
    factors = [given[name] for name in ("micro_batch", "accumulate", "ranks")]
    product = 1
    for factor in factors:
        product *= factor or 1
    text = f"the batch numbers contradict each other: {shown['micro_batch']} * {shown['accumulate']} * {shown['ranks']}"
    if None in factors:
        above = -(-(given["global_batch"] or 1) // product) * product
        return f"{text} can't make {shown['global_batch']}; the nearest multiple of {product} from there up is global_batch = {above}"
    return f"{text} = {product}, but {shown['global_batch']}; give global_batch = {product}, or leave one of them out and it is derived"


def _largest_divisor(number: int, at_most: int) -> int:
    return next((n for n in range(min(number, at_most), 0, -1) if number % n == 0), 1)
