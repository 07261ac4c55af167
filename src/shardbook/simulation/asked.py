"""What a simulation is asked, checked; by itself, as everything else reads it."""

from dataclasses import dataclass
from typing import Any

from shardbook.checks import listed, nearest
from shardbook.config import ZeroConfig
from shardbook.errors import ConfigError
from shardbook.facts.hardware import Device
from shardbook.facts.hardware import device as find_device
from shardbook.replay.settings import Settings
from shardbook.simulation.group import check_group

ENGINES = ("shardbook", "fsdp2", "ddp")
BLOCKS = ("auto", "all")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Who trains, where. ``allocator``: settings of a device's caching allocator as they were given; "" for torch's defaults.

    Raises:
        ConfigError: a field outside what is allowed.
        UsageError: this process is in a process group already.
    """

    config: ZeroConfig
    engine: str
    ranks: int
    rank: int
    device: Device | None
    allocator: str
    settings: Settings
    blocks: str

    @property
    def may_extrapolate(self) -> bool:
        """DDP's buckets are shared by blocks, and a caching allocator has to see every request."""
        return self.blocks == "auto" and self.engine != "ddp" and self.device is None

    @classmethod
    def of(cls, *, config: Any, engine: str, ranks: int, rank: int, device: str | None, allocator: Any, blocks: str) -> "Asked":
        """From what a person says."""
        check_group(ranks, rank)
        if not isinstance(config, ZeroConfig):
            raise ConfigError(f"config = {config!r}: allowed is a ZeroConfig; ZeroConfig() is stage 3 in fp32")
        if engine not in ENGINES:
            raise ConfigError(f"engine = {engine!r}: allowed is {listed(ENGINES)}; {nearest(engine, ENGINES)}")
        if blocks not in BLOCKS:
            raise ConfigError(f"blocks = {blocks!r}: allowed is {listed(BLOCKS)}; {nearest(blocks, BLOCKS)}")
        if not isinstance(allocator, (str, type(None))):
            raise ConfigError(f"allocator = {allocator!r}: allowed is text as in PYTORCH_CUDA_ALLOC_CONF; expandable_segments:True, say")
        if allocator is not None and device is None:
            raise ConfigError(f"allocator = {allocator!r}: a CPU has no caching allocator; give device= as well")
        found = None if device is None else find_device(device)
        return cls(
            config=config,
            engine=engine,
            ranks=ranks,
            rank=rank,
            device=found,
            allocator=allocator or "",
            settings=Settings.parse(allocator or ""),
            blocks=blocks,
        )
