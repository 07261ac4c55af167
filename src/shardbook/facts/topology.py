"""Which memory a device is near to, and over which link: read from sysfs, with the standard library only.

Whatever the system does not show is None: a virtual machine often has no NUMA nodes of devices, and no links.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys")
_DISPLAY_CONTROLLERS = "0x03"
_ACCELERATORS = "0x12"
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node: processors that share a way to memory."""

    number: int
    cores: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An accelerator on PCI Express.

    Args:
        address: as the system has it, ``0000:3b:00.0``.
        maker: of the chip.
        node: the NUMA node that it is near to; None: the system does not say.
        width, speed: lanes and GT/s of the link as it is now (an idle device lowers its speed).
        most_width, most_speed: what both of its ends can do.
    """

    address: str
    maker: str
    node: int | None
    width: int | None
    speed: float | None
    most_width: int | None
    most_speed: float | None

    def describe(self) -> str:
        """In a line.

        >>> slot = Slot(address="0000:3b:00.0", maker="NVIDIA", node=0, width=8, speed=16.0, most_width=16, most_speed=16.0)
        >>> slot.describe()
        '0000:3b:00.0 NVIDIA: near NUMA node 0; link of 8 lanes of 16, PCIe 4 of 4'
        """
        near = "its NUMA node can't be seen" if self.node is None else f"near NUMA node {self.node}"
        if self.width is None or self.speed is None:
            return f"{self.address} {self.maker}: {near}; its link can't be seen"
        lanes = f"{self.width} lanes" + ("" if self.most_width is None else f" of {self.most_width}")
        speed = f"PCIe {generation(self.speed)}" + ("" if self.most_speed is None else f" of {generation(self.most_speed)}")
        return f"{self.address} {self.maker}: {near}; link of {lanes}, {speed}"


def generation(speed: float) -> int:
    """Of PCI Express, by the GT/s of a lane.

    >>> [generation(speed) for speed in (2.5, 5.0, 8.0, 16.0, 32.0)]
    [1, 2, 3, 4, 5]
    """
    return next((number for number, most in enumerate((2.5, 5.0, 8.0, 16.0, 32.0), start=1) if speed <= most), 6)


def nodes(root: Path = ROOT) -> tuple[Node, ...]:
    """NUMA nodes that have processors; none where the system does not show them."""
    found: list[Node] = []
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        cores = parse_cores(_text(folder / "cpulist") or "")
        if cores:
            found.append(Node(number=int(folder.name.removeprefix("node")), cores=cores))
    return tuple(sorted(found, key=lambda node: node.number))


def slots(root: Path = ROOT) -> tuple[Slot, ...]:
    """Accelerators on PCI Express, by their addresses."""
    return tuple(_slots(root))


def _slots(root: Path) -> Iterator[Slot]:
    base = root / "bus/pci/devices"
    for folder in sorted(base.iterdir()) if base.is_dir() else ():
        kind, maker = _text(folder / "class") or "", _text(folder / "vendor") or ""
        if maker in _MAKERS and kind.startswith((_DISPLAY_CONTROLLERS, _ACCELERATORS)):
            yield slot_of(folder.name, root)


def slot_of(address: str, root: Path = ROOT) -> Slot:
    """What is known of the device at a PCI address."""
    folder = root / "bus/pci/devices" / address.lower()
    node = _number(folder / "numa_node")
    return Slot(
        address=address.lower(),
        maker=_MAKERS.get(_text(folder / "vendor") or "", "unknown maker"),
        node=None if node is None or node < 0 else int(node),
        width=_whole(_number(folder / "current_link_width")),
        speed=_number(folder / "current_link_speed"),
        most_width=_whole(_number(folder / "max_link_width")),
        most_speed=_number(folder / "max_link_speed"),
    )


def parse_cores(text: str) -> frozenset[int]:
    """A list of processors as the system writes it.

    >>> sorted(parse_cores("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def near_cores(rank: int, num_ranks: int, found: tuple[Node, ...], node: int | None = None) -> frozenset[int]:
    """Processors of the node that a rank is to run on: the one that its device is near to, else nodes in turn, by blocks of ranks.

    Empty where there are fewer than two nodes: nothing is near or far.

    >>> two = (Node(number=0, cores=frozenset({0, 1})), Node(number=1, cores=frozenset({2, 3})))
    >>> [sorted(near_cores(rank, 4, two)) for rank in range(4)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    >>> sorted(near_cores(0, 4, two, node=1)), near_cores(0, 4, two[:1])
    ([2, 3], frozenset())
    """
    if len(found) < 2:
        return frozenset()
    for one in found:
        if one.number == node:
            return one.cores
    return found[rank * len(found) // num_ranks].cores


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _number(path: Path) -> float | None:
    """The number that a file begins with: ``16.0 GT/s PCIe``; None: there is none, or it is 0, which says unknown of a link."""
    words = (_text(path) or "").split()
    try:
        value = float(words[0]) if words else None
    except ValueError:
        return None
    return None if value == 0 and "link" in path.name else value


def _whole(value: float | None) -> int | None:
    """A width; 255 lanes say that the device does not know."""
    return None if value is None or not 0 < value < 255 else int(value)
