"""The figures of a forecast that several places show: terminal, pictures and JSON. No words are laid out here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardbook.accounts import Account
from shardbook.forecasting.result import Forecast
from shardbook.tables.reconciliation import in_order

ABOVE = "above the allocator"
"""The part of a stack that no account holds: contexts, communicators, what the caching allocator keeps."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of several settings beside each other. ``forecast`` is None where the setting is refused, and ``why`` says so."""

    label: str
    forecast: Forecast | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A decimal and a binary unit for one column each, with so many decimals that the largest figure has about four digits."""

    decimal: float
    decimal_unit: str
    binary: float
    binary_unit: str
    digits: int

    def in_decimal(self, nbytes: int) -> str:
        """Without the unit, which is the column's head."""
        return amount(nbytes / self.decimal, self.digits)

    def in_binary(self, nbytes: int) -> str:
        """Without the unit, which is the column's head."""
        return amount(nbytes / self.binary, self.digits)


def scale_for(largest: int) -> Scale:
    """GB and GiB, or MB and MiB where the largest figure is below a tenth of one.

    >>> scale = scale_for(120 * 10**9)
    >>> scale.decimal_unit, scale.in_decimal(1_875_000_000), scale_for(5 * 10**6).binary_unit
    ('GB', '1.9', 'MiB')
    """
    decimal, names, binary = (1e9, ("GB", "GiB"), 2.0**30) if largest >= 10**8 else (1e6, ("MB", "MiB"), 2.0**20)
    top = largest / decimal
    digits = 1 if top >= 100 else 2 if top >= 10 else 3
    return Scale(decimal=decimal, decimal_unit=names[0], binary=binary, binary_unit=names[1], digits=digits)


def amount(value: float, digits: int) -> str:
    """A figure with so many decimals, never 0 for something.

    >>> amount(0.04, 1), amount(0, 1), amount(1234.56, 1)
    ('<0.1', '0.0', '1,234.6')
    """
    least = 10.0**-digits
    return f"<{least:g}" if 0 < value < least / 2 else f"{value:,.{digits}f}"


def both(nbytes: int) -> str:
    """Bytes as the makers of devices and as their drivers count them.

    >>> both(112 * 10**9), both(760_000), both(0)
    ('112.0 GB (104.3 GiB)', '0.760 MB (0.725 MiB)', '0 B')
    """
    if not nbytes:
        return "0 B"
    scale = scale_for(abs(nbytes))
    scale = replace(scale, digits=1 if abs(nbytes) >= scale.decimal else 3)
    return f"{scale.in_decimal(nbytes)} {scale.decimal_unit} ({scale.in_binary(nbytes)} {scale.binary_unit})"


def gb_signed(nbytes: int) -> str:
    """In decimal units only; what is added has a minus.

    >>> gb_signed(14 * 10**9), gb_signed(-2 * 10**6)
    ('14.0 GB', '-2.0 MB')
    """
    words = both(abs(nbytes)).partition(" (")[0]
    return f"-{words}" if nbytes < 0 else words


def seconds_words(seconds: float) -> str:
    """With three digits that count.

    >>> seconds_words(0.01234), seconds_words(1.5), seconds_words(250)
    ('12.3 ms', '1.50 s', '250 s')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def device_memory(forecast: Forecast) -> int | None:
    """Bytes of the device that was asked about; None: none was."""
    found = forecast.inputs.get("device_memory")
    return found if isinstance(found, int) else None


def margin(forecast: Forecast) -> tuple[int, int] | None:
    """Bytes of the device that are left over, at least and at most; negative ones are missing. None: no device was asked about."""
    memory = device_memory(forecast)
    if memory is None:
        return None
    low, high = forecast.needed
    return memory - high, memory - low


def verdict(forecast: Forecast) -> str:
    """Whether the device that was asked about is large enough; "" without a device."""
    memory = device_memory(forecast)
    return "" if memory is None else forecast.fits(memory)


def held(forecast: Forecast) -> int:
    """Bytes of parameters, gradients, master and moments on this rank, whatever of them lives at the same time."""
    return sum(one.here for one in forecast.holdings) or forecast.persistent


def saved(forecast: Forecast) -> int:
    """Bytes of them that this rank need not hold because other ranks do, parameters that are cast when they are used among them.

    Padding can make a rank hold more than its share; that saves nothing.
    """
    return sum(max(0, one.total - one.here) for one in forecast.holdings) + _cast(forecast)


def _cast(forecast: Forecast) -> int:
    """Bytes of parameters that are in no holding, because at this stage they are the master, cast."""
    param, master = (forecast.convention.term(account) for account in (Account.PARAM, Account.MASTER))
    whole = sum(one.total for one in forecast.holdings if one.account == Account.MASTER)
    return round(whole / master.nbytes * param.nbytes) if param.is_cast(forecast.stage) and master.nbytes else 0


def stacked(forecast: Forecast) -> Mapping[str, int]:
    """Account to bytes at the peak in the order of every stack, and last what comes on top, by its lower bound."""
    parts = {account: forecast.accounts[account] for account in in_order(forecast.accounts) if forecast.accounts[account]}
    beyond = forecast.needed[0] - sum(parts.values())
    return {**parts, ABOVE: beyond} if beyond > 0 else parts


def partitions(forecast: Forecast, account: str) -> str:
    """How a persistent account lies on the ranks, in a word or two; "" for the others."""
    found = next((one for one in forecast.holdings if one.account == account), None)
    if found is None:
        return ""
    return f"over {found.partitions:,}" if found.partitions > 1 else "replicated"


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """Every field of a forecast, and what follows from them."""
    low, high = forecast.needed
    left = margin(forecast)
    return {
        **json.loads(forecast.to_json()),
        "is_peak": forecast.is_peak,
        "needed": [low, high],
        "device_memory": device_memory(forecast),
        "verdict": verdict(forecast) or None,
        "margin": None if left is None else list(left),
        "held": held(forecast),
        "saved": saved(forecast),
    }


def cases_json(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Settings beside each other; a refused one has its reason and no forecast."""
    return [
        {"setting": case.label, "forecast": None if case.forecast is None else forecast_json(case.forecast), "refused": case.why or None}
        for case in cases
    ]
