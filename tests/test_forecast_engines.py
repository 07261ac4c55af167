"""Forecasts of DDP, a single process and DeepSpeed against measured steps of a small GPT: the peak, and every account at it.

What a run has and a walk leaves out is small change: counters of the optimizer, losses, and one element of placeholders.
"""

import gc
import importlib.util
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import shardbook as sb
from benchmarks import engines, models
from shardbook.accounts import Account
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.forecasting.engines.deepspeed_fetch import Fetcher
from shardbook.forecasting.graph import Weight
from shardbook.forecasting.tape import Tape
from tests import ranks

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make peers")
CONFIG = models.GPTConfig(layers=3, width=128, heads=4, vocab=2048, sequence=64)
SMALL_CHANGE = 1024
BUCKET = 2**16
"""Elements: smaller than a matrix of a block, so that gradients travel alone and together."""


@dataclass(frozen=True)
class Run:
    """One case. ``sizes``: of ``zero_optimization``."""

    engine: str
    dtype: Any = "fp32"
    micro_batch: int = 2
    kernel: Any = "fused"
    views: bool = True
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def stage(self) -> Any:
        return int(self.engine[-1]) if self.engine.startswith("deepspeed") else 0

    @property
    def ranks(self) -> int:
        return 1 if self.engine == "plain" else 2


def measured(run: Run) -> tuple[int, dict[str, int]]:
    """The highest instant of the second and third step on one rank: bytes, and by account. Run by every rank."""
    with warnings.catch_warnings():  # the process goes on to other tests
        warnings.simplefilter("ignore")  # DeepSpeed's own, while it is imported and when it calls collectives
        return _measured(run)


def _measured(run: Run) -> tuple[int, dict[str, int]]:
    contender = contender_of(run)
    contender.step(*models.batch(CONFIG, run.micro_batch, rank=0, step=0))
    gc.collect()
    with sb.measure(contender.model, contender.optimizer) as measuring:
        for step in range(2):
            contender.step(*models.batch(CONFIG, run.micro_batch, rank=0, step=step))
    found = max(measuring.document().reconciliations, key=lambda each: each.allocated)
    return found.allocated, {account: nbytes for account, nbytes in found.books.items() if nbytes}


def contender_of(run: Run) -> engines.Contender:
    if run.engine == "plain":
        return plain(run)
    options: dict[str, Any] = run.sizes if run.stage else {"gradient_as_bucket_view": run.views}
    return engines.make(run.engine, run.dtype, CONFIG, **options)


def plain(run: Run) -> engines.Contender:
    model = models.build(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), fused=run.kernel == "fused", foreach=run.kernel == "foreach")

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.dtype == "bf16"):
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return engines.Contender(name="plain", model=model, optimizer=optimizer, step=step)


def forecast(run: Run) -> sb.Forecast:
    with torch.device("meta"):
        model = models.GPT(CONFIG)
    names = {name.removeprefix("stage3_"): size for name, size in run.sizes.items()}
    knobs = Knobs(stage=run.stage, dtype=run.dtype, grad_accum_dtype=run.dtype, communication_dtype=run.dtype, **names)  # pyright: ignore[reportArgumentType]
    return sb.forecast(
        model,
        sb.ZeroConfig(stage=run.stage, precision=sb.Precision(param=run.dtype)),
        engine="deepspeed" if run.stage else "ddp",
        ranks=run.ranks,
        micro_batch=run.micro_batch,
        sequence=CONFIG.sequence,
        choices=sb.Choices(kernel=run.kernel, bucket_views=run.views),
        knobs=knobs if run.stage else None,
    )


def assert_matches(run: Run, allocated: int, books: dict[str, int]) -> None:
    told = forecast(run)
    assert abs(told.peak_allocated - allocated) <= SMALL_CHANGE, (told.peak_phase, told.peak_where, dict(told.accounts), books)
    for account in sorted({*books, *told.accounts}):
        assert abs(told.accounts.get(account, 0) - books.get(account, 0)) <= SMALL_CHANGE, (account, dict(told.accounts), books)


# ---- DDP and a single process -----------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ddp(dtype, views):
    run = Run("ddp", dtype, views=views)
    for value in ranks.call(2, measured, run):
        assert_matches(run, *value)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_a_single_process(kernel, dtype):
    run = Run("plain", dtype, micro_batch=2, kernel=kernel)
    assert_matches(run, *ranks.call(1, measured, run)[0])


def test_a_second_micro_batch_adds_to_the_gradients_of_the_first():
    once, twice = (
        sb.forecast("gpt2", sb.ZeroConfig(stage=0, accumulate=accumulate), engine="ddp", ranks=1, micro_batch=1, sequence=256)
        for accumulate in (1, 2)
    )
    backward = [next(peak for peak in told.phases if peak.phase == "backward" and not peak.first) for told in (once, twice)]
    whole = 4 * once.num_parameters
    assert backward[1].accounts[Account.GRAD] == whole  # all of them live from the first backward to the step
    assert backward[1].nbytes > backward[0].nbytes


# ---- DeepSpeed --------------------------------------------------------------------------------------------------------------

SMALL_BUCKETS = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
SMALL_FETCHES = {
    "stage3_prefetch_bucket_size": BUCKET,
    "stage3_max_live_parameters": 4 * BUCKET,
    "stage3_max_reuse_distance": 2 * BUCKET,
    "stage3_param_persistence_threshold": 1000,
}


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_1_and_2(stage, dtype):
    """Of so large a batch that the highest instant is the loss: behind it, how long gloo holds what it sends differs from run to run."""
    compare_on_fresh_ranks(Run(f"deepspeed-{stage}", dtype, micro_batch=8, sizes=SMALL_BUCKETS))


@pytest.mark.peers
@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [{"reduce_bucket_size": BUCKET}, {"reduce_bucket_size": BUCKET, **SMALL_FETCHES}], ids=["all", "few"])
def test_deepspeed_3(sizes, dtype):
    """All parameters stay between forward and backward, or few are here at once."""
    compare_on_fresh_ranks(Run("deepspeed-3", dtype, sizes=sizes))


def compare_on_fresh_ranks(run: Run) -> None:
    """DeepSpeed's engines stay alive, and its stage 3 changes torch: each run has processes of its own."""
    values: list[tuple[int, dict[str, int]]] = []
    for ending in ranks.fresh_ranks(2, measured, run):
        assert ending.how == "value", ending.text or ending.message
        values.append(ending.value)
    allocated, books = max(values)
    assert_matches(run, allocated, {account: nbytes for account, nbytes in books.items() if account != Account.UNACCOUNTED or nbytes > 1})


def test_a_bucket_is_as_large_as_it_is_set_whatever_the_model():
    small = forecast(Run("deepspeed-2", sizes={"reduce_bucket_size": 10**6}))
    large = forecast(Run("deepspeed-2", sizes={"reduce_bucket_size": 10**8}))
    assert large.peak_phase == "backward"
    whole = 4 * CONFIG.num_parameters
    assert large.accounts[Account.COMM] == 4 * 10**8 + whole  # all gradients fit: they are reduced together, in a copy
    assert large.peak_allocated - small.peak_allocated > 4 * (10**8 - 2 * 10**6)


def test_overlapping_takes_a_second_bucket():
    knobs = Knobs(stage=2, reduce_bucket_size=10**8)
    one, two = (
        sb.forecast(
            "gpt2",
            sb.ZeroConfig(stage=2),
            engine="deepspeed",
            ranks=4,
            micro_batch=1,
            sequence=128,
            knobs=replace(knobs, overlap_comm=overlap),
        )
        for overlap in (False, True)
    )
    assert two.peak_allocated - one.peak_allocated == 4 * 10**8


# ---- DeepSpeed's order of fetching ------------------------------------------------------------------------------------------


def fetcher(**knobs: int) -> tuple[Tape, Fetcher]:
    """Four modules of one weight of 100 elements each: forward and backward."""
    tape = Tape()
    modules = {name: [Weight(f"{name}.weight", name, 100, 4)] for name in "abcd"}
    given = Knobs(stage=3, param_persistence_threshold=0, **{"max_reuse_distance": 0, **knobs})
    return tape, Fetcher(tape, given, modules, "abcddcba", ranks=2, width=4, on_cuda=True)


def held(tape: Tape) -> tuple[int, int]:
    """Bytes of parameters and of all-gathers, now."""
    live = dict.fromkeys((Account.GATHERED, Account.COMM), 0)
    for entry, change in tape._log:
        live[entry.account] += change
    return live[Account.GATHERED], live[Account.COMM]


def test_looking_ahead_fetches_to_the_end_of_its_bucket_and_the_last_one_whole():
    tape, fetching = fetcher(prefetch_bucket_size=150)
    fetching.enter("a")
    assert held(tape) == (400, 800)  # a; b and c on their way together
    fetching.leave("a")
    assert held(tape) == (0, 800)
    fetching.enter("b")
    assert held(tape) == (800, 800 + 800)  # b and c have their own memory, and c is not used yet; d comes, and a once more
    fetching.enter("c")
    assert held(tape) == (800, 800)


def test_no_more_live_than_are_allowed():
    tape, fetching = fetcher(prefetch_bucket_size=10**6, max_live_parameters=200)
    fetching.enter("a")
    assert held(tape) == (800, 0)  # room for one more


def test_what_comes_again_soon_stays():
    tape, fetching = fetcher(prefetch_bucket_size=0, max_reuse_distance=250)
    for name in "abcd":
        fetching.enter(name)
        fetching.leave(name)
    assert held(tape) == (800, 0)  # c, after 100 elements of d, and d; b comes after 300
