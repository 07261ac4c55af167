"""A file under direct I/O: what it is made of, what it refuses when it is made, and what it says when the disk fails."""

import errno
import fcntl
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardbook.errors import ConfigError, DiskError
from shardbook.tiers import direct, pages
from shardbook.tiers.direct import DirectFile, Extent
from shardbook.tiers.pages import PAGE_NBYTES, aligned_empty, bytes_of

SHARED_MEMORY = Path("/dev/shm")
FOLDERS = ["disk", pytest.param("memory", marks=pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm"))]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if getattr(request, "param", "disk") == "disk":
        yield tmp_path
        return
    made = SHARED_MEMORY / f"shardbook-test-{os.getpid()}"
    made.mkdir()
    yield made
    made.rmdir()  # fails where something was left in it


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    filled = aligned_empty(nbytes)
    return filled.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_what_is_written_is_read(folder: Path) -> None:
    file = DirectFile(folder, 1 << 20)
    parts = {offset: pattern(1 << 18, offset) for offset in (0, 1 << 18, 3 << 18)}
    for offset, part in parts.items():
        file.write(bytes_of(part), offset)
    for offset, part in parts.items():
        back = aligned_empty(1 << 18).zero_()
        file.read(bytes_of(back), offset)
        assert torch.equal(back, part)
    file.close()


def test_direct_where_the_file_system_has_it(folder: Path) -> None:
    file = DirectFile(folder, PAGE_NBYTES)
    flags = fcntl.fcntl(file._descriptor, fcntl.F_GETFL)
    assert bool(flags & os.O_DIRECT) == file.is_direct
    file.close()


def test_nothing_is_seen_in_the_folder_and_the_space_is_taken(folder: Path) -> None:
    file = DirectFile(folder, 10_000)
    assert file.nbytes == 12288
    assert list(folder.iterdir()) == []
    found = os.fstat(file._descriptor)
    assert (found.st_size, found.st_blocks * 512) == (12288, 12288)
    file.close()


def test_a_killed_process_leaves_nothing(folder: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from shardbook.tiers.direct import DirectFile\n"
        "file = DirectFile(Path(sys.argv[1]), 1 << 20); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -9
    assert list(folder.iterdir()) == []


def test_the_descriptor_ends_with_the_object(folder: Path) -> None:
    file = DirectFile(folder, PAGE_NBYTES)
    descriptor = file._descriptor
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_system_without_direct_io_is_said_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(direct, "_try_access", refuses)
    with caplog.at_level(logging.WARNING, "shardbook"):
        file = DirectFile(folder, PAGE_NBYTES)
    assert [record.message for record in caplog.records if "no direct I/O" in record.message and str(folder) in record.message]
    assert not file.is_direct
    assert not fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
    one, back = pattern(PAGE_NBYTES, 1), aligned_empty(PAGE_NBYTES)
    file.write(bytes_of(one), 0)
    file.read(bytes_of(back), 0)
    assert torch.equal(one, back)
    file.close()


def test_a_missing_folder_is_made_and_a_missing_parent_is_not(tmp_path: Path) -> None:
    DirectFile(tmp_path / "one", PAGE_NBYTES).close()
    assert (tmp_path / "one").is_dir()
    with pytest.raises(ConfigError, match=r"Offload\.path = '.*two/three': its parent is missing"):
        DirectFile(tmp_path / "two" / "three", PAGE_NBYTES)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        DirectFile(tmp_path / "file", PAGE_NBYTES)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(direct.os, "open", refuses)
    with pytest.raises(ConfigError, match=rf"nothing can be written there \({errno.errorcode[code]}: .*choose a folder"):
        DirectFile(tmp_path, PAGE_NBYTES)


def test_a_full_disk_is_known_when_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"needs 3\.00 GiB of \d+\.\d\d GiB free \(No space left on device\)"):
        DirectFile(tmp_path, 3 << 30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [PAGE_NBYTES, PAGE_NBYTES + 100, 5 * PAGE_NBYTES])
def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(direct.os, "pwritev", lambda d, b, o: pwritev(d, [b[0][: step // PAGE_NBYTES * PAGE_NBYTES]], o))

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return min(step, preadv(descriptor, buffers, offset))

    monkeypatch.setattr(direct.os, "preadv", short)
    file, whole, back = DirectFile(tmp_path, 64 << 10), pattern(64 << 10, 3), aligned_empty(64 << 10)
    file.write(bytes_of(whole), 0)
    file.read(bytes_of(back), 0)
    assert torch.equal(whole, back)
    file.close()


@pytest.mark.parametrize("moved", [0, 100])
def test_no_progress_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int) -> None:
    file = DirectFile(tmp_path, 64 << 10)
    monkeypatch.setattr(direct.os, "preadv", lambda *_: moved)
    with pytest.raises(DiskError, match=rf"reading 8,192 bytes at offset 4,096 returned {moved} bytes and no error") as found:
        file.read(bytes_of(aligned_empty(8192)), 4096)
    assert (found.value.errno, found.value.offset, found.value.nbytes) == (None, 4096, 8192)
    file.close()


def test_an_error_of_the_disk_names_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, pwritev = DirectFile(tmp_path, 64 << 10), os.pwritev

    def fails(descriptor: int, buffers: Any, offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwritev(descriptor, [buffers[0][:4096]], offset)

    monkeypatch.setattr(direct.os, "pwritev", fails)
    with pytest.raises(DiskError) as found:
        file.write(bytes_of(aligned_empty(8192).zero_()), 0)
    assert (found.value.path, found.value.offset, found.value.nbytes, found.value.errno) == (str(file.path), 4096, 4096, errno.EIO)
    assert f"{file.path}: writing 4,096 bytes at offset 4,096 returned EIO (Input/output error)" in str(found.value)
    assert "last checkpoint" in str(found.value)
    file.close()


@pytest.mark.parametrize("nbytes", [1, 4096, (4 << 20) - 1, 4 << 20, 5 << 20])
def test_aligned_memory(nbytes: int) -> None:
    made = aligned_empty(nbytes)
    assert made.numel() == nbytes
    assert made.data_ptr() % (pages.LARGE_PAGE_NBYTES if nbytes >= 4 << 20 else PAGE_NBYTES) == 0
    assert made.untyped_storage().nbytes() == nbytes + pages.slack_nbytes(nbytes)


def test_free_space_of_a_folder_to_be(tmp_path: Path) -> None:
    assert direct.free_nbytes(tmp_path / "not" / "there") > 0


@pytest.mark.parametrize(
    ("one", "other", "meets"), [((0, 4), (4, 4), False), ((0, 5), (4, 4), True), ((2, 1), (0, 4), True), ((4, 4), (0, 4), False)]
)
def test_extents_meet(one: tuple[int, int], other: tuple[int, int], meets: bool) -> None:
    assert Extent(*one).meets(Extent(*other)) == meets
