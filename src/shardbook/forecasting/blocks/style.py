"""Whose code runs the blocks: the choices by which two codes of one architecture keep different bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a code computes what an architecture says.

    Args:
        rms: RMSNorm: ``"composed"`` of operators in fp32, weight included; ``"cast"`` in fp32 and cast back before the weight
            (transformers, torchtune); ``"kernel"`` one operator that keeps its input (Transformer Engine); ``"module"`` is
            ``torch.nn.RMSNorm``: composed on the CPU, a kernel on CUDA.
        rotary: ``"halves"`` in fp32, with tables made in each layer; ``"shared"`` the same with one table for all; ``"complex"`` in fp32
            pairs; ``"rotate_half"`` in the type of the queries, with one table for all; ``"kernel"`` keeps nothing.
        swiglu: ``"operators"`` keeps the gate before and after its activation, and both factors; ``"kernel"`` keeps the two factors
            as one matrix, and computes the activation again.
        gelu_new: GELU by its tanh, as GPT-2 has it: ``"operators"`` keeps four of its steps, ``"kernel"`` its input.
        positions: learned ones are a ``"slice"`` of their table, or ``"looked-up"``, which keeps their numbers.
        softmax: of eager attention: ``"fp32"`` by operators, or ``"own"``: one kernel in the type of the queries.
        logits: ``"fp32"`` a copy in fp32 goes into the loss; ``"own"`` the loss takes the logits as they are.
        loss: ``"torch"`` log-probabilities and their gradients; ``"kernel"`` one fp32 matrix that becomes its own gradient;
            ``"own-kernel"`` keeps the logits as they are, and makes a gradient of their type.
        loss_outside: the model gives logits, and the loss is computed by whoever calls it.
        holds_logits: whoever calls the model still has its logits in backward.
        source: where this was read.
    """

    rms: Literal["composed", "cast", "kernel", "module"] = "cast"
    rotary: Literal["halves", "shared", "complex", "rotate_half", "kernel"] = "rotate_half"
    swiglu: Literal["operators", "kernel"] = "operators"
    gelu_new: Literal["operators", "kernel"] = "kernel"
    positions: Literal["slice", "looked-up"] = "slice"
    softmax: Literal["fp32", "own"] = "fp32"
    logits: Literal["fp32", "own"] = "fp32"
    loss: Literal["torch", "kernel", "own-kernel"] = "torch"
    loss_outside: bool = False
    holds_logits: bool = False
    source: str = ""


STYLES: Mapping[str, Style] = {
    "shardbook": Style(rms="composed", rotary="halves", source="shardbook/models/decoder.py"),
    "gpt": Style(rms="module", rotary="halves", source="plain torch modules, as in nanoGPT"),
    "plain": Style(
        rms="module",
        rotary="shared",
        loss_outside=True,
        holds_logits=True,
        source="a Llama of plain torch modules; logits, loss and backward in one loop",
    ),
    "transformers": Style(
        gelu_new="operators", positions="looked-up", source="transformers 5.24, modeling_llama.py, modeling_gpt2.py, activations.py"
    ),
    "torchtitan": Style(loss_outside=True, rms="module", rotary="complex", source="torchtitan 0.3, models/llama3/model.py; nn.RMSNorm"),
    "torchtune": Style(
        loss_outside=True, rms="cast", rotary="complex", source="torchtune 0.6, modules/rms_norm.py, position_embeddings.py"
    ),
    "litgpt": Style(loss_outside=True, rms="cast", rotary="rotate_half", source="litgpt 0.5, model.py"),
    "megatron": Style(
        rms="kernel",
        rotary="kernel",
        swiglu="kernel",
        softmax="own",
        loss="kernel",
        source="Megatron-LM core 0.12 with Transformer Engine",
    ),
    "llm-foundry": Style(
        rms="module",
        rotary="halves",
        logits="own",
        loss="own-kernel",
        loss_outside=True,
        holds_logits=True,
        source="llm-foundry 0.4, models/mpt: fused_crossentropy of flash-attn by default; composer holds the outputs",
    ),
}


def compiled(style: Style) -> Style:
    """With blocks under torch.compile: chains of pointwise operators become one kernel, and what is cheap is computed again in backward.

    That is what Inductor's min-cut partitioner decides for these blocks (functorch, ``min_cut_rematerialization_partition``); what it
    decides for others is not modelled.
    """
    return replace(style, rms="kernel", rotary="kernel", swiglu="kernel", gelu_new="kernel")
