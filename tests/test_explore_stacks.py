"""Stacks as boxes: their order, their widths, the device's line, and what they say to those who don't see them."""

import re

import pytest

from shardbook.explore.stacks import Bar, axis_for, draw

GB = 10**9


def boxes(text):
    return re.findall(r'sb-box" style="width:([\d.]+)%.*?title="([^:]+):', text)


def test_parts_stand_in_the_order_of_the_accounts_in_every_stack():
    bars = [Bar(label="one", parts={"WORKSPACE": GB, "PARAM": 2 * GB}), Bar(label="two", parts={"PARAM": GB, "OTHER": GB, "GRAD": GB})]
    assert [name for _, name in boxes(draw(bars, ""))] == ["PARAM", "WORKSPACE", "PARAM", "GRAD", "OTHER"]


def test_widths_are_shares_of_the_axis_and_nothing_has_no_box():
    text = draw([Bar(label="one", parts={"PARAM": 20 * GB, "GRAD": 0, "MOMENT": 30 * GB})], "", 80 * GB)
    assert axis_for(80 * GB).end == 80 * GB
    assert [(float(width), name) for width, name in boxes(text)] == [(25.0, "PARAM"), (37.5, "MOMENT")]
    assert re.findall(r'sb-limit" style="left:([\d.]+)%', text) == ["100.00"]
    assert 'aria-label="one: 50.0 GB (46.6 GiB)"' in text


def test_without_a_device_there_is_no_line():
    assert "sb-limit" not in draw([Bar(label="one", parts={"PARAM": GB})], "")


@pytest.mark.parametrize("largest", [0, 1, 999, 10**6, 85 * GB, 112 * GB, 7 * 10**12])
def test_an_axis_holds_what_it_has_to_with_a_few_round_ticks(largest):
    axis = axis_for(largest)
    assert axis.end >= largest
    assert axis.end <= 2.5 * max(largest, 1)
    assert 2 <= len(axis.ticks) <= 6
    assert (axis.ticks[0], axis.ticks[-1]) == (0, axis.end)
    assert all(len(f"{tick / axis.divisor:g}") <= 4 for tick in axis.ticks)


def test_what_is_written_stays_text():
    text = draw([Bar(label="<b>", parts={"<i>": GB})], "<u>")
    assert not {"<b>", "<i>", "<u>"} & set(re.findall(r"<\w+>", text))
