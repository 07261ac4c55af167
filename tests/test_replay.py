"""A whole trace at once, the settings in torch's own words, snapshots, and what is refused."""

import os
import pickle
import re
import time

import pytest

from shardbook.errors import ConfigError
from shardbook.replay import Settings, compare, compare_snapshot, read_snapshot, recorded, replay, segments_after, snapshot_of
from shardbook.replay.trace import EMPTY_CACHE, Event, alloc, free
from tests.replay_samples import M, record

# 3 MiB: a segment of 20. 12 MiB: out of its rest of 17. 30 MiB: a segment of its own. The first two go back, and the cache is emptied
RUN = [alloc(1, 3 * M, label="weights"), alloc(2, 12 * M, time=5), alloc(3, 30 * M), free(1), free(2), EMPTY_CACHE]


def test_series_peak_and_map():
    result = replay(RUN)
    assert list(result.reserved) == [20 * M, 20 * M, 50 * M, 50 * M, 50 * M, 30 * M]
    assert list(result.allocated) == [3 * M, 15 * M, 45 * M, 42 * M, 30 * M, 30 * M]
    assert list(result.largest_free) == [17 * M, 5 * M, 5 * M, 5 * M, 20 * M, 0]
    assert (result.peak_reserved, result.peak_allocated, result.peak_active, result.peak_event) == (50 * M, 45 * M, 45 * M, 2)
    assert [[(block.id, block.nbytes) for block in one.blocks] for one in result.segments_at_peak] == [
        [(1, 3 * M), (2, 12 * M), (-1, 5 * M)],
        [(3, 30 * M)],
    ]
    assert list(result.times) == [0, 5, 0, 0, 0, 0]
    assert result.shortages == ()
    assert [(change.event, change.signed_nbytes) for change in result.changes] == [(0, 20 * M), (2, 30 * M), (5, -20 * M)]


def test_fragmentation():
    result = replay(RUN)
    # unused: 17/20, 5/20, 5/50, 8/50, 20/50, 0/30
    assert result.unused_shares == pytest.approx([0.85, 0.25, 0.1, 0.16, 0.4, 0.0])
    # after the free of 1, 3 and 5 MiB are free apart: 5 of 8 in one piece
    assert result.scattered_shares == pytest.approx([0, 0, 0, 1 - 5 / 8, 0, 0])


def test_a_shortage_is_filed_under_its_event_and_the_replay_goes_on():
    events = [alloc(1, 12 * M), alloc(2, 30 * M, label="activations"), free(2), alloc(3, 12 * M), free(1)]
    result = replay(events, Settings(capacity=32 * M))
    [short] = result.shortages
    assert (short.event, short.label, short.wanted, short.device_free, short.free) == (1, "activations", 30 * M, 20 * M, 0)
    assert list(result.reserved) == [12 * M, 12 * M, 12 * M, 24 * M, 24 * M]
    assert (result.stats["num_ooms"], result.stats["num_alloc_retries"]) == (1, 1)


def test_stats_have_torchs_names():
    stats = replay(RUN).stats
    assert (stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"]) == (30 * M, 50 * M)
    assert (stats["segment.all.current"], stats["segment.all.peak"], stats["allocation.all.peak"]) == (1, 2, 3)
    # the rest of 5 MiB, then 3 and 5 free around what is in use, then a whole segment
    assert (stats["inactive_split_bytes.all.current"], stats["inactive_split_bytes.all.peak"]) == (0, 17 * M)
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)


def test_the_map_after_any_event():
    assert [one.nbytes for one in segments_after(RUN, 1)] == [20 * M]
    assert segments_after(RUN, -1) == ()


@pytest.mark.slow
@pytest.mark.parametrize("expandable", [False, True])
def test_two_hundred_thousand_events_take_seconds(expandable):
    # 1,000 live blocks of sizes that never repeat, replaced one by one in a scattered order
    events = [alloc(number, 1000 * number + 512) for number in range(1000)]
    for number in range(1000, 100_500):
        events += [free((number * 7919) % 1000), alloc((number * 7919) % 1000, (number * 104_729) % (24 * M))]
    assert len(events) == 200_000
    begin = time.process_time()
    result = replay(events, Settings(expandable_segments=expandable))
    assert time.process_time() - begin < 10
    assert result.peak_reserved >= result.peak_allocated > 0


def test_an_error_names_the_event():
    with pytest.raises(ConfigError, match="event 1: free of id 9: allowed is an id that is allocated"):
        replay([alloc(1, 5), free(9)])


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"kind": "malloc"}, "Event.kind = 'malloc'"), ({"kind": "alloc", "nbytes": -1}, "Event.nbytes = -1 (id 0): allowed is")],
)
def test_an_event_is_checked_when_it_is_made(fields, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Event(**fields)


# ---- settings ---------------------------------------------------------------------------------------------------------------


def test_settings_are_read_as_torch_reads_them():
    text = (
        "expandable_segments:True, max_split_size_mb:128, garbage_collection_threshold:0.8, large_segment_size_mb:32,"
        "max_non_split_rounding_mb:64,per_process_memory_fraction:0.5,backend:native,pinned_use_background_threads:True,"
    )
    assert Settings.parse(text, capacity=100 * M, elsewhere=M) == Settings(
        expandable_segments=True,
        max_split_size=128 * M,
        garbage_collection_threshold=0.8,
        large_segment=32 * M,
        max_non_split_rounding=64 * M,
        memory_fraction=0.5,
        capacity=100 * M,
        elsewhere=M,
    )
    assert Settings.parse("") == Settings()
    assert (Settings.parse("roundup_power2_divisions:8").divisions, Settings().divisions) == ((8,) * 16, None)
    # between two entries nothing is divided: 4 and 8 MiB are not named
    divided = Settings.parse("roundup_power2_divisions:[2:4,16:8]").roundup_power2_divisions
    assert divided == (4, 4, 0, 0, 8) + (0,) * 11


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expandable_segment:True", "'expandable_segment': allowed is a key of PYTORCH_CUDA_ALLOC_CONF; the nearest is"),
        ("expandable_segments:true", "expandable_segments:true: allowed is True or False"),
        ("expandable_segments", "'expandable_segments': allowed is expandable_segments:VALUE"),
        ("max_split_size_mb:19", "Settings.max_split_size = 19922944: allowed is an integer from 20971520 up, or None"),
        ("max_split_size_mb:1.5", "max_split_size_mb:1.5: allowed is a whole number of MiB"),
        ("large_segment_size_mb:10", "Settings.large_segment = 10485760"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold:1: allowed is a number above 0 and below 1"),
        ("garbage_collection_threshold:high", "garbage_collection_threshold:high: allowed is a number"),
        ("roundup_power2_divisions:3", "'3': allowed is 0 or a power of two"),
        ("roundup_power2_divisions:[0:4]", "boundary '0'"),
        ("backend:cudaMallocAsync", "allowed is backend:native"),
        ("per_process_memory_fraction:0.5", "Settings.memory_fraction = 0.5: allowed is 1.0 without a capacity"),
        ("per_process_memory_fraction:2", "Settings.memory_fraction = 2.0: allowed is from 0 to 1"),
    ],
)
def test_settings_that_torch_refuses_are_refused(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Settings.parse(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"capacity": 0}, "Settings.capacity = 0"),
        ({"capacity": 5, "elsewhere": 6}, "Settings.elsewhere = 6: allowed is no more than capacity"),
        ({"roundup_power2_divisions": (1, 2)}, "or 16 of them"),
        ({"garbage_collection_threshold": -0.1}, "garbage_collection_threshold = -0.1"),
    ],
)
def test_fields_out_of_bounds_are_named(fields, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Settings(**fields)


# ---- snapshots --------------------------------------------------------------------------------------------------------------


def written(tmp_path, data, name="snapshot.pickle"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return path


def sample(begin=0):
    return record(RUN, Settings(), begin=begin)[0]


def test_a_snapshot_file_is_compared(tmp_path):
    found = compare_snapshot(written(tmp_path, sample()))
    assert found.equal
    assert (found.num_events, found.peak_reserved, found.real_peak_reserved, found.largest_gap) == (6, 50 * M, 50 * M, 0)
    assert "equals the allocator at each of 6 events" in str(found)


def test_a_snapshot_of_the_second_half_is_compared(tmp_path):
    found = compare_snapshot(written(tmp_path, sample(begin=3)))
    assert (found.equal, found.num_events, found.peak_reserved) == (True, 3, 50 * M)


def test_a_run_that_reserved_otherwise_is_not_equal():
    data = sample()
    # as if the segment for 30 MiB had been one of 32
    [entry] = [entry for entry in data["device_traces"][0] if entry["action"] == "segment_alloc" and entry["size"] == 30 * M]
    entry["size"] = 32 * M
    for segment in data["segments"]:
        segment["total_size"], segment["blocks"][0]["size"] = 32 * M, 32 * M
    found = compare(recorded(snapshot_of(data)))
    [difference] = found.differences
    assert (difference.event, difference.real, difference.replayed) == (2, (32 * M,), (30 * M,))
    assert (found.equal, found.same_end, found.largest_gap, found.real_peak_reserved) == (False, False, 2 * M, 52 * M)
    assert "event 2: the allocator took 33554432, the replay took 31457280" in str(found)


def test_labels_are_the_innermost_frame_outside_torch():
    data = sample()
    for entry in data["device_traces"][0]:
        entry["frames"] = [
            {"filename": "/x/site-packages/torch/nn/modules/linear.py", "line": 3, "name": "forward"},
            {"filename": "/home/me/model.py", "line": 12, "name": "attend"},
        ]
    assert {entry.label for entry in snapshot_of(data).entries} == {"model.py:12 attend"}


def test_nothing_in_a_file_is_run(tmp_path):
    marker = tmp_path / "run"

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    for data in (Attack(), {"segments": [], "device_traces": [[Attack()]]}):
        with pytest.raises(ConfigError, match=r"the snapshot names (posix|nt)\.mkdir: allowed is plain data"):
            read_snapshot(written(tmp_path, data))
    assert not marker.exists()


def spoiled(change):
    data = sample()
    change(data)
    return data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps(sample())[:-200], "a complete pickle"),
        (b"", "0 bytes"),
        (b"not a pickle", "snapshot"),
        ([1, 2], "a snapshot that is a list"),
        ({"segments": []}, "the lists segments and device_traces"),
        ({"segments": [], "device_traces": [[], []]}, "the trace of every device is empty"),
        (spoiled(lambda data: data["device_traces"].append(data["device_traces"][0])), "one of [0, 1]"),
        (spoiled(lambda data: data["device_traces"][0][0].update(action="defragment")), "action of trace entry 0 = 'defragment'"),
        (spoiled(lambda data: data["device_traces"][0][1].update(size=-5)), "size of trace entry 1 = -5: allowed is an integer from 0"),
        (spoiled(lambda data: data["device_traces"][0][1].pop("addr")), "addr of trace entry 1 = None"),
        (spoiled(lambda data: data["device_traces"][0][1].update(pool_id=(1, 0))), "private pool (1, 0)"),
        (spoiled(lambda data: data["segments"][0].update(total_size=-1)), "total_size of the segment"),
        (spoiled(lambda data: data["segments"][0]["blocks"][0].update(state="lost")), "state of a block"),
        (spoiled(lambda data: data["segments"].append(7)), "segment 1 of the snapshot is a int"),
    ],
)
def test_files_that_are_no_snapshot_are_refused_in_one_line(tmp_path, data, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        read_snapshot(written(tmp_path, data))
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_a_missing_device(tmp_path):
    with pytest.raises(ConfigError, match="a file that can be read"):
        read_snapshot(tmp_path / "none.pickle")
    with pytest.raises(ConfigError, match="the trace of device 3 is empty"):
        read_snapshot(written(tmp_path, sample()), device=3)


def test_a_trace_that_is_not_of_these_segments_is_refused(tmp_path):
    data = spoiled(lambda data: data["segments"].clear())
    with pytest.raises(ConfigError, match=r"trace entry \d+ \(alloc at .*a trace after which that allocation is in use"):
        compare_snapshot(written(tmp_path, data))
