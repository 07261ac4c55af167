"""``measure`` around loops that go wrong: what was seen can still be had, and the document says what is missing.

Each runs in a process of its own, where no other test's tensors are.
"""

import contextlib
import datetime
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardbook.errors import BudgetError, ConfigError, UsageError
from shardbook.ledger import assemble, signals
from shardbook.ledger.measurement import measure
from shardbook.ledger.script import Ending, ending_of
from tests import ranks

WIDTH = 256
NBYTES = 4 * (2 * WIDTH * 4 * WIDTH + 5 * WIDTH)  # of the parameters


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    return model, torch.optim.Adam(model.parameters())


def train(model, optimizer, num_steps=1):
    for _ in range(num_steps):
        model(torch.randn(32, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(job, *args):
    """The job's value, from a process of its own."""
    ending = ranks.alone(job, *args)
    assert ending.how == "value", ending.text
    return ending.value


def explained(document):
    found = document.reconciliations[0]
    return found.books["UNACCOUNTED"] <= 0.01 * found.allocated


# ---- exceptions --------------------------------------------------------------------------------------------------------------


def ends_by(error):
    model, optimizer = parts()
    run = measure(model, optimizer)
    try:
        with run:
            train(model, optimizer, 2)
            model(torch.randn(32, WIDTH)).square().mean().backward()
            raise error
    except type(error):
        document = run.document()
    train(model, optimizer)  # the loop goes on without it
    return document, hooks_of(model, optimizer)


def hooks_of(model, optimizer):
    """How many hooks are left on a loop's parts, and on everything."""
    modules = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    glob = nn.modules.module
    everywhere = len(glob._global_forward_pre_hooks) + len(glob._global_forward_hooks)
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return sum(modules) + everywhere + steps


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ValueError("too much\nand more"), "ended by ValueError: too much"),
        (KeyboardInterrupt(), "ended by KeyboardInterrupt: no message"),
        (SystemExit(3), "ended by SystemExit: 3"),
    ],
)
def test_an_exception_inside_leaves_what_was_seen_and_nothing_else(error, note):
    document, num_hooks = alone(ends_by, error)
    assert document.notes == (note,)
    assert [one.step for one in document.steps] == [1, 2]
    assert explained(document)
    assert document.peak["PARAM"] == NBYTES
    assert num_hooks == 0


def fails_in_an_operator():
    model, optimizer = parts()
    run = measure(model, optimizer)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught, run:
        train(model, optimizer)
        model(torch.randn(32, 7))
    del caught
    train(model, optimizer)
    with measure(model, optimizer) as again:
        train(model, optimizer)
    return run.document(), again.document()


def test_an_operator_that_fails_ends_the_measurement_and_another_may_follow():
    document, again = alone(fails_in_an_operator)
    assert len(document.notes) == 1
    assert document.notes[0].startswith("ended by RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert [one.step for one in document.steps] == [1]
    assert [one.step for one in again.steps] == [1]
    assert not again.notes
    assert explained(again)


# ---- loops that do not do what is expected -----------------------------------------------------------------------------------------


def never_steps(mode):
    model, optimizer = parts()
    with measure(model, optimizer, mode=mode) as run:
        model(torch.randn(32, WIDTH)).sum().backward()
    return run.document()


@pytest.mark.parametrize("mode", ["full", "light"])
def test_an_optimizer_that_never_steps(mode):
    document = alone(never_steps, mode)
    assert any("the optimizer never stepped" in note for note in document.notes)
    assert not document.steps
    assert document.peak["PARAM"] == NBYTES
    assert "MOMENT" not in document.peak


def does_nothing():
    with measure() as run:
        pass
    return run.document()


def test_nothing_at_all():
    document = alone(does_nothing)
    assert any("the optimizer never stepped" in note for note in document.notes)
    assert document.num_parameters == 0
    assert document.peak.get("PARAM", 0) == 0


def changes_the_model():
    model, optimizer = parts()
    with measure(model, optimizer) as run:
        train(model, optimizer)
        extra = nn.Linear(WIDTH, WIDTH)
        model.append(extra)
        optimizer.add_param_group({"params": extra.parameters()})
        train(model, optimizer, 2)
    return run.document()


def test_a_model_that_grows_while_it_is_measured():
    document = alone(changes_the_model)
    extra = WIDTH * WIDTH + WIDTH
    assert [one.step for one in document.steps] == [1, 2, 3]
    assert document.peak["PARAM"] == NBYTES + 4 * extra
    assert document.num_parameters == NBYTES // 4 + extra
    assert explained(document)
    assert any("the model changed" in note for note in document.notes), document.notes


def replaces_a_parameter():
    model, optimizer = parts()
    with measure(model, optimizer) as run:
        train(model, optimizer)
        model[0] = nn.Linear(WIDTH, 4 * WIDTH)  # the optimizer keeps the old one: a mistake, and visible
        train(model, optimizer, 2)
    return run.document()


def test_a_layer_replaced_behind_the_optimizers_back():
    document = alone(replaces_a_parameter)
    assert explained(document)
    assert document.peak["PARAM"] == NBYTES
    assert document.peak["MASTER"] == 4 * (WIDTH * 4 * WIDTH + 4 * WIDTH), "what the optimizer still holds"
    assert any("the model changed" in note for note in document.notes), document.notes


# ---- wrong use --------------------------------------------------------------------------------------------------------------------


def nests():
    model, optimizer = parts()
    with measure(model, optimizer) as run:
        train(model, optimizer)
        with pytest.raises(UsageError, match="a measurement is open already, and they can't nest; close it first"), measure():
            pytest.fail("it opened")
        train(model, optimizer)
    with pytest.raises(UsageError, match="this measurement has ended"), run:
        pytest.fail("it opened again")
    return run.document()


def test_a_nested_measurement_is_refused_and_the_outer_one_goes_on():
    document = alone(nests)
    assert [one.step for one in document.steps] == [1, 2]
    assert not document.notes
    assert explained(document)


def reads_too_early():
    model, optimizer = parts()
    with measure(model, optimizer) as run:
        train(model, optimizer, 2)
        model(torch.randn(32, WIDTH))
        early = run.document()
        train(model, optimizer)
    return early, run.document()


def test_a_document_read_while_the_measurement_goes_on_says_so():
    early, late = alone(reads_too_early)
    assert any("while the measurement went on" in note for note in early.notes)
    assert [one.step for one in early.steps] == [1, 2]
    assert [one.step for one in late.steps] == [1, 2, 3]
    assert not late.notes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "half"}, "mode = 'half': allowed are 'full'"),
        ({"budget": 0}, "budget = 0: it must be a positive number of bytes"),
        ({"budget": 100, "mode": "light"}, "budget = 100: light mode sees no allocation"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ConfigError) as caught:
        measure(**options)
    assert str(caught.value).startswith(said)


def crosses_a_budget():
    model, optimizer = parts()
    run = measure(model, optimizer, budget=3 * NBYTES)
    with pytest.raises(BudgetError, match="MOMENT|WORKSPACE") as caught, run:
        train(model, optimizer)
    return str(caught.value), run.document()


def test_a_budget_is_said_where_it_is_crossed():
    message, document = alone(crosses_a_budget)
    assert message.startswith(f"budget = {3 * NBYTES:,} bytes: ")
    assert document.shortage.phase == "step"
    assert document.shortage.budget == 3 * NBYTES
    assert document.shortage.live["PARAM"] == NBYTES
    assert sum(document.shortage.live.values()) > 3 * NBYTES


# ---- several ranks --------------------------------------------------------------------------------------------------------------------


def one_ends_early(how):
    assemble._PATIENCE = datetime.timedelta(seconds=2)
    model, optimizer = parts()
    run = measure(model, optimizer)
    with contextlib.suppress(ValueError), run:
        train(model, optimizer, 2)
        if dist.get_rank() == 1:
            if how == "exits":
                os._exit(0)
            raise ValueError("too much")
    return run.document()


@pytest.mark.ranks
def test_a_rank_that_tells_nothing_is_named():
    alive, gone = ranks.fresh_ranks(2, one_ends_early, "exits")
    assert gone.how == "lost"
    document = alive.value
    assert [found.rank for found in document.reconciliations] == [0]
    assert [note for note in document.notes if note.startswith("rank 1 told nothing")]
    assert explained(document)


@pytest.mark.ranks
def test_a_rank_that_raises_tells_what_it_saw():
    found, other = (ending.value for ending in ranks.fresh_ranks(2, one_ends_early, "raises"))
    assert found.notes == other.notes == ("rank 1: ended by ValueError: too much",)
    assert [one.rank for one in found.reconciliations] == [0, 1]
    assert {(one.rank, one.step) for one in found.steps} == {(0, 1), (0, 2), (1, 1), (1, 2)}


# ---- a script and its signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (SystemExit(), 0, False),
        (SystemExit(0), 0, False),
        (SystemExit(3), 3, False),
        (SystemExit(-1), 255, False),
        (SystemExit(True), 1, False),
        (SystemExit("words"), 1, False),
        (KeyboardInterrupt(), 130, True),
        (ValueError(), 1, True),
    ],
)
def test_exit_codes_are_pythons(capsys, error, code, shown):
    assert ending_of(error) == Ending(code, error if shown else None)
    assert capsys.readouterr().err == ("words\n" if error.args == ("words",) else "")


def is_stuck(in_own_handler):
    """SIGTERM while the main thread waits for another rank: how the process ended, and what was done from outside."""
    signals.GRACE_SECONDS = 0.3
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        with signals.signals_raise(lambda code: os.write(writing, str(code).encode())):
            if in_own_handler:
                signal.signal(signal.SIGTERM, lambda *_: None)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["what a rank that is gone would say"], datetime.timedelta(seconds=2))
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(writing)
    return code, os.read(reading, 100)


def test_sigterm_reaches_a_script_that_is_stuck():
    assert alone(is_stuck, False) == (128 + signal.SIGTERM, b"143")


@pytest.mark.full
def test_a_script_that_handles_sigterm_is_left_alone():
    assert alone(is_stuck, True) == (9, b"")
