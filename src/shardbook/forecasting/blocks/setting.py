"""What every part of a block needs to know: sizes, style, and what the devices share."""

from dataclasses import dataclass
from typing import Literal

from shardbook.facts.architecture import Architecture
from shardbook.forecasting.blocks.style import Style


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One micro-batch on one device.

    Args:
        facts, style: the architecture, and whose code runs it.
        micro_batch, sequence: sequences, and tokens of each on this device (context-parallel devices have a part each).
        tensor: devices that share heads, feed-forward and vocabulary; with ``sequence_parallel`` the residual stream as well.
        expert: devices that share the experts.
        attention: ``"flash"``, ``"efficient"`` or ``"eager"``.
        loss: ``"full"``, ``"chunked"`` or ``"fused"``; ``loss_chunks`` pieces.
        on_cuda: CUDA's kernels rather than the CPU's.
    """

    facts: Architecture
    style: Style
    micro_batch: int
    sequence: int
    tensor: int = 1
    expert: int = 1
    sequence_parallel: bool = True
    attention: Literal["flash", "efficient", "eager"] = "flash"
    loss: Literal["full", "chunked", "fused"] = "full"
    loss_chunks: int = 8
    on_cuda: bool = False

    @property
    def rows(self) -> int:
        """Tokens on this device."""
        return self.micro_batch * self.sequence

    @property
    def stream_rows(self) -> int:
        """Tokens of the residual stream that lie here."""
        return -(-self.rows // self.tensor) if self.sequence_parallel else self.rows

    @property
    def shared_stream(self) -> int:
        """Devices that share the tokens of the residual stream."""
        return self.tensor if self.sequence_parallel else 1
