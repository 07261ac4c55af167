"""What a forecast says in words: formulas behind its figures, what it leaves out, and what a person must know of them."""

from collections.abc import Iterator, Mapping

from shardbook.accounts import Account
from shardbook.forecasting.conventions import ACCOUNTS, Convention
from shardbook.forecasting.homes import homes
from shardbook.forecasting.peak import Peak, style_name
from shardbook.forecasting.question import Question
from shardbook.forecasting.result import Term
from shardbook.forecasting.state import State

_ZERO = "ZeRO paper (Rajbhandari et al. 2020), sections 5 and 7"


def not_modelled(question: Question, peak: Peak) -> tuple[str, ...]:
    """Sentences with the remedy."""
    return tuple(_not_modelled(question, peak))


def _not_modelled(question: Question, peak: Peak) -> Iterator[str]:
    facts = question.facts
    if not peak.is_peak and question.activations is None:
        if facts.architecture is None:
            yield "activations not modelled: give --activations or an architecture"
        elif question.micro_batch is None:
            yield "activations not modelled: give --micro-batch and --sequence, or --activations"
        yield "gathers, unreduced gradients and buffers not modelled without a batch: give one, or --temporary"
    if facts.architecture is not None and facts.architecture.experts is not None and peak.is_peak:
        yield "uneven load of the experts: every expert is taken to see the same number of tokens"
    if question.choices.compiled:
        yield "torch.compile beyond the blocks: each block is taken to be compiled, the loss is not"
    if not homes(question.config).are_device and question.engine != "shardbook":
        yield "staging buffers of offload"
    if peak.is_peak and question.device is None:
        yield "reserved memory, context and communicators: give --device"


def warnings_of(question: Question, convention: Convention) -> tuple[str, ...]:
    """Another version of what a preset models, and keys of a file that nobody knows."""
    found: list[str] = []
    other = convention.other_version()
    if other:
        found.append(other)
    if question.knobs is not None:
        found += [f"unknown key in the DeepSpeed configuration: {key}" for key in question.knobs.unknown]
        found += list(question.knobs.notes)
    return tuple(found)


def explain(question: Question, held: State, peak: Peak, accounts: Mapping[str, int]) -> tuple[Term, ...]:
    """Formula, value and source of every account, and of what activations consist of."""
    return tuple(_terms(question, held, peak, accounts))


def _terms(question: Question, held: State, peak: Peak, accounts: Mapping[str, int]) -> Iterator[Term]:
    facts, convention = question.facts, held.convention
    for holding in held.holdings:
        width = convention.term(Account(holding.account)).nbytes
        numel = facts.num_parameters if holding.account == Account.PARAM else facts.num_trainable
        divided = f" / {holding.partitions}" if holding.partitions > 1 else ""
        tensor = f" / tensor {question.tensor}" if question.tensor > 1 else ""
        yield Term(account=holding.account, nbytes=holding.here, formula=f"{width:g} * {numel:,}{tensor}{divided}", source=_ZERO)
    if not peak.is_peak:
        return
    b, s = question.micro_batch, question.sequence
    code = f"as the code of {style_name(question)} saves it"
    for name, nbytes in peak.saved.items():
        yield Term(
            account=Account.ACTIVATION.value, nbytes=nbytes, formula=f"{name}, micro-batch {b}, sequence {s}, live at the peak", source=code
        )
    for account, nbytes in accounts.items():
        if account not in ACCOUNTS and account != Account.ACTIVATION:
            yield Term(account=account, nbytes=nbytes, formula=_WORDS.get(account, ""), source=f"walk through a step of {question.engine}")


_WORDS: Mapping[str, str] = {
    Account.GATHERED: "full parameters of the units that are here at the peak",
    Account.GRAD_FULL: "unreduced gradients at the peak",
    Account.COMM: "send and receive buffers of the collectives under way at the peak",
    Account.WORKSPACE: "results and temporaries of operators that are live at the peak and not saved",
    Account.INPUT: "inputs and targets, 16 bytes a token",
}
