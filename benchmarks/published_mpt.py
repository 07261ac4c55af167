"""From a row of a table of runs that fitted to the question that a forecast answers: Mosaic's MPT models under FSDP1."""

from benchmarks.published_rows import Asked, NotModelledError, Row
from shardbook.config import Precision, Recompute, ZeroConfig
from shardbook.facts.architecture import Architecture
from shardbook.facts.parameters import model_facts
from shardbook.forecasting.choices import Choices

MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32),
    "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
"""Width, blocks and heads (llm-foundry, scripts/train/yamls/pretrain)."""


def mpt(row: Row) -> Asked:
    """The question behind one row of ``feasible.csv``: FSDP1 with each block a unit, fused as FSDP2 has it (llm-foundry and composer).

    ``PURE`` reduces in 16 bits, ``DEFAULT`` in fp32; shards are fp32 in both. The numbers of parameters in the table say that biases
    and learned positions are on.

    Raises:
        NotModelledError: with the reason.
    """
    if row["precision"] not in ("amp_bf16", "bf16"):
        raise NotModelledError(f"precision: {row['precision']}")
    hidden, layers, heads = MPT[row["model"].removeprefix("MPT-")]
    sequence = int(row["seq_len"])
    architecture = Architecture(
        family="mpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=4 * hidden, vocab=50_368,
        tied=True, norm="layer", gated=False, activation="gelu", qkv_bias=True, out_bias=True, ffn_bias=True, fused_qkv=True,
        positions="learned", learned_positions=sequence,
    )  # fmt: skip
    facts = model_facts(architecture, name=row["model"], source="llm-foundry")
    if facts.num_parameters != int(row["num_params"]):
        raise NotModelledError(f"another model: {facts.num_parameters:,} parameters, not {int(row['num_params']):,}")
    return Asked(
        model=facts,
        engine="fsdp2",
        config=ZeroConfig(
            precision=Precision(param="bf16", reduce="bf16" if row["mp_mode"] == "PURE" else "fp32", grad="fp32"),
            recompute=Recompute(policy="full" if row["act_ckpt"] == "True" else "none"),
            accumulate=int(row["grad_accum"]),
        ),
        choices=Choices(implementation="llm-foundry", kernel="for-loop", reshard=row["sharding"] == "FULL_SHARD"),
        ranks=int(row["n_gpus"]),
        device=row["gpu"].replace("_", "-"),
        micro_batch=int(row["micro_batch"]),
        sequence=sequence,
    )
