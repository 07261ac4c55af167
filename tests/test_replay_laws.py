"""Laws of the allocator's model that hold for any trace and any settings: no byte is lost, none is invented."""

from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardbook.replay import Allocator, compare, recorded, replay, snapshot_of
from tests.replay_samples import SETTINGS, M, record, traces

# no shrinking: a failing trace of 60 events is short enough, and the search for a shorter one takes minutes
MANY = settings(derandomize=True, deadline=None, max_examples=100, phases=(Phase.explicit, Phase.generate))


def assert_books_balance(allocator):
    """The map of segments, the counters and the pools all say the same."""
    segments, counters = allocator.segments(), allocator.counters
    blocks = [block for segment in segments for block in segment.blocks]
    assert all(segment.nbytes == sum(block.nbytes for block in segment.blocks) for segment in segments)
    assert all(block.nbytes > 0 and block.nbytes % 512 == 0 for block in blocks)
    assert all(block.nbytes >= block.requested for block in blocks)
    # stretches neither overlap nor touch an address twice
    ends = [segment.address + segment.nbytes for segment in segments]
    assert all(end <= later.address for end, later in zip(ends, segments[1:], strict=False))
    assert counters.reserved == sum(segment.nbytes for segment in segments)
    assert counters.allocated == sum(block.nbytes for block in blocks if block.state == "allocated")
    assert counters.active == sum(block.nbytes for block in blocks if block.state != "free")
    assert counters.requested == sum(block.requested for block in blocks)
    assert counters.allocated <= counters.active <= counters.reserved
    assert counters.num_segments == sum(not segment.expandable for segment in segments)
    assert allocator.largest_free == max((block.nbytes for block in blocks if block.state == "free"), default=0)
    split = [block for one in segments if not one.expandable and len(one.blocks) > 1 for block in one.blocks if block.state == "free"]
    assert (counters.inactive_split, counters.num_inactive_split) == (sum(block.nbytes for block in split), len(split))
    assert counters.reserved == sum(change.signed_nbytes for change in allocator.changes)
    assert_pools_are_right(allocator, segments)


def assert_pools_are_right(allocator, segments):
    """Free blocks stand in the pool of their stream and size class, each once, sorted; two neighbours are never both free."""
    state = allocator._state
    for pool in (state.small, state.large):
        for stream, entries in pool.free.items():
            assert entries == sorted(entries, key=lambda entry: entry[:2])
            assert all((size, address) == (block.nbytes, block.address) for size, address, block in entries)
            mapped = [
                (one.nbytes, one.state)
                for segment in segments
                if (segment.stream, segment.small) == (stream, pool.small)
                for one in segment.blocks
            ]
            assert sorted(size for size, _, _ in entries) == sorted(size for size, kind in mapped if kind == "free")
    for segment in segments:
        assert not any("free" == one.state == two.state for one, two in zip(segment.blocks, segment.blocks[1:], strict=False))
        for block in segment.blocks:
            assert block.state == "free" or (block.nbytes <= M) == segment.small or not segment.small


@MANY
@given(events=traces(), chosen=SETTINGS)
def test_no_byte_is_lost_or_invented(events, chosen):
    allocator = Allocator(chosen)
    for number, event in enumerate(events):
        allocator.apply(event, number)
        assert_books_balance(allocator)
        if chosen.capacity is not None:
            assert allocator.counters.reserved <= chosen.capacity
        if chosen.limit is not None and not chosen.expandable_segments:
            assert allocator.counters.reserved <= chosen.limit


@MANY
@given(events=traces(), chosen=SETTINGS)
def test_everything_freed_and_emptied_leaves_nothing(events, chosen):
    allocator = Allocator(chosen)
    live = set()
    for event in events:
        allocator.apply(event)
        if event.kind in ("alloc", "free"):
            (live.add if event.kind == "alloc" else live.discard)(event.id)
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    stats = allocator.counters.memory_stats()
    assert {name for name, value in stats.items() if name.endswith(".current") and value} == set()
    assert allocator.segments() == ()
    assert allocator._state.regions == set()
    assert allocator._state.device.used_nbytes == 0


@MANY
@given(events=traces(), chosen=SETTINGS)
def test_a_replay_says_the_same_twice_and_agrees_with_its_steps(events, chosen):
    first, second = replay(events, chosen), replay(events, chosen)
    assert first == second
    allocator = Allocator(chosen)
    for number, event in enumerate(events):
        short = allocator.apply(event, number)
        counters = allocator.counters
        assert (first.allocated[number], first.active[number], first.reserved[number], first.largest_free[number]) == (
            counters.allocated,
            counters.active,
            counters.reserved,
            allocator.largest_free,
        )
        assert (short is not None) == any(one.event == number for one in first.shortages)
    if not events:
        assert (first.peak_event, first.peak_reserved, first.segments_at_peak) == (-1, 0, ())
        return
    assert first.peak_reserved >= max(first.reserved)
    assert sum(segment.nbytes for segment in first.segments_at_peak) == first.reserved[first.peak_event] == max(first.reserved)
    assert all(0 <= share <= 1 for share in (*first.unused_shares, *first.scattered_shares))


@MANY
@given(events=traces(), chosen=SETTINGS, place=st.integers(0, 40))
def test_an_allocator_begun_in_the_middle_is_the_same(events, chosen, place):
    """Restoring a map gives an allocator with that map and those counters. What is gone is age and addresses never used again."""
    before = Allocator(chosen)
    for event in events[:place]:
        before.apply(event)
    after = Allocator(chosen)
    after.restore(before.segments())
    assert after.segments() == before.segments()
    for name in ("allocated", "active", "requested", "reserved", "inactive_split", "num_inactive_split", "num_segments", "num_active"):
        assert getattr(after.counters, name) == getattr(before.counters, name), name
    assert after.largest_free == before.largest_free
    assert after._state.device.used_nbytes == before._state.device.used_nbytes


def as_recorded(chosen):
    """The settings that come back out of a snapshot: 16 divisions in place of one."""
    return replace(chosen, roundup_power2_divisions=chosen.divisions or (0,) * 16)


@settings(MANY, max_examples=150)
@given(events=traces(), chosen=SETTINGS.filter(lambda chosen: not chosen.garbage_collection_threshold))
def test_a_snapshot_of_a_whole_run_replays_to_the_same(events, chosen):
    # on a full device, memory that the program gives back looks like a second try of the request that follows
    events = [event for event in events if chosen.capacity is None or event.kind != "empty_cache"]
    written, allocator = record(events, chosen)
    if not written["device_traces"][0]:
        return
    run = recorded(snapshot_of(written, capacity=chosen.capacity))
    assert (run.settings, run.start) == (as_recorded(chosen), ())
    if chosen.capacity is None or not chosen.expandable_segments:
        # what was given back for a second try is no request of the program
        told = [event.kind for event in run.events].count("empty_cache")
        gave_back = {change.event for change in allocator.changes if change.signed_nbytes < 0}
        assert told == sum(events[number].kind == "empty_cache" for number in gave_back)
    found = compare(run)
    assert found.equal, str(found)
    assert found.peak_reserved == found.real_peak_reserved == allocator.counters.peaks["reserved"]


@settings(MANY, max_examples=150)
@given(events=traces(), chosen=SETTINGS.filter(lambda chosen: not chosen.garbage_collection_threshold), place=st.integers(1, 30))
def test_the_start_of_a_trace_is_found_by_undoing_it(events, chosen, place):
    """Switched on before event ``place``: every segment, every request and its state are found as they were."""
    written, _ = record(events, chosen, begin=place)
    if place >= len(events) or not written["device_traces"][0]:
        return
    start = recorded(snapshot_of(written, capacity=chosen.capacity)).start
    _, then = record(events[:place], chosen)
    assert outline(start) == outline(then.segments())


def outline(segments):
    """Memory and requests. The free rest behind a block that has gone since may be told from it, or belong to it."""
    found = []
    for segment in segments:
        address, held = segment.address, []
        for block in segment.blocks:
            if block.state != "free":
                held.append((address, block.requested, block.state))
            address += block.nbytes
        found.append((segment.address, segment.nbytes, segment.stream, segment.expandable, held))
    return found
