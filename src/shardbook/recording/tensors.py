"""Full tensors of a record: one safetensors file for each complete step and rank, beside the rank's file."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from shardbook.recording.fragments import Fragment


class TensorFiles:
    """Adds the phases of a step to its file. Names are ``phase/start/parameter``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def write(self, step: int, phase: str, parts: list[Fragment]) -> None:
        path = path_of(self._folder, self._rank, step, phase)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".part")
        save_file({f"{part.start}/{part.name}": part.tensor.detach().cpu().clone() for part in parts}, partial)
        partial.replace(path)


def path_of(folder: Path, rank: int, step: int, phase: str) -> Path:
    return folder / "tensors" / f"step-{step:06d}-{phase}-rank-{rank:05d}.safetensors"


def read(folder: Path, rank: int, step: int, phase: str) -> dict[tuple[str, int], Tensor]:
    """(parameter, first element) -> flat values, of one rank; empty where the phase was not recorded."""
    path = path_of(folder, rank, step, phase)
    if not path.exists():
        return {}
    found: dict[tuple[str, int], Tensor] = {}
    for name, tensor in load_file(path).items():
        start, _, parameter = name.partition("/")
        found[parameter, int(start)] = tensor
    return found
