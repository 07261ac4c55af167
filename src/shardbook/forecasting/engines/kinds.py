"""The class that stands for each engine."""

from collections.abc import Mapping

from shardbook.forecasting.engines.fsdp2 import Fsdp2, Sharding
from shardbook.forecasting.engines.megatron import Megatron
from shardbook.forecasting.engines.shardbook import Shardbook
from shardbook.forecasting.graph import Weight
from shardbook.forecasting.placement import Placement, divided_facts, merged, num_weights
from shardbook.forecasting.question import Question
from shardbook.forecasting.state import State, moments_of
from shardbook.forecasting.tape import Tape
from shardbook.forecasting.walk import Residence


def engine_for(question: Question, state: State, tape: Tape, *, steady: bool) -> tuple[Residence, Mapping[str, Weight]]:
    """The engine that is asked about, ready for a step, and the weights by the units that it has."""
    placement = state.placement
    assert placement is not None
    if question.engine == "fsdp2":
        return _fsdp2(question, placement, tape, steady=steady)
    if question.engine == "megatron":
        fused = {name: Weight(name, each.unit, each.numel, each.width, trainable=each.trainable, fused=question.choices.fused_gradients) for name, each in placement.weights.items()}
        return Megatron(tape, state.accounts, steady=steady), fused
    counts = num_weights(placement.weights)
    engine = Shardbook(
        tape, placement.structure, question.config, moments_of(question), counts, kernel=question.choices.kernel, steady=steady
    )
    return engine, placement.weights


def _fsdp2(question: Question, placement: Placement, tape: Tape, *, steady: bool) -> tuple[Residence, Mapping[str, Weight]]:
    wrapped, units = merged(placement, divided_facts(question.facts, question.tensor, question.expert))
    precision, moments = question.config.precision, moments_of(question)
    how = Sharding(
        ranks=question.shards,
        precision=precision,
        reshard=question.choices.reshard,
        moments_nbytes=moments.per_element * (1 if question.choices.optimizer == "adamw-8bit" else _width(question)),
        kernel=question.choices.kernel,
    )
    return Fsdp2(tape, units, how, steady=steady), wrapped.weights


def _width(question: Question) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}[question.config.precision.master_dtype]
