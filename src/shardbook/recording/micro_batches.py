"""The micro-batches of a step as a record gives them back. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardbook.recording.prints import Fingerprint

OUTPUT, OUTPUT_GRADIENT = "output", "output_gradient"
PHASES = (OUTPUT, OUTPUT_GRADIENT)
"""Their rows are of micro-batches, by number, where those of all other phases are of parameters and buffers."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor that went into a model.

    Args:
        hash: 64 bits; Σ over rows (the first dimension) of a hash of the row, so that cuts along rows add up.
        numel: elements.
        valid: elements of an integer tensor that are not negative; None for other types.
        dtype: its type.
    """

    hash: int
    numel: int
    valid: int | None
    dtype: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward of the outermost recorded module with gradients enabled.

    Args:
        inputs: the tensors it was given: positional ones in their order, then keyword arguments sorted by name. What can't be hashed
            (sparse, nested and quantized tensors, subclasses) is left out.
        num_rows: of the first of them that has any.
        learning_rates: of the optimizer's parameter groups at that time.
        evaluating: modules that were in evaluation mode.
        holding: parameters that held a gradient when it began: none in the first of a step, all in later ones, where gradients add up.
        autocast: the type that autocast was computing in, None where it was off.
        held: narrowest type of those gradients, None where there are none.
        silent: complete steps: places of the sample (along all dimensions but the last) to which no gradient came back.
        output: complete steps: the first floating tensor in the output that requires a gradient, a sample of whole leading rows of up
            to 2^18 elements.
        output_gradient: of the same elements, over all backwards; where the output is a scalar loss it is the factor on that loss.
            None where no backward came to it.
    """

    inputs: tuple[TensorFacts, ...]
    num_rows: int
    learning_rates: tuple[float, ...]
    evaluating: int
    autocast: str | None
    holding: int = 0
    held: str | None = None
    silent: int | None = None
    output: Fingerprint | None = None
    output_gradient: Fingerprint | None = None


def facts(row: Sequence[Any]) -> TensorFacts:
    """As it was written: [hash, elements, valid ones, type]."""
    value, numel, valid, dtype = row
    return TensorFacts(value % 2**64, numel, valid, dtype)


def micro_batches(about: Mapping[str, Any], rows: Mapping[tuple[str, str], Fingerprint]) -> tuple[MicroBatch, ...]:
    """Those of one rank's step; ``rows``: by phase and number of the forward.

    Forwards with more modules in evaluation mode than the others of the step have are an evaluation's, with gradients enabled.
    """
    each = list(enumerate(about.get("forwards", ())))
    training = min((one["evaluating"] for _, one in each), default=0)
    return tuple(
        MicroBatch(
            inputs=tuple(facts(row) for row in one["inputs"]),
            num_rows=one["rows"],
            learning_rates=tuple(float(rate) for rate in one["rates"]),
            evaluating=one["evaluating"],
            autocast=one["autocast"],
            holding=one["holding"],
            held=one["held"],
            silent=one["silent"],
            output=rows.get((OUTPUT, str(place))),
            output_gradient=rows.get((OUTPUT_GRADIENT, str(place))),
        )
        for place, one in each
        if one["evaluating"] == training
    )


def given(about: Mapping[str, Any]) -> tuple[tuple[TensorFacts, ...], ...]:
    """The tensors of the batch that was passed to ``Recorder.step``, by micro-batch."""
    return tuple(tuple(facts(row) for row in micro_batch) for micro_batch in about.get("given", ()))
