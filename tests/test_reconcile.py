"""Which block is which item: on records made by hand, where the answer is known."""

import pytest

from shardbook.accounts import Account
from shardbook.ledger.allocator import Change, CudaRecords
from shardbook.ledger.items import Item
from shardbook.ledger.reconcile import Blocks, Peak, StepLog, curve, reconcile
from shardbook.ledger.shortage import Situation, shortage_of
from shardbook.ledger.watcher import Operator


def item(address, nbytes, account, born, died=None, *, memory_gone=False):
    made = Item(address, nbytes, account, "unit", "name", "forward")
    made.born, made.died, made.memory_gone = born, died, memory_gone
    return made


def log(changes, items, operators=(), base=()):
    blocks = Blocks({made.address: made for made in base}, 0)
    before = dict(blocks.live)
    told, peak = blocks.follow([Change(*change) for change in changes], 1000, items)
    return StepLog(1, 0, 1000, before, told, items, list(operators), 0, peak), blocks


def test_a_block_is_the_item_at_its_address_at_its_time():
    first, second = item(1, 10, Account.ACTIVATION, 105, 200), item(1, 30, Account.GRAD, 305)
    found, _ = log([(100, 1, 10), (200, 1, -10), (300, 1, 30)], [first, second])
    assert found.peak == Peak(30, 300)
    assert reconcile(found, 0, 0).books == {"GRAD": 30, "UNACCOUNTED": 0}


def test_a_block_that_nobody_saw_is_unaccounted_and_an_item_without_block_overstated():
    gone, never = item(3, 7, Account.COMM, 55), item(4, 9, Account.INPUT, 50)  # its memory was taken away; it never was torch's
    found, _ = log([(50, 3, 7), (60, 3, -7), (100, 1, 10), (110, 2, 5)], [item(2, 5, Account.PARAM, 111), gone, never])
    told = reconcile(found, 0, 0)
    assert told.books == {"PARAM": 5, "UNACCOUNTED": 10}
    assert told.overstated == 7


def test_a_block_longer_than_its_item_is_unaccounted_for_the_rest():
    found, _ = log([(100, 1, 512)], [item(1, 500, Account.PARAM, 101)])
    assert reconcile(found, 0, 0).books == {"PARAM": 500, "UNACCOUNTED": 12}


def test_an_operators_own_temporary_is_workspace_and_one_that_outlives_it_is_not():
    operators = [Operator(90, 200, "mm", "forward", "unit")]
    inside, _ = log([(100, 1, 10), (110, 2, 5), (150, 1, -10)], [item(2, 5, Account.PARAM, 111)], operators)
    assert reconcile(inside, 0, 0).books == {"PARAM": 5, "WORKSPACE": 10, "UNACCOUNTED": 0}
    assert reconcile(inside, 0, 0).operator == "mm"
    kept, _ = log([(100, 1, 10), (110, 2, 5), (250, 1, -10)], [item(2, 5, Account.PARAM, 111)], operators)
    assert reconcile(kept, 0, 0).books == {"PARAM": 5, "UNACCOUNTED": 10}


def test_a_collectives_staging_is_recognised_by_its_length():
    operators = [Operator(90, 100, "_allgather_base_.default", "forward", "unit", staged=64)]
    found, _ = log([(120, 1, 64), (130, 2, 65), (900, 1, -64)], [], operators)
    assert reconcile(found, 0, 0).books == {"COMM": 64, "UNACCOUNTED": 65}


def test_blocks_older_than_the_records_and_those_freed_elsewhere_go_with_their_storage():
    old = item(1, 100, Account.PARAM, 0, 50, memory_gone=True)
    elsewhere = item(2, 40, Account.COMM, 105, 150, memory_gone=True)
    found, blocks = log([(100, 2, 40), (200, 3, 60)], [old, elsewhere, item(3, 60, Account.GRAD, 201)], base=[old])
    assert found.peak == Peak(100, 50)
    assert sum(block.nbytes for block in blocks.live.values()) == 60


def test_a_free_that_was_recorded_is_not_taken_twice():
    seen = item(1, 10, Account.WORKSPACE, 105, 149, memory_gone=True)
    found, blocks = log([(100, 1, 10), (150, 1, -10), (160, 1, 20)], [seen, item(1, 20, Account.GRAD, 161)])
    assert sum(block.nbytes for block in blocks.live.values()) == 20
    assert found.peak == Peak(20, 160)


def test_memory_over_time_changes_account_when_an_engine_says_so():
    found, _ = log([(100, 1, 10), (900, 1, -10)], [item(1, 10, Account.GRAD_FULL, 101, 500), item(1, 10, Account.GRAD, 500, 899)])
    made = curve(found, 0)
    assert set(made.accounts) == {"GRAD_FULL", "GRAD"}
    assert max(made.allocated) == 10


def test_cudas_history_is_read_as_the_profilers_records():
    history = [
        {"action": "alloc", "addr": 5, "size": 512, "time_us": 7},
        {"action": "free_requested", "addr": 5, "size": 512, "time_us": 8},
        {"action": "free_completed", "addr": 5, "size": 512, "time_us": 9},
        {"action": "segment_alloc", "addr": 5, "size": 2**21, "time_us": 9},
    ]
    assert CudaRecords.changes_of(history, 1000) == [Change(6000, 5, 512), Change(8000, 5, -512)]


@pytest.mark.parametrize(
    ("engine", "phase", "first"),
    [
        ("plain", "step", "optimizer with fused=True"),
        ("ddp", "backward", "ZeRO stage 1"),
        ("shardbook stage 1", "backward", "ZeRO stage 2"),
        ("shardbook stage 2", "backward", "ZeRO stage 3"),
        ("shardbook stage 3", "backward", "half the micro-batch, twice as many"),
        ("fsdp2", "forward", "reshard_after_forward=True"),
        ("deepspeed 2", "backward", "smaller reduce_bucket_size and allgather_bucket_size"),
    ],
)
def test_levers_begin_with_the_cheapest_that_frees_anything(engine, phase, first):
    live = {str(account): 1000 for account in Account}
    told = shortage_of(
        Situation(
            engine=engine, num_ranks=4, num_units=10, rank=0, step=1, phase=phase, unit="", account=Account.GRAD, asked=1,
            budget=None, live=live,
        )
    )  # fmt: skip
    assert told.levers[0].name == first
    assert len(told.levers) == 3
    freed = {lever.name: lever.nbytes for lever in told.levers}
    if engine == "ddp":
        assert freed == {"ZeRO stage 1": 1500, "ZeRO stage 2": 1500 + 1500, "ZeRO stage 3": 1500 + 1500 + 750}
