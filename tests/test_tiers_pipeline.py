"""Read-ahead, work and write-behind: every byte once, in order, and nothing hangs when a disk fails."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardbook.errors import DiskError, UsageError
from shardbook.tiers.direct import Extent
from shardbook.tiers.pages import PAGE_NBYTES, aligned_empty
from shardbook.tiers.pipeline import Pipeline

NUM = 8
EXTENTS = [Extent(index * PAGE_NBYTES, PAGE_NBYTES) for index in range(NUM)]


class Memory:
    """A file in memory that keeps a diary, fails where it is told to, and is slow on demand."""

    def __init__(self) -> None:
        self.content = bytearray(NUM * PAGE_NBYTES)
        self.diary: list[tuple[str, int]] = []
        self.fails: dict[tuple[str, int], BaseException] = {}
        self.slow: dict[str, float] = {}
        self.threads: set[str] = set()

    def _meet(self, kind: str, offset: int) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.slow.get(kind, 0))
        index = offset // PAGE_NBYTES
        if (kind, index) in self.fails:
            raise self.fails[kind, index]
        self.diary.append((kind, index))

    def read(self, into: memoryview, offset: int) -> None:
        self._meet("read", offset)
        into[:] = self.content[offset : offset + len(into)]

    def write(self, data: memoryview, offset: int) -> None:
        self._meet("write", offset)
        self.content[offset : offset + len(data)] = data

    def values(self) -> list[int]:
        return [self.content[index * PAGE_NBYTES] for index in range(NUM)]


def made(num_slots: int = 3) -> tuple[Memory, Pipeline]:
    file = Memory()
    return file, Pipeline(file, [aligned_empty(PAGE_NBYTES) for _ in range(num_slots)])


def failure(offset: int = 0) -> DiskError:
    return DiskError("the disk fails", path="x", offset=offset, nbytes=1, errno=5)


def add_one(pipeline: Pipeline, **how: bool) -> None:
    for slot in pipeline.run(EXTENTS, **how):
        slot.memory.add_(1)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's exception, or its result; fails where it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 20])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("slow", ["", "read", "write"])
def test_every_extent_is_read_worked_on_and_written(num_slots: int, started: bool, slow: str) -> None:
    file, pipeline = made(num_slots)
    file.slow = {slow: 0.001}
    for index in range(NUM):
        file.content[index * PAGE_NBYTES] = index
    for step in range(1, 4):
        if started:
            pipeline.start(EXTENTS)
        add_one(pipeline)
        pipeline.finish()
        assert file.values() == [index + step for index in range(NUM)]
    assert sorted(file.diary) == sorted((kind, index) for kind in ("read", "write") for index in range(NUM) for _ in range(3))
    assert file.threads == {"shardbook disk reads", "shardbook disk writes"}
    pipeline.close()


def test_a_write_ends_before_the_same_bytes_are_read() -> None:
    file, pipeline = made(num_slots=2 * NUM)  # so many that reads need not wait for a slot
    file.slow = {"write": 0.01}
    add_one(pipeline)
    pipeline.start(EXTENTS)  # while the first step's writes are under way
    add_one(pipeline)
    pipeline.finish()
    assert file.values() == [2] * NUM
    pipeline.close()


def test_reading_runs_ahead_of_the_work() -> None:
    file, pipeline = made()
    pipeline.start(EXTENTS)
    deadline = time.monotonic() + 10
    while len(file.diary) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert file.diary == [("read", 0), ("read", 1), ("read", 2)]
    add_one(pipeline)
    pipeline.finish()
    assert file.diary.count(("read", 0)) == 1
    assert file.values() == [1] * NUM
    pipeline.close()


def test_a_start_for_other_extents_is_given_up() -> None:
    file, pipeline = made()
    pipeline.start(EXTENTS)
    for slot in pipeline.run(EXTENTS[5:7]):
        slot.memory.fill_(9)
    pipeline.finish()
    assert file.values() == [0, 0, 0, 0, 0, 9, 9, 0]
    pipeline.close()


def test_what_somebody_else_has_changed_is_read_after_forget() -> None:
    file, pipeline = made()
    pipeline.start(EXTENTS)
    pipeline.forget()
    file.content[:] = bytes([5]) * len(file.content)
    add_one(pipeline)
    pipeline.finish()
    assert file.values() == [6] * NUM
    pipeline.close()


def test_reads_or_writes_alone() -> None:
    file, pipeline = made()
    add_one(pipeline, reads=False, writes=True)
    pipeline.finish()
    assert {kind for kind, _ in file.diary} == {"write"}
    file.diary.clear()
    add_one(pipeline, writes=False)
    assert file.diary == [("read", index) for index in range(NUM)]
    pipeline.close()


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("index", [0, 3, NUM - 1])
def test_an_error_is_raised_where_the_work_is_done(kind: str, index: int) -> None:
    file, pipeline = made()
    file.fails[kind, index] = failure(index)
    file.slow = {"write": 0.002}

    def step() -> None:
        add_one(pipeline)
        pipeline.finish()

    assert within(10, step) is file.fails[kind, index]
    worked = [number for one, number in file.diary if one == "write"]
    assert worked == [number for number in range(len(worked) + 1) if (kind, number) != ("write", index)][: len(worked)]
    assert within(10, lambda: pipeline.start(EXTENTS)) is file.fails[kind, index]
    assert within(10, pipeline.finish) is file.fails[kind, index]
    pipeline.close()


def test_the_other_writes_end_before_an_error_is_raised() -> None:
    file, pipeline = made(num_slots=4)
    file.fails["write", 0] = failure()
    file.slow = {"write": 0.03}
    error = within(10, lambda: add_one(pipeline))
    assert isinstance(error, DiskError)
    handed_back = len(file.diary)
    time.sleep(0.1)
    assert len(file.diary) == handed_back  # nothing is under way
    assert ("write", 1) in file.diary
    pipeline.close()


def test_an_exception_in_the_work_leaves_the_rest_as_it_was() -> None:
    file, pipeline = made()

    def step() -> None:
        for number, slot in enumerate(pipeline.run(EXTENTS)):
            slot.memory.add_(1)
            if number == 3:
                raise KeyError("mine")

    assert isinstance(within(10, step), KeyError)
    gc.collect()
    assert file.values() == [1, 1, 1, 0, 0, 0, 0, 0]
    add_one(pipeline)  # and it can go on
    pipeline.finish()
    assert file.values() == [2, 2, 2, 1, 1, 1, 1, 1]
    pipeline.close()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardbook disk")]


def test_threads_end_on_close_and_with_the_pipeline() -> None:
    before = len(alive())
    _, pipeline = made()
    assert len(alive()) == before + 2
    pipeline.close()
    assert len(alive()) == before
    with pytest.raises(UsageError, match="closed"):
        pipeline.start(EXTENTS)
    _, pipeline = made()
    pipeline.start(EXTENTS)
    del pipeline
    gc.collect()
    deadline = time.monotonic() + 10
    while len(alive()) > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(alive()) == before


def test_one_run_at_a_time() -> None:
    _, pipeline = made()
    running = pipeline.run(EXTENTS)
    next(running)
    with pytest.raises(UsageError, match="running already"):
        pipeline.start(EXTENTS)
    running.close()
    pipeline.close()


def test_memory_of_slots_is_the_callers() -> None:
    memories = [aligned_empty(PAGE_NBYTES) for _ in range(3)]
    pipeline = Pipeline(Memory(), memories)
    seen = {slot.memory.data_ptr() for slot in pipeline.run(EXTENTS, writes=False)}
    assert seen == {memory.data_ptr() for memory in memories}
    assert torch.equal(memories[0], torch.zeros(PAGE_NBYTES, dtype=torch.uint8))
    pipeline.close()
