"""Copies between the device and the host's memory, each of them told to whoever observes.

Where the device is the host itself, a copy is a copy. On CUDA copies run on a stream of their own, beside the kernels: what goes up
is waited for by the stream that uses it, what comes down by the host before it reads it (:meth:`Link.settle`, once, at the step).
"""

from typing import Any

import torch
from torch import Tensor

from shardbook.accounts import Account
from shardbook.engine.journal import Journal
from shardbook.engine.storage import Buffer, Storage


class Link:
    """One per engine."""

    def __init__(self, storage: Storage, journal: Journal) -> None:
        self._storage, self._journal = storage, journal
        self._stream: Any = torch.cuda.Stream(storage.device) if storage.device.type == "cuda" else None
        self._staging: Buffer | None = None
        self._staged: Any = None  # event: the staging buffer has been read

    def up(self, target: Tensor, source: Tensor, unit: str) -> None:
        """Copy from the host to the device, cast to the target's type on the host: the narrower of the two travels."""
        self._journal.transfer("host to device", unit, target.numel() * target.element_size())
        if self._stream is None:
            target.copy_(source)
            return
        if source.dtype != target.dtype:
            source = self._cast(source, target.dtype)
        self._run(target, source)
        self._staged = torch.cuda.Event()
        self._staged.record(self._stream)
        torch.cuda.current_stream(self._storage.device).wait_stream(self._stream)

    def down(self, target: Tensor, source: Tensor, unit: str) -> None:
        """Copy from the device to the host, where it may be read after :meth:`settle`. Both have one type."""
        self._journal.transfer("device to host", unit, source.numel() * source.element_size())
        if self._stream is None:
            target.copy_(source)
            return
        self._run(target, source)
        # whatever takes the memory of ``source`` next is ordered behind the copy
        torch.cuda.current_stream(self._storage.device).wait_stream(self._stream)

    def settle(self) -> None:
        """Everything that came down is here."""
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self, target: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._storage.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def _cast(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in another type, in the one pinned buffer that is kept for it."""
        nbytes = source.numel() * dtype.itemsize
        if self._staged is not None:
            self._staged.synchronize()
        if self._staging is None or self._staging.nbytes < nbytes:
            if self._staging is not None:
                self._staging.give_back()
            self._staging = self._storage.away_buffer(Account.COMM, "root", nbytes, torch.uint8)
        return self._staging.tensor[:nbytes].view(dtype).copy_(source)
