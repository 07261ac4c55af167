"""Tensors of several blocks, which threads check, read and round piece by piece: nothing is lost at the seams."""

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import shardbook as sb
from shardbook.accounts import Account
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


@dataclass(frozen=True)
class Refused:
    """A load into an engine without optimizer state that failed, while the error is still held; in bytes."""

    message: str
    has_state: bool
    moments: int
    peak: int
    left: int


def refused_job(folder: Path) -> Refused:
    engine = engine_of(3, "fp32", 1)
    assert engine.optimizer is not None
    table = engine.model.table.clone()
    before = tensors_nbytes()
    with sb.measure(engine) as run, run.step():
        with pytest.raises(sb.CheckpointError) as caught:
            engine.load(folder)
        after = tensors_nbytes()
    assert torch.equal(engine.model.table, table)
    peak = run.document().peak["MOMENT"]
    found = Refused(str(caught.value), bool(engine.optimizer.state), engine._journal.live(Account.MOMENT), int(peak), after - before)
    engine.close()
    return found


def tensors_nbytes() -> int:
    """Of all storages that a tensor of this process refers to."""
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def once_job(folder: Path) -> tuple[list[int], int, bool]:
    """Bytes read by a load into an engine without optimizer state and by another one after it, bytes booked, and whether both are equal."""
    engine = engine_of(3, "fp32", 1)
    assert engine.optimizer is not None
    (piece,) = engine._units[0].flats[0].pieces
    counts, values = [], []
    for _ in range(2):
        before = bytes_read()
        engine.load(folder)
        counts.append(bytes_read() - before)
        values.append(engine.optimizer.state[piece.parameter]["momentum_buffer"].clone())
    booked = engine._journal.live(Account.MOMENT)
    engine.close()
    expected = Model(0).table[piece.span.start : piece.span.stop]
    return counts, booked - 4 * expected.numel(), all(torch.equal(value, expected) for value in values)


def bytes_read() -> int:
    """By this process, from files and the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.ranks
def test_a_late_damage_leaves_no_state(loaded: tuple[Path, list[list[tuple[bool, bool, bool]]]], tmp_path: Path):
    """Only rank 1 reads the damaged block; rank 0, for which all is well, gives its memory back too, while the error is still held."""
    folder = shutil.copytree(loaded[0], tmp_path / "c")
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    for found in ranks.call(2, refused_job, folder):
        assert "momentum_buffer of 'long' is damaged" in found.message
        assert not found.has_state
        assert found.moments == 0
        assert found.peak >= NUMEL // 2 * 4  # it was on the books while it was there
        assert found.left < 1 << 16  # what the ranks told each other


@pytest.mark.ranks
def test_what_is_fresh_is_read_once(loaded: tuple[Path, list[list[tuple[bool, bool, bool]]]]):
    for (fresh, again), unbooked, is_equal in ranks.call(2, once_job, loaded[0]):
        assert is_equal
        assert unbooked == 0
        assert abs(again - fresh - NUMEL // 2 * 4) < 1 << 18  # the momentum of half the elements


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks_cut_blocks_elsewhere(loaded: tuple[Path, list[list[tuple[bool, bool, bool]]]], num_ranks: int):
    for (fresh, _), unbooked, is_equal in ranks.call(num_ranks, once_job, loaded[0]):
        assert is_equal
        assert unbooked == 0
        assert fresh > 0
