"""What a run does that a ZeroConfig does not say, and that its memory depends on."""

from dataclasses import dataclass
from typing import Literal

from shardbook.checks import Check

IMPLEMENTATIONS = ("shardbook", "gpt", "plain", "transformers", "torchtitan", "torchtune", "litgpt", "megatron", "llm-foundry")
"""Whose code the blocks are: what autograd keeps differs. ``gpt`` is torch's modules with fused QKV, ``plain`` a Llama of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Details of a run.

    Args:
        optimizer: what keeps the moments; ``"adamw-8bit"`` has two of one byte.
        kernel: how torch's optimizer steps: ``"fused"`` has no temporaries, ``"foreach"`` has lists as large as the parameters,
            ``"for-loop"`` those of one parameter.
        attention: ``"flash"`` and ``"efficient"`` keep no matrix of scores, ``"eager"`` does. ``"auto"`` is what torch picks: flash.
        loss: ``"full"`` logits with an fp32 copy; ``"chunked"`` cuts the sequence into ``loss_chunks``; ``"fused"`` never has them whole.
        loss_chunks: pieces of the sequence with ``"chunked"``.
        reshard: FSDP2 and FSDP1: parameters are freed between forward and backward.
        autocast: parameters are stored in fp32 and cast operator by operator (torch.autocast), with the casts kept until the step's
            forward ends.
        implementation: whose code the blocks are, one of :data:`IMPLEMENTATIONS`; ``""``: the engine's usual one.
        trainable: share of the parameters that is trained; the rest is frozen and has no gradient, master or moment.
        lora_rank: rank of adapters on the linear layers named by ``lora_targets``; 0: none. The rest is then frozen.
        lora_targets: ``"attention"`` queries and values, ``"all"`` every linear layer of a block.
        sequence_parallel: tensor-parallel devices share the tokens of the residual stream as well; None: as the engine does by
            itself, which Megatron-LM does not.
        fused_gradients: weight gradients are added into the buffer where they stay by the product that makes them (Megatron-LM's
            ``gradient_accumulation_fusion``).
        compiled: each block runs under torch.compile; the loss does not.
        bucket_views: DDP's gradients are views of its buckets (``gradient_as_bucket_view``); False, torch's own default, keeps both.

    Raises:
        ConfigError: a field outside what is allowed.
    """

    optimizer: Literal["adamw", "adamw-8bit", "sgd", "sgd-momentum"] = "adamw"
    kernel: Literal["fused", "foreach", "for-loop"] = "fused"
    attention: Literal["auto", "flash", "efficient", "eager"] = "auto"
    loss: Literal["full", "chunked", "fused"] = "full"
    loss_chunks: int = 8
    reshard: bool = True
    autocast: bool = False
    implementation: str = ""
    trainable: float = 1.0
    lora_rank: int = 0
    lora_targets: Literal["attention", "all"] = "attention"
    sequence_parallel: bool | None = None
    fused_gradients: bool = True
    compiled: bool = False
    bucket_views: bool = True

    def __post_init__(self) -> None:
        check = Check(self)
        check.choice("optimizer", ("adamw", "adamw-8bit", "sgd", "sgd-momentum"))
        check.choice("kernel", ("fused", "foreach", "for-loop"))
        check.choice("attention", ("auto", "flash", "efficient", "eager"))
        check.choice("loss", ("full", "chunked", "fused"))
        check.integer("loss_chunks", least=1, remedy="8 is torchtune's")
        for name in ("reshard", "autocast", "fused_gradients", "compiled", "bucket_views"):
            check.flag(name)
        if self.sequence_parallel is not None:
            check.flag("sequence_parallel")
        check.choice("implementation", ("", *IMPLEMENTATIONS))
        check.integer("lora_rank", least=0, remedy="0: no adapters")
        check.choice("lora_targets", ("attention", "all"))
        check.done()
        if not 0 <= self.trainable <= 1:
            check.add("trainable", self.trainable, "a share from 0 to 1", "1 trains everything")
        check.done()
