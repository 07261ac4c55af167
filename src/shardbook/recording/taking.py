"""Takes the fingerprints of lists of fragments, with a plan kept for each geometry that has come up."""

from collections.abc import Iterable
from typing import Any, Literal

import torch

from shardbook.recording.fingerprint import Extent, Plan, Prints, norms
from shardbook.recording.fragments import Fragment
from shardbook.recording.writer import Rows, Table

Detail = Literal["norm", "brief", "complete"]


class Taker:
    """One for a run."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def rows(self, phase: str, parts: list[Fragment], detail: Detail) -> Rows:
        """One row per part, those of one type and device together."""
        kinds = sorted({(part.tensor.dtype, part.tensor.device) for part in parts}, key=str)
        table: list[tuple[str, int, int, str]] = []
        prints: list[Prints] = []
        for dtype, device in kinds:
            own = [part for part in parts if part.tensor.dtype == dtype and part.tensor.device == device]
            rows = tuple((part.name, part.start, part.tensor.numel(), type_name(dtype)) for part in own)
            tensors = [part.tensor for part in own]
            prints.append(norms(tensors) if detail == "norm" else self._plan(rows, dtype, device).prints(tensors, brief=detail == "brief"))
            table += rows
        return Rows(phase, tuple(table), prints)

    def _plan(self, rows: Table, dtype: torch.dtype, device: torch.device) -> Plan:
        if (rows, device) not in self._plans:
            self._plans[rows, device] = Plan([Extent(start, numel) for _, start, numel, _ in rows], dtype, device)
        return self._plans[rows, device]


def type_name(dtype: torch.dtype) -> str:
    """As records name types.

    >>> type_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def state_of(parts: Iterable[Fragment]) -> dict[str, tuple[int, int, int]]:
    """Address and version of each: the same again where nothing was written in between."""
    return {f"{part.name} {part.start}": (part.tensor.data_ptr(), part.tensor._version, part.version) for part in parts}
