"""Tensors of several blocks, which threads check, read and round piece by piece: nothing is lost at the seams."""

import shutil
from pathlib import Path

import pytest
import torch

import shardbook as sb
from shardbook.checkpoint.verify import faults
from shardbook.checkpoint.write import BLOCK_NBYTES
from tests import ranks

WIDTH = 1500
NUMEL = WIDTH * WIDTH + 7
assert NUMEL * 4 > 2 * BLOCK_NBYTES


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.long = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
        self.register_buffer("table", torch.randn(NUMEL, generator=generator))

    def forward(self) -> torch.Tensor:
        return (self.long * self.table).sum()


def engine_of(stage: int, param: str, seed: int) -> sb.Engine:
    model = Model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param=param)))


def job(folder: Path) -> list[tuple[bool, bool, bool]]:
    """Save after a step in fp32; whether parameter, momentum and module buffer are right where they are loaded."""
    engine = engine_of(3, "fp32", 0)
    engine.backward(engine())
    engine.step()
    expected = Model(0)
    with torch.no_grad():
        expected.long -= expected.table
    engine.save(folder / "c")
    engine.close()
    found = []
    for stage, param in ((0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")):
        engine = engine_of(stage, param, 1)
        engine.load(folder / "c")
        assert engine.optimizer is not None
        (piece,) = engine._units[0].flats[0].pieces
        momentum = engine.optimizer.state[piece.parameter]["momentum_buffer"]
        values = engine.state_dict() or expected.state_dict()  # rank 0 has them
        found.append(
            (
                torch.equal(values["long"], expected.long.detach().to(values["long"].dtype)),
                torch.equal(momentum, expected.table[piece.span.start : piece.span.stop]),
                torch.equal(engine.model.table, expected.table),
            )
        )
        engine.close()
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[bool, bool, bool]]]]:
    folder = tmp_path_factory.mktemp("blocks")
    return folder / "c", ranks.call(2, job, folder)


@pytest.mark.ranks
def test_every_element_arrives(loaded: tuple[Path, list[list[tuple[bool, bool, bool]]]]):
    path, found = loaded
    assert found == [[(True, True, True)] * 4] * 2
    assert list(faults(path)) == []


@pytest.mark.ranks
def test_the_block_that_is_damaged_is_named(loaded: tuple[Path, list[list[tuple[bool, bool, bool]]]], tmp_path: Path):
    folder = shutil.copytree(loaded[0], tmp_path / "c")
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)
    (fault,) = faults(folder)
    assert "is damaged near byte" in fault
    near = int(fault.split("near byte ")[1].split(":")[0])
    assert near <= place < near + BLOCK_NBYTES
