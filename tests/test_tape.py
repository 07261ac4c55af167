"""A log of sizes: highest instants by place, accounts that become known later, granules and pools."""

from hypothesis import given
from hypothesis import strategies as st

from shardbook.accounts import Account
from shardbook.forecasting.tape import Memory, Tape


def found(tape: Tape) -> list[tuple[str, str, int]]:
    return [(peak.phase, peak.where, peak.nbytes) for peak in tape.peaks()]


def test_what_was_held_when_a_place_began_counts_in_it():
    tape = Tape()
    tape.at("forward", "blocks.0")
    kept = tape.take(Account.ACTIVATION, 100)
    tape.at("forward", "blocks.1")
    tape.give(kept)
    tape.at("backward", "blocks.1")
    tape.take(Account.GRAD, 30)
    assert found(tape) == [("forward", "blocks.0", 100), ("forward", "blocks.1", 100), ("backward", "blocks.1", 30)]


def test_a_place_where_nothing_happens_hides_no_other():
    tape = Tape()
    tape.at("forward", "blocks.0")
    tape.take(Account.ACTIVATION, 100)
    tape.at("forward", "blocks.1")
    tape.at("backward", "blocks.1")
    assert found(tape)[-3:] == [("forward", "blocks.0", 100), ("forward", "blocks.1", 100), ("backward", "blocks.1", 100)]


def test_an_account_is_read_when_the_walk_is_over():
    tape = Tape()
    tape.at("forward", "")
    entry = tape.take(Account.WORKSPACE, 8)
    assert tape.peaks()[-1].accounts == {"WORKSPACE": 8}
    entry.account = Account.ACTIVATION
    assert tape.peaks()[-1].accounts == {"ACTIVATION": 8}


def test_memory_that_becomes_something_else_was_what_it_was():
    tape = Tape()
    tape.at("backward", "waits")
    memory = Memory(tape, Account.WORKSPACE, 8, "gradient")
    tape.at("backward", "lands")
    memory.becomes(Account.GRAD_FULL)
    more = tape.take(Account.COMM, 1)
    waits, lands = tape.peaks()[-2:]
    assert (waits.accounts, lands.accounts) == ({"WORKSPACE": 8}, {"GRAD_FULL": 8, "COMM": 1})
    tape.give(more)
    del memory
    assert sum(change for _, change in tape._log) == 0


def test_memory_is_given_back_when_nothing_refers_to_it():
    tape = Tape()
    tape.at("forward", "")
    memory = Memory(tape, Account.WORKSPACE, 8, "result")
    other = memory
    del memory
    assert len(tape._log) == 1
    del other
    assert [change for _, change in tape._log] == [8, -8]


def test_an_allocator_gives_out_whole_granules():
    tape = Tape(granule=512)
    tape.at("forward", "")
    assert [tape.take(Account.WORKSPACE, nbytes).nbytes for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_pools_reach_their_highest_at_different_instants():
    tape = Tape()
    tape.at("forward", "")
    tape.give(tape.take(Account.COMM, 10, pool="communication"))
    tape.give(tape.take(Account.WORKSPACE, 7))
    assert tape.pools() == {"communication": 10, "": 7}
    assert tape.peaks()[-1].nbytes == 10


def test_what_is_live_at_the_highest_instant_largest_first():
    tape = Tape()
    tape.at("forward", "")
    small, large = tape.take(Account.PARAM, 1, "small"), tape.take(Account.PARAM, 5, "large")
    tape.give(tape.take(Account.WORKSPACE, 2, "passing"))
    tape.give(large)
    tape.take(Account.GRAD, 1, "later")
    assert list(tape.live_at_peak().items()) == [("PARAM: large", 5), ("WORKSPACE: passing", 2), ("PARAM: small", 1)]
    tape.give(small)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=60))
def test_peaks_are_those_of_a_running_sum(steps):
    """Against the plain sum: in every place the largest total since it began, what it began with included."""
    tape, live, total = Tape(), [], 0
    expected: list[list[int]] = []
    for place, nbytes, gives in steps:
        if not expected or place == 0:
            tape.at("forward", f"{len(expected)}")
            expected.append([total])
        if gives and live:
            total -= live[-1].nbytes
            tape.give(live.pop())
        else:
            live.append(tape.take(Account.WORKSPACE, nbytes))
            total += nbytes
        expected[-1].append(total)
    assert [peak.nbytes for peak in tape.peaks() if peak.phase] == [max(totals) for totals in expected]
