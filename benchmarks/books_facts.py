"""What measuring has to find by itself: memory hidden on purpose, and what is known of engines and models anyway."""

from benchmarks.books_case import (
    GPT,
    HIDDEN_NBYTES,
    HIDING,
    OVERSIZED,
    OVERSIZED_FACTOR,
    WIDE_VOCABULARY,
    Case,
    NotRun,
    Outcome,
    documents,
    worst,
)
from benchmarks.engines import Dtype
from benchmarks.evidence_engine import Section, prose, table
from benchmarks.measure import MIB
from shardbook.document import RunDocument

DTYPES: tuple[Dtype, ...] = ("fp32", "bf16")
BUCKETS = tuple(Case(engine=f"deepspeed-{stage}", dtype=dtype) for stage in (1, 2, 3) for dtype in DTYPES)
GATHERING = tuple(Case(engine=name) for name in ("fsdp2-keep", "fsdp2", "shardbook-3"))
ADAMW = tuple(Case(engine=name, shape="small") for name in ("plain-foreach", "plain"))
LOGITS = (Case(engine="plain", micro_batch=2, shape="wide vocabulary"),)
OVER = tuple(Case(engine=name, micro_batch=16, shape="oversized") for name in ("shardbook-3", "fsdp2"))


def bucket_cases(*, quick: bool) -> tuple[Case, ...]:
    """DeepSpeed with its default buckets."""
    return BUCKETS[1:2] if quick else BUCKETS


def fact_cases(*, quick: bool) -> tuple[Case, ...]:
    """All that the known facts need."""
    return (*bucket_cases(quick=quick), *GATHERING, *ADAMW, *LOGITS, *OVER)


def hiding_cases(*, quick: bool) -> tuple[Case, ...]:
    """Engines from which memory is hidden."""
    names = ("plain", "shardbook-3") if quick else ("plain", "ddp", "fsdp2", "shardbook-0", "shardbook-3")
    return tuple(Case(engine=name, shape="hiding") for name in names)


def not_run_lines(found: dict[Case, Outcome]) -> list[str]:
    """What could not be run here, why, and the remedy."""
    reasons: dict[str, list[str]] = {}
    for case, one in found.items():
        if isinstance(one, NotRun):
            reasons.setdefault(one.reason, []).append(f"{case.engine} {case.dtype}")
    return [line for reason, names in reasons.items() for line in prose(f"*Not run*: {', '.join(names)}. {reason}.")]


_TINY_NBYTES = 64
"""An engine keeps a number or two in tensors of its own: FSDP2 the ranks of its mesh."""


# ---- a hidden tensor -----------------------------------------------------------------------------------------------------


def hidden(*, quick: bool) -> Section:
    """Memory that nobody tells of is seen, with its length and its place."""
    section = Section(title="Memory hidden on purpose")
    section.text += prose(
        f"In the forward of `{HIDING}` a storage of {HIDDEN_NBYTES:,} bytes is made that no tensor has and no operator made; it stays",
        "until the next forward.",
    )
    rows: list[list[str]] = []
    for case, found in documents(hiding_cases(quick=quick)).items():
        assert isinstance(found, RunDocument)
        peak = worst(found)
        items = [item for item in peak.items if item.account == "UNACCOUNTED" and item.nbytes > _TINY_NBYTES]
        nbytes, places = peak.books["UNACCOUNTED"], ", ".join(f"{item.phase} {item.unit}" for item in items)
        rows.append([case.engine, f"{peak.allocated:,}", f"{nbytes:,}", places])
        right = HIDDEN_NBYTES <= nbytes <= HIDDEN_NBYTES + _TINY_NBYTES and places == f"forward {HIDING}"
        section.promise(f"{case.engine}: {nbytes:,} bytes UNACCOUNTED, made in {places}; hidden were {HIDDEN_NBYTES:,}", holds=right)
    section.text += table(["engine", "peak, bytes", "UNACCOUNTED, bytes", "made in"], rows)
    return section


# ---- known facts ---------------------------------------------------------------------------------------------------------


def facts(*, quick: bool) -> Section:
    """What is known of these engines and models comes out by itself."""
    section = Section(title="Known facts, found again")
    section.text += prose("Each by a measured run that is told nothing of what it should find; the figures are in the list at the top.")
    _default_buckets(section, bucket_cases(quick=quick))
    for tell in (_kept_gathered, _foreach_temporaries, _logits, _oversized):
        tell(section)
    return section


def _default_buckets(section: Section, cases: tuple[Case, ...]) -> None:
    found = documents(cases)
    for case, one in found.items():
        if isinstance(one, NotRun):
            continue
        largest = max((item for item in worst(one).items if item.account == "COMM"), key=lambda item: item.nbytes, default=None)
        expected = 500_000_000 * (2 if case.dtype == "bf16" else 4)
        said = "no COMM" if largest is None else f"{largest.name}, {largest.nbytes:,} bytes of {largest.dtype}"
        right = largest is not None and "bucket" in largest.name and largest.nbytes == expected
        section.promise(f"{case.engine} in {case.dtype}: its default bucket is the largest COMM: {said}", holds=right)
    section.text += not_run_lines(found)


def _kept_gathered(section: Section) -> None:
    found = documents(GATHERING)
    gathered = {case.engine: worst(one).books.get("GATHERED", 0) for case, one in found.items() if isinstance(one, RunDocument)}
    block, whole = 4 * (12 * GPT.width**2 + 13 * GPT.width), 4 * GPT.num_parameters
    root = whole - GPT.layers * block
    kept = gathered["fsdp2-keep"]
    section.promise(
        f"FSDP2 without reshard holds {kept / MIB:.1f} MiB GATHERED at its peak, all parameters are {whole / MIB:.1f}",
        holds=kept >= 0.99 * whole,
    )
    for name in ("fsdp2", "shardbook-3"):
        said = f"{name}: {gathered[name] / MIB:.1f} MiB GATHERED at its peak; the root and two blocks are {(root + 2 * block) / MIB:.1f}"
        section.promise(said, holds=gathered[name] <= root + 2 * block)


def _foreach_temporaries(section: Section) -> None:
    found = documents(ADAMW)
    highest: dict[str, int] = {}
    for case, one in found.items():
        assert isinstance(one, RunDocument)
        highest[case.engine] = _highest(one, "WORKSPACE", "step")
        if case.engine == "plain-foreach":
            peak = worst(one)
            said = f"foreach AdamW: the peak is in phase {peak.phase}, with {peak.books.get('WORKSPACE', 0) / MIB:.1f} MiB of WORKSPACE"
            section.promise(said, holds=peak.phase == "step" and peak.books.get("WORKSPACE", 0) > 0.1 * peak.books["PARAM"])
    section.promise(
        f"WORKSPACE in phase step: {highest['plain-foreach']:,} bytes by foreach AdamW, {highest['plain']:,} by fused",
        holds=highest["plain-foreach"] > 100 * max(1, highest["plain"]),
    )


def _highest(document: RunDocument, account: str, phase: str) -> int:
    """The most that an account held while a phase went on, in the step with the peak."""
    curve = document.curves[0]
    spans = [(begin, end) for name, _, begin, end in curve.spans if name == phase]
    series = curve.accounts.get(account, (0,) * len(curve.seconds))
    within = (any(begin <= instant <= end for begin, end in spans) for instant in curve.seconds)
    return max((nbytes for nbytes, counts in zip(series, within, strict=True) if counts), default=0)


def _logits(section: Section) -> None:
    ((_, found),) = documents(LOGITS).items()
    assert isinstance(found, RunDocument)
    peak, vocab = worst(found), WIDE_VOCABULARY.vocab
    passing = [item for item in peak.items if item.account in ("ACTIVATION", "WORKSPACE", "GRAD_FULL")]
    largest = passing[0]
    logits = sum(item.nbytes for item in passing if item.shape and item.shape[-1] == vocab)
    share = logits / sum(peak.books.get(name, 0) for name in ("ACTIVATION", "WORKSPACE", "GRAD_FULL"))
    section.promise(
        f"vocabulary {vocab:,}: the largest item that is neither parameter nor state is {largest.name} {list(largest.shape)} in "
        f"{largest.unit}; {share:.0%} of what lives for a pass ends in the vocabulary",
        holds=largest.shape[-1] == vocab and share > 0.5,
    )


def _oversized(section: Section) -> None:
    for case, found in documents(OVER).items():
        assert isinstance(found, RunDocument)
        by_unit: dict[str, int] = {}
        for item in worst(found).items:
            if item.account == "GATHERED":
                by_unit[item.unit] = by_unit.get(item.unit, 0) + item.nbytes
        largest = max(by_unit, key=lambda unit: by_unit[unit])
        section.promise(
            f"{case.engine}, one MLP {OVERSIZED_FACTOR} times as wide as the others (blocks.{OVERSIZED}): the largest gather at the peak "
            f"is that of {largest}, {by_unit[largest]:,} bytes",
            holds=largest == f"blocks.{OVERSIZED}",
        )
