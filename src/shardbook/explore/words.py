"""What the notebook says between its pictures."""

from collections.abc import Callable, Sequence

from shardbook.accounts import Account
from shardbook.explore.jobs import NOT_A_BENCHMARK
from shardbook.explore.stacks import Bar
from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_figures import Case, both, device_memory
from shardbook.report.forecast_words import gb, verdict_line

OPENING = f"""
# Where the bytes of training are

Turn a knob, and every picture below follows. Each section asks a question, answers it by a forecast, and has a button that runs a small
training on this machine, whose own output is shown. Those runs are tiny: *{NOT_A_BENCHMARK}*.
"""

CONVENTION = "**Bytes per parameter.** A preset, and over it any term of your own; an empty field keeps the preset's."

BUDGETS = "**Your own figures**, in place of what would be forecast; an empty field keeps the forecast."

WEIGHTS = """
## 1. Why 14 GB is not training memory

Seven billion parameters of two bytes are 14 GB, and that is what they take to answer. To train, each of them has a gradient, an fp32 copy
that the optimizer updates, and two moments: 2 + 2 + 4 + 8 = 16 bytes, 112 GB. Choose another model, or other bytes.
"""

STAGES = """
## 2. What each stage partitions

Stage 1 leaves each of N ranks 1/N of master and moments, stage 2 of the gradients too, stage 3 of the parameters as well. What is not
partitioned lies whole on every rank. Turn the stage, then the ranks: what of the stack does not move?
"""

CHECKPOINTING = """
## 3. Checkpointing is another ledger

No stage touches activations: they belong to a rank's own micro-batch. Recomputation keeps the inputs of blocks and computes the rest again
in backward, about a third more compute. It frees nothing of the state. Make the sequence longer: which of the two ledgers grows?
"""

THROUGHPUT = """
## 4. Capacity against throughput

A byte that a rank does not hold has to come from another rank when it is needed. Stages 1 and 2 send what plain data parallelism sends
(with one micro-batch a step); stage 3 gathers parameters in forward and again in backward: half as much again. These are bytes, not
seconds: what of them is hidden behind computing only a run can say.
"""

DIVIDE = """
## 5. Must the peak divide by eight?

Under stage 3 on eight ranks each rank holds an eighth of the state. The peak is more than state: the unit in use is whole, and so are its
gradients until they are reduced, and activations are a rank's own. Turn the micro-batch and look at what stays.
"""

MEASURED = """
## 6. A measured run over its forecast

The `run.json` of `shardbook train` or `shardbook measure`; a run from a button above is put here by itself. Where the document
says which model was trained and how, the forecast is of that run; else it is the one at the top.
"""


def verdict(forecast: Forecast) -> str:
    """Whether it fits, with the margin; without a device, that none was chosen."""
    return verdict_line(forecast) if device_memory(forecast) is not None else "choose a device to see whether it fits"


def weights_and_state(forecast: Forecast, draw: Callable[..., str]) -> str:
    """The two figures that are taken for one another, both of the whole model."""
    state = {one.account: one.total for one in forecast.holdings if one.total}
    if sum(state.values()) != forecast.state:  # parameters that are cast from the master are in no holding
        state[Account.PARAM.value] = state.get(Account.PARAM, 0) + forecast.state - sum(state.values())
    bars = [Bar(label="weights alone", parts={Account.PARAM.value: forecast.weights}), Bar(label="training state", parts=state)]
    times = forecast.state / forecast.weights if forecast.weights else 0
    words = f"Whole model: {gb(forecast.weights)} of weights, {gb(forecast.state)} of state, {times:.1f} times as much, before any activation."
    return draw(bars, words, device_memory(forecast))


def divided(cases: Sequence[Case]) -> str:
    """The answer for the setting at hand, from the figures."""
    found = [case.forecast for case in cases]
    if len(found) != 2 or found[0] is None or found[1] is None:
        return ""
    one, eight = found
    if not eight.is_peak:
        return "Only state is known here: choose a model of the catalog and a micro-batch to see the peak."
    ratio = eight.peak_allocated / one.peak_allocated
    whole = [name for name, nbytes in eight.accounts.items() if 8 * nbytes > 1.1 * one.accounts.get(name, 0)]
    rest = sum(eight.accounts[name] for name in whole)
    answer = "yes" if ratio <= 1.1 / 8 else "no"
    return f"Here: {answer}. The peak is {ratio:.3f} of one rank's (1/8 is 0.125); {both(rest)} of it do not divide: {', '.join(sorted(whole))}."
