"""Where parameters lie: every element has one owner, and every cut falls at a multiple of 64 elements of its parameter."""

from hypothesis import given
from hypothesis import strategies as st

from shardbook.engine.layout import ALIGNMENT, FlatLayout, lay_out

numels = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700), st.sampled_from([63, 64, 65, 127, 128, 4096, 10007])), max_size=12)
num_ranks = st.integers(1, 9)


def laid_out(sizes: list[int], ranks: int, reserve: int = 0) -> FlatLayout:
    return lay_out([(f"p{index}", numel) for index, numel in enumerate(sizes)], ranks, reserve)


@given(numels, num_ranks)
def test_the_spans_of_all_ranks_are_every_element_once(sizes: list[int], ranks: int) -> None:
    layout = laid_out(sizes, ranks)
    seen: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
    for rank in range(ranks):
        for span in layout.spans(rank):
            assert span.start == seen[span.slot]  # in order, without gaps
            assert span.numel > 0
            seen[span.slot] = span.stop
    assert list(seen.values()) == sizes


@given(numels, num_ranks)
def test_cuts_fall_at_multiples_of_64(sizes: list[int], ranks: int) -> None:
    layout = laid_out(sizes, ranks)
    assert ALIGNMENT == 64
    assert layout.shard_numel % 64 == 0
    for rank in range(ranks):
        for span in layout.spans(rank):
            assert span.start % 64 == 0
            assert span.offset % 64 == 0
            assert span.stop % 64 == 0 or span.stop == sizes[span.slot]


@given(numels, num_ranks)
def test_offsets_in_the_shard_are_offsets_in_the_buffer(sizes: list[int], ranks: int) -> None:
    layout = laid_out(sizes, ranks)
    for rank in range(ranks):
        first, end = layout.bounds(rank)
        assert end - first == layout.shard_numel
        for span in layout.spans(rank):
            assert first + span.offset == layout.slots[span.slot].offset + span.start
            assert span.offset + span.numel <= layout.shard_numel


@given(numels, num_ranks, st.sampled_from([0, 64]))
def test_padding_is_stated_and_bounded(sizes: list[int], ranks: int, reserve: int) -> None:
    layout = laid_out(sizes, ranks, reserve)
    assert layout.padding == layout.numel - sum(sizes)
    assert reserve <= layout.padding < 64 * len(sizes) + 64 * ranks + reserve + 1
    if reserve:
        used = max((slot.offset + slot.numel for slot in layout.slots), default=0)
        assert layout.numel - used >= reserve


@given(numels)
def test_whole_is_one_span_a_parameter(sizes: list[int]) -> None:
    layout = laid_out(sizes, 3)
    assert [(span.slot, span.numel) for span in layout.whole()] == [(index, numel) for index, numel in enumerate(sizes) if numel]
