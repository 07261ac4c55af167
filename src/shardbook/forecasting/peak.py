"""The peak of a step: a walk through it, where architecture and batch are known; else what persists."""

import gc
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shardbook.accounts import Account
from shardbook.forecasting.above import cublas_workspace
from shardbook.forecasting.blocks.decoder import Decoder
from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.blocks.style import STYLES, compiled
from shardbook.forecasting.conventions import ACCOUNTS
from shardbook.forecasting.engines.kinds import engine_for, kernels_for
from shardbook.forecasting.engines.shardbook import Shardbook
from shardbook.forecasting.question import Question
from shardbook.forecasting.recomputing import Recomputing
from shardbook.forecasting.result import PhasePeak
from shardbook.forecasting.state import State, away
from shardbook.forecasting.tape import Tape
from shardbook.forecasting.walk import Residence, Walk

USUAL = {"shardbook": "shardbook", "deepspeed": "transformers", "fsdp2": "plain", "ddp": "transformers", "megatron": "megatron"}
"""Whose code the blocks are where nobody says."""

NUM_BYTES_OF_A_TOKEN = 16
"""Inputs and targets are int64."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest instant. ``loss``: account to bytes of the logits and what follows them, live then; ``phase`` is "" without a walk.

    ``host``: account to bytes of the host's memory when that held most. ``pooled``: the highest totals of all pools of a caching
    allocator together, reached at different instants. ``rested``: bytes of recomputation's inputs that go to the host in a micro-batch,
    and come back.
    """

    accounts: Mapping[str, int]
    phase: str = ""
    where: str = ""
    phases: tuple[PhasePeak, ...] = ()
    loss: Mapping[str, int] = field(default_factory=dict[str, int])
    saved: Mapping[str, int] = field(default_factory=dict[str, int])
    host: Mapping[str, int] = field(default_factory=dict[str, int])
    rested: int = 0
    pooled: int = 0

    @property
    def is_peak(self) -> bool:
        return self.phase != ""


def peak_of(question: Question, state: State) -> Peak:
    """The peak of a step after the first, and of each phase."""
    placement = state.placement
    if question.micro_batch is None or placement is None or not placement.weights:
        return Peak(accounts=state.accounts, host=state.host)
    tape, rested = _walked(question, state, steady=True)
    found = _by_phase(_on_device(question, tape.peaks()))
    first = [replace(peak, first=True) for peak in _by_phase(_on_device(question, _walked(question, state, steady=False)[0].peaks()))]
    highest = max(found, key=lambda peak: peak.nbytes)
    live = tape.live_at_peak()
    return Peak(
        accounts=_with_convention(question, state, highest.accounts),
        phase=highest.phase,
        where=highest.where,
        phases=(*found, *first),
        loss=_loss(live),
        saved=_saved(live),
        host=tape.host or state.host,
        rested=rested,
        pooled=sum(tape.pools().values()),
    )


def style_name(question: Question) -> str:
    """Whose code the blocks are."""
    architecture = question.facts.architecture
    told = question.choices.implementation or (architecture.implementation if architecture else "")
    return told or USUAL[question.engine]


def setting_of(question: Question) -> Setting:
    """What each part of a block needs to know."""
    facts, choices = question.facts.architecture, question.choices
    assert facts is not None
    assert question.micro_batch is not None
    assert question.sequence is not None
    name = style_name(question)
    if name in ("gpt", "shardbook") and facts.norm == "layer":
        name = "gpt"
    return Setting(
        facts=facts,
        style=compiled(STYLES[name]) if choices.compiled else STYLES[name],
        micro_batch=question.micro_batch,
        sequence=question.sequence // question.context,
        tensor=question.tensor,
        expert=question.expert,
        sequence_parallel=question.engine != "megatron" if choices.sequence_parallel is None else choices.sequence_parallel,
        attention="flash" if choices.attention == "auto" else choices.attention,
        loss=choices.loss,
        loss_chunks=choices.loss_chunks,
        on_cuda=question.device is not None,
    )


MICRO_BATCHES = 3
"""The first, the last, and one between them: all between are alike."""


def _walked(question: Question, state: State, *, steady: bool) -> tuple[Tape, int]:
    """The tape of a step, and bytes of inputs that rest on the host, of one micro-batch."""
    num_micro_batches = min(MICRO_BATCHES, question.config.accumulate)
    question = replace(question, config=replace(question.config, accumulate=num_micro_batches))
    tape = Tape(granule=512 if question.device is not None else 1)
    engine, weights = engine_for(question, state, tape, steady=steady)
    setting = setting_of(question)
    tape.take(Account.WORKSPACE, _library_workspaces(question), "workspaces of cuBLAS")
    tape.take(Account.INPUT, setting.rows * NUM_BYTES_OF_A_TOKEN, "inputs and targets")
    walk = Walk(tape, engine, kernels_for(question, engine))
    recomputing = _recomputing(question, tape, engine)
    walk.ops.recomputing = recomputing
    model = Decoder(setting, weights, recomputed=recomputed_of(question), choose=choice_of(question))
    with no_collection():
        for _ in range(num_micro_batches):
            walk.micro_batch(lambda: model.loss(walk))
        walk.step()
    return tape, 0 if recomputing is None else recomputing.moved // num_micro_batches


def _recomputing(question: Question, tape: Tape, engine: Residence) -> Recomputing | None:
    """shardbook's own way of recomputing; None: another engine's, or none."""
    if not isinstance(engine, Shardbook) or question.config.recompute.policy == "none":
        return None
    found = Recomputing(tape, rests=question.config.recompute.offload, on_cuda=question.device is not None)
    engine.on_backward = found.look_ahead
    return found


def _library_workspaces(question: Question) -> int:
    """Bytes that libraries take from the caching allocator once and keep: part of what is allocated, and of no one step."""
    if question.device is None:
        return 0
    return cublas_workspace(question.device.name, transformer_engine=style_name(question) == "megatron")


@contextmanager
def no_collection() -> Generator[None]:
    """A walk makes many small objects and no cycles: looking for cycles among them would take half of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def recomputed_of(question: Question) -> frozenset[int]:
    recompute, facts = question.config.recompute, question.facts.architecture
    if recompute.policy == "none" or facts is None:
        return frozenset()
    return frozenset(range(0, facts.layers, recompute.every))


def choice_of(question: Question) -> Callable[[], Callable[[str], bool]] | None:
    """Selective: results of attention, and of every second product of matrices (torchtitan's ``selective`` by operator)."""
    return _Selective if question.config.recompute.policy == "selective" else None


class _Selective:
    """Counts the products of one block."""

    def __init__(self) -> None:
        self._products = 0

    def __call__(self, kind: str) -> bool:
        if kind != "linear":
            return True
        self._products += 1
        return self._products % 2 == 1


def _on_device(question: Question, peaks: list[PhasePeak]) -> list[PhasePeak]:
    """Without what is offloaded, which an engine holds from the beginning of a step to its end."""
    gone = away(question)
    if not gone or question.engine == "shardbook":  # whose walk keeps the tiers apart by itself
        return peaks
    kept = [{account: nbytes for account, nbytes in peak.accounts.items() if account not in gone} for peak in peaks]
    return [replace(peak, accounts=accounts) for peak, accounts in zip(peaks, kept, strict=True)]


def _by_phase(peaks: list[PhasePeak]) -> list[PhasePeak]:
    """The highest of each phase, in the order in which phases come first."""
    best: dict[str, PhasePeak] = {}
    for peak in peaks:
        if peak.phase and (peak.phase not in best or peak.nbytes > best[peak.phase].nbytes):
            best[peak.phase] = peak
    return list(best.values())


def _with_convention(question: Question, state: State, accounts: Mapping[str, int]) -> Mapping[str, int]:
    """A person's own convention says what persists, whatever the engine keeps."""
    if question.convention is None:
        return accounts
    kept = {account: nbytes for account, nbytes in accounts.items() if account not in ACCOUNTS}
    return {**state.accounts, **kept}


_LOSS_WORDS = ("logits", "log-probabilities", "head.weight")


def _loss(live: Mapping[str, int]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for label, nbytes in live.items():
        account, _, words = label.partition(": ")
        if any(word in words for word in _LOSS_WORDS) and account in (Account.ACTIVATION, Account.WORKSPACE):
            found[account] = found.get(account, 0) + nbytes
    return found


def _saved(live: Mapping[str, int]) -> Mapping[str, int]:
    """What autograd saved, by what it is, blocks added up."""
    found: dict[str, int] = {}
    for label, nbytes in live.items():
        account, _, words = label.partition(": ")
        if account == Account.ACTIVATION:
            parts = words.split(".")
            name = ".".join(parts[2:]) if parts[0] == "blocks" and len(parts) > 2 else words
            found[name] = found.get(name, 0) + nbytes
    return found
