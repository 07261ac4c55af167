"""Devices that models are trained on: what the driver gives torch, which is less than what is written on the box.

``memory`` is the least ``total_memory`` that torch has been seen to report, in out-of-memory messages ("has a total capacity of"),
so that what fits into it fits into every card of that name; it depends on driver, ECC and virtualisation. Bandwidths are the
makers' figures for one direction: nominal, and above what a collective reaches.

>>> device("h100-80gb").memory, device("24GiB").memory, round(device("h100-80gb").sold / 1e9)
(84965190533, 25769803776, 80)
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from shardbook.checks import SIZE_EXAMPLE, parse_nbytes
from shardbook.errors import ConfigError

GIB = 2**30
_SEEN = "total_memory in torch's out-of-memory messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as torch sees it: half a card where a card is two devices (MI250X).

    Args:
        name: as the catalog spells it.
        memory: bytes that torch reports, the least that has been seen.
        sold: bytes on the box, so many times 10^9; chips hold so many GiB, so that torch may report more.
        peers: bytes a second to other devices of the host, one direction (NVLink, Infinity Fabric); 0: over ``host``.
        host: bytes a second to the host, one direction (PCIe, or the chip's own link).
        source: where ``memory`` and the bandwidths are from.
        note: what a person should know.
    """

    name: str
    memory: int
    sold: int
    peers: float = 0.0
    host: float = 0.0
    source: str = ""
    note: str = ""


# name: least GiB seen, GB sold, GB/s to peers, GB/s to the host, link, what more is known of the memory.
_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0
_ROWS: Mapping[str, tuple[float, int, float, float, str, str]] = {
    "t4": (14.56, 16, 0, _PCIE3, "", "14.56 to 14.76 GiB; ECC takes a sixteenth"),
    "v100-16gb": (15.75, 16, 150, _PCIE3, "NVLink 2", "15.75 to 15.78 GiB"),
    "v100-32gb": (31.73, 32, 150, _PCIE3, "NVLink 2", "31.73 to 31.75 GiB"),
    "titan-rtx": (23.65, 24, 50, _PCIE3, "NVLink 2", ""),
    "rtx-3090": (23.56, 24, 56.25, _PCIE4, "NVLink bridge", "23.56 to 23.70 GiB; less where it drives a screen"),
    "rtx-4090": (23.52, 24, 0, _PCIE4, "", "23.52 to 23.68 GiB; less where it drives a screen"),
    "rtx-5090": (31.36, 32, 0, _PCIE5, "", "31.36 to 31.47 GiB; less where it drives a screen"),
    "rtx-pro-6000": (94.96, 96, 0, _PCIE5, "", "94.96 to 95.00 GiB"),
    "a10-24gb": (22.03, 24, 0, _PCIE4, "", "22.03 to 22.20 GiB; ECC takes a sixteenth"),
    "a30": (23.53, 24, 100, _PCIE4, "NVLink bridge", ""),
    "a40": (44.34, 48, 56.25, _PCIE4, "NVLink bridge", "44.34 to 44.56 GiB with ECC"),
    "a6000": (47.27, 48, 56.25, _PCIE4, "NVLink bridge", "47.27 to 47.54 GiB"),
    "l4": (22.03, 24, 0, _PCIE4, "", "22.03 to 22.17 GiB; ECC takes a sixteenth"),
    "l40s": (44.31, 48, 0, _PCIE4, "", "44.31 to 44.53 GiB; ECC takes a sixteenth"),
    "a100-40gb": (39.38, 40, 300, _PCIE4, "NVLink 3", "39.38 to 39.59 GiB"),
    "a100-80gb": (79.14, 80, 300, _PCIE4, "NVLink 3", "79.14 to 79.35 GiB"),
    "a800-80gb": (79.14, 80, 200, _PCIE4, "NVLink 3, eight links", "79.14 to 79.35 GiB, as the A100"),
    "h100-80gb": (79.13, 80, 450, _PCIE5, "NVLink 4", "79.1 to 79.65 GiB"),
    "h100-nvl": (93.0, 94, 300, _PCIE5, "NVLink 4 bridge", "93.0 to 93.1 GiB"),
    "h100-96gb": (94.5, 96, 450, _PCIE5, "NVLink 4", "94.5 to 95.0 GiB"),
    "h800-80gb": (79.13, 80, 200, _PCIE5, "NVLink 4, eight links", "79.1 to 79.65 GiB, as the H100"),
    "h20": (95.0, 96, 450, _PCIE5, "NVLink 4", "95.0 to 95.22 GiB"),
    "gh200-96gb": (94.5, 96, 450, 450, "NVLink 4, and NVLink-C2C to the host", "94.5 to 95.0 GiB"),
    "h200": (139.72, 141, 450, _PCIE5, "NVLink 4", "139.72 to 139.81 GiB"),
    "b200": (178.35, 192, 900, _PCIE5, "NVLink 5", "178.35 to 179 GiB; the driver shows 180 GB and more of the 192 GB of chips"),
    "gb200": (184.31, 192, 900, 450, "NVLink 5, and NVLink-C2C to the host", ""),
    "mi250x": (63.98, 64, 200, 36, "Infinity Fabric", "one of the card's two devices; 63.59 to 63.98 GiB"),
    "mi300x": (191.69, 192, 448, _PCIE5, "Infinity Fabric", "191.69 to 191.98 GiB"),
    "mi325x": (255.69, 256, 448, _PCIE5, "Infinity Fabric", "255.69 to 255.98 GiB"),
    "mi355x": (287.98, 288, 537.6, _PCIE5, "Infinity Fabric", ""),
}
_ALIASES: Mapping[str, str] = {
    "v100": "v100-16gb",
    "a100": "a100-40gb",
    "a10": "a10-24gb",
    "a10g": "a10-24gb",
    "a800": "a800-80gb",
    "h100": "h100-80gb",
    "h800": "h800-80gb",
    "h100-94gb": "h100-nvl",
    "gh200": "gh200-96gb",
    "rtx-a6000": "a6000",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}


def names() -> tuple[str, ...]:
    """Every device that is known by name, without aliases."""
    return tuple(_ROWS)


def device(name: str) -> Device:
    """A device by name (case, spaces, hyphens and underscores do not matter), or a plain size such as ``"24GiB"``.

    A name that is sold with several sizes stands for the smallest: ``"a100"`` is the one of 40 GB.

    Raises:
        ConfigError: neither; names the nearest.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f'device = {name!r}: allowed is the name of a device or a size such as "{SIZE_EXAMPLE}"; for example "h100-80gb"')
    known = _known().get(_plain(name))
    if known is not None:
        return known
    nbytes = parse_nbytes(name)
    if nbytes is None:
        raise ConfigError(f'device = {name!r}: allowed is the name of a device or a size such as "{SIZE_EXAMPLE}"; {_nearest(name)}')
    return Device(name=name.strip(), memory=nbytes, sold=nbytes, source="the size that was given")


def _nearest(name: str) -> str:
    plain = _plain(name)
    close = list(dict.fromkeys(_known()[key].name for key in get_close_matches(plain, list(_known()), n=4, cutoff=0.5)))
    close = close or [each for each in _ROWS if _plain(each)[:2] == plain[:2]][:4]
    return f"nearest: {', '.join(close)}" if close else f"known are {', '.join(list(_ROWS)[:8])} and {len(_ROWS) - 8} more"


@cache
def _known() -> Mapping[str, Device]:
    found = {_plain(each.name): each for each in _devices()}
    return found | {_plain(alias): found[_plain(name)] for alias, name in _ALIASES.items()}


def _devices() -> Iterator[Device]:
    for name, (gib, sold, peers, host, link, note) in _ROWS.items():
        links = f"makers' data sheets for {link or 'PCIe'}"
        yield Device(
            name=name,
            memory=int(gib * GIB),
            sold=sold * 10**9,
            peers=peers * 1e9,
            host=host * 1e9,
            source=f"{_SEEN}; {links}",
            note=note,
        )


def _plain(name: str) -> str:
    """``"NVIDIA H100 80GB"`` and ``"h100_80gb"`` are ``"h10080gb"``."""
    low = re.sub(r"[\s_\-]+", "", name.lower())
    return re.sub(r"^(nvidia|amd|geforce|tesla|instinct)+", "", low)
