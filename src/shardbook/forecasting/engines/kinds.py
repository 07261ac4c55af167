"""The class that stands for each engine."""

from collections.abc import Mapping

from shardbook.accounts import Account
from shardbook.forecasting.autocast import Autocast
from shardbook.forecasting.engines.ddp import Ddp, Replica
from shardbook.forecasting.engines.deepspeed import DeepSpeed, Setup
from shardbook.forecasting.engines.deepspeed3 import DeepSpeed3
from shardbook.forecasting.engines.fsdp2 import Fsdp2, Sharding
from shardbook.forecasting.engines.megatron import Megatron
from shardbook.forecasting.engines.optimizers import kernel_of
from shardbook.forecasting.engines.shardbook import Shardbook
from shardbook.forecasting.graph import Weight
from shardbook.forecasting.kernels import Kernels
from shardbook.forecasting.placement import Placement, divided_facts, merged, num_weights
from shardbook.forecasting.question import Question
from shardbook.forecasting.state import State, knobs_of, moments_of
from shardbook.forecasting.tape import Tape
from shardbook.forecasting.walk import MakeKernels, Residence


def engine_for(question: Question, state: State, tape: Tape, *, steady: bool) -> tuple[Residence, Mapping[str, Weight]]:
    """The engine that is asked about, ready for a step, and the weights by the units that it has."""
    placement = state.placement
    assert placement is not None
    if question.engine == "fsdp2":
        return _fsdp2(question, placement, tape, steady=steady)
    if question.engine == "megatron":
        fused = {
            name: Weight(name, each.unit, each.numel, each.width, trainable=each.trainable, fused=question.choices.fused_gradients)
            for name, each in placement.weights.items()
        }
        return Megatron(tape, state.accounts, steady=steady), fused
    if question.engine == "ddp":
        return _ddp(question, state, placement.weights, tape, steady=steady)
    if question.engine == "deepspeed":
        return _deepspeed(question, state, placement.weights, tape, steady=steady)
    counts = num_weights(placement.weights)
    engine = Shardbook(
        tape, placement.structure, question.config, moments_of(question), counts, kernel=kernel_of(question.choices), steady=steady
    )
    return engine, placement.weights


def _fsdp2(question: Question, placement: Placement, tape: Tape, *, steady: bool) -> tuple[Residence, Mapping[str, Weight]]:
    wrapped, units = merged(placement, divided_facts(question.facts, question.tensor, question.expert))
    precision, moments = question.config.precision, moments_of(question)
    how = Sharding(
        ranks=question.shards,
        precision=precision,
        reshard=question.choices.reshard,
        moments_nbytes=moments.per_element * _width(question) + moments.quantised_nbytes,
        kernel=kernel_of(question.choices),
    )
    return Fsdp2(tape, units, how, steady=steady), wrapped.weights


def _width(question: Question) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}[question.config.precision.master_dtype]


def kernels_for(question: Question, engine: Residence) -> MakeKernels:
    """What makes the operators: DDP computes in 16 bits under torch.autocast, DeepSpeed's stage 3 fetches what each of them uses."""
    if isinstance(engine, DeepSpeed3):
        return engine.kernels
    return Autocast if _autocasts(question) else Kernels


def _autocasts(question: Question) -> bool:
    precision = question.config.precision
    return question.engine == "ddp" and (question.choices.autocast or (precision.param in ("bf16", "fp16") and precision.has_master))


def _ddp(
    question: Question, state: State, weights: Mapping[str, Weight], tape: Tape, *, steady: bool
) -> tuple[Residence, Mapping[str, Weight]]:
    if _autocasts(question):
        weights = {name: Weight(name, each.unit, each.numel, 4, trainable=each.trainable) for name, each in weights.items()}
    trained = [each for each in weights.values() if each.trainable]
    counters = moments_of(question).per_piece_nbytes * len(trained)
    replica = Replica(
        held={**state.accounts, Account.MOMENT: state.accounts.get(Account.MOMENT, 0) + counters},
        in_buckets=question.shards > 1,
        views=question.choices.bucket_views,
        kernel=kernel_of(question.choices),
        stepped=[each.numel * each.width for each in trained],
    )
    return Ddp(tape, replica, steady=steady), weights


def _deepspeed(
    question: Question, state: State, weights: Mapping[str, Weight], tape: Tape, *, steady: bool
) -> tuple[Residence, Mapping[str, Weight]]:
    knobs, moments = knobs_of(question), moments_of(question)
    if knobs.uses_bf16_optimizer:  # whole fp32 gradients that live always
        return Megatron(tape, state.accounts, steady=steady), weights
    if knobs.stage == 0:
        return _ddp(question, state, weights, tape, steady=steady)
    setup = Setup(
        knobs=knobs,
        ranks=question.shards,
        weights=sorted(weights.values(), key=_registered),
        moments_nbytes=moments.per_element * (2 if knobs.narrow_moments else 4) + moments.quantised_nbytes,
        counter_nbytes=moments.per_piece_nbytes,
        kernel=kernel_of(question.choices),
        accumulate=question.config.accumulate,
        on_cuda=question.device is not None,
    )
    if knobs.stage == 3:
        return DeepSpeed3(tape, setup, recomputed=_recomputed(question), steady=steady), weights
    return DeepSpeed(tape, setup, steady=steady), weights


def _recomputed(question: Question) -> frozenset[str]:
    recompute, facts = question.config.recompute, question.facts.architecture
    if recompute.policy == "none" or facts is None:
        return frozenset()
    return frozenset(f"blocks.{index}" for index in range(0, facts.layers, recompute.every))


def _registered(weight: Weight) -> int:
    """Tables, blocks, then the last norm and the head; each in the order that they have."""
    return 1 if weight.name.startswith("blocks.") else 0 if weight.name.startswith(("embedding", "positions")) else 2
