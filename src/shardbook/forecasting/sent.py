"""Bytes that a rank sends in a step, for the question asked."""

import re

from shardbook.forecasting import traffic
from shardbook.forecasting.question import Question
from shardbook.forecasting.state import knobs_of, state_of

_BLOCK = re.compile(r"\.\d+$")
"""How the names of repeated units end."""


def flow_of(question: Question) -> traffic.Flow:
    """What travels, and in which types."""
    facts = question.facts
    numel, trained = -(-facts.num_parameters // question.tensor), -(-facts.num_trainable // question.tensor)
    flow = traffic.Flow(
        engine=question.engine,  # pyright: ignore[reportArgumentType]
        stage=question.config.stage,
        ranks=question.shards,
        numel=numel,
        numel_trainable=trained,
        micro_batches=question.config.accumulate,
        kept_numel=_kept(question, numel) if question.engine == "fsdp2" else 0,
    )
    if question.convention is not None:
        return traffic.flow_of_convention(question.convention, flow)
    if question.engine == "deepspeed":
        return traffic.flow_of_knobs(knobs_of(question), flow)
    return traffic.flow_of_config(question.config, flow)


def _kept(question: Question, numel: int) -> int:
    """FSDP2 keeps its root, which is all that is in no block, from forward to backward; without reshard everything."""
    if not question.choices.reshard:
        return numel
    return sum(unit.numel for unit in question.facts.units if not _BLOCK.search(unit.name)) // question.tensor


def sent_of(question: Question) -> int:
    """Bytes; shardbook's with their padding where its units are known."""
    if question.engine == "shardbook" and question.convention is None and question.facts.units:
        placement = state_of(question).placement
        assert placement is not None
        return sum(line.nbytes for line in traffic.of_structure(placement.structure, question.config))
    return traffic.sent_nbytes(flow_of(question))
