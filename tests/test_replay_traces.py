"""The allocator's model against traces worked out by hand from the rules of ``c10/cuda/CUDACachingAllocator.cpp``.

Each step says what is asked and what must then hold: allocated and reserved bytes, and the map of every segment. A segment is
written as its blocks in order: ``1=3M`` is allocation 1, ``~1=3M`` waits for another stream, ``free=17M`` is free.
"""

import re

import pytest

from shardbook.errors import ConfigError
from shardbook.replay import Allocator, Settings

K, M = 2**10, 2**20
UNITS = {"": 1, "K": K, "M": M}


def nbytes(text):
    number, unit = re.fullmatch(r"(\d+)([KM]?)", text).groups()
    return int(number) * UNITS[unit]


def told(size):
    return f"{size // M}M" if size % M == 0 else f"{size // K}K" if size % K == 0 else str(size)


def shown(segment):
    names = {"free": "free", "allocated": "{id}", "waiting": "~{id}"}
    return " ".join(f"{names[block.state].format(id=block.id)}={told(block.nbytes)}" for block in segment.blocks)


class Trace:
    """One allocator, asked and looked at step by step."""

    def __init__(self, **settings):
        self.allocator = Allocator(Settings(**settings))
        self.counters = self.allocator.counters

    def alloc(self, key, size, *, stream=0):
        return self.allocator.alloc(key, nbytes(size) if isinstance(size, str) else size, stream=stream)

    def holds(self, allocated, reserved, *segments):
        counted = self.counters.allocated, self.counters.reserved
        assert (tuple(map(told, counted)), tuple(map(shown, self.allocator.segments()))) == ((allocated, reserved), segments)


# ---- sizes ------------------------------------------------------------------------------------------------------------------


def test_sizes_are_rounded_to_512_bytes():
    trace = Trace()
    # 1 byte is a block of 512, in a segment of 2 MiB = 2,097,152: 2,096,640 are left
    trace.alloc(1, 1)
    trace.holds("512", "2M", "1=512 free=2096640")
    # 513 is a block of 1,024: 2,095,616 are left, in the same segment
    trace.alloc(2, 513)
    trace.holds("1536", "2M", "1=512 2=1K free=2095616")
    # 1,024 is a multiple of 512 already
    trace.alloc(3, 1024)
    trace.holds("2560", "2M", "1=512 2=1K 3=1K free=2094592")
    assert trace.counters.requested == 1 + 513 + 1024


def test_requests_up_to_one_mebibyte_share_segments_of_two():
    trace = Trace()
    # exactly 1 MiB is small still; the second fills the segment to the last byte
    trace.alloc(1, "1M")
    trace.holds("1M", "2M", "1=1M free=1M")
    trace.alloc(2, "1M")
    trace.holds("2M", "2M", "1=1M 2=1M")
    # nothing is free: a second segment
    trace.alloc(3, 512)
    trace.holds(told(2 * M + 512), "4M", "1=1M 2=1M", "3=512 free=2096640")
    assert trace.counters.num_segments == 2


def test_a_small_rest_of_512_bytes_is_split_off():
    trace = Trace()
    # 1 MiB + (1 MiB - 512): exactly 512 are left, and 512 is enough for a block in the small pool
    trace.alloc(1, "1M")
    trace.alloc(2, M - 512)
    trace.holds(told(2 * M - 512), "2M", "1=1M 2=1048064 free=512")
    trace.alloc(3, 512)
    trace.holds("2M", "2M", "1=1M 2=1048064 3=512")


def test_requests_between_one_and_ten_mebibytes_take_segments_of_twenty():
    trace = Trace()
    # 1 MiB + 1 rounds to 1,049,088, above 1 MiB: large pool, a segment of 20 MiB = 20,971,520; 19,922,432 are left
    trace.alloc(1, M + 1)
    trace.holds("1049088", "20M", "1=1049088 free=19922432")
    # 3 MiB come out of the rest: 19,922,432 - 3,145,728 = 16,776,704
    trace.alloc(2, "3M")
    trace.holds("4194816", "20M", "1=1049088 2=3M free=16776704")


def test_the_border_at_ten_mebibytes():
    trace = Trace()
    # 512 bytes below 10 MiB: a segment of 20 MiB, 10 MiB + 512 are left
    trace.alloc(1, 10 * M - 512)
    trace.holds(told(10 * M - 512), "20M", f"1={10 * M - 512} free={10 * M + 512}")
    # 10 MiB fit into that rest; 512 are left, not above 1 MiB: the block has all 10 MiB + 512
    trace.alloc(2, "10M")
    trace.holds("20M", "20M", f"1={10 * M - 512} 2={10 * M + 512}")
    # 10 MiB again: a segment of its own size
    trace.alloc(3, "10M")
    trace.holds("30M", "30M", f"1={10 * M - 512} 2={10 * M + 512}", "3=10M")


def test_from_ten_mebibytes_on_segments_are_multiples_of_two():
    trace = Trace()
    # 10 MiB + 1 rounds to a block of 10,486,272 in a segment of 12 MiB = 12,582,912; 2,096,640 are left, above 1 MiB: split
    trace.alloc(1, 10 * M + 1)
    trace.holds("10486272", "12M", "1=10486272 free=2096640")


def test_a_rest_of_one_mebibyte_is_not_split_off_in_the_large_pool():
    trace = Trace()
    # 11 MiB in a segment of 12: exactly 1 MiB is left, and it would have to be more: the block has 12 MiB
    trace.alloc(1, "11M")
    trace.holds("12M", "12M", "1=12M")
    assert trace.counters.requested == 11 * M
    # 512 bytes fewer: a rest of 1 MiB + 512 is split off
    trace.alloc(2, 11 * M - 512)
    trace.holds(told(23 * M - 512), "24M", "1=12M", f"2={11 * M - 512} free={M + 512}")


def test_large_segments_may_be_given_another_size():
    trace = Trace(large_segment=12 * M)
    trace.alloc(1, "3M")
    trace.holds("3M", "12M", "1=3M free=9M")


def test_sizes_between_powers_of_two_may_be_few():
    trace = Trace(roundup_power2_divisions=4)
    # 9,000 lies between 8,192 and 16,384: four steps of 2,048, so 10,240; 2 MiB - 10,240 = 2,086,912 are left
    trace.alloc(1, 9000)
    trace.holds("10K", "2M", "1=10K free=2038K")
    # 1,200 is not above 4 * 512: a multiple of 512 as ever
    trace.alloc(2, 1200)
    trace.holds("11776", "2M", "1=10K 2=1536 free=2085376")
    # 17 MiB: between 16 and 32 in steps of 4: 20 MiB, and so is the segment
    trace.alloc(3, "17M")
    trace.holds(told(20 * M + 11776), "22M", "1=10K 2=1536 free=2085376", "3=20M")


def test_each_interval_may_have_its_own_divisions():
    # torch's index: 256 MiB is interval 8, 512 is 9; the first also serves all below, and ">" all above the last
    settings = Settings.parse("roundup_power2_divisions:[256:1,512:2,>:8]")
    assert settings.roundup_power2_divisions == (1,) * 9 + (2,) + (8,) * 6
    trace = Trace(roundup_power2_divisions=settings.roundup_power2_divisions)
    # 300 MiB: interval 8 is not divided. 600 MiB: interval 9, steps of 256, so 768. 1,100 MiB: steps of 128, so 1,152
    trace.alloc(1, "300M")
    trace.alloc(2, "600M")
    trace.alloc(3, "1100M")
    trace.holds("2220M", "2220M", "1=300M", "2=768M", "3=1152M")


def test_nothing_is_taken_for_nothing():
    trace = Trace()
    trace.alloc(1, 0)
    trace.holds("0M", "0M")
    trace.allocator.free(1)
    trace.holds("0M", "0M")


# ---- which block ------------------------------------------------------------------------------------------------------------


def test_the_smallest_block_that_is_large_enough_is_taken():
    trace = Trace()
    for key, size in ((1, "16M"), (2, "12M"), (3, "14M")):
        trace.alloc(key, size)
    for key in (1, 2, 3):
        trace.allocator.free(key)
    trace.holds("0M", "42M", "free=16M", "free=12M", "free=14M")
    # 13 MiB: 12 is too small, 14 the smallest that will do; 1 MiB would be left, which is not split off
    trace.alloc(4, "13M")
    trace.holds("14M", "42M", "free=16M", "free=12M", "4=14M")
    # 13 MiB again: now 16, whose rest of 3 is split off
    trace.alloc(5, "13M")
    trace.holds("27M", "42M", "5=13M free=3M", "free=12M", "4=14M")


def test_of_two_equal_blocks_the_lower_address_is_taken():
    trace = Trace()
    trace.alloc(1, "12M")
    trace.alloc(2, "12M")
    trace.allocator.free(2)
    trace.allocator.free(1)
    trace.alloc(3, "12M")
    trace.holds("12M", "24M", "3=12M", "free=12M")


def test_small_and_large_never_share_a_segment():
    trace = Trace()
    trace.alloc(1, "5M")
    trace.allocator.free(1)
    trace.holds("0M", "20M", "free=20M")
    # 512 bytes would fit into 20 free MiB, but they lie in the other pool
    trace.alloc(2, 512)
    trace.holds("512", "22M", "free=20M", "2=512 free=2096640")
    # and 1.5 MiB, large, do not go into the 2 MiB of the small pool once those are free
    trace.allocator.free(2)
    trace.alloc(3, "20M")
    trace.alloc(4, "1536K")
    trace.holds("22016K", "42M", "3=20M", "free=2M", "4=1536K free=18944K")


def test_a_stream_does_not_take_what_another_has_freed():
    trace = Trace()
    trace.alloc(1, "5M", stream=0)
    trace.allocator.free(1)
    trace.alloc(2, "5M", stream=7)
    trace.holds("5M", "40M", "free=20M", "2=5M free=15M")
    trace.alloc(3, "5M", stream=0)
    trace.holds("10M", "40M", "3=5M free=15M", "2=5M free=15M")
    assert [segment.stream for segment in trace.allocator.segments()] == [0, 7]


# ---- split and merge --------------------------------------------------------------------------------------------------------


def test_a_freed_block_merges_to_the_right_and_then_on_both_sides():
    trace = Trace()
    for key in (1, 2, 3):
        trace.alloc(key, "6M")
    trace.holds("18M", "20M", "1=6M 2=6M 3=6M free=2M")
    assert (trace.counters.inactive_split, trace.counters.num_inactive_split) == (2 * M, 1)
    # no neighbour of 1 is free: two free pieces that cannot be given back, 8 MiB
    trace.allocator.free(1)
    trace.holds("12M", "20M", "free=6M 2=6M 3=6M free=2M")
    assert (trace.counters.inactive_split, trace.counters.num_inactive_split) == (8 * M, 2)
    # 3 takes in the 2 MiB behind it: 6 and 8
    trace.allocator.free(3)
    trace.holds("6M", "20M", "free=6M 2=6M free=8M")
    assert (trace.counters.inactive_split, trace.counters.num_inactive_split) == (14 * M, 2)
    # 2 takes in both: the segment is whole, and could be given back
    trace.allocator.free(2)
    trace.holds("0M", "20M", "free=20M")
    assert (trace.counters.inactive_split, trace.counters.num_inactive_split) == (0, 0)


def test_a_freed_block_merges_to_the_left():
    trace = Trace()
    # 6 + 6 + 8 = 20: no rest
    for key, size in ((1, "6M"), (2, "6M"), (3, "8M")):
        trace.alloc(key, size)
    trace.allocator.free(1)
    trace.allocator.free(2)
    trace.holds("8M", "20M", "free=12M 3=8M")
    # a request for 12 takes exactly that
    trace.alloc(4, "12M")
    trace.holds("20M", "20M", "4=12M 3=8M")
    assert trace.counters.inactive_split == 0


# ---- other streams ----------------------------------------------------------------------------------------------------------


def test_a_block_that_another_stream_uses_is_free_only_after_it():
    trace = Trace()
    trace.alloc(1, "12M")
    trace.allocator.use(1, stream=3)
    trace.allocator.free(1)
    # the program has given it back, but it is active still
    trace.holds("0M", "12M", "~1=12M")
    assert (trace.counters.active, trace.counters.requested) == (12 * M, 12 * M)
    # so the next request needs a segment of its own
    trace.alloc(2, "12M")
    trace.holds("12M", "24M", "~1=12M", "2=12M")
    # stream 3 is past it; the allocator only looks at the next request, which then has it
    trace.allocator.complete(1)
    trace.holds("12M", "24M", "~1=12M", "2=12M")
    trace.alloc(3, "12M")
    trace.holds("24M", "24M", "3=12M", "2=12M")
    assert trace.counters.active == 24 * M


def test_a_waiting_block_does_not_merge():
    trace = Trace()
    trace.alloc(1, "6M")
    trace.alloc(2, "6M")
    trace.allocator.use(1, stream=3)
    trace.allocator.free(1)
    trace.allocator.free(2)
    trace.holds("0M", "20M", "~1=6M free=14M")
    trace.allocator.complete(1)
    trace.alloc(3, "20M")
    trace.holds("20M", "20M", "3=20M")


def test_a_use_on_its_own_stream_delays_nothing():
    trace = Trace()
    trace.alloc(1, "12M", stream=3)
    trace.allocator.use(1, stream=3)
    trace.allocator.free(1)
    trace.holds("0M", "12M", "free=12M")


def test_a_request_that_runs_short_waits_for_the_other_stream():
    trace = Trace(capacity=20 * M)
    trace.alloc(1, "12M")
    trace.allocator.use(1, stream=3)
    trace.allocator.free(1)
    # 8 of 20 are left for a segment of 12: wait for stream 3, give the 12 back, and take 12 new ones
    assert trace.alloc(2, "12M") is None
    trace.holds("12M", "12M", "2=12M")
    assert trace.counters.num_retries == 1
    # what the trace says about stream 3 later is known already
    trace.allocator.complete(1)
    trace.holds("12M", "12M", "2=12M")


# ---- giving back ------------------------------------------------------------------------------------------------------------


def test_emptying_the_cache_keeps_segments_that_are_split():
    trace = Trace()
    trace.alloc(1, "12M")
    trace.alloc(2, "5M")
    trace.alloc(3, "5M")
    trace.alloc(4, 512)
    for key in (1, 2, 4):
        trace.allocator.free(key)
    trace.holds("5M", "34M", "free=12M", "free=5M 3=5M free=10M", "free=2M")
    # the 12 and the 2 are whole; 15 free MiB of the 20 stay
    trace.allocator.empty_cache()
    trace.holds("5M", "20M", "free=5M 3=5M free=10M")
    assert trace.counters.inactive_split == 15 * M
    trace.allocator.free(3)
    trace.allocator.empty_cache()
    trace.holds("0M", "0M")


def test_short_of_memory_it_gives_back_what_is_free_and_tries_again():
    trace = Trace(capacity=32 * M)
    trace.alloc(1, "12M")
    trace.alloc(2, "12M")
    trace.allocator.free(1)
    # 16 MiB: the free block has 12, the device 8; with the 12 given back it has 20
    assert trace.alloc(3, "16M") is None
    trace.holds("28M", "28M", "2=12M", "3=16M")
    assert (trace.counters.num_retries, trace.counters.num_ooms) == (1, 0)


def test_a_shortage_says_what_was_wanted_and_what_there_was():
    trace = Trace(capacity=24 * M, elsewhere=2 * M)
    trace.alloc(1, "3M")
    trace.holds("3M", "20M", "1=3M free=17M")
    # 18 MiB: 17 are free in one block, the device has 2, and the segment is split, so nothing can be given back
    short = trace.alloc(2, 18 * M - 100)
    assert (short.wanted, short.segment, short.device_free, short.free, short.largest_free, short.allocated, short.reserved) == (
        18 * M,
        18 * M,
        2 * M,
        17 * M,
        17 * M,
        3 * M,
        20 * M,
    )
    trace.holds("3M", "20M", "1=3M free=17M")
    assert (trace.counters.num_retries, trace.counters.num_ooms) == (1, 1)
    # the program catches it and goes on
    assert trace.alloc(3, "17M") is None
    trace.holds("20M", "20M", "1=3M 3=17M")


def test_a_share_of_the_device_is_a_limit():
    trace = Trace(capacity=100 * M, memory_fraction=0.25)
    # 25 MiB may be reserved: 20 and then 12 are too many, though the device has 80 left
    trace.alloc(1, "3M")
    assert trace.alloc(2, "12M") is None
    trace.holds("15M", "20M", "1=3M 2=12M free=5M")
    assert trace.alloc(3, "6M").device_free == 80 * M
    trace.holds("15M", "20M", "1=3M 2=12M free=5M")


def test_blocks_from_max_split_size_on_are_not_split():
    trace = Trace(max_split_size=32 * M)
    trace.alloc(1, "40M")
    trace.allocator.free(1)
    # 10 MiB, below the limit: they may not come out of 40
    trace.alloc(2, "10M")
    trace.holds("10M", "50M", "free=40M", "2=10M")
    # 38 MiB, above it: 40 is less than 20 MiB more, so it is given whole
    trace.alloc(3, "38M")
    trace.holds("50M", "50M", "3=40M", "2=10M")
    # 20 MiB, below the limit: not out of the 40, which are free again
    trace.allocator.free(3)
    trace.alloc(4, "20M")
    trace.holds("30M", "70M", "free=40M", "2=10M", "4=20M")


def test_an_oversized_block_may_be_twenty_mebibytes_too_large_at_most():
    trace = Trace(max_split_size=32 * M)
    trace.alloc(1, "60M")
    trace.allocator.free(1)
    # 40 MiB: 60 is not below 40 + 20: a segment of its own
    trace.alloc(2, "40M")
    trace.holds("40M", "100M", "free=60M", "2=40M")
    # 40 MiB + 512: 60 is below it now: given whole
    trace.alloc(3, 40 * M + 512)
    trace.holds("100M", "100M", "3=60M", "2=40M")


def test_oversized_blocks_are_given_back_before_all_others():
    trace = Trace(max_split_size=32 * M, capacity=120 * M)
    trace.alloc(1, "40M")
    trace.alloc(2, "44M")
    trace.alloc(3, "12M")
    for key in (1, 2, 3):
        trace.allocator.free(key)
    trace.holds("0M", "96M", "free=40M", "free=44M", "free=12M")
    # 66 MiB: the device has 24. No block has 66: the largest, 44, goes, then 40, which makes 84; the 12 may stay, and no retry counts
    assert trace.alloc(4, "66M") is None
    trace.holds("66M", "78M", "free=12M", "4=66M")
    assert trace.counters.num_retries == 0


def test_no_more_oversized_blocks_are_given_back_than_it_takes():
    trace = Trace(max_split_size=32 * M, capacity=140 * M)
    for key, size in ((1, "40M"), (2, "44M"), (3, "48M")):
        trace.alloc(key, size)
    for key in (1, 2, 3):
        trace.allocator.free(key)
    # 80 MiB: the device has 8. 48 are too few, 48 + 44 = 92 enough: the 40 stay
    assert trace.alloc(4, "80M") is None
    trace.holds("80M", "120M", "free=40M", "4=80M")


def test_a_block_of_exactly_max_split_size_is_not_split():
    trace = Trace(max_split_size=32 * M)
    trace.alloc(1, "32M")
    trace.allocator.free(1)
    trace.alloc(2, "10M")
    trace.holds("10M", "42M", "free=32M", "2=10M")


def test_one_oversized_block_is_given_back_if_it_is_enough():
    trace = Trace(max_split_size=32 * M, capacity=100 * M)
    trace.alloc(1, "60M")
    trace.alloc(2, "40M")
    trace.allocator.free(1)
    trace.allocator.free(2)
    # 12 MiB: oversized blocks may not serve it and the device has none: the smallest block from 32 MiB up goes, 40
    assert trace.alloc(3, "12M") is None
    trace.holds("12M", "72M", "free=60M", "3=12M")
    assert trace.counters.num_retries == 0


def test_garbage_collection_gives_back_the_old_and_keeps_the_young():
    # 100 of 200 MiB may be reserved; above 0.6 of that, 60 MiB, it collects
    trace = Trace(capacity=200 * M, memory_fraction=0.5, garbage_collection_threshold=0.6)
    trace.alloc(1, "12M")  # look-up 1
    trace.alloc(2, "14M")  # look-up 2
    trace.alloc(3, "10M")  # look-up 3
    trace.allocator.free(1)  # since look-up 3
    trace.alloc(4, "16M")  # look-up 4; 36 are reserved
    trace.allocator.free(2)  # since look-up 4
    trace.alloc(5, "18M")  # look-up 5; 52 are reserved
    trace.holds("44M", "70M", "free=12M", "free=14M", "3=10M", "4=16M", "5=18M")
    # look-up 6: 70 are reserved, 10 too many. Ages 6-3 = 3 and 6-4 = 2, 2.5 on average: the 12 go, which is enough
    trace.alloc(6, "20M")
    trace.holds("64M", "78M", "free=14M", "3=10M", "4=16M", "5=18M", "6=20M")
    assert trace.counters.num_retries == 0


def test_garbage_collection_goes_on_until_enough_is_reclaimed():
    trace = Trace(capacity=200 * M, memory_fraction=0.5, garbage_collection_threshold=0.4)
    trace.alloc(1, "12M")  # look-up 1
    trace.alloc(2, "14M")  # look-up 2
    trace.alloc(3, "10M")  # look-up 3
    trace.allocator.free(1)  # since 3
    trace.alloc(4, "16M")  # look-up 4; 36 of 40 are reserved, nothing is collected
    trace.allocator.free(2)  # since 4
    trace.holds("26M", "52M", "free=12M", "free=14M", "3=10M", "4=16M")
    # look-up 5: 52 are reserved, 12 too many: ages 2 and 1, 1.5 on average: the 12 go, which is exactly enough
    trace.alloc(5, "30M")
    trace.holds("56M", "70M", "free=14M", "3=10M", "4=16M", "5=30M")
    # look-up 6: 70 are reserved, 30 too many: the 14 are all there is
    trace.alloc(6, "18M")
    trace.holds("74M", "74M", "3=10M", "4=16M", "5=30M", "6=18M")


# ---- expandable segments ----------------------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_by_pages_and_joins_what_is_free():
    trace = Trace(expandable_segments=True)
    # 3 MiB: one page of 20
    trace.alloc(1, "3M")
    trace.holds("3M", "20M", "1=3M free=17M")
    # 18 MiB: 17 are free at the end, 1 is missing: one more page, 37 in one piece
    trace.alloc(2, "18M")
    trace.holds("21M", "40M", "1=3M 2=18M free=19M")
    assert trace.counters.num_segments == 0  # torch counts cudaMalloc only
    assert [change.action for change in trace.allocator.changes] == ["segment_map", "segment_map"]


def test_an_expandable_segment_serves_growing_sizes_from_one_place():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, "30M")
    trace.holds("30M", "40M", "1=30M free=10M")
    trace.allocator.free(1)
    # 41 MiB: 40 are free, one more page; segments of cudaMalloc would hold 30 + 42
    trace.alloc(2, "41M")
    trace.holds("41M", "60M", "2=41M free=19M")
    trace.allocator.free(2)
    trace.alloc(3, "60M")
    trace.holds("60M", "60M", "3=60M")


def test_a_rest_of_512_bytes_is_split_off_in_an_expandable_segment():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, 20 * M - 512)
    trace.holds(told(20 * M - 512), "20M", f"1={20 * M - 512} free=512")


def test_small_pages_are_two_mebibytes():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, 512)
    trace.alloc(2, "1M")
    trace.holds(told(M + 512), "2M", "1=512 2=1M free=1048064")
    # 1 MiB more: 512 bytes are missing, one more page of 2 MiB
    trace.alloc(3, "1M")
    trace.holds(told(2 * M + 512), "4M", "1=512 2=1M 3=1M free=2096640")


def test_a_hole_is_preferred_to_the_end_that_can_grow():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, "19M")
    trace.alloc(2, "4M")
    trace.holds("23M", "40M", "1=19M 2=4M free=17M")
    trace.allocator.free(1)
    # 15 MiB: 17 fits better than 19, but it could grow on, so the hole is taken
    trace.alloc(3, "15M")
    trace.holds("19M", "40M", "3=15M free=4M 2=4M free=17M")


def test_emptying_the_cache_unmaps_whole_pages_only():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, "5M")
    trace.alloc(2, "30M")
    trace.allocator.free(2)
    trace.holds("5M", "40M", "1=5M free=35M")
    # the free block is [5, 40): of its pages only [20, 40) lies in it completely
    trace.allocator.empty_cache()
    trace.holds("5M", "20M", "1=5M free=15M")
    trace.allocator.free(1)
    trace.allocator.empty_cache()
    trace.holds("0M", "0M")


def test_a_hole_of_unmapped_pages_is_filled_first():
    trace = Trace(expandable_segments=True)
    trace.alloc(1, "20M")
    trace.alloc(2, "20M")
    trace.allocator.free(1)
    trace.allocator.empty_cache()
    trace.holds("20M", "20M", "2=20M")
    # 10 MiB: the lowest address with room is the hole, which makes one stretch again
    trace.alloc(3, "10M")
    trace.holds("30M", "40M", "3=10M free=10M 2=20M")
    # 25 MiB: the hole has too little, the end is mapped: two pages
    trace.alloc(4, "25M")
    trace.holds("55M", "80M", "3=10M free=10M 2=20M 4=25M free=15M")


def test_short_of_pages_it_unmaps_those_of_other_streams():
    trace = Trace(expandable_segments=True, capacity=50 * M)
    trace.alloc(1, "30M")
    trace.holds("30M", "40M", "1=30M free=10M")
    # stream 1 needs a page of 20 and the device has 10; the free block [30, 40) has no whole page
    short = trace.alloc(2, "5M", stream=1)
    assert (short.device_free, short.free, short.segment) == (10 * M, 10 * M, 20 * M)
    trace.holds("30M", "40M", "1=30M free=10M")
    trace.allocator.free(1)
    # now two whole pages are free: both go, one is mapped for stream 1
    assert trace.alloc(3, "5M", stream=1) is None
    trace.holds("5M", "20M", "3=5M free=15M")
    assert (trace.counters.num_retries, trace.counters.num_ooms) == (2, 1)


def test_pages_of_one_stretch_are_mapped_together_or_not_at_all():
    trace = Trace(expandable_segments=True, capacity=70 * M)
    trace.alloc(1, "20M")
    trace.alloc(2, "20M")
    trace.alloc(3, "20M")
    trace.allocator.free(2)
    # [20, 40) is free and mapped, then 3, then nothing: 40 MiB need two pages at the end, and the device has 10 MiB: not even one.
    # Unmapping [20, 40) leaves 30: one page, but all pages of one stretch are mapped or none
    short = trace.alloc(4, "40M")
    assert (short.free, short.device_free) == (0, 30 * M)
    trace.holds("40M", "40M", "1=20M", "3=20M")
    # 30 free MiB do for one page
    assert trace.alloc(5, "20M") is None
    trace.holds("60M", "60M", "1=20M 5=20M 3=20M")


def test_the_limit_counts_a_whole_segment_where_a_page_is_mapped():
    # 42 MiB may be reserved. 19 MiB ask for a segment of 20; the page is mapped
    trace = Trace(expandable_segments=True, capacity=84 * M, memory_fraction=0.5)
    trace.alloc(1, "19M")
    trace.holds("19M", "20M", "1=19M free=1M")
    # 23 MiB: 22 missing, 40 would be mapped. `alloc_block` counts 20 + 24 = 44, above 42: short
    assert trace.alloc(2, "23M") is not None
    # 22 MiB: 20 + 22 = 42 is not above 42, though two pages then make 60
    assert trace.alloc(3, "22M") is None
    trace.holds("41M", "60M", "1=19M 3=22M free=19M")


# ---- what a program may not ask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda allocator: allocator.alloc(1, 5), "alloc of id 1: allowed is an id that is not in use"),
        (lambda allocator: allocator.free(2), "free of id 2: allowed is an id that is allocated"),
        (lambda allocator: allocator.use(2, stream=1), "use of id 2 on stream 1"),
        (lambda allocator: allocator.complete(1), "complete of id 1: allowed is an id that was freed and waits"),
        (lambda allocator: allocator.address(2), "address of id 2"),
    ],
)
def test_requests_that_do_not_fit_are_named(ask, said):
    trace = Trace()
    trace.alloc(1, 5)
    with pytest.raises(ConfigError, match=re.escape(said)):
        ask(trace.allocator)
    trace.holds("512", "2M", "1=512 free=2096640")


def test_a_waiting_id_is_in_use():
    trace = Trace()
    trace.alloc(1, 5)
    trace.allocator.use(1, stream=1)
    trace.allocator.free(1)
    with pytest.raises(ConfigError, match="alloc of id 1"):
        trace.alloc(1, 5)
    trace.allocator.complete(1)
    trace.alloc(1, 600)
    trace.holds("1K", "2M", "1=1K free=2047K")
