"""What the notebook says between its pictures, and what it puts together for a section."""

from collections.abc import Sequence
from functools import lru_cache

from shardbook.accounts import Account
from shardbook.document import RunDocument
from shardbook.errors import ConfigError
from shardbook.explore import cases, pictures
from shardbook.explore.measured import forecast_of, overlay
from shardbook.explore.settings import Settings
from shardbook.explore.small import NOT_A_BENCHMARK
from shardbook.explore.stacks import Bar, draw
from shardbook.forecasting.result import Forecast
from shardbook.report import markup
from shardbook.report.forecast_figures import Case, both, device_memory
from shardbook.report.forecast_words import gb, verdict_line
from shardbook.tables.reconciliation import in_order

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

A byte that a rank does not hold has to come from another rank when it is needed. Stages 1 and 2 send no more than stage 0 does (with one
micro-batch a step; less, where stage 0 returns gradients wider than parameters). Stage 3 gathers parameters in forward and in backward:
half as much again as stages 1 and 2. These are bytes, not seconds: what of them is hidden behind computing only a run can say.
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


_SLACK = 1.1
"""An account divides if it is at most this many times an eighth: shards are padded."""

NO_RUN = "No run yet: press a button above, or give a file."


def verdict(forecast: Forecast) -> str:
    """Whether it fits, with the margin; without a device, that none was chosen."""
    return verdict_line(forecast) if device_memory(forecast) is not None else "choose a device to see whether it fits"


def weights_and_state(forecast: Forecast) -> str:
    """The two figures that are taken for one another, both of the whole model."""
    state = {one.account: one.total for one in forecast.holdings if one.total}
    if sum(state.values()) != forecast.state:  # parameters that are cast from the master are in no holding
        state[Account.PARAM.value] = state.get(Account.PARAM, 0) + forecast.state - sum(state.values())
    state = {account: state[account] for account in in_order(state)}
    bars = [Bar(label="weights alone", parts={Account.PARAM.value: forecast.weights}), Bar(label="training state", parts=state)]
    times = forecast.state / forecast.weights if forecast.weights else 0
    words = (
        f"Whole model: {gb(forecast.weights)} of weights, {gb(forecast.state)} of state, {times:.1f} times as much, before any activation."
    )
    return draw(bars, words, device_memory(forecast), per="")


@lru_cache(maxsize=64)
def state_picture(bare: Settings, limit: int | None) -> str:
    """State against ranks; the knobs of the step, which change nothing of it, don't have it drawn again."""
    return pictures.by_ranks(cases.state_by_ranks(bare), limit)


def divided(found: Sequence[Case]) -> str:
    """The answer for the setting at hand, from the figures of one rank and of eight."""
    known = [case.forecast for case in found if case.forecast is not None]
    if len(known) != 2:
        return ""
    one, eight = known
    if not eight.is_peak:
        return "Only state is known here: choose a model of the catalog and a micro-batch to see the peak."
    ratio = eight.peak_allocated / one.peak_allocated
    whole = [name for name, nbytes in eight.accounts.items() if 8 * nbytes > _SLACK * one.accounts.get(name, 0)]
    rest = both(sum(eight.accounts[name] for name in whole))
    verdict = "yes" if 8 * ratio <= _SLACK else "no"
    why = f"{rest} of it do not divide: {', '.join(sorted(whole))}"
    return f"Here: {verdict}. The peak is {ratio:.3f} of one rank's, an eighth is 0.125; {why}."


def laid_over(document: RunDocument | None, instead: Forecast | None) -> str:
    """A run's stack under the forecast of that run; "" where there is none."""
    if document is None:
        return ""
    try:
        return "".join(compared(document, instead)[:2])
    except ConfigError:
        return ""


def compared(document: RunDocument, instead: Forecast | None) -> list[str]:
    """Stacks, notes, and the difference by account.

    Raises:
        ConfigError: the run kept no books; nothing is there to lay it over.
    """
    own = forecast_of(document)
    if own is None and instead is None:
        raise ConfigError("the run does not say what was trained, and the knobs give no forecast; see the message at the top")
    found = overlay(document, own or instead)  # pyright: ignore[reportArgumentType]
    bars = [Bar(label=name, parts=accounts) for name, accounts in found.rows]
    heading = f"{document.engine}, {document.num_parameters:,} parameters; the peak was on {found.when}"
    table = pictures.differences(found.forecast.accounts, found.measured)
    return [
        markup.text("p", heading),
        draw(bars, "Live bytes at the peak of a step."),
        table,
        *(markup.text("p", note, "soft") for note in found.notes),
    ]
