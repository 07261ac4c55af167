"""Lines above the allocator: intervals that are intervals, each with its source, none of them called validated; published figures lie
inside. Those of contexts and communicators are the sources themselves, so that only the pairs of allocated and reserved are a check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardbook.errors import ConfigError
from shardbook.facts.hardware import device, names
from shardbook.forecasting.above import GIB, MIB, Surroundings, cublas_workspace, lines, reserved


def line(name: str, around: Surroundings, peak: int = 10 * GIB):
    return next((each for each in lines(peak, around) if each.name == name), None)


@given(
    peak=st.integers(0, 200 * GIB),
    name=st.sampled_from(["", *names()]),
    ranks=st.integers(1, 20_000),
    groups=st.integers(0, 6),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_line_is_an_interval_with_a_source_and_none_is_called_validated(peak, name, ranks, groups, flags):
    all_to_all, expandable, records = flags
    around = Surroundings(device=name, ranks=ranks, groups=groups, all_to_all=all_to_all, expandable=expandable, records_streams=records)
    found = lines(peak, around)
    assert all(0 <= each.low <= each.high and each.source and not each.validated for each in found)
    assert len({each.name for each in found}) == len(found)
    low, high = reserved(peak, around)
    assert peak <= low <= high
    if (slack := line("reserved", around, peak)) is not None:
        assert (peak + slack.low, peak + slack.high) == (low, high)


@pytest.mark.parametrize("name", names())
def test_what_stands_above_leaves_room_on_every_device(name):
    memory = device(name).memory
    around = Surroundings(device=name, ranks=8)
    assert sum(each.high for each in lines(0, around)) < memory / 5


def test_a_process_alone_has_no_communicator():
    assert line("communicators", Surroundings(device="a100-80gb")) is None
    assert line("communicators", Surroundings(device="a100-80gb", ranks=8, groups=0)) is None


def test_each_group_has_buffers_of_its_own_and_more_across_nodes():
    one, three = (line("communicators", Surroundings(device="a100-80gb", ranks=8, groups=groups)) for groups in (1, 3))
    assert (three.low, three.high) == (3 * one.low, 3 * one.high)
    assert line("communicators", Surroundings(device="a100-80gb", ranks=16)).high > one.high


def test_an_all_to_all_opens_connections_to_every_peer_of_the_node():
    around = Surroundings(device="h100-80gb", ranks=8, all_to_all=True)
    assert line("all-to-all connections", Surroundings(device="h100-80gb", ranks=8)) is None
    # NVIDIA/nccl #1685: 1.06 GB before the first one, 4.34 GB after it
    before = sum(each.high for each in lines(0, Surroundings(device="h100-80gb", ranks=8)))
    after = sum(each.high for each in lines(0, around))
    assert before >= 1.06e9
    assert after >= 4.34e9
    assert sum(each.low for each in lines(0, around)) <= 1.06e9


@pytest.mark.parametrize(("name", "nbytes"), [("a100-80gb", 287_047_680), ("rtx-4090", 426 * MIB), ("", 287_047_680)])
def test_published_contexts_lie_in_the_interval(name, nbytes):
    found = line("context", Surroundings(device=name))
    assert found.low <= nbytes <= found.high


@pytest.mark.parametrize("nbytes", [544 * MIB, 688 * MIB])
def test_published_communicators_lie_in_the_interval(nbytes):
    found = line("communicators", Surroundings(device="a100-40gb", ranks=4))
    assert found.low <= nbytes <= found.high


def test_reserved_is_more_than_allocated_and_much_more_across_streams():
    plain, expandable, recorded = (
        reserved(100 * GIB, Surroundings(**fields)) for fields in ({}, {"expandable": True}, {"records_streams": True})
    )
    assert plain[0] == expandable[0] == recorded[0] == 100 * GIB
    assert expandable[1] < plain[1] < recorded[1]
    assert 100 * GIB / plain[1] == pytest.approx(1 - 0.15, abs=1e-4)
    assert 100 * GIB / recorded[1] == pytest.approx(1 - 0.43, abs=1e-4)


def test_cublas_takes_its_workspace_from_the_allocator():
    assert cublas_workspace("a100-80gb", threads=1) == 8_519_680  # as in a snapshot of torch's allocator, discuss.pytorch.org 178671
    assert cublas_workspace("h200", threads=1) == 32 * MIB
    assert cublas_workspace("mi300x", threads=1) == 128 * MIB
    assert cublas_workspace("b200") == 2 * cublas_workspace("b200", threads=1)


@pytest.mark.parametrize(
    ("allocated", "held", "recorded"),
    [
        (13.0013, 13.0199, False),  # torchtune, Llama-2-7B as it is built
        (39.1155, 58.6733, True),  # an issue of llama-cookbook, Llama-2-70B with FSDP1 on 16 A100
        (39.1155, 54.0167, True),  # the same after a change
    ],
)
def test_published_pairs_of_allocated_and_reserved_lie_in_the_interval(allocated, held, recorded):
    """None of them was used to choose it."""
    low, high = reserved(int(allocated * GIB), Surroundings(records_streams=recorded))
    assert low <= held * GIB <= high


def test_counts_below_their_least_are_refused():
    with pytest.raises(ConfigError, match="ranks"):
        Surroundings(ranks=0)


# GiB in torch's out-of-memory messages: allocated, reserved but unallocated, all of the process. By then the allocator has given back
# what it could, so that the second figure is holes alone.
OUT_OF_MEMORY = [
    ("huggingface/sentence-transformers#3214, one L40S", 43.89, 79.61 / 1024, 44.47, Surroundings(device="l40s")),
    ("hiyouga/LlamaFactory#3816, ZeRO-3", 13.18, 438.51 / 1024, 14.33, Surroundings(device="v100-16gb", ranks=4, records_streams=True)),
    ("hiyouga/LlamaFactory#7532, ZeRO-3", 73.28, 1.59, 76.92, Surroundings(device="a100-80gb", ranks=48, records_streams=True)),
    ("huggingface/trl#3436, FSDP1 on RTX 3080", 6.61, 2.57, 9.54, Surroundings(ranks=8, records_streams=True)),
]


@pytest.mark.parametrize(("source", "allocated", "holes", "process", "around"), OUT_OF_MEMORY, ids=[row[0] for row in OUT_OF_MEMORY])
def test_published_out_of_memory_messages_lie_in_the_intervals(source, allocated, holes, process, around):
    low, high = reserved(int(allocated * GIB), around)
    assert low <= (allocated + holes) * GIB * 1.001
    assert (allocated + holes) * GIB <= high
    beyond = [each for each in lines(int(allocated * GIB), around) if each.name != "reserved"]
    rest = (process - allocated - holes) * GIB
    assert sum(each.low for each in beyond) <= rest <= sum(each.high for each in beyond)
