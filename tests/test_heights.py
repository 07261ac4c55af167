"""The highest instants of a step: on records made by hand, and on a real measurement beside its reconciliation."""

import pytest
import torch

from shardbook.accounts import Account
from shardbook.ledger.heights import heights
from shardbook.ledger.measurement import Measurement
from shardbook.ledger.reconcile import curve
from shardbook.ledger.watcher import Operator
from tests.test_measure import batch, build
from tests.test_reconcile import item, log

OPERATORS = (
    Operator(100, 200, "mm", "forward", "first"),
    Operator(210, 300, "add", "forward", "second"),
    Operator(310, 400, "mm", "backward", "second"),
)
CHANGES = [(90, 1, 5), (110, 2, 10), (220, 3, 40), (230, 3, -40), (240, 4, 7), (320, 5, 3), (330, 4, -7)]
ITEMS = (
    item(1, 5, Account.INPUT, 91),
    item(2, 10, Account.ACTIVATION, 111),
    item(4, 7, Account.ACTIVATION, 241),
    item(5, 3, Account.GRAD, 321),
)


def test_each_phase_has_its_highest_instant_with_place_and_books():
    found, _ = log(CHANGES, ITEMS, OPERATORS)
    assert [(one.phase, one.unit, one.operator, one.nbytes, one.allocated) for one in heights(found)] == [
        ("between", "", "", 5, 5),
        ("forward", "second", "add", 40, 55),
        ("backward", "second", "mm", 3, 25),
    ]
    assert [one.inside for one in heights(found)] == [False, True, True]
    assert [one.books for one in heights(found)] == [
        {"INPUT": 5},
        {"INPUT": 5, "ACTIVATION": 10, "WORKSPACE": 40},
        {"INPUT": 5, "ACTIVATION": 17, "GRAD": 3},
    ]


def test_finely_each_unit_operator_and_number_of_bytes_has_one():
    found, _ = log(CHANGES, ITEMS, OPERATORS)
    assert [(one.unit, one.operator, one.nbytes, one.allocated) for one in heights(found, finely=True)] == [
        ("", "", 5, 5),
        ("first", "mm", 10, 15),
        ("second", "add", 40, 55),
        ("second", "add", 7, 22),
        ("second", "mm", 3, 25),
    ]


def test_what_is_longer_than_its_item_is_unaccounted_for_the_rest_in_heights_and_curve():
    found, _ = log([(100, 1, 512)], [item(1, 500, Account.PARAM, 101)])
    assert heights(found)[0].books == {"PARAM": 500, "UNACCOUNTED": 12}
    assert curve(found, 0).accounts == {"PARAM": (500,), "UNACCOUNTED": (12,)}


def test_items_of_somebody_else_are_left_out():
    theirs = item(9, 100, Account.UNACCOUNTED, 0)
    found, _ = log(CHANGES, [*ITEMS, theirs], OPERATORS, base=[theirs])
    assert heights(found, [theirs]) == heights(log(CHANGES, ITEMS, OPERATORS)[0])


@pytest.mark.parametrize("finely", [False, True])
def test_the_highest_of_all_is_the_peak_that_a_real_measurement_reconciles(finely):
    model, optimizer = build()
    run = Measurement(model, optimizer, mode="full")
    with run:
        for step in range(2):
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (peak,) = run.document().reconciliations
    found = run.heights(finely=finely)
    highest = max(found, key=lambda one: one.allocated)
    assert (highest.allocated, highest.phase, highest.unit) == (peak.allocated, peak.phase, peak.unit)
    assert (highest.operator if highest.inside else "") == peak.operator
    assert highest.books == {name: nbytes for name, nbytes in peak.books.items() if nbytes}
    assert {one.phase for one in found} >= {"forward", "backward", "step"}
    assert all(sum(one.books.values()) == one.allocated for one in found)


def test_light_measurements_have_none():
    with Measurement(torch.nn.Linear(2, 2), None, mode="light") as run:
        pass
    assert run.heights() == []
