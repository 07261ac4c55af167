"""Near memory and links from a made-up sysfs, and where ranks are bound."""

import os
import types

import pytest
import torch

from shardbook.facts.topology import Node, near_cores, nodes, parse_cores, slot_of, slots
from shardbook.train import near
from shardbook.train.world import ALONE


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def two_nodes(root, first="0-1", second="2-3"):
    write(root / "devices/system/node/node0/cpulist", first)
    write(root / "devices/system/node/node1/cpulist", second)
    write(root / "devices/system/node/node2/cpulist", "")  # memory without processors


def accelerator(root, address, node="1"):
    folder = root / "bus/pci/devices" / address
    facts = {"class": "0x030200", "vendor": "0x10de", "numa_node": node, "current_link_width": "8", "max_link_width": "16"}
    for name, text in {**facts, "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}.items():
        write(folder / name, text)
    return folder


def test_nodes_and_slots_are_read(tmp_path):
    two_nodes(tmp_path)
    accelerator(tmp_path, "0000:3b:00.0")
    write(tmp_path / "bus/pci/devices/0000:00:00.0/class", "0x060000")
    assert [(node.number, sorted(node.cores)) for node in nodes(tmp_path)] == [(0, [0, 1]), (1, [2, 3])]
    assert [slot.describe() for slot in slots(tmp_path)] == ["0000:3b:00.0 NVIDIA: near NUMA node 1; link of 8 lanes of 16, PCIe 4 of 5"]


def test_what_cannot_be_seen_is_said(tmp_path):
    folder = accelerator(tmp_path, "0000:3b:00.0", node="-1")
    for name in ("current_link_width", "max_link_width"):
        write(folder / name, "255")  # what the kernel says where a virtual machine hides the link
    write(folder / "current_link_speed", "Unknown")
    assert slots(tmp_path)[0].describe() == "0000:3b:00.0 NVIDIA: its NUMA node can't be seen; its link can't be seen"
    assert nodes(tmp_path / "nothing") == slots(tmp_path / "nothing") == ()
    assert slot_of("0000:00:01.0", tmp_path).maker == "unknown maker"


def test_lists_of_processors():
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cores("") == frozenset()


def test_ranks_go_to_the_node_of_their_device_or_in_blocks():
    found = (Node(number=0, cores=frozenset({0, 1})), Node(number=1, cores=frozenset({2, 3})))
    assert [sorted(near_cores(rank, 3, found)) for rank in range(3)] == [[0, 1], [0, 1], [2, 3]]
    assert near_cores(0, 3, found, node=1) == {2, 3}
    assert near_cores(0, 3, found, node=7) == {0, 1}  # a node that has no processors
    assert near_cores(0, 1, found[:1]) == frozenset()


@pytest.fixture
def bound(monkeypatch):
    kept = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: kept.update({thread: set(cores)}))
    return kept


WORLD = types.SimpleNamespace(local_rank=1, num_local_ranks=2)


def test_every_thread_is_bound(tmp_path, bound):
    two_nodes(tmp_path)
    assert near.bind(WORLD, torch.device("cpu"), tmp_path) == "bound to NUMA node 1 (2 cores), in turn"
    assert os.getpid() in bound
    assert all(cores == {2, 3} for cores in bound.values())


def test_a_device_draws_its_rank_to_its_node(tmp_path, bound, monkeypatch):
    two_nodes(tmp_path)
    accelerator(tmp_path, "0000:3b:00.0", node="0")
    monkeypatch.setattr(near, "address_of", lambda _: "0000:3b:00.0")
    assert near.bind(WORLD, torch.device("cpu"), tmp_path) == "bound to NUMA node 0 (2 cores), near to its device"
    assert all(cores == {0, 1} for cores in bound.values())


def test_nothing_is_bound_where_nothing_is_near_or_somebody_has_bound(tmp_path, bound, monkeypatch):
    assert near.bind(ALONE, torch.device("cpu"), tmp_path) == "not bound: NUMA nodes can't be seen"
    two_nodes(tmp_path, second="")
    assert near.bind(ALONE, torch.device("cpu"), tmp_path) == "not bound: one NUMA node"
    two_nodes(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    assert near.bind(ALONE, torch.device("cpu"), tmp_path) == "bound already, to 2 cores"
    assert bound == {}


def test_the_address_of_a_device(monkeypatch):
    facts = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    assert near.address_of(torch.device("cuda", 0)) == "0000:3b:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace())
    assert near.address_of(torch.device("cuda", 0)) is None
    assert near.address_of(torch.device("cpu")) is None
