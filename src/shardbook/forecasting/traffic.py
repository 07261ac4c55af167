"""Bytes that one rank sends in a step, by engine and stage.

Ψ parameters, N ranks, k micro-batches; each line is elements × (N-1)/N × bytes of what travels (ZeRO paper, section 7):

    paper, shardbook    stages 0 and 1  2Ψ       stage 2  kΨ + Ψ       stage 3  3kΨ
    DeepSpeed           stage 0  2Ψ   stage 1  3Ψ   stage 2  2kΨ + Ψ   stage 3  3kΨ less what is kept
    FSDP2               3kΨ; 2kΨ where units are not resharded after forward
    DDP                 2Ψ (2kΨ without ``no_sync``)
    Megatron            2Ψ; distributed optimizer Ψ + Ψ

An all-reduce sends 2Ψ, a reduce-scatter or an all-gather Ψ. DeepSpeed 0.19.8 reduces with an all-reduce of each bucket at stages 1
and 2 (``use_multi_rank_bucket_allreduce``, on by default), and keeps the part of each rank: more than the paper's count. Recomputing
a unit in backward gathers nothing again: the unit is gathered for backward anyway.

>>> flow = Flow(engine="shardbook", stage=3, ranks=4, numel=1000, micro_batches=2)
>>> [(line.kind, line.nbytes) for line in lines(flow)], sent_nbytes(flow)
([('reduce', 6000), ('gather', 12000)], 18000)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES, Check
from shardbook.config import ZeroConfig
from shardbook.forecasting.buffers import FlatForm, adds_locally, flat_form
from shardbook.forecasting.conventions import Convention
from shardbook.forecasting.deepspeed_knobs import Knobs
from shardbook.structure import Structure

Engine = Literal["convention", "shardbook", "deepspeed", "fsdp2", "ddp", "megatron"]
ENGINES: tuple[str, ...] = get_args(Engine)

PAPER = "Rajbhandari et al. 2020, arXiv:1910.02054, section 7"
_SOURCES = {
    "convention": PAPER,
    "shardbook": "docs/how-it-works.md, one step",
    "deepspeed": "DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py",
    "fsdp2": "torch 2.13, torch/distributed/fsdp/_fully_shard",
    "ddp": "torch 2.13, torch/nn/parallel/distributed.py",
    "megatron": "Megatron-LM docs/source/api-guide/dist_optimizer.md",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What travels.

    Args:
        engine, stage, ranks: who sends; FSDP2, DDP and Megatron have no stages (for Megatron 1 is its distributed optimizer).
        numel, numel_trainable: elements of all parameters, and of the trained ones (None: all).
        micro_batches: k.
        param_nbytes: bytes of an element as parameters travel: the type they compute in.
        grad_nbytes: bytes of an element as gradients travel.
        back_nbytes: bytes of an element as whole gradients come back at shardbook's stage 0; None: as they travelled.
        kept_numel: elements that stay gathered from forward to backward: FSDP2's root, or all of it without reshard; DeepSpeed 3's
            within ``max_reuse_distance`` (:func:`kept_by_deepspeed`).
        each_micro_batch: DDP without ``no_sync`` and Megatron without overlap of accumulation reduce in each micro-batch.
        multi_rank_buckets: DeepSpeed's ``use_multi_rank_bucket_allreduce``.

    Raises:
        ConfigError: an unknown engine, a stage, or a count below its least.
    """

    engine: Engine
    ranks: int
    numel: int
    stage: int = 0
    numel_trainable: int | None = None
    micro_batches: int = 1
    param_nbytes: float = 4
    grad_nbytes: float = 4
    back_nbytes: float | None = None
    kept_numel: int = 0
    each_micro_batch: bool = False
    multi_rank_buckets: bool = True

    def __post_init__(self) -> None:
        check = Check(self)
        check.choice("engine", ENGINES)
        check.stage("stage")
        check.integer("ranks", least=1, remedy="1 is a single process")
        check.integer("numel", least=0, remedy="count the elements of the parameters")
        check.integer("numel_trainable", least=0, remedy="None: all are trained", optional=True)
        check.integer("micro_batches", least=1, remedy="1 steps after every micro-batch")
        check.integer("kept_numel", least=0, remedy="0: nothing is kept")
        check.done()

    @property
    def trained(self) -> int:
        """Elements that have gradients."""
        return self.numel if self.numel_trainable is None else self.numel_trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One kind of collective: what a rank sends in a step. ``kind``: gather, reduce, refresh (new parameters), return (gradients)."""

    kind: str
    nbytes: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """A stage: bytes that its state takes on one rank, how many fewer than at stage 0, and bytes sent in a step."""

    stage: int
    held: int
    saved: int
    sent: int


def lines(flow: Flow) -> tuple[Sent, ...]:
    """What a rank sends, by kind."""
    rule = {"deepspeed": _deepspeed, "fsdp2": _fsdp2, "ddp": _ddp, "megatron": _megatron}.get(flow.engine, _zero)
    return tuple(line for line in rule(flow) if line.nbytes)


def sent_nbytes(flow: Flow) -> int:
    """Bytes that a rank sends in a step."""
    return sum(line.nbytes for line in lines(flow))


def by_stage(flow: Flow, convention: Convention) -> tuple[StageTraffic, ...]:
    """Bytes saved beside bytes sent, for each stage.

    >>> from shardbook.forecasting.conventions import PRESETS
    >>> for row in by_stage(Flow(engine="shardbook", ranks=4, numel=1000), PRESETS["fp32"]):
    ...     print(row.stage, row.held, row.saved, row.sent)
    0 16000 0 6000
    1 10000 6000 6000
    2 7000 9000 6000
    3 4000 12000 9000
    """
    held = [sum(one.here for one in convention.holdings(flow.numel, flow.trained, stage, flow.ranks)) for stage in range(4)]
    return tuple(
        StageTraffic(stage=stage, held=held[stage], saved=held[0] - held[stage], sent=sent_nbytes(replace(flow, stage=stage)))
        for stage in range(4)
    )


def flow_of_convention(convention: Convention, flow: Flow) -> Flow:
    """``flow`` with the bytes that a convention says: parameters and gradients travel as they are held."""
    return replace(flow, param_nbytes=convention.term(Account.PARAM).nbytes, grad_nbytes=convention.term(Account.GRAD).nbytes)


def of_structure(structure: Structure, config: ZeroConfig) -> tuple[Sent, ...]:
    """What a rank of shardbook's engine sends in a step, to the byte: flat buffers with their padding, each in its own types.

    Σ over flat buffers of (N-1)·s elements, where s is a shard. The exchange of the step (some hundred bytes) is not counted, nor what
    is sent while an engine is built. A rank without data sends what the others do.

    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4))
    >>> [(line.kind, line.nbytes) for line in of_structure(model, ZeroConfig(stage=2))]
    [('reduce', 3072), ('refresh', 3072)]
    """
    others = structure.group.num_ranks - 1
    forms = [flat_form(flat, config, structure.group) for unit in structure.units for flat in unit.flats]
    micro, trained = config.accumulate, [form for form in forms if form.trainable]

    def shards(which: list[FlatForm], width: str, times: int = 1) -> int:
        return times * others * sum(form.shard_numel * getattr(form, width) for form in which)

    reduced = shards(trained, "wire_nbytes", 1 if config.stage < 2 else micro)
    found = [_line("shardbook", "reduce", reduced, "Σ (N-1)·s·w" + ("" if config.stage < 2 else " · k"))]
    if config.stage == 0:
        found.append(_line("shardbook", "return", shards(trained, "grad_nbytes"), "Σ (N-1)·s·g"))
    elif config.stage < 3:
        found.append(_line("shardbook", "refresh", shards(trained, "param_nbytes"), "Σ (N-1)·s·p"))
    else:
        found.append(_line("shardbook", "gather", shards(forms, "param_nbytes", 2 * micro), "2k · Σ (N-1)·s·p"))
    return tuple(line for line in found if line.nbytes)


def flow_of_config(config: ZeroConfig, flow: Flow) -> Flow:
    """``flow`` with stage, micro-batches and types of a configuration, without the padding that :func:`of_structure` knows."""
    precision, nbytes = config.precision, DTYPE_NBYTES
    ordered = config.reduction == "ordered" or (config.reduction == "auto" and flow.ranks <= 64)
    wire = nbytes[precision.param if ordered else precision.reduce]
    if flow.engine == "ddp":
        wire = nbytes[precision.master_dtype]  # gradients have the type in which parameters are stored
    elif flow.engine == "fsdp2":
        wire = nbytes[precision.reduce]
    elif adds_locally(config):
        wire = max(wire, nbytes[precision.reduce], nbytes[precision.grad_dtype])
    return replace(
        flow,
        stage=config.stage,
        micro_batches=config.accumulate,
        param_nbytes=nbytes[precision.param],
        grad_nbytes=wire,
        back_nbytes=nbytes[precision.grad_dtype],
    )


def flow_of_knobs(knobs: Knobs, flow: Flow) -> Flow:
    """``flow`` under DeepSpeed's own settings: stage, micro-batches, types, buckets, and what stage 3 keeps."""
    kept = kept_by_deepspeed(flow.numel, knobs.max_reuse_distance, knobs.max_live_parameters, knobs.prefetch_bucket_size)
    return replace(
        flow,
        engine="deepspeed",
        stage=knobs.stage,
        micro_batches=knobs.accumulate,
        param_nbytes=DTYPE_NBYTES[knobs.dtype],
        grad_nbytes=DTYPE_NBYTES[knobs.communication_dtype],
        kept_numel=kept if knobs.stage == 3 else 0,
        multi_rank_buckets=knobs.multi_rank_buckets or not knobs.reduce_scatter,
    )


def kept_by_deepspeed(numel: int, max_reuse_distance: int, max_live_parameters: int, prefetch_bucket_size: int = 50_000_000) -> int:
    """Elements that DeepSpeed 3 does not gather again in backward, from the second step on; within one parameter.

    Two rules keep parameters, and the one that keeps more decides (runtime/zero/partitioned_param_coordinator.py). Released is what is
    not used again within ``max_reuse_distance`` elements; as backward comes to a unit after all behind it were used twice, the last
    half of that stays. And the prefetcher passes over everything that is still here, up to backward's own uses, and what it passed is
    not released: it runs ahead until ``max_live_parameters`` are gathered, however small its bucket is. A bucket of 0 turns it off.

    >>> kept_by_deepspeed(7_000_000_000, 10**9, 10**9), kept_by_deepspeed(7_000_000_000, 10**9, 10**9, prefetch_bucket_size=0)
    (1000000000, 500000000)
    """
    return min(numel, max(max_reuse_distance // 2, max_live_parameters if prefetch_bucket_size else 0))


# ---- by engine -----------------------------------------------------------------------------------------------------------------


def _zero(flow: Flow) -> Iterator[Sent]:
    """As in the paper; stage 0 is a reduction to the owner and a way back."""
    k = flow.micro_batches
    if flow.stage < 2:
        yield _grads(flow, "reduce", 1, "Ψ")
    else:
        yield _grads(flow, "reduce", k, "kΨ")
    if flow.stage == 0:
        width = flow.grad_nbytes if flow.back_nbytes is None else flow.back_nbytes
        yield _line(flow.engine, "return", _share(flow, flow.trained, width), "Ψ × (N-1)/N")
    elif flow.stage < 3:
        yield _refresh(flow)
    else:
        yield from _gathers(flow)


def _deepspeed(flow: Flow) -> Iterator[Sent]:
    k = flow.micro_batches
    if flow.stage == 3:
        yield _grads(flow, "reduce", k, "kΨ")
        yield from _gathers(flow)
        return
    times = 2 if flow.stage == 0 or flow.multi_rank_buckets else 1  # an all-reduce of the bucket, or one reduce for each owner
    if flow.stage == 2:
        yield _grads(flow, "reduce", times * k, f"{times if times > 1 else ''}kΨ")
    else:
        yield _grads(flow, "reduce", times, f"{times if times > 1 else ''}Ψ")
    if flow.stage:
        yield _refresh(flow)


def _fsdp2(flow: Flow) -> Iterator[Sent]:
    yield _grads(flow, "reduce", flow.micro_batches, "kΨ")
    yield from _gathers(flow)


def _ddp(flow: Flow) -> Iterator[Sent]:
    times = flow.micro_batches if flow.each_micro_batch else 1
    yield _grads(flow, "reduce", 2 * times, "2kΨ" if flow.each_micro_batch else "2Ψ")


def _megatron(flow: Flow) -> Iterator[Sent]:
    """Gradients of all micro-batches are added locally, then reduced once."""
    if flow.stage == 0:
        yield _grads(flow, "reduce", 2, "2Ψ")
        return
    yield _grads(flow, "reduce", 1, "Ψ")
    yield _refresh(flow)


def _grads(flow: Flow, kind: str, times: int, formula: str) -> Sent:
    return _line(flow.engine, kind, times * _share(flow, flow.trained, flow.grad_nbytes), f"{formula} × (N-1)/N")


def _refresh(flow: Flow) -> Sent:
    return _line(flow.engine, "refresh", _share(flow, flow.trained, flow.param_nbytes), "Ψ × (N-1)/N")


def _gathers(flow: Flow) -> Iterator[Sent]:
    """Each unit in forward and, unless it is kept, in backward; frozen parameters too."""
    kept = min(flow.kept_numel, flow.numel)
    again = _share(flow, flow.numel - kept, flow.param_nbytes)
    nbytes = flow.micro_batches * (_share(flow, flow.numel, flow.param_nbytes) + again)
    formula = "2kΨ" if not kept else "kΨ" if kept == flow.numel else "k(2Ψ - kept)"
    yield _line(flow.engine, "gather", nbytes, f"{formula} × (N-1)/N")


def _share(flow: Flow, numel: int, nbytes: float) -> int:
    """Bytes of the N-1 shards of ⌈numel/N⌉ elements that are not this rank's own."""
    return int((flow.ranks - 1) * -(-numel // flow.ranks) * nbytes)


def _line(engine: str, kind: str, nbytes: int, formula: str) -> Sent:
    return Sent(kind=kind, nbytes=nbytes, formula=formula, source=_SOURCES[engine])
