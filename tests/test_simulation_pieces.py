"""Pieces of a simulation, each by itself: its memory, what collectives send, the allocator's replay, and what is told of them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import shardbook as sb
from shardbook.cli import simulate as command
from shardbook.engine.guard import Guard
from shardbook.errors import ConfigError
from shardbook.forecasting import above
from shardbook.forecasting.conventions import ACCOUNTS
from shardbook.ledger.allocator import Change, storage_of
from shardbook.ledger.memory import REAL
from shardbook.replay.settings import Settings
from shardbook.simulation import asked
from shardbook.simulation.caching import NUM_POINTS, events, replayed
from shardbook.simulation.group import fake_group
from shardbook.simulation.memory import FakeMemory
from shardbook.simulation.sent import sent_nbytes

CPU = torch.device("cpu")
MIB = 2**20

# ---- memory ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    mode = FakeTensorMode()
    with mode, FakeMemory(mode, lambda operator, *_: 100 if operator.__name__ == "mm.default" else 0) as found:
        yield found


def told(memory):
    return [change.nbytes for change in memory.trace]


def test_a_storage_is_told_once_and_when_it_dies(memory):
    x = torch.ones(10)
    view = x.view(2, 5)
    assert told(memory) == [40]
    del x
    assert told(memory) == [40]
    del view
    assert told(memory) == [40, -40]


def test_a_storage_that_is_emptied_and_filled_again_is_told_each_time(memory):
    storage = torch.ones(10).untyped_storage()
    storage.resize_(0)
    storage.resize_(0)
    storage.resize_(40)
    assert told(memory) == [40, -40, 40]
    storage.resize_(80)
    assert told(memory)[3:] == [-40, 80]
    assert len({change.address for change in memory.trace}) == 1


def test_what_a_kernel_takes_inside_comes_and_goes_behind_its_result(memory):
    x = torch.ones(2, 2)
    y = x @ x
    assert told(memory) == [16, 16, 100, -100]
    assert memory.storage_of(y).nbytes() == 16


def test_changes_are_those_since_the_start_and_the_trace_has_all(memory):
    before = torch.ones(3)
    records = memory.records(CPU)
    records.start()
    x = torch.ones(4)
    assert [(change.address, change.nbytes) for change in records.stop()] == [(memory.address_of(memory.storage_of(x)), 16)]
    assert records.stop() == []
    assert told(memory) == [12, 16]
    del before


def test_live_is_what_has_memory_now(memory):
    kept, emptied, gone = torch.ones(3), torch.ones(4), torch.ones(5)
    emptied.untyped_storage().resize_(0)
    del gone
    storage = kept.untyped_storage()
    assert {address: found[1].nbytes() for address, found in memory.live(CPU).items()} == {memory.address_of(storage): 12}


def test_tensors_of_another_mode_and_real_ones_have_no_memory_here(memory):
    with FakeTensorMode():
        other = torch.ones(3)
    assert memory.storage_of(other) is None
    with unset_fake_temporarily():
        assert memory.storage_of(torch.ones(3)) is None
    assert memory.storage_of(torch.ones(3)).nbytes() == 12


def test_while_shapes_alone_are_wanted_nothing_is_told():
    mode, shapes_only = FakeTensorMode(), [False]
    with mode, FakeMemory(mode, lambda *_: 0, lambda: shapes_only[0]) as memory:
        first = torch.ones(1)
        shapes_only[0] = True
        shape = torch.ones(2)
        assert memory.storage_of(first) is None
        shapes_only[0] = False
        last = torch.ones(3)
    assert told(memory) == [4, 12]
    assert (shape.shape, last.shape) == ((2,), (3,))


def test_real_memory_answers_the_same_questions():
    x = torch.ones(10)
    storage = REAL.storage_of(x)
    assert REAL.address_of(storage) == x.data_ptr()
    assert REAL.live(CPU)[x.data_ptr()][1].nbytes() == 40
    with FakeTensorMode():
        assert REAL.storage_of(torch.ones(3)) is None


# ---- sent --------------------------------------------------------------------------------------------------------------------


class Operator:
    def __init__(self, name):
        self.__name__ = name


@pytest.mark.parametrize(
    ("name", "arguments", "nbytes"),
    [
        ("_allgather_base_.default", (torch.empty(80), torch.empty(20)), 320 * 3 // 4),
        ("_reduce_scatter_base_.default", (torch.empty(20), torch.empty(80)), 320 * 3 // 4),
        ("allgather_.default", ([[torch.empty(20)] * 4], [torch.empty(20)]), 320 * 3 // 4),
        ("reduce_scatter_.default", ([torch.empty(20)], [[torch.empty(20)] * 4]), 320 * 3 // 4),
        ("alltoall_base_.default", (torch.empty(80), torch.empty(80, dtype=torch.bfloat16)), 160 * 3 // 4),
        ("allreduce_.default", ([torch.empty(80), torch.empty(8)],), 2 * 352 * 3 // 4),
        ("barrier.default", (torch.empty(80),), 0),
    ],
)
def test_a_rank_sends_its_share_of_the_whole_buffer(name, arguments, nbytes):
    assert sent_nbytes(Operator(name), arguments, 4) == nbytes
    assert sent_nbytes(Operator(name), arguments, 1) == 0


def test_a_group_of_one_is_made_only_for_who_needs_it():
    with fake_group(1, 0):
        assert not torch.distributed.is_initialized()
    with fake_group(1, 0, alone_needs_one=True):
        assert torch.distributed.get_world_size() == 1
    assert not torch.distributed.is_initialized()


# ---- the caching allocator ---------------------------------------------------------------------------------------------------

CHANGES = [Change(10, 7, 3 * MIB), Change(20, 8, 18 * MIB), Change(30, 7, -3 * MIB), Change(40, 7, 1000), Change(50, 8, -18 * MIB)]


def test_changes_become_an_allocators_events_behind_what_libraries_keep():
    found = list(events(CHANGES, held=64))
    assert [(one.kind, one.id, one.nbytes) for one in found[1:]] == [
        ("alloc", 7, 3 * MIB), ("alloc", 8, 18 * MIB), ("free", 7, 0), ("alloc", 7, 1000), ("free", 8, 0),
    ]  # fmt: skip
    assert (found[0].kind, found[0].nbytes, found[0].label) == ("alloc", 64, "workspaces of libraries")
    assert len(list(events(CHANGES, held=0))) == 5


def test_reserved_and_its_unused_share_when_most_is_reserved():
    """3 MiB take a segment of 20, 18 MiB one of their own; then 1,000 bytes a small one of 2, while the 3 are free."""
    found = replayed(CHANGES, 0, Settings(), "as given")
    assert (found.settings, found.reserved, found.allocated) == ("as given", 40 * MIB, 21 * MIB)
    assert found.fragmented == pytest.approx(1 - (18 * MIB + 1024) / (40 * MIB))
    assert [(allocated, reserved) for _, allocated, reserved in found.series] == [
        (3 * MIB, 20 * MIB), (21 * MIB, 38 * MIB), (18 * MIB, 38 * MIB), (18 * MIB + 1024, 40 * MIB), (1024, 40 * MIB),
    ]  # fmt: skip


def test_a_long_series_keeps_its_highest_points():
    pairs = [(Change(2 * n, 1, MIB * (2 if n != 700 else 50)), Change(2 * n + 1, 1, -1)) for n in range(1000)]
    found = replayed([change for pair in pairs for change in pair], 0, Settings(), "")
    assert len(found.series) == NUM_POINTS
    assert max(reserved for _, _, reserved in found.series) == found.reserved
    assert [place for place, *_ in found.series] == sorted(place for place, *_ in found.series)
    assert all(0 <= place < 1 for place, *_ in found.series)


# ---- what is asked, and what is told ------------------------------------------------------------------------------------------


def simulate(build_model=lambda: nn.Linear(64, 64), **options):
    how = {"ranks": 2, "optimizer": torch.optim.AdamW, "loss": lambda out: (out.sum(), 4)}
    return sb.simulate(build_model, lambda: torch.ones(4, 64), sb.ZeroConfig(), **{**how, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "fsdp"}, 'engine = .fsdp.: allowed is "shardbook", "fsdp2" or "ddp"; the nearest is "fsdp2"'),
        ({"blocks": "some"}, 'blocks = .some.: allowed is "auto" or "all"'),
        ({"allocator": "expandable_segments:True"}, "a CPU has no caching allocator; give device= as well"),
        ({"device": "h100-80gb", "allocator": "expandable_segment:True"}, "expandable_segment"),
    ],
)
def test_an_argument_outside_what_is_allowed_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        simulate(**options)


def test_a_configuration_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"config = 3: allowed is a ZeroConfig"):
        sb.simulate(lambda: nn.Linear(2, 2), lambda: torch.ones(1, 2), 3, ranks=1, optimizer=torch.optim.AdamW)


def test_the_command_knows_the_same_engines():
    assert command.ENGINES == asked.ENGINES


def test_what_is_not_modelled_is_said_with_and_without_a_device():
    plain, on_device = simulate(), simulate(device="a100-40gb")
    assert plain.not_modelled == ("a device: what its kernels take and its caching allocator reserves; name one",)
    assert "a100-40gb have not been validated on a GPU" in on_device.not_modelled[0]
    assert (plain.simulated.replayed, plain.peak_reserved, plain.above) == (None, None, ())


def test_on_a_device_libraries_are_held_throughout_and_reserved_is_the_replays():
    plain, on_device = simulate(), simulate(device="a100-40gb")
    kept = 2 * 8_519_680  # cuBLAS's
    assert on_device.accounts["WORKSPACE"] - plain.accounts.get("WORKSPACE", 0) == kept
    assert on_device.peak_allocated == sum(on_device.accounts.values()) == plain.peak_allocated + kept
    replay = on_device.simulated.replayed
    assert on_device.peak_reserved == (replay.reserved, replay.reserved)
    assert kept < replay.allocated <= replay.reserved
    assert len(replay.series) <= NUM_POINTS


class Warming(nn.Linear):
    """Takes more in its first forward than in others, as kernels that are chosen by trying them do."""

    def forward(self, x):
        if not hasattr(self, "is_warm"):
            self.is_warm = True
            torch.empty(8 * MIB, dtype=torch.uint8)
        return super().forward(x)


def test_a_first_step_that_takes_most_is_warned_of():
    usual, warming = simulate(), simulate(lambda: Warming(64, 64))
    assert usual.warnings == ()
    first, later = warming.simulated.first_peak, warming.simulated.later_peak
    assert first > 8 * MIB > later == warming.peak_allocated == usual.peak_allocated
    (warning,) = warming.warnings
    assert warning.startswith(f"the first step takes most: {first:,} bytes, {first - later:,} more")


class Nobody:
    def completes(self, name):
        return False


def test_a_guarded_fake_is_no_memory_of_a_real_measurement():
    """Something may hold the model of a simulation that failed while a real one is measured."""
    nobody = Nobody()
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(4))
        guard = Guard("unit", [("weight", parameter, True)], nobody.completes)
        guard.close()
        assert type(parameter).__name__ == "ShardedParameter"
        assert storage_of(parameter) is None
        guard.open()
        assert storage_of(parameter) is None


@pytest.mark.full
def test_reserved_is_at_least_the_replay_and_at_most_what_holes_may_take():
    """No GPU has held the replay: what the closed form allows for holes stays the upper end."""

    def told(allocator):
        return sb.simulate(
            lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))),
            lambda: (torch.zeros(4096, 1024),),
            sb.ZeroConfig(stage=0),
            ranks=1,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
            loss=lambda output: (output.sum(), 4096),
            device="h100-80gb",
            allocator=allocator,
        )

    for allocator in (None, "expandable_segments:True"):
        found = told(allocator)
        low, high = found.peak_reserved
        line = next(line for line in found.above if line.name == "reserved")
        assert low == max(found.peak_allocated, found.simulated.replayed.reserved) == found.peak_allocated + line.low
        assert high == found.peak_allocated + line.high
        assert not line.validated
        closed = above.reserved(
            found.peak_allocated, above.Surroundings(device="h100-80gb", expandable=allocator is not None, settled=settled_of(found))
        )
        assert high == max(low, closed[1])
    found = told(None)
    assert found.peak_reserved[0] < found.peak_reserved[1]


def settled_of(found):
    return sum(nbytes for account, nbytes in found.accounts.items() if account in ACCOUNTS)
