"""Bytes, seconds and places as people read them. MiB and GiB are powers of 2, GB is 10^9 bytes."""

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_PHASES = {"between": "between phases", "before": "before the measurement"}


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one of it.

    >>> size(3 * 2**20), size(5 * 2**30), size(100), size(-2048)
    ('3.0 MiB', '5.00 GiB', '100 B', '-2.0 KiB')
    """
    amount = abs(nbytes)
    if amount >= _GIB:
        return f"{nbytes / _GIB:,.2f} GiB"
    if amount >= _MIB:
        return f"{nbytes / _MIB:,.1f} MiB"
    return f"{nbytes / _KIB:,.1f} KiB" if amount >= _KIB else f"{nbytes:,} B"


def device_size(nbytes: int) -> str:
    """Bytes where somebody compares with a device, whose maker counts in GB and whose driver in GiB.

    >>> device_size(8 * 2**30)
    '8.590 GB = 8.000 GiB'
    """
    return f"{nbytes / 1e9:,.3f} GB = {nbytes / _GIB:,.3f} GiB"


def exact_size(nbytes: int) -> str:
    """The number of bytes itself, and the rounded size where that says more.

    >>> exact_size(16 * 2**20), exact_size(12)
    ('16,777,216 bytes (16.0 MiB)', '12 bytes')
    """
    return f"{nbytes:,} bytes" + (f" ({size(nbytes)})" if abs(nbytes) >= _KIB else "")


def change(nbytes: int) -> str:
    """A difference of bytes, with its sign.

    >>> change(2**20), change(-512), change(0)
    ('+1.0 MiB', '-512 B', '0 B')
    """
    return f"+{size(nbytes)}" if nbytes > 0 else size(nbytes)


def duration(seconds: float) -> str:
    """Seconds, in milliseconds below one.

    >>> duration(0.0123), duration(2.5)
    ('12.30 ms', '2.500 s')
    """
    return f"{seconds:,.3f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:,.2f} ms"


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` in percent, with more digits where it is small, and never 0 for something; empty where there is no whole.

    >>> percent(1, 3), percent(1, 5000), percent(1, 10**9), percent(0, 7), percent(1, 0)
    ('33.3%', '0.020%', '<0.001%', '0.0%', '')
    """
    if not whole:
        return ""
    value = 100 * part / whole
    if 0 < value < 0.001:
        return "<0.001%"
    return f"{value:.3f}%" if 0 < abs(value) < 0.1 else f"{value:.1f}%"


def place(phase: str, unit: str, operator: str = "") -> str:
    """Where something happened, in words.

    >>> place("backward", "layers.3", "aten::mm"), place("step", ""), place("", "head"), place("", "")
    ('backward of layers.3, in aten::mm', 'step', 'head, outside of any phase', 'outside of any phase')
    """
    phase = _PHASES.get(phase, phase)
    words = " of ".join(part for part in (phase, unit) if part) if phase else ", ".join(filter(None, (unit, "outside of any phase")))
    return words + (f", in {operator}" if operator else "")
