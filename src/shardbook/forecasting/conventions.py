"""Conventions: bytes per parameter in each account, and the stage from which each is partitioned.

A convention is data. One is written as its numbers, called by a name of :data:`PRESETS`, or either of them edited term by term:

>>> Convention.parse("2+2+4+8").total
16
>>> print(Convention.parse("deepspeed-bf16,grad=4,moment=2").describe())  # doctest: +ELLIPSIS
deepspeed-bf16,grad=4,moment=2: 12 bytes per parameter = parameters 2 + gradients 4 + master 4 + moments 2, ...

It says what persists. Gathers, buckets, receive buffers and temporaries of a step are no part of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES, Check, listed, nearest, refuse
from shardbook.config import Precision

ACCOUNTS = (Account.PARAM, Account.GRAD, Account.MASTER, Account.MOMENT)
"""The accounts of a convention, in the order in which its numbers are written."""

MOST_NBYTES = 64
"""Bytes per parameter of one account above which a number is taken for a mistake."""

_WORDS = {Account.PARAM: "parameters", Account.GRAD: "gradients", Account.MASTER: "master", Account.MOMENT: "moments"}
_KEYS = {"param": Account.PARAM, "grad": Account.GRAD, "master": Account.MASTER, "moment": Account.MOMENT}
_ZERO_STAGES: Mapping[Account, int] = {Account.PARAM: 3, Account.GRAD: 2, Account.MASTER: 1, Account.MOMENT: 1}
_EXAMPLE = 'for example "2+2+4+8": parameters + gradients + master + moments (three numbers: no master)'

Optimizer = Literal["adamw", "adamw-8bit", "sgd", "sgd-momentum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One account of a convention.

    Args:
        account: one of :data:`ACCOUNTS`.
        nbytes: bytes per parameter, also a fraction.
        partitioned_from: first stage at which each rank holds 1/N; 0: at every stage; None: at none.
        what: what these bytes are, in words.
        cast_from: first stage at which trained parameters are not kept, being cast from the master when they are needed. Frozen
            ones have no master and stay.
        to_step: held from the reduction of the gradients to the step only, not between steps.
        kept_from: first stage at which it stays between steps in spite of ``to_step``; None: at none.
        held_from: first stage at which there is any: below it the engine has no such account.
    """

    account: Account
    nbytes: float
    partitioned_from: int | None
    what: str = ""
    cast_from: int | None = None
    to_step: bool = False
    kept_from: int | None = None
    held_from: int = 0

    def __post_init__(self) -> None:
        check = Check(self)
        if self.account not in ACCOUNTS:
            check.add("account", str(self.account), ", ".join(ACCOUNTS), "other accounts are no part of a convention")
        if isinstance(self.nbytes, bool) or not 0 <= self.nbytes <= MOST_NBYTES:  # nan is not, either
            check.add("nbytes", self.nbytes, f"0 to {MOST_NBYTES} bytes per parameter in each account", _EXAMPLE)
        if self.held_from not in (0, 1, 2, 3):
            check.add("held_from", self.held_from, "a stage from 0 to 3", "0: at every stage")
        for name in ("partitioned_from", "cast_from", "kept_from"):
            if getattr(self, name) not in (None, 0, 1, 2, 3):
                check.add(name, getattr(self, name), "a stage from 0 to 3, or None", "None: at no stage")
        check.done()

    def is_partitioned(self, stage: int) -> bool:
        """Whether each rank holds 1/N of it."""
        return self.partitioned_from is not None and stage >= self.partitioned_from

    def is_cast(self, stage: int) -> bool:
        """Whether trained parameters are not kept, but cast from the master when they are needed."""
        return self.cast_from is not None and stage >= self.cast_from

    def is_here(self, stage: int, *, between_steps: bool = False) -> bool:
        """Whether the engine has it at all: at that stage, and at the step or between two."""
        kept = not self.to_step or (self.kept_from is not None and stage >= self.kept_from)
        return stage >= self.held_from and (kept or not between_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One persistent account: bytes of the whole model, on this rank, and over how many ranks they are partitioned (1: replicated)."""

    account: str
    total: int
    here: int
    partitions: int


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Bytes per parameter by account.

    Args:
        name: as a person writes it.
        terms: one for each of :data:`ACCOUNTS`, in their order.
        models: name and version of what this describes; "" for a person's own numbers.
        source: paper, documentation or files behind it.
        stage: the one stage that an engine without a choice has; None: any.

    Raises:
        ConfigError: terms missing, twice or out of order.
    """

    name: str
    terms: tuple[Share, ...]
    models: str = ""
    source: str = ""
    stage: int | None = None

    def __post_init__(self) -> None:
        if tuple(term.account for term in self.terms) != ACCOUNTS:
            given = " + ".join(term.account for term in self.terms)
            refuse(f"Convention.terms = {given or 'nothing'}", " + ".join(ACCOUNTS), "give each account once, in this order")

    @classmethod
    def parse(cls, text: str) -> "Convention":
        """A convention as a person writes it.

        ``"2+2+4+8"`` is parameters + gradients + master + moments, partitioned as in the ZeRO paper; of three numbers the last is the
        moments and there is no master. Or a name of :data:`PRESETS`. Behind either, edits: ``,grad=4`` sets bytes, ``,grad=4@1`` the
        first stage that partitions them as well, ``,grad=4@never`` none.

        Raises:
            ConfigError: an unknown name, with the nearest; a number that is none, negative or above :data:`MOST_NBYTES`; an edit of
                no account.
        """
        base, *edits = (part.strip() for part in text.split(","))
        found = PRESETS.get(base) or (_of_numbers(base) if "+" in base else None)
        if found is None:
            refuse(f"convention = {text!r}", f"numbers ({_EXAMPLE}), or one of {listed(PRESETS)}", nearest(base, PRESETS))
        for edit in edits:
            found = found.edited(edit)
        return found

    @classmethod
    def of_precision(cls, precision: Precision, optimizer: Optimizer = "adamw") -> "Convention":
        """What shardbook's engine keeps under ``precision``.

        >>> [Convention.of_precision(Precision(param="bf16")).per_rank(stage, ranks=4) for stage in (0, 1, 2, 3)]
        [18.0, 9.0, 6.0, 4.0]
        """
        nbytes, master = DTYPE_NBYTES, precision.has_master
        casts = 3 if master and not precision.keep_param_shard else None
        own = precision.master_dtype if master else "no separate copy"
        name = next((known for known, preset in _PRECISIONS.items() if preset == precision), "precision")
        convention = cls(
            name=f"shardbook-{name}",
            terms=(
                Share(account=Account.PARAM, nbytes=nbytes[precision.param], partitioned_from=3, what=precision.param, cast_from=casts),
                Share(
                    account=Account.GRAD, nbytes=nbytes[precision.grad_dtype], partitioned_from=2, what=precision.grad_dtype, to_step=True
                ),
                Share(account=Account.MASTER, nbytes=nbytes[precision.master_dtype] if master else 0, partitioned_from=1, what=own),
                Share(account=Account.MOMENT, nbytes=2 * nbytes[precision.master_dtype], partitioned_from=1, what=precision.master_dtype),
            ),
            models="shardbook, this version",
            source="docs/accounts.md",
        )
        return convention.with_optimizer(optimizer)

    def term(self, account: Account) -> Share:
        """The term of one of :data:`ACCOUNTS`."""
        return self.terms[ACCOUNTS.index(account)]

    def with_term(self, term: Share) -> Self:
        """The same with one term replaced."""
        return replace(self, terms=tuple(term if old.account == term.account else old for old in self.terms))

    def edited(self, edit: str) -> Self:
        """The same with ``edit`` applied, for example ``"grad=4"`` or ``"grad=4@1"``.

        Raises:
            ConfigError: no edit of this form; an account it does not have.
        """
        key, equals, value = edit.partition("=")
        if not equals or key.strip() not in _KEYS:
            close = nearest(key.strip(), _KEYS) if equals else 'write for example "grad=4"'
            refuse(f"convention edit {edit!r}", f"{listed(_KEYS)}, an equals sign and bytes per parameter", close)
        number, at, stage = value.partition("@")
        old = self.term(_KEYS[key.strip()])
        first = _stage(stage.strip(), edit) if at else old.partitioned_from
        term = replace(old, nbytes=_number(number, edit), partitioned_from=first, what="given")
        return replace(self.with_term(term), name=f"{self.name},{edit}")

    def with_optimizer(self, optimizer: Optimizer) -> Self:
        """The same with the moments of another optimizer, in the type of what it steps on; 8-bit ones take a byte each.

        8-bit optimizers keep an fp32 scale for each block of elements besides: 0.03 bytes per parameter with blocks of 256, not counted.
        """
        stepped = self.term(Account.MASTER).nbytes or self.term(Account.PARAM).nbytes
        nbytes = {"adamw": 2 * stepped, "adamw-8bit": 2, "sgd": 0, "sgd-momentum": stepped}[optimizer]
        moment = self.term(Account.MOMENT)
        return self if nbytes == moment.nbytes else self.with_term(replace(moment, nbytes=nbytes, what=f"of {optimizer}"))

    @property
    def total(self) -> float:
        """Bytes per trained parameter in all accounts together, unpartitioned."""
        return _whole(math.fsum(term.nbytes for term in self.terms))

    def nbytes_per_parameter(self, account: Account, stage: int, ranks: int) -> float:
        """Bytes of an account on one rank, per trained parameter of the whole model: c, c/N where partitioned, 0 where cast at use.

        >>> PRESETS["2+2+4+8"].nbytes_per_parameter(Account.MOMENT, stage=1, ranks=4)
        2.0
        """
        term = self.term(account)
        if term.is_cast(stage) or not term.is_here(stage):
            return 0.0
        return term.nbytes / ranks if term.is_partitioned(stage) else float(term.nbytes)

    def per_rank(self, stage: int, ranks: int) -> float:
        """Bytes per trained parameter on one rank, all accounts together."""
        return math.fsum(self.nbytes_per_parameter(account, stage, ranks) for account in ACCOUNTS)

    def holdings(
        self, numel_total: int, numel_trainable: int, stage: int, ranks: int, *, between_steps: bool = False
    ) -> tuple[Holding, ...]:
        """What one rank holds of a model: PARAM of every parameter, the rest of the trained ones only.

        A shard has ⌈numel/N⌉ elements: padding beyond that belongs to an engine, not to a convention. ``between_steps`` leaves out
        what lives from reduction to step only.

        >>> held = PRESETS["2+2+4+8"].holdings(7_500_000_000, 7_500_000_000, stage=1, ranks=64)
        >>> [(one.account, one.here, one.partitions) for one in held if one.account in ("PARAM", "MOMENT")]
        [('PARAM', 15000000000, 1), ('MOMENT', 937500000, 64)]
        """
        found: list[Holding] = []
        for term in self.terms:
            numel = numel_trainable
            if term.account == Account.PARAM:
                numel = numel_total - numel_trainable if term.is_cast(stage) else numel_total
            if not term.is_here(stage, between_steps=between_steps):
                numel = 0
            parts = ranks if term.is_partitioned(stage) else 1
            total, here = math.ceil(numel * term.nbytes), math.ceil(-(-numel // parts) * term.nbytes)
            found.append(Holding(account=str(term.account), total=total, here=here, partitions=parts))
        return tuple(found)

    def state(self, numel_total: int, numel_trainable: int | None = None) -> int:
        """Bytes of the whole training state, unpartitioned.

        >>> PRESETS["2+2+4+8"].state(7_000_000_000)
        112000000000
        """
        trained = numel_total if numel_trainable is None else numel_trainable
        return sum(math.ceil((numel_total if term.account == Account.PARAM else trained) * term.nbytes) for term in self.terms)

    def describe(self) -> str:
        """One line: name, bytes, partitioning, what it models. Stands beside every result.

        >>> print(PRESETS["2+2+4+8"].describe())  # doctest: +NORMALIZE_WHITESPACE
        2+2+4+8: 16 bytes per parameter = parameters 2 + gradients 2 + master 4 + moments 8,
        partitioned from stage 3 / 2 / 1 / 1; models the ZeRO paper (2020)
        """
        terms = " + ".join(f"{_WORDS[term.account]} {_whole(term.nbytes):g}" for term in self.terms)
        line = f"{self.name}: {self.total:g} bytes per parameter = {terms}, {self._partitioning()}"
        if any(term.cast_from is not None for term in self.terms):
            line += "; at stage 3 parameters are cast from the master at each gather"
        line += "".join(f"; no {_WORDS[term.account]} below stage {term.held_from}" for term in self.terms if term.held_from)
        return line + (f"; models {self.models}" if self.models else "; your own figures")

    def _partitioning(self) -> str:
        stages = [term.partitioned_from for term in self.terms]
        if stages == [None] * len(stages):
            return "all replicated"
        if stages == [0] * len(stages):
            return "all partitioned"
        return "partitioned from stage " + " / ".join("never" if stage is None else str(stage) for stage in stages)

    def other_version(self, installed: Callable[[str], str] | None = None) -> str | None:
        """A sentence if another version of what this models is installed; None: the same one, or none.

        Args:
            installed: from the name of a distribution to its version; None: ``importlib.metadata.version``.
        """
        name, _, version = self.models.rpartition(" ")
        if name not in _DISTRIBUTIONS:
            return None
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as of_metadata

        try:
            here = (installed or of_metadata)(_DISTRIBUTIONS[name])
        except PackageNotFoundError:
            return None
        if f"{here.partition('+')[0]}.".startswith(f"{version}."):
            return None
        return f"{self.name} models {self.models}, and {here} is installed: its figures may differ"


_DISTRIBUTIONS = {"DeepSpeed": "deepspeed", "torch": "torch", "Megatron Core": "megatron-core"}


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _number(text: str, where: str) -> float:
    try:
        return _whole(float(text))
    except (ValueError, OverflowError):
        refuse(f"convention {where!r}: {text.strip()!r}", f"a number of bytes per parameter, 0 to {MOST_NBYTES}", _EXAMPLE)


def _stage(text: str, where: str) -> int | None:
    if text == "never":
        return None
    if text not in ("0", "1", "2", "3"):
        refuse(f"convention edit {where!r}: {text!r}", 'a stage from 0 to 3, or "never"', 'for example "grad=4@2"')
    return int(text)


def _of_numbers(text: str) -> Convention:
    parts = text.split("+")
    if len(parts) not in (3, 4):
        refuse(f"convention = {text!r}", "three or four numbers", _EXAMPLE)
    numbers = [_number(part, text) for part in parts]
    if len(numbers) == 3:
        numbers.insert(2, 0)
    return _convention(text, numbers, _ZERO_STAGES)


def _convention(
    name: str,
    numbers: "list[float] | tuple[float, ...]",
    stages: "Mapping[Account, int | None]",
    about: tuple[str, str, int | None] = ("", "", None),
    to_step: bool = False,
) -> Convention:
    """``about``: models, source and the only stage."""
    terms = tuple(
        Share(account=account, nbytes=nbytes, partitioned_from=stages[account], to_step=to_step and account == Account.GRAD)
        for account, nbytes in zip(ACCOUNTS, numbers, strict=True)
    )
    models, source, stage = about
    return Convention(name=name, terms=terms, models=models, source=source, stage=stage)


def _of_deepspeed(
    name: str, numbers: tuple[float, ...], about: tuple[str, str, None], *, kept_from: int = 3, master_from: int = 0
) -> Convention:
    """Gradients go with the step but for a flat buffer that stage 3 never frees. The master is a copy in fp32, too, once there is one."""
    found = _convention(name, numbers, _ZERO_STAGES, about, to_step=True)
    found = found.with_term(replace(found.term(Account.GRAD), kept_from=kept_from))
    return found.with_term(replace(found.term(Account.MASTER), held_from=master_from))


# ---- presets -----------------------------------------------------------------------------------------------------------------

_PRECISIONS: Mapping[str, Precision] = {name: Precision.preset(name) for name in ("fp32", "bf16", "fp16", "pure-bf16", "2+2+4+8")}

_NEVER: Mapping[Account, None] = dict.fromkeys(ACCOUNTS)
_ALWAYS: Mapping[Account, int] = dict.fromkeys(ACCOUNTS, 0)
_STATE_ONLY: Mapping[Account, int | None] = {Account.PARAM: None, Account.GRAD: None, Account.MASTER: 1, Account.MOMENT: 1}

_PAPER = ("the ZeRO paper (2020)", "Rajbhandari et al. 2020, arXiv:1910.02054, sections 3 and 5", None)
_PLAIN = ("torch 2.13", "torch/optim: gradients and moments have the parameters' type", None)
_DEEPSPEED = ("DeepSpeed 0.19.8", "deepspeed/runtime/zero/stage_1_and_2.py and stage3.py", None)
_DEEPSPEED_FP32 = ("DeepSpeed 0.19.8", "deepspeed/runtime/bf16_optimizer.py (stage 1), zero/stage_1_and_2.py and stage3.py", None)
_FSDP2 = ("torch 2.13", "torch/distributed/fsdp/_fully_shard: shards and reduced gradients keep the parameters' own type", 3)
_DDP = ("torch 2.13", "torch/nn/parallel/distributed.py: gradients are views of the reducer's buckets, which stay", 0)
_MEGATRON = "Megatron Core 0.19"
_MEGATRON_SOURCE = "Megatron-LM docs/source/api-guide/dist_optimizer.md: bf16 parameters, fp32 gradients"


def _presets() -> Mapping[str, Convention]:
    """In the order in which they are listed. Where gradients are freed with the step (``to_step``), they don't count between steps."""
    zero, step = _ZERO_STAGES, True
    conventions = (
        _convention("2+2+4+8", (2, 2, 4, 8), zero, _PAPER),
        *(replace(Convention.of_precision(precision), name=f"shardbook-{name}") for name, precision in _PRECISIONS.items()),
        _of_deepspeed("deepspeed-bf16", (2, 2, 4, 8), _DEEPSPEED),
        _of_deepspeed("deepspeed-bf16-fp32-grads", (2, 4, 4, 8), _DEEPSPEED_FP32, kept_from=1),
        _of_deepspeed("deepspeed-fp16", (2, 2, 4, 8), _DEEPSPEED),
        _of_deepspeed("deepspeed-fp32", (4, 4, 4, 8), _DEEPSPEED, master_from=1),
        _convention("fsdp2-fp32", (4, 4, 0, 8), _ALWAYS, _FSDP2, step),
        _convention("fsdp2-bf16", (4, 4, 0, 8), _ALWAYS, _FSDP2, step),  # MixedPrecisionPolicy: bf16 only while gathered
        _convention("fsdp2-pure-bf16", (2, 2, 0, 4), _ALWAYS, _FSDP2, step),
        _convention("ddp-fp32", (4, 4, 0, 8), _NEVER, _DDP),
        _convention("ddp-amp", (4, 4, 0, 8), _NEVER, _DDP),  # the casts of torch.autocast are activations
        _convention("ddp-pure-bf16", (2, 2, 0, 4), _NEVER, _DDP),
        _convention("megatron-bf16", (2, 4, 4, 8), _NEVER, (_MEGATRON, _MEGATRON_SOURCE, 0)),
        _convention("megatron-bf16-distributed", (2, 4, 4, 8), _STATE_ONLY, (_MEGATRON, _MEGATRON_SOURCE, 1)),
        _convention("fp32", (4, 4, 0, 8), zero, _PLAIN),
        _convention("pure-bf16", (2, 2, 0, 4), zero, _PLAIN),
        _convention("adam-8bit", (2, 2, 4, 2), zero, ("bitsandbytes", "Dettmers et al. 2022, arXiv:2110.02861", None)),
        _convention("pure-bf16-8bit", (2, 2, 0, 2), zero, ("bitsandbytes", "Dettmers et al. 2022, arXiv:2110.02861", None)),
        _convention("sgd", (4, 4, 0, 0), zero, _PLAIN),
        _convention("sgd-momentum", (4, 4, 0, 4), zero, _PLAIN),
    )
    return {convention.name: convention for convention in conventions}


PRESETS: Mapping[str, Convention] = _presets()
"""Every convention that has a name."""
